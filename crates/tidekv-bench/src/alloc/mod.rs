//! `kvbench alloc`: what does it cost to lease k blocks and to free them again, and does that depend on the
//! size of the pool?
//!
//! ```text
//!   alloc+free  lease k blocks and free them at once: what was freed last is leased next, all in cache.
//!               The share `--occupancy` of every page is leased beforehand, at random places.
//!   replace     free a random request of k blocks and lease k for it: what serving does, cache misses
//!               included. The requests have been replaced many times before, in a pool of the same occupancy.
//! ```
//!
//! The first asks for the cost of the algorithm, and must not depend on the size of the pool. The second also
//! pays for memory: the tables of a million blocks do not fit a cache.
//!
//! Why every page is leased to the same share and not the pool at random: the allocator takes the fullest pages
//! first, and chance makes pages with a single free block in a large pool and none in a small one. Sixteen
//! blocks from sixteen pages cost several times as much as from two, which would look like a cost of size.
//!
//! One pair takes about as long as reading the clock, so a sample is a batch of [`BATCH`] pairs, and a
//! percentile is one of batches: it shows a slow stretch, not one slow call. Pools take turns in short
//! rounds, so that a machine that gets slower half-way does so for all of them.
//!
//! Both are measured through [`KvPool`](tidekv_pool::KvPool), which is what engines call, and on the bare allocator
//! inside it. Three more questions are asked of `KvPool` alone: what `available()` costs, what several threads on one
//! pool make of its lock, and what an allocation costs that has to map a page first.
//!
//! | figure of `summary`                              | meaning                                              |
//! |--------------------------------------------------|------------------------------------------------------|
//! | `alloc_free_ns.k<k>.p50`, `.p99`                 | one pair in the slowest of the pools                 |
//! | `replace_ns.k<k>.p50`, `.p99`                    | one replacement in the slowest of the pools          |
//! | `pools.<blocks>.k<k>.p50`, `.p99`                | one pair in this pool, in ns                         |
//! | `pools.<blocks>.replace_k<k>.p50`, `.p99`        | one replacement in this pool, in ns                  |
//! | `largest_over_smallest_pool.k<k>`                | median pair of the largest pool over the smallest's  |
//! | `core_...`                                       | each of these for the bare allocator                 |
//! | `available_ns.p50`, `.p99`                       | one call of `available()`                            |
//! | `threads.<n>.pairs_per_s`                        | pairs of 16 blocks that n threads make on one pool   |
//! | `threads<n>_over_1`                              | the same over that of one thread                     |
//! | `slow_path_us.p50`, `.p99`                       | an allocation that maps one page of 2 MiB            |

mod elastic;
mod pool;
mod report;

use std::sync::Arc;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use tidekv_mem::{Backend, BackendName};

use crate::host::HostInfo;
use crate::lab::Lab;
use crate::list::List;
use crate::output::OutputArgs;
use crate::progress::Progress;
use crate::result::BenchResult;
use crate::stats::Samples;
use pool::{Blocks, Pool};
use tidekv_cli::exit::Outcome;

/// Pairs per clock reading.
pub const BATCH: u32 = 64;

/// How often each pool has its turn.
const ROUNDS: u32 = 10;

const DEFAULT_ITERS: u32 = 10_000;
const QUICK_ITERS: u32 = 1_000;

/// Bounds that keep a run within the memory and the patience of a laptop.
const MAX_BLOCKS: u32 = 100_000_000;
const MAX_ITERS: u32 = 10_000_000;
const MAX_THREADS: u32 = 256;

/// Arguments of `kvbench alloc`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct AllocArgs {
    /// Sizes of the pools, in blocks
    #[arg(long, value_name = "N,...", default_value = "1000,1000000")]
    pub blocks: List<u32>,

    /// Blocks leased and freed together
    #[arg(long, value_name = "K,...", default_value = "1,16,64,256")]
    pub k: List<u32>,

    /// Samples of each measurement, of 64 pairs each [default: 10000, with --quick 1000]
    #[arg(long, value_name = "N")]
    pub iters: Option<u32>,

    /// Share of each pool that is leased beforehand, scattered over its pages
    #[arg(long, value_name = "SHARE", default_value_t = 0.5)]
    pub occupancy: f64,

    /// Blocks of one page; a pool is rounded up to whole pages
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub blocks_per_page: u32,

    /// Memory behind the pools: host, cuda, fake, or auto (cuda where there is a GPU)
    #[arg(long, value_name = "NAME", default_value_t = BackendName::Host)]
    pub backend: BackendName,

    /// CUDA device number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,

    /// Threads that share one pool; one thread is always measured, to compare with
    #[arg(long, value_name = "N,...", default_value = "1,8")]
    pub threads: List<u32>,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench alloc
  kvbench alloc --quick --k 16
  kvbench alloc --blocks 1000,100000,1000000 --occupancy 0.9
  kvbench alloc --backend fake --threads 1,2,4,8,16
  kvbench alloc --output alloc.json --quiet && kvbench compare before.json alloc.json";

/// Measures, prints and keeps the result.
pub fn run(args: &AllocArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    let mut result = BenchResult::new("alloc", &plan, HostInfo::current())?;
    let memory = Memory { backend: tidekv_mem::open(args.backend, args.device)?, lab: Lab::new()? };
    let progress = output.progress(plan.steps());
    let measurements = measure(&plan, &memory, &progress)?;
    let elastic = elastic::measure(&plan, &memory, &progress)?;
    drop(progress);
    report::fill(&mut result, &measurements, &elastic);
    output.emit(&result, &report::tables(&measurements, &elastic))?;
    Ok(Outcome::Done)
}

