//! `kvbench shm-lookup`: what does it cost to find the memory that an address of another process, or a handle, names?
//!
//! ```text
//!   linear        walk all segments of a map in order until one contains the address       O(n)
//!   tree          search the same map                                                      O(log n)
//!   arithmetic    all segments in one window: subtract, compare, add                       O(1), no check of validity
//!   ours          the arena's handle: segment there, block held, generation right           O(1)
//! ```
//!
//! Every answer is compared with the one that is known to be right; one that is wrong is an error. `independent` lookups
//! may overlap in the processor; each of the `dependent` ones needs the answer of the one before.
//!
//! The map is a search tree of single nodes in the order in which they were inserted, as C++'s `std::map` is: a Rust
//! `BTreeMap` would be a better map, and so not what is compared with here.
//!
//! | figure of `summary`                          | meaning                                                        |
//! |----------------------------------------------|----------------------------------------------------------------|
//! | `ours_ns`, `ours_dependent_ns`               | a lookup of ours, median chunk                                 |
//! | `linear_ns`, `tree_ns`, `arithmetic_ns`      | the others, independent                                        |
//! | `speedup`                                    | linear over ours                                               |
//! | `growth_10_to_10000`                         | ours in 10,000 segments over ours in 10                        |
//! | `ours_10_ns`, `ours_10000_ns`                | both sides of that                                             |
//! | `wrong`                                      | answers that were not the right ones: 0                        |

mod handles;
mod report;
mod strategies;
mod tree;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use tidekv_cli::exit::Outcome;

use super::{CommonArgs, HugePageKind, Report, present, within};
use crate::host::HostInfo;
use crate::output::OutputArgs;
use crate::progress::Progress;
use crate::result::BenchResult;

const MAX_SEGMENTS: u32 = 16_000;
const MAX_LOOKUPS: u32 = 10_000_000;
const MAX_SEGMENT_MB: u32 = 1 << 20;

/// Flags of the benchmark itself.
#[derive(Args, Clone, Debug)]
pub struct LookupFlags {
    /// Segments to look in
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub num_segments: u32,

    /// Lookups of one pass; below 500 also those of one chunk
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    pub num_lookups: u32,

    /// Addresses that one segment has, in MB. Of the arena, whose segments are memory, they are 256 KB
    #[arg(long, value_name = "MB", default_value_t = 64)]
    pub segment_size_mb: u32,
}

/// Arguments of `kvbench shm-lookup`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES, args_override_self = true)]
pub struct ShmLookupArgs {
    /// The benchmark's own.
    #[command(flatten)]
    pub flags: LookupFlags,

    /// Shared by the three.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench shm-lookup
  kvbench shm-lookup --num_lookups=1000                 # a first look, as a step of CI
  kvbench shm-lookup --num_segments=1000 --seed 7 --repeat 5 --output lookup.json

Exit status: 0 done, 2 a lookup found the wrong segment or a call failed.";

/// Measures, prints and keeps the result.
pub fn run(args: &ShmLookupArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(&args.flags, &args.common)?;
    present(&args.common, &args.output, STEPS, |host, progress| measure(&plan, host, progress))
}

/// What is measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Plan {
    num_segments: u32,
    num_lookups: u32,
    segment_size_mb: u32,
    seed: u64,
    hugepages: HugePageKind,
}

impl Plan {
    pub(super) fn of(flags: &LookupFlags, common: &CommonArgs) -> anyhow::Result<Self> {
        common.check()?;
        let plan = Self {
            num_segments: within("--num_segments", flags.num_segments, MAX_SEGMENTS)?,
            num_lookups: within("--num_lookups", flags.num_lookups, MAX_LOOKUPS)?,
            segment_size_mb: within("--segment_size_mb", flags.segment_size_mb, MAX_SEGMENT_MB)?,
            seed: common.seed,
            hugepages: common.hugepages,
        };
        let all_mb = u64::from(plan.num_segments) * u64::from(plan.segment_size_mb);
        ensure!(
            all_mb <= strategies::MAX_ADDRESSES_MB,
            "{} segments of {} MB do not fit into the addresses of a process: lower one of them",
            plan.num_segments,
            plan.segment_size_mb
        );
        Ok(plan)
    }
}

pub(super) const STEPS: u64 = 3;

/// Measures everything once.
pub(super) fn measure(plan: &Plan, host: HostInfo, progress: &Progress) -> anyhow::Result<Report> {
    let mut result = BenchResult::new("shm-lookup", plan, host)?;
    progress.now("searches");
    let searches = strategies::measure(plan);
    progress.step();
    progress.now("handles");
    let ours = handles::measure(plan, plan.num_segments)?;
    progress.step();
    progress.now("handles of 10 and of 10,000 segments");
    let growth = handles::growth(plan)?;
    progress.step();
    let wrong = searches.iter().map(|search| search.wrong).sum::<u64>() + ours.wrong + growth.wrong();
    let text = report::fill(&mut result, plan, &searches, &ours, &growth, wrong);
    let wrong = (wrong > 0).then(|| format!("{wrong} lookups found something else than what they looked for"));
    Ok(Report { result, text, wrong })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let plan = |args: &[&str]| {
            let all = ["kvbench", "shm-lookup"].iter().chain(args).map(std::ffi::OsString::from);
            match Cli::parse_args(all)?.command {
                Command::ShmLookup(args) => Plan::of(&args.flags, &args.common),
                other => panic!("{other:?}"),
            }
        };
        assert!(plan(&[]).is_ok());
        for args in [
            &["--num_segments=0"][..],
            &["--num_lookups=0"],
            &["--segment_size_mb=0"],
            &["--num_segments=16000", "--segment_size_mb=1048576"],
            &["--num_segments", "-5"],
        ] {
            assert!(plan(args).is_err(), "{args:?}");
        }
    }
}
