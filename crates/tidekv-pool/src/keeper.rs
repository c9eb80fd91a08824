//! The background thread: it sleeps until something happens, looks at everything, does what is due, sleeps again.
//!
//! ```text
//!   woken by              bell (the hot path left its band, an order, a step), ledger or segment changed, time
//!   one pass              0. the fleet, where the pool is on one: who lives, who is back
//!                         1. the ledger: expired demand, dead owners, budget        at most every HEARTBEAT
//!                         2. orders: limit, ceiling, trim
//!                         3. give back: what the limit forbids, what neighbours are owed
//!                         4. the reserve: refill or decay
//!                         5. publish: ledger entry, segment                         at most 10 times a second
//!   asleep for            the shortest time after which one of these would do something
//! ```
//!
//! A pass reads the ledger without its lock and writes it only when something is different. The thread holds no
//! lock while it waits, calls the driver or calls back. A failure is logged and looked at again at the next heartbeat.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tidekv_core::share::PoolClaim;
use tidekv_core::units::Bytes;
use tidekv_fork::Birth;
use tidekv_shm::{EntryState, EventKind, LedgerEntry, LedgerView, Note, Reason, Watch, now_ms};

use crate::departures::Cause;
use crate::error::PoolError;
use crate::inner::Inner;
use crate::owed::{Owed, neediest};
use crate::reserve::Reserve;
use crate::returning;
use crate::table::Settlement;

/// The longest sleep: dead owners, other users of the device, a deleted segment.
const HEARTBEAT: Duration = Duration::from_millis(500);
/// Figures that merely moved are published no more often than this.
const PUBLISH_EVERY: Duration = Duration::from_millis(100);
/// After a failure to read the ledger.
const RETRY: Duration = Duration::from_millis(50);
/// How long the last drop waits for the thread.
const JOIN_WITHIN: Duration = Duration::from_secs(5);

/// Owns the thread. Dropping it ends the thread, and waits for that within a bound.
#[derive(Debug)]
pub(crate) struct Runner {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
    /// Locked by nobody: a receiver alone could not be shared between threads.
    ended: Mutex<Receiver<()>>,
    birth: Birth,
}

impl Runner {
    pub(crate) fn start(inner: Arc<Inner>, reserve: Reserve) -> Result<Self, PoolError> {
        let watch = inner.account.watch().map_err(PoolError::Ledger)?;
        if let Err(error) = watch.add(inner.segment.path()) {
            tracing::debug!(%error, "the segment is looked at by time alone");
        }
        let (end, ended) = sync_channel(1);
        let keeper = Keeper::new(Arc::clone(&inner), watch, reserve);
        let thread = std::thread::Builder::new()
            .name("tidekv-keeper".to_owned())
            .spawn(move || keeper.run(&end))
            .map_err(PoolError::system("clone"))?;
        Ok(Self { inner, thread: Some(thread), ended: Mutex::new(ended), birth: Birth::here() })
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.birth.is_foreign() {
            // There is no such thread in a forked child.
            std::mem::forget(thread);
            return;
        }
        self.inner.stopping.store(true, Release);
        self.inner.bell.ring();
        if thread.thread().id() == std::thread::current().id() {
            // A callback dropped the last clone. It ends after this pass, and the pool with it.
            return;
        }
        match self.ended.get_mut().unwrap_or_else(PoisonError::into_inner).recv_timeout(JOIN_WITHIN) {
            Err(RecvTimeoutError::Timeout) => {
                tracing::error!(pool = %self.inner.name, "the background thread is stuck and was left behind");
            }
            // It said so, or it panicked: either way it is about to be gone.
            Ok(()) | Err(RecvTimeoutError::Disconnected) => drop(thread.join()),
        }
    }
}

/// The thread's own state.
struct Keeper {
    inner: Arc<Inner>,
    watch: Watch,
    reserve: Reserve,
    started: Instant,
    maintained: Option<Instant>,
    published: Option<Instant>,
    /// The last request to trim that was carried out, and the last that was begun.
    trims_done: u64,
    trims_begun: u64,
    /// The last request to trim that asked for cached prefixes, and their pages that have not gone since.
    cached_trims_begun: u64,
    cached_trim: u32,
    /// Pages that the engine was asked for on behalf of neighbours.
    asked: u32,
    /// What the segment shows: used, prealloc.
    shown: (Bytes, Bytes),
}