/// Where pools get their pages, and where their files lie.
#[derive(Debug)]
struct Memory {
    backend: Arc<dyn Backend>,
    lab: Lab,
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Plan {
    blocks: Vec<u32>,
    k: Vec<u32>,
    iters: u32,
    batch: u32,
    occupancy: f64,
    blocks_per_page: u32,
    backend: &'static str,
    device: u32,
    threads: Vec<u32>,
}

impl Plan {
    fn of(args: &AllocArgs) -> anyhow::Result<Self> {
        let default_iters = if args.output.quick { QUICK_ITERS } else { DEFAULT_ITERS };
        let plan = Self {
            blocks: args.blocks.to_vec(),
            k: args.k.to_vec(),
            iters: args.iters.unwrap_or(default_iters),
            batch: BATCH,
            occupancy: args.occupancy,
            blocks_per_page: args.blocks_per_page,
            backend: args.backend.name(),
            device: args.device,
            threads: args.threads.to_vec(),
        };
        ensure!((1..=MAX_ITERS).contains(&plan.iters), "--iters is {}: give 1 to {MAX_ITERS}", plan.iters);
        ensure!(
            (0.0..1.0).contains(&plan.occupancy),
            "--occupancy is {}: give a share from 0 to below 1, such as 0.5",
            plan.occupancy
        );
        let per_page = plan.blocks_per_page;
        ensure!((1..=MAX_BLOCKS).contains(&per_page), "--blocks-per-page is {per_page}: give 1 to {MAX_BLOCKS}");
        for &blocks in &plan.blocks {
            ensure!((1..=MAX_BLOCKS).contains(&blocks), "--blocks has {blocks}: give 1 to {MAX_BLOCKS}");
        }
        ensure!(plan.k.iter().all(|&k| k > 0), "--k has 0: lease at least one block");
        for &threads in &plan.threads {
            ensure!((1..=MAX_THREADS).contains(&threads), "--threads has {threads}: give 1 to {MAX_THREADS}");
        }
        Ok(plan)
    }

    fn rounds(&self) -> u32 {
        ROUNDS.min(self.iters)
    }

    /// Samples to take in one round, so that all rounds together take `iters`.
    fn samples_in_round(&self, round: u32) -> u32 {
        self.iters / self.rounds() + u32::from(round < self.iters % self.rounds())
    }

    fn steps(&self) -> u64 {
        let measurements = self.blocks.len() * self.k.len();
        u64::try_from(measurements).unwrap_or(u64::MAX).saturating_mul(u64::from(self.rounds())) + elastic::STEPS
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// `KvPool`.
    Pool,
    /// The bare allocator.
    Core,
}

/// What was measured of one pool with one k. A sample is [`BATCH`] pairs.
#[derive(Debug)]
struct Measurement {
    side: Side,
    blocks: u32,
    k: u32,
    alloc_free: Samples,
    /// Empty where fewer than k blocks are leased beforehand.
    replace: Samples,
}

impl Measurement {
    fn new(side: Side, blocks: u32, k: u32) -> Self {
        Self { side, blocks, k, alloc_free: Samples::new(), replace: Samples::new() }
    }
}

fn measure(plan: &Plan, memory: &Memory, progress: &Progress) -> anyhow::Result<Vec<Measurement>> {
    let mut measurements = Vec::new();
    for &k in &plan.k {
        let mut turns: Vec<Box<dyn Turn>> = Vec::new();
        for &blocks in &plan.blocks {
            progress.now(format!("{blocks} blocks, k = {k}: setting up"));
            let elastic = || elastic::open(plan, memory, blocks);
            turns.push(Contender::boxed(plan, Measurement::new(Side::Pool, blocks, k), elastic)?);
            let bare = || pool::bare_allocator(blocks, plan.blocks_per_page);
            turns.push(Contender::boxed(plan, Measurement::new(Side::Core, blocks, k), bare)?);
        }
        for round in 0..plan.rounds() {
            for turn in &mut turns {
                turn.take(plan.samples_in_round(round))?;
            }
            progress.now(format!("k = {k}"));
            plan.blocks.iter().for_each(|_| progress.step());
        }
        measurements.extend(turns.into_iter().map(|turn| turn.finish()));
    }
    Ok(measurements)
}

/// Something that is measured in turn with others.
trait Turn {
    fn take(&mut self, samples: u32) -> anyhow::Result<()>;
    fn finish(self: Box<Self>) -> Measurement;
}

/// Two pools of one kind and size, one for each loop, and what was measured of them.
struct Contender<B> {
    scattered: Pool<B>,
    settled: Pool<B>,
    measurement: Measurement,
}

impl<B: Blocks + 'static> Contender<B> {
    fn boxed(
        plan: &Plan,
        measurement: Measurement,
        open: impl Fn() -> anyhow::Result<B>,
    ) -> anyhow::Result<Box<dyn Turn>> {
        let pool = || Pool::scattered(open()?, plan.blocks_per_page, plan.occupancy, measurement.k);
        let (scattered, settled) = (pool()?, pool()?.settled()?);
        Ok(Box::new(Self { scattered, settled, measurement }))
    }
}

impl<B: Blocks> Turn for Contender<B> {
    fn take(&mut self, samples: u32) -> anyhow::Result<()> {
        self.scattered.alloc_free(samples, &mut self.measurement.alloc_free)?;
        self.settled.replace(samples, &mut self.measurement.replace)
    }

    fn finish(self: Box<Self>) -> Measurement {
        self.measurement
    }
}

#[cfg(test)]
mod tests;
