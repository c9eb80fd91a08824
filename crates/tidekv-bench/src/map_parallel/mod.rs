//! `kvbench map-parallel`: do processes that map at the same time get done sooner than one that maps everything, or
//! does the system below serve them one after the other?
//!
//! ```text
//!   single     rank 0 maps N/P pages           what a process takes with nobody beside it
//!   serial     rank 0 maps N pages
//!   parallel   ranks 0 to P-1 map N/P pages each, from the same moment on
//!
//!   time ──────────── at ─────────────────────────────────────────────>
//!   rank 0   asleep    ├── maps ──┤ asleep
//!   rank 1   asleep    ├── maps ───────┤
//!                      └──── wall ─────┘   from the common moment to the end of the slowest
//! ```
//!
//! Every rank is a process of its own that opens the back-end, reserves a KV cache over all memory of its device and
//! maps its range of page ids in one batch: nothing of `tidekv-ipc` is on this path. The three cases take turns,
//! iteration by iteration, so that whatever slows the machine for a while slows each of them; pages are unmapped between
//! two turns, outside the measured time.
//!
//! The barrier of an iteration is an appointment: once all ranks have answered, each is told the moment to begin, on a
//! clock that all processes share. No rank waits for another one's wake-up, and a rank that comes late makes the parent
//! try again with more notice.
//!
//! | figure of `summary`                              | meaning                                                      |
//! |--------------------------------------------------|--------------------------------------------------------------|
//! | `<case>.wall_ms.{mean,p50,p95,max,min}`          | `single`, `serial` and `parallel`: one iteration             |
//! | `<case>.pages_per_s`                             | pages of an iteration / mean wall                            |
//! | `speedup_parallel_over_serial`                   | mean wall of serial / mean wall of parallel                  |
//! | `ideal_speedup`                                  | P                                                            |
//! | `parallel_over_single`                           | mean walls: 1 where ranks do not feel each other, P where they queue |
//! | `late_starts`                                    | iterations measured although a rank came late, every time    |

mod measure;
mod report;
mod worker;

use anyhow::{Context, ensure};
use clap::Args;
use serde::Serialize;

use crate::host::HostInfo;
use crate::output::{OutputArgs, warn};
use crate::ranks::cache::{CacheArgs, CacheFacts, CacheSpec};
use crate::ranks::devices::{DeviceMap, DeviceMode};
use crate::result::BenchResult;
use tidekv_cli::exit::Outcome;

pub use worker::{MapWorkerArgs, run as run_worker};

const DEFAULT_ITERS: u32 = 20;
const QUICK_ITERS: u32 = 5;
const MAX_ITERS: u32 = 1_000_000;
const MAX_PROCS: u32 = 256;
const MAX_THREADS: u32 = 256;

/// Arguments of `kvbench map-parallel`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct MapParallelArgs {
    /// Pages mapped in each iteration, by all processes together: N
    #[arg(long, value_name = "N")]
    pub pages_total: u32,

    /// Processes of the parallel case: P
    #[arg(long, value_name = "P", default_value_t = 1)]
    pub procs: u32,

    /// Iterations [default: 20, with --quick 5]
    #[arg(long, value_name = "N")]
    pub iters: Option<u32>,

    /// Where the processes map
    #[arg(long, value_enum, value_name = "MODE", default_value_t = DeviceMode::PerRank)]
    pub device_mode: DeviceMode,

    /// First page id; ranks map one behind the other from here on
    #[arg(long, value_name = "ID", default_value_t = 0)]
    pub base_page: u32,

    /// Threads of each process that share its pages
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: u32,

    /// Print every iteration
    #[arg(long, short)]
    pub verbose: bool,

    /// The cache.
    #[command(flatten)]
    pub cache: CacheArgs,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench map-parallel --pages-total 100 --procs 4 --iters 20      # 4 processes map 25 pages each, on GPU 0 to 3
  kvbench map-parallel --pages-total 100 --procs 4 --device-mode same
  kvbench map-parallel --pages-total 100 --procs 4 --not-contiguous  # kvcached's per-layer tensors
  kvbench map-parallel --pages-total 16 --procs 2 --backend host --quick

--pages-total is at most memory / layers / 2 / page size: a page id has one page of that size for the K and one for
the V of every layer. If P does not divide N, the first N mod P ranks map one page more.";

