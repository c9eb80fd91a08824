//! `kvbench shm-transfer`: how fast are blocks copied inside shared memory, and is that as fast as this machine can?
//!
//! ```text
//!   round 1    memcpy, movsb, nt, ours      of each size, hot and cold; who is first changes with the round
//!   round 2    ...                          some blocks that are not timed, then samples; the median of all is reported
//!
//!   hot     the same block again and again: a measure of caches, as far as it fits
//!   cold    the next block of a region that no cache holds: what a block of a KV cache is
//! ```
//!
//! `ours` is `Copier`, told what happens next: `ReadSoon` for hot blocks, `Cold` for cold ones. Bytes are counted once.
//!
//! | figure of `summary`                               | meaning                                              |
//! |---------------------------------------------------|------------------------------------------------------|
//! | `sizes[] {kb, temperature}`                       | a row: block size, `hot` or `cold`                    |
//! | `sizes[] .ours_gibps`, `.memcpy_gibps`            | both sides                                           |
//! | `sizes[] .best_gibps`                             | the fastest method of this row, ours included         |
//! | `sizes[] .ours_over_memcpy`, `.ours_over_best`    | their quotients                                      |
//! | `cold_speedup`                                    | ours over memcpy, cold, 16 KiB to 16 MiB: the least   |
//! | `single_gibps`, `single_ns`                       | the block of `--transfer_size_kb`                    |

mod report;
mod single;
mod sweep;

use std::num::NonZero;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use serde::Serialize;
use tidekv_cli::exit::Outcome;
use tidekv_shm::baseline::SharedMemory;
use tidekv_shm::copy::{Copier, CopyOptions, Destination, Method, Profile, ProfileSource};

use super::{CommonArgs, HugePageKind, Report, gflags, present, within};
use crate::host::HostInfo;
use crate::output::OutputArgs;
use crate::progress::Progress;
use crate::random::Random;
use crate::result::BenchResult;

/// Blocks that are always measured.
const SIZES: [usize; 8] = [1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// Of source and of destination each.
const MEMORY_MB: u32 = 128;
const MEMORY: usize = (MEMORY_MB as usize) << 20;

const MAX_TRANSFERS: u32 = 10_000_000;
const MAX_THREADS: u32 = 64;

/// Flags of the benchmark itself.
#[derive(Args, Clone, Debug)]
pub struct TransferFlags {
    /// Block that is measured by itself, in KB
    #[arg(long, value_name = "KB", default_value_t = 4)]
    pub transfer_size_kb: u32,

    /// Largest block of the table, in MB
    #[arg(long, value_name = "MB", default_value_t = 64)]
    pub max_transfer_size_mb: u32,

    /// Copies of that one block; below 500 the table has fewer rounds too
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub num_transfers: u32,

    /// Copy that one block with memcpy; false: byte by byte
    #[arg(long, value_name = "BOOL", default_value = "true", default_missing_value = "true", num_args = 0..=1, value_parser = gflags::parse_switch)]
    pub use_memcpy: bool,

    /// Compare every copy with its source
    #[arg(long, value_name = "BOOL", default_value = "false", default_missing_value = "true", num_args = 0..=1, value_parser = gflags::parse_switch)]
    pub verify_data: bool,

    /// Measure hot or cold blocks only [default: both]
    #[arg(long, value_enum, value_name = "WHICH")]
    pub pattern: Option<Temperature>,

    /// Threads that our side may use for one block
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: u32,

    /// Method of our side
    #[arg(long, value_enum, value_name = "METHOD", default_value_t = CopyKind::Auto)]
    pub copy: CopyKind,
}

/// Whether caches hold a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Temperature {
    /// The same block again and again
    Hot,
    /// The next block of a large region
    Cold,
}

impl Temperature {
    const fn name(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Cold => "cold",
        }
    }

    const fn destination(self) -> Destination {
        match self {
            Self::Hot => Destination::ReadSoon,
            Self::Cold => Destination::Cold,
        }
    }
}

