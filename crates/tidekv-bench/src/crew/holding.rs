//! A worker's pool, and the thread that makes it as large as it should be.
//!
//! ```text
//!    target (Order::Want) ──> grower: leases what is missing, waiting for neighbours ──> leases
//!    reclaim request ───────> obey: frees that many pages whole                      <──┘
//! ```
//!
//! What an engine's scheduler does between two steps happens here at full speed: always hungry, and always
//! giving back what it is asked for.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tidekv_core::blocks::BlockLease;
use tidekv_core::pages::Fence;
use tidekv_core::units::Step;
use tidekv_pool::{KvPool, PoolError};

use super::message::{Refusal, Report};

/// No device work ever sees these blocks.
const FENCE: Fence = Fence::Step(Step(0));

/// How long the grower waits for neighbours before it asks again: for one block, and for several, of which fewer might
/// be had at once.
const PATIENCE: Duration = Duration::from_millis(100);
const STEP_PATIENCE: Duration = Duration::from_millis(10);

/// How long a request to give memory back may stand before it is obeyed once more: a page that was given may not have been
/// free as a whole, because the grower was leasing from it.
const OBEY_AGAIN: Duration = Duration::from_secs(1);

/// The most that is asked for at once. Twice as much after a lease, half after a refusal: large steps while there
/// is much to be had, single blocks where pools settle.
const MAX_STEP: u32 = 32;

/// A pool and what is leased of it.
#[derive(Debug)]
pub(crate) struct Holding {
    pub(crate) pool: KvPool,
    state: Mutex<State>,
    changed: Condvar,
    ended: AtomicBool,
    exhausted: AtomicU64,
    reclaims: AtomicU64,
    leases: AtomicU64,
    worst_overrun_us: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    leases: Vec<BlockLease>,
    target: usize,
    /// When the target was set.
    since: Option<Instant>,
    /// Numbers of blocks that are worth a word, the next one last.
    marks: Vec<u32>,
    /// Revision of the last reclaim request that was obeyed, and when.
    obeyed: Option<(u64, Instant)>,
    failure: Option<String>,
}

/// A mark that was reached.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reached {
    pub(crate) mark: u32,
    /// Since the target was set.
    pub(crate) after: Duration,
}

impl Holding {
    pub(crate) fn new(pool: KvPool) -> Arc<Self> {
        Arc::new(Self {
            pool,
            state: Mutex::default(),
            changed: Condvar::new(),
            ended: AtomicBool::new(false),
            exhausted: AtomicU64::new(0),
            reclaims: AtomicU64::new(0),
            leases: AtomicU64::new(0),
            worst_overrun_us: AtomicU64::new(0),
        })
    }

    /// Sets how many blocks to hold; too many are freed at once, too few come with time. `marks` are ascending.
    pub(crate) fn want(&self, blocks: u32, marks: &[u32]) -> Result<(), PoolError> {
        let mut state = self.state();
        state.target = count(blocks);
        state.since = Some(Instant::now());
        state.marks = marks.iter().rev().copied().collect();
        let keep = state.target.min(state.leases.len());
        let surplus = state.leases.split_off(keep);
        drop(state);
        self.changed.notify_all();
        self.pool.free(&surplus, FENCE)
    }

    /// Follows a request to give memory back: frees all blocks of that many pages. Pages go as a whole or not at all; blocks
    /// of two half pages would help nobody.
    pub(crate) fn obey(&self) -> Result<(), PoolError> {
        let request = self.pool.reclaim_requested();
        let mut state = self.state();
        let answered = |(revision, at): (u64, Instant)| revision == request.revision && at.elapsed() < OBEY_AGAIN;
        if request.pages == 0 || state.obeyed.is_some_and(answered) {
            return Ok(());
        }
        state.obeyed = Some((request.revision, Instant::now()));
        let page_of = |lease: &BlockLease| lease.block.0 / self.pool.geometry().blocks_per_page();
        let pages: BTreeSet<u32> = state.leases.iter().map(page_of).collect();
        let given: BTreeSet<u32> = pages.into_iter().rev().take(count(request.pages)).collect();
        let surplus: Vec<_> = state.leases.extract_if(.., |lease| given.contains(&page_of(lease))).collect();
        drop(state);
        self.reclaims.fetch_add(1, Ordering::Relaxed);
        let freed = self.pool.free(&surplus, FENCE);
        // Less than it should be: the grower asks again, and waits behind those the memory is for.
        self.changed.notify_all();
        freed
    }

