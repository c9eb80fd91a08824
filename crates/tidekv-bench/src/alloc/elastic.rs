//! What is asked of `KvPool` alone: `available()`, several threads on one pool, and allocations that map a page.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use anyhow::Context;
use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, Step};
use tidekv_pool::{KvPool, ReservePolicy};
use tidekv_shm::PoolName;

use super::pool::{Blocks, Pool};
use super::{BATCH, Memory, Plan};
use crate::lab::small_pages;
use crate::progress::Progress;
use crate::stats::{Samples, to_f64};

/// Steps of the progress bar.
pub(super) const STEPS: u64 = 3;

/// Calls of `available()` per clock reading.
pub(super) const AVAILABLE_BATCH: u32 = 1024;

/// Blocks of one pair in the measurement of threads.
pub(super) const THREADS_K: u32 = 16;

/// The page that the slow path maps.
pub(super) const SLOW_PAGE: Bytes = Bytes::mib(2);
const SLOW_BLOCKS: u32 = 16;

/// Allocations on the slow path that are timed, at most.
const MAX_SLOW_SAMPLES: u32 = 500;

/// How long each number of threads runs, in turns.
const THREADS_TURN: Duration = Duration::from_millis(100);
const THREADS_TURNS: u32 = 5;

/// Idle pages of these pools stay: what is measured must not depend on how long ago the pool was set up.
const NO_DECAY: Duration = Duration::from_secs(24 * 3600);

const FENCE: Fence = Fence::Step(Step(0));

/// Times of `KvPool` beyond those of a pair.
#[derive(Debug, Default)]
pub(super) struct ElasticTimes {
    /// Batches of [`AVAILABLE_BATCH`] calls.
    pub(super) available: Samples,
    /// One thread first, then as asked for.
    pub(super) rates: Vec<Rate>,
    /// Allocations that map a page.
    pub(super) slow_path: Samples,
}

/// What a number of threads achieves together.
#[derive(Debug)]
pub(super) struct Rate {
    pub(super) threads: u32,
    pub(super) pairs_per_s: f64,
}

impl ElasticTimes {
    /// A rate over that of one thread; `None` for one thread itself.
    pub(super) fn over_one(&self, rate: &Rate) -> Option<f64> {
        let one = self.rates.iter().find(|rate| rate.threads == 1)?;
        (rate.threads != 1 && one.pairs_per_s > 0.0).then(|| rate.pairs_per_s / one.pairs_per_s)
    }
}

pub(super) fn measure(plan: &Plan, memory: &Memory, progress: &Progress) -> anyhow::Result<ElasticTimes> {
    progress.now("available()");
    let available = available(plan, memory).context("measuring available()")?;
    progress.step();
    progress.now("threads");
    let rates = threads(plan, memory).context("measuring threads")?;
    progress.step();
    progress.now("slow path");
    let slow_path = slow_path(plan, memory).context("measuring the slow path")?;
    progress.step();
    Ok(ElasticTimes { available, rates, slow_path })
}

/// A pool with room for `blocks`, in pages as small as the memory allows.
pub(super) fn open(plan: &Plan, memory: &Memory, blocks: u32) -> anyhow::Result<KvPool> {
    let smallest = memory.backend.capabilities().granularity;
    // 16 bytes a block are the least that keeps blocks apart and aligned.
    let page_bytes = Bytes((u64::from(plan.blocks_per_page) * 16).next_multiple_of(smallest.0));
    open_pages(memory, page_bytes, plan.blocks_per_page, blocks.div_ceil(plan.blocks_per_page), None)
}