/// How a pass found the pool against its neighbours.
struct Balance {
    /// Pages that only the engine can free.
    evict: u32,
    /// Those of them that it must free even if requests must make room.
    firm: u32,
    /// What of the last request the engine had not freed.
    outstanding: u32,
    /// Whether neighbours wait for anything of ours, or an operator does.
    owing: bool,
}

impl Keeper {
    fn new(inner: Arc<Inner>, watch: Watch, reserve: Reserve) -> Self {
        let started = Instant::now();
        Self {
            inner,
            watch,
            reserve,
            started,
            maintained: None,
            published: None,
            trims_done: 0,
            trims_begun: 0,
            cached_trims_begun: 0,
            cached_trim: 0,
            asked: 0,
            shown: (Bytes::ZERO, Bytes::ZERO),
        }
    }

    fn run(mut self, end: &SyncSender<()>) {
        while !self.inner.stopping.load(Acquire) {
            // A broken promise of ours must not take the engine's memory service with it.
            let pass = catch_unwind(AssertUnwindSafe(|| self.pass()));
            self.sleep(pass.unwrap_or_else(|_| {
                tracing::error!(pool = %self.inner.name, "the background thread panicked and goes on");
                HEARTBEAT
            }));
        }
        // Its part of the pool goes before the last owner hears of the end, so that that owner closes the pool.
        drop(self);
        let _ = end.send(());
    }

    fn sleep(&self, time: Duration) {
        let until_look = |at: Instant| at.saturating_duration_since(Instant::now());
        let time = self.watch.second_look().map_or(time, |at| time.min(until_look(at)));
        let timeout = Timespec::try_from(time).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut fds = [PollFd::new(&self.inner.bell, PollFlags::IN), PollFd::new(&self.watch, PollFlags::IN)];
        // A signal only means an early look.
        let _ = poll(&mut fds, Some(&timeout));
        self.inner.bell.answer();
        if let Err(error) = self.watch.wait(Duration::ZERO) {
            tracing::debug!(%error, "the ledger is looked at by time alone");
        }
    }

    /// Looks at everything and does what is due. Says how long nothing will be.
    fn pass(&mut self) -> Duration {
        let inner = Arc::clone(&self.inner);
        inner.account.expire_demand();
        inner.tell_idle();
        let tend_again = inner.memory.tend();
        let Some((view, me)) = inner.account.look() else {
            // Unreadable, replaced, or our entry is lost: the next update puts it back.
            self.publish_entry(0);
            return RETRY;
        };
        let (view, me, mut sleep) = self.maintain(view, me);
        self.obey(&view.entries[me]);
        let (view, me, balance) = self.give_back(view, me);
        let asked = inner.mailbox.demand(balance.evict, balance.firm, balance.outstanding, inner.page_bytes());
        if asked {
            let cause = inner.table.lock().debt_cause();
            inner.account.note(cause.evict_note(inner.bytes_of(balance.evict as usize)));
        }
        sleep = sleep.min(self.keep_reserve(&balance));
        self.note_headroom(&view, me);
        sleep = sleep.min(self.publish(&view.entries[me]));
        inner.progress.announce();
        sleep = [inner.account.lingers_for(), tend_again].into_iter().flatten().fold(sleep, Duration::min);
        // The callback may have freed something at once.
        if asked { Duration::ZERO } else { sleep }
    }

    /// What concerns the whole device, and what may have happened to our files: now and then, and at once when somebody
    /// died.
    fn maintain(&mut self, view: LedgerView, me: usize) -> (LedgerView, usize, Duration) {
        let due = self.maintained.is_none_or(|at| at.elapsed() >= HEARTBEAT);
        let is_dead = |entry: &LedgerEntry| entry.state == EntryState::Returning || !view.is_owner_alive(entry.slot);
        let someone_died = || (0..).zip(&view.entries).any(|(at, entry)| at != me && is_dead(entry));
        if !due && !someone_died() {
            return (view, me, HEARTBEAT);
        }
        self.maintained = Some(Instant::now());
        if let Err(error) = self.inner.account.maintain() {
            tracing::debug!(%error, "the ledger is looked after later");
        }
        self.inner.retry_refused();
        self.heal_segment();
        let (view, me) = self.inner.account.look().unwrap_or((view, me));
        let asynchronous = self.inner.account.is_asynchronous();
        let look_again = returning::next_look_ms(&view, now_ms(), asynchronous).map(Duration::from_millis);
        (view, me, look_again.unwrap_or(HEARTBEAT).min(HEARTBEAT))
    }