/// A method, as a flag names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CopyKind {
    /// The fastest by size and temperature, as measured once on this machine
    Auto,
    /// The C library's
    Memcpy,
    /// Stores that pass the caches by
    Nt,
    /// rep movsb
    Movsb,
}

/// Arguments of `kvbench shm-transfer`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES, args_override_self = true)]
pub struct ShmTransferArgs {
    /// The benchmark's own.
    #[command(flatten)]
    pub flags: TransferFlags,

    /// Shared by the three.
    #[command(flatten)]
    pub common: CommonArgs,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench shm-transfer
  kvbench shm-transfer --num_transfers=100              # a first look, as a step of CI
  kvbench shm-transfer --pattern=cold --threads 2 --verify_data
  kvbench shm-transfer --copy=nt --hugepages=thp --repeat 5 --output transfer.json

Exit status: 0 done, 2 a copy differs from its source or a call failed.";

/// Measures, prints and keeps the result.
pub fn run(args: &ShmTransferArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(&args.flags, &args.common)?;
    present(&args.common, &args.output, plan.steps(), |host, progress| measure(&plan, host, progress))
}

/// What is measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Plan {
    transfer_size_kb: u32,
    max_transfer_size_mb: u32,
    num_transfers: u32,
    use_memcpy: bool,
    verify_data: bool,
    pattern: Option<Temperature>,
    threads: u32,
    copy: CopyKind,
    seed: u64,
    hugepages: HugePageKind,
}

impl Plan {
    pub(super) fn of(flags: &TransferFlags, common: &CommonArgs) -> anyhow::Result<Self> {
        common.check()?;
        let plan = Self {
            transfer_size_kb: within("--transfer_size_kb", flags.transfer_size_kb, MEMORY_MB << 10)?,
            max_transfer_size_mb: within("--max_transfer_size_mb", flags.max_transfer_size_mb, MEMORY_MB)?,
            num_transfers: within("--num_transfers", flags.num_transfers, MAX_TRANSFERS)?,
            use_memcpy: flags.use_memcpy,
            verify_data: flags.verify_data,
            pattern: flags.pattern,
            threads: within("--threads", flags.threads, MAX_THREADS)?,
            copy: flags.copy,
            seed: common.seed,
            hugepages: common.hugepages,
        };
        let method = plan.method();
        ensure!(
            method.is_none_or(Method::is_available),
            "--copy={} needs an x86-64 processor",
            method.map_or("auto", Method::name)
        );
        Ok(plan)
    }

    fn method(&self) -> Option<Method> {
        match self.copy {
            CopyKind::Auto => None,
            CopyKind::Memcpy => Some(Method::Plain),
            CopyKind::Nt => Some(Method::NonTemporal),
            CopyKind::Movsb => Some(Method::Movsb),
        }
    }

    /// Block sizes of the table: the fixed ones, and the one asked for.
    fn sizes(&self) -> Vec<usize> {
        let last = self.max_transfer_size_mb as usize * (1 << 20);
        SIZES.into_iter().chain((!SIZES.contains(&last)).then_some(last)).collect()
    }

    fn temperatures(&self) -> Vec<Temperature> {
        self.pattern.map_or_else(|| vec![Temperature::Hot, Temperature::Cold], |only| vec![only])
    }

    pub(super) fn steps(&self) -> u64 {
        (self.sizes().len() * self.temperatures().len()) as u64 + 1
    }

    fn copier(&self) -> Copier {
        let profile = self.method().map_or(ProfileSource::Kept, |method| ProfileSource::Given(Profile::always(method)));
        let threads = NonZero::new(self.threads as usize).unwrap_or(NonZero::<usize>::MIN);
        Copier::new(CopyOptions { threads, profile })
    }
}