    /// One attempt to lease, timed against its deadline.
    pub(crate) fn lease(&self, blocks: u32, wait: Duration, out: &mut Vec<BlockLease>) -> Result<(), PoolError> {
        let started = Instant::now();
        let outcome = self.pool.alloc_within(blocks, wait, out);
        let overrun = started.elapsed().saturating_sub(wait);
        self.leases.fetch_add(1, Ordering::Relaxed);
        self.worst_overrun_us.fetch_max(micros(overrun), Ordering::Relaxed);
        if outcome.as_ref().is_err_and(PoolError::is_transient) {
            self.exhausted.fetch_add(1, Ordering::Relaxed);
        }
        outcome
    }

    /// Frees blocks that were leased with [`lease`](Self::lease).
    pub(crate) fn free(&self, leases: &[BlockLease]) -> Result<(), PoolError> {
        self.pool.free(leases, FENCE)
    }

    pub(crate) fn report(&self) -> Report {
        Report {
            held_bytes: self.pool.reservation().expect("memory of its own").backend().held().0,
            leased_blocks: u32::try_from(self.state().leases.len()).unwrap_or(u32::MAX),
            exhausted: self.exhausted.load(Ordering::Relaxed),
            reclaims: self.reclaims.load(Ordering::Relaxed),
            leases: self.leases.load(Ordering::Relaxed),
            worst_overrun_us: self.worst_overrun_us.load(Ordering::Relaxed),
        }
    }

    /// Why the grower gave up, if it did.
    pub(crate) fn failure(&self) -> Option<String> {
        self.state().failure.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that leases what is missing. It ends with the value.
#[derive(Debug)]
pub(crate) struct Grower {
    holding: Arc<Holding>,
    thread: Option<JoinHandle<()>>,
}

impl Grower {
    /// Starts it; `reached` is told when a mark is.
    pub(crate) fn start(holding: &Arc<Holding>, reached: impl Fn(Reached) + Send + 'static) -> std::io::Result<Self> {
        let shared = Arc::clone(holding);
        let thread = thread::Builder::new().name("grower".to_owned()).spawn(move || {
            if let Err(error) = grow(&shared, &reached) {
                shared.state().failure = Some(refusal(&error).text);
            }
        })?;
        Ok(Self { holding: Arc::clone(holding), thread: Some(thread) })
    }
}

impl Drop for Grower {
    fn drop(&mut self) {
        self.holding.ended.store(true, Ordering::Relaxed);
        // Under the lock: a grower that has just looked at `ended` and is about to wait must not miss this.
        drop(self.holding.state());
        self.holding.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn grow(holding: &Holding, reached: &impl Fn(Reached)) -> Result<(), PoolError> {
    let mut step = 1;
    let mut fresh = Vec::new();
    while let Some(missing) = wait_for_demand(holding) {
        let blocks = missing.min(step);
        let patience = if blocks == 1 { PATIENCE } else { STEP_PATIENCE };
        match holding.lease(blocks, patience, &mut fresh) {
            Ok(()) => step = (step * 2).min(MAX_STEP),
            Err(error) if error.is_transient() => step = (step / 2).max(1),
            Err(error) => return Err(error),
        }
        let mut state = holding.state();
        state.leases.append(&mut fresh);
        // The target may have fallen while the lease was under way.
        let keep = state.leases.len().min(state.target);
        let surplus = state.leases.split_off(keep);
        let after = state.since.map_or(Duration::ZERO, |since| since.elapsed());
        let held = state.leases.len();
        let mut passed = Vec::new();
        while let Some(mark) = state.marks.pop_if(|mark| count(*mark) <= held) {
            passed.push(Reached { mark, after });
        }
        drop(state);
        passed.into_iter().for_each(reached);
        if !surplus.is_empty() {
            holding.free(&surplus)?;
        }
    }
    Ok(())
}

/// Blocks that are missing, as soon as some are; `None` at the end.
fn wait_for_demand(holding: &Holding) -> Option<u32> {
    let mut state = holding.state();
    loop {
        if holding.ended.load(Ordering::Relaxed) {
            return None;
        }
        match state.target.saturating_sub(state.leases.len()) {
            0 => state = holding.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            missing => return Some(u32::try_from(missing).unwrap_or(u32::MAX)),
        }
    }
}

pub(crate) fn refusal(error: &PoolError) -> Refusal {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(source) = cause {
        text += &format!(": {source}");
        cause = source.source();
    }
    Refusal { transient: error.is_transient(), text }
}

fn count(blocks: u32) -> usize {
    usize::try_from(blocks).unwrap_or(usize::MAX)
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