    fn heal_segment(&self) {
        match self.inner.segment.heal() {
            Ok(false) => {}
            Ok(true) => {
                tracing::warn!(pool = %self.inner.name, "the segment was damaged or deleted and is made again");
                let _ = self.watch.add(self.inner.segment.path());
            }
            Err(error) => tracing::debug!(%error, "the segment could not be looked at"),
        }
    }

    /// Orders of operators: the limit, from the ledger or from the segment; the ceiling; a trim.
    fn obey(&mut self, entry: &LedgerEntry) {
        let inner = &self.inner;
        let ordered = inner.see_limit(entry);
        inner.see_ceiling(entry);
        if inner.apply_limit() || ordered {
            tracing::info!(pool = %inner.name, limit = %inner.limits().bytes(), "new limit");
        }
        inner.show_limit();
        if entry.trim_request > self.trims_begun {
            inner.retire(u32::MAX, Cause::Trim(Reason::Operator));
            inner.drain(u32::MAX);
            self.trims_begun = entry.trim_request;
            self.reserve.suppress();
        }
        let cached_pages = inner.page_counts_of(&inner.table.lock()).1;
        // What is cached after the request is not meant by it.
        self.cached_trim = self.cached_trim.min(cached_pages);
        if entry.trim_cached > self.cached_trims_begun {
            self.cached_trims_begun = entry.trim_cached;
            self.cached_trim = cached_pages;
        }
        if self.cached_trim == 0 {
            self.trims_done = self.trims_begun;
        }
        if inner.trimmed.swap(false, Relaxed) {
            self.reserve.suppress();
        }
    }

    /// Gives back what the limit forbids and what neighbours are owed, as far as idle pages go, chunk by chunk: what
    /// is owed may be less after each.
    fn give_back(&mut self, mut view: LedgerView, mut me: usize) -> (LedgerView, usize, Balance) {
        let inner = Arc::clone(&self.inner);
        let mut chunk = 1;
        let (mut gave, mut outstanding) = (false, None);
        loop {
            // Also what earlier passes retired and the device is done with now.
            let next_step = inner.drain(u32::MAX).next_step;
            if inner.steps.wait_for(next_step) {
                // It ended since we looked. Not another round here: an engine with short steps could keep us in it.
                inner.bell.ring();
            }
            let owed = self.owed(&view, me);
            let settled = {
                let mut table = inner.table.lock();
                let settled = table.settle(owed, neediest(&view, me), self.cached_trim, chunk);
                table.publish();
                settled
            };
            let outstanding = *outstanding.get_or_insert(settled.outstanding);
            let owing = owed.pages > 0 || self.cached_trim > 0;
            if owing {
                self.reserve.suppress();
            }
            if settled.retired == 0 {
                let paid = self.asked > outstanding;
                if gave || paid {
                    inner.account.tally.reclaims.fetch_add(1, Relaxed);
                }
                self.asked = if owed.pages > 0 { settled.evict } else { 0 };
                let Settlement { evict, firm, .. } = settled;
                return (view, me, Balance { evict, firm, outstanding, owing });
            }
            gave |= owed.pages > 0;
            inner.drain(u32::MAX);
            chunk = inner.chunk_pages();
            if let Some((next, at)) = inner.account.look() {
                (view, me) = (next, at);
            }
        }
    }

    fn owed(&self, view: &LedgerView, me: usize) -> Owed {
        let is_above = self.inner.account.is_above_given_budget(view);
        let here = Owed::on_device(view.header.budget, is_above, &self.claims(view, me), me, self.inner.page_bytes());
        here.max(self.inner.memory.owed(|| self.inner.spare_pages()))
    }

    /// All pools, with ourselves as we are now and not as we last said.
    fn claims(&self, view: &LedgerView, me: usize) -> Vec<PoolClaim> {
        let mut claims = view.pool_claims();
        claims[me] = self.inner.account.claim(&view.entries[me], self.inner.figures());
        claims
    }

