//! `kvbench shm-alloc`: what does a block of shared memory cost, by system calls and from the arena?
//!
//! ```text
//!   system calls    shm_open | ftruncate | mmap | touch | munmap + close + shm_unlink      each timed alone
//!   arena           alloc + touch + free                                                   timed in chunks
//!   two processes   the same pairs by several processes on one arena at the same time
//! ```
//!
//! Memory that was never touched has no pages yet, so a block that is only mapped costs its page faults later, at the
//! worst moment. Figures with `touched` write every byte, those with `paged` one byte of every page.
//!
//! | figure of `summary`                               | meaning                                                        |
//! |---------------------------------------------------|----------------------------------------------------------------|
//! | `arena_pair_ns`                                   | alloc and free of mixed sizes, one thread, median chunk         |
//! | `syscall_pair_ns`                                 | the six calls of a block's life, the same sizes, median         |
//! | `speedup`                                         | the second over the first                                      |
//! | `two_process_pair_ns`                             | a pair while other processes do the same, the slowest of them   |
//! | `speedup_touched_64k`, `speedup_touched_1m`       | system calls over arena, every byte written                    |
//! | `speedup_paged_64k`, `speedup_paged_1m`           | the same with one byte of every page written                   |
//! | `sizes[] {kb, syscall_pair_ns, arena_pair_ns}`    | by size, untouched                                             |
//! | `touched.<size>.{syscall,arena}_pair_ns`          | both sides of the figures above; `paged.<size>` likewise        |
//! | `calls.<call>_ns_p50`                             | one system call                                                |

mod arena;
mod peer;
mod report;
mod syscalls;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use serde::Serialize;
use tidekv_cli::exit::Outcome;
use tidekv_shm::baseline::{self, Touch};

use super::{CommonArgs, HugePageKind, Report, gflags, present, within};
use crate::host::HostInfo;
use crate::output::OutputArgs;
use crate::progress::Progress;
use crate::random::Random;
use crate::result::BenchResult;

pub use peer::{PeerArgs, run as run_peer};

/// Blocks of the figures with touched memory: what a KV block has, small and large.
const TOUCHED_KB: [u32; 2] = [64, 1024];

const MAX_ITERATIONS: u32 = 10_000_000;
/// The largest block that the arena has.
const MAX_SIZE_KB: u32 = 2 << 20;
const MAX_PROCS: u32 = 16;

/// Flags of the benchmark itself.
#[derive(Args, Clone, Debug)]
pub struct AllocFlags {
    /// Allocations by system calls; below 500 also operations of one chunk
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub num_iterations: u32,

    /// Smallest block in KB; the one whose calls are timed one by one
    #[arg(long, value_name = "KB", default_value_t = 4)]
    pub min_size_kb: u32,

    /// Largest block in KB
    #[arg(long, value_name = "KB", default_value_t = 1024)]
    pub max_size_kb: u32,

    /// Time mmap alone, on an object that is there already
    #[arg(long, value_name = "BOOL", default_value = "false", default_missing_value = "true", num_args = 0..=1, value_parser = gflags::parse_switch)]
    pub measure_mmap_only: bool,

    /// Unlink each object; false leaves them, and names them
    #[arg(long, value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, value_parser = gflags::parse_switch)]
    pub cleanup: bool,

    /// Measure one side only [default: both]
    #[arg(long = "impl", value_enum, value_name = "SIDE")]
    pub side: Option<Side>,

    /// What is written to the blocks whose calls are timed one by one
    #[arg(long, value_enum, value_name = "HOW", default_value_t = TouchKind::None)]
    pub touch: TouchKind,

    /// Processes that allocate at the same time
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub procs: u32,
}

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// shm_open, ftruncate and mmap
    Syscall,
    /// Ours
    Arena,
}

/// What is written to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum TouchKind {
    /// Nothing
    None,
    /// Its first byte
    First,
    /// Every byte
    All,
}

impl TouchKind {
    fn touch(self) -> Touch {
        match self {
            Self::None => Touch::Nothing,
            Self::First => Touch::First,
            Self::All => Touch::Bytes,
        }
    }
}

/// Arguments of `kvbench shm-alloc`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES, args_override_self = true)]
pub struct ShmAllocArgs {
    /// The benchmark's own.
    #[command(flatten)]
    pub flags: AllocFlags,

    /// Shared by the three.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench shm-alloc
  kvbench shm-alloc --num_iterations=100                    # a first look, as a step of CI
  kvbench shm-alloc --impl=syscall --touch=all --nocleanup  # the baseline, with page faults; leaves its segments
  taskset -c 0 kvbench shm-alloc --procs 2 --repeat 5 --output alloc.json

Exit status: 0 done, 2 a call failed.";

/// Measures, prints and keeps the result.
pub fn run(args: &ShmAllocArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(&args.flags, &args.common)?;
    present(&args.common, &args.output, STEPS, |host, progress| measure(&plan, host, progress))
}

/// What is measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Plan {
    num_iterations: u32,
    min_size_kb: u32,
    max_size_kb: u32,
    measure_mmap_only: bool,
    cleanup: bool,
    #[serde(rename = "impl")]
    side: Option<Side>,
    touch: TouchKind,
    procs: u32,
    seed: u64,
    hugepages: HugePageKind,
}