fn open_pages(
    memory: &Memory,
    page_bytes: Bytes,
    blocks_per_page: u32,
    pages: u32,
    reserve: Option<ReservePolicy>,
) -> anyhow::Result<KvPool> {
    static OPENED: AtomicU32 = AtomicU32::new(0);
    let geometry = small_pages(&*memory.backend, page_bytes, blocks_per_page, pages)?;
    // Several pools are alive at once, so each brings a budget that is large enough for all of them.
    let budget = memory.backend.memory()?.total;
    let mut config = memory.lab.config(Arc::clone(&memory.backend), geometry, budget);
    config.name = PoolName::new(&format!("kvcached_alloc_{}", OPENED.fetch_add(1, Ordering::Relaxed)))?;
    config.decay = NO_DECAY;
    if let Some(reserve) = reserve {
        config.reserve = reserve;
    }
    Ok(KvPool::open(config)?)
}

fn available(plan: &Plan, memory: &Memory) -> anyhow::Result<Samples> {
    let blocks = plan.blocks.iter().copied().max().unwrap_or(1);
    let pool = Pool::scattered(open(plan, memory, blocks)?, plan.blocks_per_page, plan.occupancy, 1)?;
    let mut times = Samples::new();
    for _ in 0..plan.iters {
        let started = Instant::now();
        for _ in 0..AVAILABLE_BATCH {
            black_box(pool.blocks.available());
        }
        times.push_duration(started.elapsed());
    }
    Ok(times)
}

fn threads(plan: &Plan, memory: &Memory) -> anyhow::Result<Vec<Rate>> {
    let mut counts = vec![1];
    counts.extend(plan.threads.iter().copied().filter(|&threads| threads != 1));
    let most = counts.iter().copied().max().unwrap_or(1);
    // Room for all of them at once, so that nobody is ever refused.
    let mut pool = open(plan, memory, 4 * THREADS_K * most)?;
    let leases = pool.lease_all()?;
    pool.free(&leases, FENCE)?;

    let mut totals = vec![(0, Duration::ZERO); counts.len()];
    for _ in 0..THREADS_TURNS {
        for (&threads, (pairs, took)) in counts.iter().zip(&mut totals) {
            let turn = threads_turn(&pool, threads)?;
            *pairs += turn.0;
            *took += turn.1;
        }
    }
    let rate = |(&threads, (pairs, took)): (&u32, (u64, Duration))| Rate {
        threads,
        pairs_per_s: to_f64(pairs) / took.as_secs_f64(),
    };
    Ok(counts.iter().zip(totals).map(rate).collect())
}

/// Pairs that so many threads make in one turn, and how long it took.
fn threads_turn(pool: &KvPool, threads: u32) -> anyhow::Result<(u64, Duration)> {
    let start = Barrier::new(usize::try_from(threads)? + 1);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| -> anyhow::Result<u64> {
                    let mut leases = Vec::with_capacity(usize::try_from(THREADS_K)?);
                    let mut pairs = 0;
                    start.wait();
                    let end = Instant::now() + THREADS_TURN;
                    while Instant::now() < end {
                        for _ in 0..BATCH {
                            pool.alloc(THREADS_K, &mut leases)?;
                            pool.free(black_box(&leases), FENCE)?;
                            leases.clear();
                        }
                        pairs += u64::from(BATCH);
                    }
                    Ok(pairs)
                })
            })
            .collect();
        start.wait();
        let started = Instant::now();
        let mut pairs = 0;
        for worker in workers {
            pairs += worker.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))??;
        }
        Ok((pairs, started.elapsed()))
    })
}

fn slow_path(plan: &Plan, memory: &Memory) -> anyhow::Result<Samples> {
    // Nothing is mapped ahead of demand, so that every allocation after a trim has to map.
    let none = ReservePolicy::Fixed { min: 0, max: 0 };
    let pool = open_pages(memory, SLOW_PAGE, SLOW_BLOCKS, 1, Some(none))?;
    let mut times = Samples::new();
    let mut leases = Vec::new();
    for _ in 0..plan.iters.min(MAX_SLOW_SAMPLES) {
        let started = Instant::now();
        pool.alloc(SLOW_BLOCKS, &mut leases)?;
        times.push_duration(started.elapsed());
        pool.free(&leases, FENCE)?;
        leases.clear();
        pool.trim()?;
    }
    Ok(times)
}