/// Measures everything once.
pub(super) fn measure(plan: &Plan, host: HostInfo, progress: &Progress) -> anyhow::Result<Report> {
    let mut result = BenchResult::new("shm-transfer", plan, host)?;
    progress.now("preparing");
    let copier = plan.copier();
    let mut field = Field::new(plan)?;
    let single = single::measure(plan, &mut field)?;
    progress.step();
    let rows = sweep::measure(plan, &copier, &mut field, progress)?;
    let text = report::fill(&mut result, plan, &copier, &single, &rows);
    let differing = u32::from(single.differs) + rows.iter().map(|row| row.differing).sum::<u32>();
    let wrong = (differing > 0).then(|| format!("{differing} copies differ from their source"));
    Ok(Report { result, text, wrong })
}

/// Source and destination.
#[derive(Debug)]
pub(super) struct Field {
    source: SharedMemory,
    destination: SharedMemory,
    cursor: usize,
}

impl Field {
    fn new(plan: &Plan) -> anyhow::Result<Self> {
        let kind = plan.hugepages.of_memory();
        let (mut source, mut destination) = (SharedMemory::new(MEMORY, kind)?, SharedMemory::new(MEMORY, kind)?);
        let mut random = Random::seeded(plan.seed);
        for word in source.bytes_mut().chunks_exact_mut(8) {
            word.copy_from_slice(&random.next_word().to_le_bytes());
        }
        // Written once, so that no page fault is timed.
        destination.bytes_mut().fill(0);
        Ok(Self { source, destination, cursor: 0 })
    }

    /// Where the next block begins.
    fn next_block(&mut self, len: usize) -> usize {
        if self.cursor + len > self.source.bytes().len() {
            self.cursor = 0;
        }
        let at = self.cursor;
        self.cursor += len;
        at
    }

    /// Destination and source of a block.
    fn block(&mut self, at: usize, len: usize) -> (&mut [u8], &[u8]) {
        (&mut self.destination.bytes_mut()[at..at + len], &self.source.bytes()[at..at + len])
    }

    /// Whether the block at `at` arrived.
    fn arrived(&mut self, at: usize, len: usize) -> bool {
        let (to, from) = self.block(at, len);
        to == from
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};

    fn plan(args: &[&str]) -> anyhow::Result<Plan> {
        let all = ["kvbench", "shm-transfer"].iter().chain(args).map(std::ffi::OsString::from);
        match Cli::parse_args(all)?.command {
            Command::ShmTransfer(args) => Plan::of(&args.flags, &args.common),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_last_size_is_the_one_asked_for() {
        let plan = |args: &[&str]| plan(args).unwrap();
        assert_eq!(plan(&[]).sizes().last(), Some(&(64 << 20)));
        assert_eq!(plan(&["--max_transfer_size_mb=16"]).sizes().len(), SIZES.len());
        assert_eq!(plan(&["--pattern=cold"]).temperatures(), [Temperature::Cold]);
        assert!(!plan(&["--nouse_memcpy"]).use_memcpy && plan(&["-verify_data"]).verify_data);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for args in [
            &["--transfer_size_kb=0"][..],
            &["--transfer_size_kb=131073"],
            &["--max_transfer_size_mb=129"],
            &["--num_transfers=0"],
            &["--threads=0"],
            &["--copy=fast"],
            &["--pattern=warm"],
        ] {
            assert!(plan(args).is_err(), "{args:?}");
        }
        assert!(plan(&["--transfer_size_kb=131072"]).is_ok());
    }

    #[test]
    fn cold_blocks_walk_through_the_memory_and_begin_again() {
        let mut field = Field::new(&plan(&[]).unwrap()).unwrap();
        assert_eq!([field.next_block(MEMORY / 2), field.next_block(MEMORY / 2)], [0, MEMORY / 2]);
        assert_eq!(field.next_block(4096), 0);
        assert!(!field.arrived(0, 4096));
        let (to, from) = field.block(0, 4096);
        to.copy_from_slice(from);
        assert!(field.arrived(0, 4096));
    }
}