/// Measures, prints and keeps the result.
pub fn run(args: &MapParallelArgs) -> anyhow::Result<Outcome> {
    let (plan, facts) = Plan::of(args)?;
    let output = args.output.open()?;
    if let Some(warning) = plan.map.device_warning.as_ref().filter(|_| !args.output.quiet) {
        warn(warning);
    }
    let mut result = BenchResult::new("map-parallel", &plan, HostInfo::with_backend(&facts.capabilities))?;
    let program = tidekv_cli::program::named_path().context("finding kvbench itself, to start its processes")?;
    let progress = output.progress(u64::from(plan.iters));
    let measured = measure::measure(&plan, &program, &progress)?;
    drop(progress);
    report::fill(&mut result, &plan, &facts, &measured);
    output.emit(&result, &report::text(&plan, &facts, &measured, args.verbose))?;
    Ok(Outcome::Done)
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    pages_total: u32,
    procs: u32,
    iters: u32,
    device_mode: DeviceMode,
    base_page: u32,
    threads: u32,
    #[serde(flatten)]
    cache: CacheSpec,
    #[serde(flatten)]
    map: DeviceMap,
}

impl Plan {
    fn of(args: &MapParallelArgs) -> anyhow::Result<(Self, CacheFacts)> {
        let within = |flag, value, most| {
            ensure!((1..=most).contains(&value), "{flag} is {value}: give 1 to {most}");
            Ok(value)
        };
        let default_iters = if args.output.quick { QUICK_ITERS } else { DEFAULT_ITERS };
        let procs = within("--procs", args.procs, MAX_PROCS)?;
        let iters = within("--iters", args.iters.unwrap_or(default_iters), MAX_ITERS)?;
        let threads = within("--threads", args.threads, MAX_THREADS)?;
        ensure!(
            args.pages_total >= procs,
            "--pages-total is {}: give at least one page for each of {procs} processes",
            args.pages_total
        );
        let cache = CacheSpec::of(&args.cache)?;
        let map = DeviceMap::new(args.device_mode, "--device-mode", procs, cache.backend_name()?)?;
        let (pages_total, device_mode, base_page) = (args.pages_total, args.device_mode, args.base_page);
        let plan = Self { pages_total, procs, iters, device_mode, base_page, threads, cache, map };
        // Rank 0 maps all of them in the serial case.
        let share = |rank: &usize| u64::from(plan.ranges()[*rank].pages);
        let facts = plan.cache.look(&plan.map, |ranks| match ranks.contains(&0) {
            true => u64::from(pages_total),
            false => ranks.iter().map(share).sum(),
        })?;
        facts.check_pages("--pages-total", pages_total, base_page)?;
        Ok((plan, facts))
    }

    /// What each rank maps in the parallel case.
    fn ranges(&self) -> Vec<Range> {
        Range { first: self.base_page, pages: self.pages_total }.split(self.procs)
    }

    /// Pages of each process as far as all have them: N/P.
    fn pages_per_proc(&self) -> u32 {
        self.pages_total / self.procs
    }

    /// What the ranks map in a case: all that take part, from rank 0 on.
    fn ranges_of(&self, case: Case) -> Vec<Range> {
        let first = self.base_page;
        match case {
            Case::Single => vec![Range { first, pages: self.pages_per_proc() }],
            Case::Serial => vec![Range { first, pages: self.pages_total }],
            Case::Parallel => self.ranges(),
        }
    }

    /// All pages of one iteration.
    fn pages_of(&self, case: Case) -> u32 {
        self.ranges_of(case).iter().map(|range| range.pages).sum()
    }
}

/// What is measured, in the order of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    Single,
    Serial,
    Parallel,
}

impl Case {
    const ALL: [Self; 3] = [Self::Single, Self::Serial, Self::Parallel];

    /// Its name in results.
    const fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Serial => "serial",
            Self::Parallel => "parallel",
        }
    }
}

/// Page ids one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, Serialize)]
struct Range {
    first: u32,
    pages: u32,
}

impl Range {
    /// Parts of (almost) equal size, in order; the first ones have a page more where it does not come out even.
    fn split(self, parts: u32) -> Vec<Self> {
        let (share, more) = (self.pages / parts, self.pages % parts);
        let mut first = self.first;
        let part = |part| {
            let pages = share + u32::from(part < more);
            let range = Self { first, pages };
            first += pages;
            range
        };
        (0..parts).map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_ranks_map_one_more_where_it_does_not_come_out_even() {
        let ranges = Range { first: 50, pages: 10 }.split(4);
        assert_eq!(ranges.iter().map(|range| range.pages).collect::<Vec<_>>(), [3, 3, 2, 2]);
        assert_eq!(ranges.iter().map(|range| range.first).collect::<Vec<_>>(), [50, 53, 56, 58]);
    }

    proptest! {
        #[test]
        fn parts_are_disjoint_and_miss_nothing(first in 0..1000u32, pages in 1..1000u32, parts in 1..64u32) {
            let ranges = Range { first, pages }.split(parts);
            let ids: Vec<u32> = ranges.iter().flat_map(|range| range.first..range.first + range.pages).collect();
            prop_assert_eq!(ids, (first..first + pages).collect::<Vec<_>>());
            prop_assert_eq!(ranges.len(), parts as usize);
        }
    }
}
