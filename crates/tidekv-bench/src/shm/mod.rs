//! `kvbench shm-alloc`, `shm-lookup`, `shm-transfer`, and `shm` for all three: what does shared memory for KV blocks
//! cost by system calls, searches and `memcpy`, and what with our arena and our copies, in the same run?
//!
//! ```text
//!   alloc      shm_open + ftruncate + mmap for each block       beside   the arena's alloc and free
//!   lookup     walk a map, search a tree, do arithmetic         beside   the arena's handle -> address
//!   transfer   memcpy, rep movsb, non-temporal stores           beside   the method that `Copier` chooses
//!   suite      the three, one after the other
//!
//!   chunks     operations too short for a clock, timed in chunks       gflags    the flags as they were always written
//!   repeats    the same again, median and spread                       tidy_up   names that an interrupt must not leave
//!   lines      the lines that other tools look for
//! ```
//!
//! Flags, defaults, headings and lines are those of the benchmarks that people have: `shm_allocation_bench`,
//! `shm_address_lookup_bench` and `shm_transfer_bench`. What was wrong about them is not kept: every lookup is checked,
//! failures end with an exit code, figures come from medians of chunks, and names are this process's own.

pub mod alloc;
mod chunks;
pub mod gflags;
mod lines;
pub mod lookup;
mod repeats;
pub mod suite;
mod tidy_up;
pub mod transfer;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use serde::Serialize;
use tidekv_cli::exit::Outcome;
use tidekv_shm::arena::{Arena, HugePages, Pages};
use tidekv_shm::baseline::PageKind;

use crate::host::{HostInfo, PERFORMANCE};
use crate::output::{OutputArgs, warn};
use crate::progress::Progress;
use crate::result::BenchResult;

const MAX_REPEATS: u32 = 1000;

/// Flags that the three benchmarks share.
#[derive(Args, Clone, Debug)]
pub struct CommonArgs {
    /// Random numbers: equal seeds do equal things in equal order
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Measure all of it this often, and report median and spread
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub repeat: u32,

    /// Pages of shared memory
    #[arg(long, value_enum, value_name = "KIND", default_value_t = HugePageKind::Off)]
    pub hugepages: HugePageKind,
}

impl CommonArgs {
    fn check(&self) -> anyhow::Result<()> {
        let repeat = self.repeat;
        ensure!((1..=MAX_REPEATS).contains(&repeat), "--repeat is {repeat}: give 1 to {MAX_REPEATS}");
        ensure!(
            self.hugepages != HugePageKind::Hugetlb || free_huge_pages() != Some(0),
            "--hugepages=hugetlb needs reserved pages of 2 MiB and none is free: \
             `sysctl vm.nr_hugepages=256`, as root, reserves 512 MiB; or use --hugepages=thp"
        );
        Ok(())
    }
}

/// Reserved pages of 2 MiB that nobody uses; nothing where the kernel does not say.
fn free_huge_pages() -> Option<u64> {
    let text = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").ok()?;
    text.trim().parse().ok()
}

/// Pages, as a flag names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum HugePageKind {
    /// Those of the file system
    Off,
    /// Transparent huge pages, if the system grants them
    Thp,
    /// Reserved pages of 2 MiB
    Hugetlb,
}

impl HugePageKind {
    fn of_arena(self) -> HugePages {
        match self {
            Self::Off => HugePages::Off,
            Self::Thp => HugePages::Thp,
            Self::Hugetlb => HugePages::Hugetlb,
        }
    }

    /// An arena takes what its folder and the kernel give; that they gave less is said.
    fn warn_unless_granted(self, arena: &Arena) {
        let missing = match (self, arena.pages()) {
            (Self::Hugetlb, Pages::Small | Pages::ThpAdvised) => {
                "its folder is not on hugetlbfs: `mount -t hugetlbfs` one and name it by KVCACHED_RUNTIME_DIR"
            }
            (Self::Thp, Pages::Small) => {
                "/sys/kernel/mm/transparent_hugepage/shmem_enabled does not allow them: use advise"
            }
            _ => return,
        };
        warn(&format!("the arena has no such huge pages, {missing}"));
    }

    fn of_memory(self) -> PageKind {
        match self {
            Self::Off => PageKind::Ordinary,
            Self::Thp => PageKind::Transparent,
            Self::Hugetlb => PageKind::Reserved,
        }
    }
}

/// A number of a flag, if it can be measured.
fn within(flag: &str, value: u32, most: u32) -> anyhow::Result<u32> {
    ensure!((1..=most).contains(&value), "{flag} is {value}: give 1 to {most}");
    Ok(value)
}

/// Measures as often as asked, prints and keeps the result. `steps` are those of one measurement.
fn present(
    common: &CommonArgs,
    output: &OutputArgs,
    steps: u64,
    measure: impl Fn(HostInfo, &Progress) -> anyhow::Result<Report>,
) -> anyhow::Result<Outcome> {
    let opened = output.open()?;
    let host = host(output.quiet);
    let progress = opened.progress(u64::from(common.repeat) * steps);
    let report = repeats::measure(common.repeat, |_| measure(host.clone(), &progress))?;
    drop(progress);
    opened.emit(&report.result, &report.text)?;
    report.verdict()?;
    Ok(Outcome::Done)
}

/// What one benchmark found out.
#[derive(Clone, Debug)]
pub struct Report {
    /// Samples and figures.
    result: BenchResult,
    /// The lines for people.
    text: String,
    /// What makes the result worthless. The exit code says it, after everything was printed.
    wrong: Option<String>,
}

impl Report {
    /// An error where something was wrong.
    fn verdict(&self) -> anyhow::Result<()> {
        match &self.wrong {
            Some(wrong) => anyhow::bail!("{wrong}"),
            None => Ok(()),
        }
    }
}

/// The machine; a governor that makes times vary is pointed out.
fn host(quiet: bool) -> HostInfo {
    let host = HostInfo::current();
    if let Some(governor) = host.governor.as_deref().filter(|governor| *governor != PERFORMANCE)
        && !quiet
    {
        warn(&format!(
            "the CPU governor is {governor}, so times depend on the clock rate of the moment: \
             `cpupower frequency-set --governor performance` makes them steady"
        ));
    }
    host
}