    fn note_headroom(&self, view: &LedgerView, me: usize) {
        self.inner.account.note_headroom(view.header.budget, self.claims(view, me), me);
        self.inner.note_headroom();
    }

    /// Refills or lets decay, and tells the hot path when to wake us.
    fn keep_reserve(&mut self, balance: &Balance) -> Duration {
        let inner = Arc::clone(&self.inner);
        let sample = inner.table.lock().sample();
        let decision = self.reserve.decide(self.started.elapsed(), sample);
        if decision.decay > 0 {
            inner.retire(decision.decay, Cause::Decay);
            inner.drain(u32::MAX);
        }
        // A few pages at a time: a starved neighbour must not wait for our comfort.
        let wanted = if balance.owing { 0 } else { decision.refill.min(inner.refill_pages()) };
        let refilled = if wanted > 0 { inner.refill(wanted) } else { 0 };
        if refilled > 0 && inner.trimmed.load(Relaxed) {
            // The engine trimmed while these were on their way: it wants none.
            inner.retire(refilled, Cause::Trim(Reason::Engine));
            inner.drain(u32::MAX);
        }
        let refused = refilled < wanted;
        // Nobody rings for pages that cannot be had.
        let low = if refused || balance.owing { 0 } else { decision.low };
        inner.table.set_band(low, decision.high);
        if refilled > 0 && refilled < decision.refill {
            return Duration::ZERO;
        }
        decision.again_after.unwrap_or(HEARTBEAT)
    }

    /// Writes what changed into the ledger and the segment. Says when to look again.
    fn publish(&mut self, entry: &LedgerEntry) -> Duration {
        let inner = &self.inner;
        let figures = inner.figures();
        let urgent = entry.reserved != inner.account.granted()
            || entry.demand != inner.account.demand()
            || entry.reclaim != figures.reclaim
            || entry.limit_revision != inner.limits().revision()
            || entry.applied_revision != self.applied_revision(entry.applied_revision)
            || entry.trim_done != self.trims_done;
        let moved = inner.account.differs(entry, figures) || self.shown != self.sign();
        if !urgent && !moved {
            return HEARTBEAT;
        }
        let since = self.published.map_or(PUBLISH_EVERY, |at| at.elapsed());
        if !urgent && since < PUBLISH_EVERY {
            return PUBLISH_EVERY - since;
        }
        self.published = Some(Instant::now());
        self.publish_entry(entry.applied_revision);
        self.publish_segment();
        HEARTBEAT
    }

    fn publish_entry(&self, applied_before: u64) {
        let inner = &self.inner;
        let applied = self.applied_revision(applied_before);
        let outcome = inner.account.publish(inner.figures(), |view, me| {
            let limits = *inner.limits();
            let entry = &mut view.entries[me];
            let (set, carried_out) = (limits.revision() > entry.limit_revision, applied > entry.applied_revision);
            if set {
                (entry.limit, entry.limit_revision) = (limits.bytes(), limits.revision());
            }
            entry.applied_revision = applied;
            entry.trim_done = self.trims_done;
            let (slot, limit) = (entry.slot, entry.limit);
            // Our own orders and kvctl's are in the entry before we look: what we bring there came from the segment.
            if set {
                view.note(slot, Note::new(EventKind::LimitSet, Reason::Kvcached, limit));
            }
            if carried_out {
                view.note(slot, Note::new(EventKind::LimitApplied, Reason::None, limit));
            }
        });
        if let Err(error) = outcome {
            tracing::debug!(%error, "the ledger hears of us later");
        }
    }

    fn publish_segment(&mut self) {
        let (used, prealloc) = self.sign();
        match self.inner.segment.publish(used, prealloc) {
            Ok(()) => self.shown = (used, prealloc),
            Err(error) => tracing::debug!(%error, "the segment is written later"),
        }
    }

    /// What the segment should show: bytes in use, and bytes held beyond that.
    fn sign(&self) -> (Bytes, Bytes) {
        let counts = self.inner.table.lock().blocks.pages().counts();
        let bytes = |pages: u32| self.inner.bytes_of(pages as usize);
        (bytes(counts.in_use), bytes(counts.held() - counts.in_use))
    }

    /// The last revision that was carried out: the one in force, once nothing is held above it.
    fn applied_revision(&self, before: u64) -> u64 {
        self.inner.carried_out_revision().unwrap_or(before)
    }
}