impl Plan {
    pub(super) fn of(flags: &AllocFlags, common: &CommonArgs) -> anyhow::Result<Self> {
        common.check()?;
        let plan = Self {
            num_iterations: within("--num_iterations", flags.num_iterations, MAX_ITERATIONS)?,
            min_size_kb: within("--min_size_kb", flags.min_size_kb, MAX_SIZE_KB)?,
            max_size_kb: within("--max_size_kb", flags.max_size_kb, MAX_SIZE_KB)?,
            measure_mmap_only: flags.measure_mmap_only,
            cleanup: flags.cleanup,
            side: flags.side,
            touch: flags.touch,
            procs: within("--procs", flags.procs, MAX_PROCS)?,
            seed: common.seed,
            hugepages: common.hugepages,
        };
        let (min, max) = (plan.min_size_kb, plan.max_size_kb);
        ensure!(min <= max, "--min_size_kb is {min} and --max_size_kb {max}: the first is the smaller one");
        Ok(plan)
    }

    fn measures(&self, side: Side) -> bool {
        self.side.is_none_or(|only| only == side)
    }

    /// From the smallest to the largest block, each twice the one before.
    fn sizes_kb(&self) -> Vec<u32> {
        std::iter::successors(Some(self.min_size_kb), |kb| kb.checked_mul(2))
            .take_while(|kb| *kb <= self.max_size_kb)
            .collect()
    }

    /// `count` sizes in bytes, all equally often, in an order that the seed decides.
    fn mixed_bytes(&self, count: usize) -> Vec<usize> {
        let mut mixed: Vec<usize> = self.sizes_kb().into_iter().map(bytes).cycle().take(count).collect();
        Random::seeded(self.seed).shuffle(&mut mixed);
        mixed
    }

    /// Memory that the touched blocks need at once, so that touching them cannot end the process.
    fn check_room(&self) -> anyhow::Result<()> {
        let largest = self.max_size_kb.max(TOUCHED_KB[1]);
        let (needed, free) = (bytes(largest) as u64 + (64 << 20), baseline::free_bytes()?);
        ensure!(
            needed <= free,
            "/dev/shm has {} MiB left and {} are needed: remove what is there, or make it larger",
            free >> 20,
            needed >> 20
        );
        Ok(())
    }
}

const fn bytes(kb: u32) -> usize {
    kb as usize * 1024
}

pub(super) const STEPS: u64 = 4;

/// Measures everything once.
pub(super) fn measure(plan: &Plan, host: HostInfo, progress: &Progress) -> anyhow::Result<Report> {
    plan.check_room()?;
    let mut result = BenchResult::new("shm-alloc", plan, host)?;
    let calls = if plan.measures(Side::Syscall) {
        progress.now("system calls");
        Some(syscalls::measure(plan)?)
    } else {
        None
    };
    progress.step();
    let ours = if plan.measures(Side::Arena) { Some(arena::measure(plan, progress)?) } else { None };
    progress.step();
    let text = report::fill(&mut result, plan, calls.as_ref(), ours.as_ref());
    Ok(Report { result, text, wrong: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};

    fn plan(args: &[&str]) -> anyhow::Result<Plan> {
        let all = ["kvbench", "shm-alloc"].iter().chain(args).map(std::ffi::OsString::from);
        match Cli::parse_args(all)?.command {
            Command::ShmAlloc(args) => Plan::of(&args.flags, &args.common),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sizes_double_and_are_mixed_by_the_seed() {
        let plan = plan(&["--min_size_kb=4", "--max_size_kb=20"]).unwrap();
        assert_eq!(plan.sizes_kb(), [4, 8, 16]);
        let mixed = plan.mixed_bytes(300);
        assert_eq!(mixed.iter().filter(|&&bytes| bytes == 4096).count(), 100);
        assert_eq!(mixed, plan.mixed_bytes(300));
        let other = Plan { seed: 2, ..plan };
        assert_ne!(mixed, other.mixed_bytes(300));
    }

    #[test]
    fn flags_in_every_form() {
        let plan = |args: &[&str]| plan(args).unwrap();
        assert!(plan(&[]).cleanup && !plan(&["--nocleanup"]).cleanup && !plan(&["--cleanup=false"]).cleanup);
        assert!(!plan(&["--cleanup", "false"]).cleanup && !plan(&["-cleanup=0"]).cleanup);
        assert!(plan(&["--cleanup", "--measure_mmap_only", "-num_iterations", "7"]).measure_mmap_only);
        assert_eq!(plan(&["-num_iterations=7", "--num-iterations=8"]).num_iterations, 8);
        assert_eq!(plan(&["--impl=arena"]).side, Some(Side::Arena));
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for args in [
            &["--min_size_kb=0"][..],
            &["--num_iterations=0"],
            &["--min_size_kb=8", "--max_size_kb=4"],
            &["--procs=0"],
            &["--cleanup=perhaps"],
            &["--no_such_flag"],
            &["--max_size_kb=99999999"],
            &["--repeat=0"],
        ] {
            assert!(plan(args).is_err(), "{args:?}");
        }
    }
}
