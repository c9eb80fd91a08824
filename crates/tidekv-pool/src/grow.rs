//! Growing: decide, reserve in the ledger, map, commit. Whatever fails, everything before it is undone.
//!
//! ```text
//!   step              lock held          on failure, in this order
//!   ----------------  -----------------  -------------------------------------------------------
//!   plan              table              nothing to undo
//!   reserve           the ledger's       abort the plan
//!   map               none               (the batch undoes itself) abort the plan, release
//!   commit            table              (the limit was lowered) its pages are idle and leave as such
//! ```
//!
//! Pages that the driver will not take back after a failed map stay claimed and stay reserved in the ledger: they do
//! hold memory. The background thread tries them again.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidekv_core::blocks::{AllocPlan, BlockLease, CommitError, CommitRefusal};
use tidekv_core::pages::PageClaim;
use tidekv_core::units::{Bytes, PageId};
use tidekv_shm::{EventKind, LedgerError, Note, Reason};

use crate::account::{Asker, Grant, LEDGER_PATIENCE};
use crate::error::{PoolError, Shortage};
use crate::inner::Inner;
use crate::table::assert_unlocked;

/// A refusal of the device after the ledger's grant is looked at again after this time.
const DEVICE_RETRY: Duration = Duration::from_millis(5);

/// How long the last try of a wait may wait for the ledger's lock.
const LAST_PATIENCE: Duration = Duration::from_millis(50);

/// A refill maps this much between two looks at the neighbours: a few milliseconds on host memory.
const REFILL_CHUNK: Bytes = Bytes::mib(32);

/// How long an allocation that would not wait for neighbours waits for this pool's own pages: those that its thread is
/// mapping ahead or giving back count as held, and are about to be usable or gone.
const OWN_PATIENCE: Duration = Duration::from_millis(50);

/// Who waits for longer than clocks count waits for so long.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// When a wait ends that begins now.
pub(crate) fn deadline_in(wait: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(wait).unwrap_or(now + FOR_EVER)
}

/// What a plan is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Lease,
    SetAside,
    NullBlock,
}

impl Inner {
    /// The slow path of an allocation: grows the pool as far as needed, waiting up to `wait` for neighbours.
    #[cold]
    pub(crate) fn grow(
        &self,
        count: u32,
        purpose: Purpose,
        wait: Duration,
        out: &mut Vec<BlockLease>,
    ) -> Result<(), PoolError> {
        let outcome = match wait {
            Duration::ZERO => self.grow_at_once(count, purpose, out),
            wait => self.grow_within(count, purpose, deadline_in(wait), out),
        };
        if outcome.is_err() {
            self.account.tally.failures.fetch_add(1, Relaxed);
        }
        // A refusal leaves a demand behind that must be cleared in time; growth is what the reserve follows.
        self.bell.ring();
        outcome
    }

    /// Lets neighbours know that `count` blocks will be wanted soon, as far as the limit allows them.
    pub(crate) fn ask(&self, count: u32) -> Result<(), PoolError> {
        let pages = {
            let table = self.table.lock();
            let missing = count.saturating_sub(table.blocks.leasable_blocks());
            missing.div_ceil(self.geometry.blocks_per_page()).min(table.blocks.pages().claimable())
        };
        if pages == 0 {
            return Ok(());
        }
        let bytes = self.bytes_of(pages as usize);
        let asked = self.account.ask(bytes, self.figures(), Instant::now() + LEDGER_PATIENCE);
        self.note_headroom();
        // The wish must be cleared in time.
        self.bell.ring();
        asked.map_err(PoolError::Ledger)
    }

    /// Takes back what was asked for, if another pool waits.
    pub(crate) fn give_way(&self) -> Result<bool, PoolError> {
        let given = self.account.give_way(self.figures(), Instant::now() + LEDGER_PATIENCE);
        self.note_headroom();
        given.map_err(PoolError::Ledger)
    }

    /// Tells the events why an allocation was refused, where the ledger did not do so itself.
    fn note_refusal(&self, count: u32, error: &PoolError) {
        let page = self.page_bytes();
        let blocks_per_page = self.geometry.blocks_per_page();
        let wanted = self.bytes_of(count.div_ceil(blocks_per_page) as usize);
        let (reason, bytes, free) = match error {
            PoolError::Exhausted { shortage: Shortage::Limit { held_pages, limit_pages }, .. } => {
                let ceiling = self.ceiling.load(Relaxed);
                let reason = if ceiling < self.limits().bytes().0 { Reason::Ceiling } else { Reason::Limit };
                (reason, wanted, Bytes(page.0 * u64::from(limit_pages.saturating_sub(*held_pages))))
            }
            PoolError::Exhausted { shortage: Shortage::Device { wanted }, .. } => {
                (Reason::Device, *wanted, Bytes::ZERO)
            }
            PoolError::NeverFits { pool_blocks, .. } => {
                (Reason::NeverFits, wanted, self.bytes_of((pool_blocks / blocks_per_page) as usize))
            }
            PoolError::Ledger(LedgerError::LockTimeout { .. }) => (Reason::LockTimeout, wanted, Bytes::ZERO),
            PoolError::Map(_) => (Reason::Driver, wanted, Bytes::ZERO),
            _ => return,
        };
        self.account.note(Note { free, ..Note::new(EventKind::Refused, reason, bytes) });
    }

    fn grow_at_once(&self, count: u32, purpose: Purpose, out: &mut Vec<BlockLease>) -> Result<(), PoolError> {
        let refusal = match self.attempt(count, purpose, Asker::Passing, Instant::now() + LEDGER_PATIENCE, out) {
            Err(error) => error,
            done => return done,
        };
        let at_the_limit = matches!(refusal, PoolError::Exhausted { shortage: Shortage::Limit { .. }, .. });
        if at_the_limit && self.own_pages_in_flight() {
            return self.grow_within(count, purpose, Instant::now() + OWN_PATIENCE, out);
        }
        self.note_refusal(count, &refusal);
        Err(refusal)
    }

    /// Whether this pool's own thread is mapping pages or taking them away at this moment. Pages that wait for a step of
    /// the engine are not: nobody knows when that ends. Nor are those that the driver would not take back: they are
    /// looked at again with the next heartbeat.
    fn own_pages_in_flight(&self) -> bool {
        let (in_flight, draining) = {
            let table = self.table.lock();
            (table.in_flight(), table.blocks.pages().counts().draining)
        };
        in_flight > 0 || (draining > 0 && !self.steps.is_any_awaited())
    }

    fn grow_within(
        &self,
        count: u32,
        purpose: Purpose,
        deadline: Instant,
        out: &mut Vec<BlockLease>,
    ) -> Result<(), PoolError> {
        let mut posted = Bytes::ZERO;
        let waiter = self.progress.enter();
        let mut waited = false;
        let outcome = loop {
            let seen = waiter.seen();
            let now = Instant::now();
            // The wait ends with a try, or all could leave a page that came free while they slept.
            let is_last = now >= deadline;
            let (asker, lock_deadline) = if is_last {
                (Asker::Leaving(&mut posted), now + LAST_PATIENCE)
            } else {
                (Asker::Waiting(&mut posted), deadline.min(now + LEDGER_PATIENCE))
            };
            let error = match self.attempt(count, purpose, asker, lock_deadline, out) {
                Err(error) if error.is_transient() && !is_last => error,
                done => break done,
            };
            if !std::mem::replace(&mut waited, true) {
                self.account.tally.waits.fetch_add(1, Relaxed);
                self.bell.ring();
            }
            let until = match &error {
                PoolError::Exhausted { shortage: Shortage::Device { .. } | Shortage::Rank { .. }, .. } => {
                    Instant::now() + DEVICE_RETRY
                }
                _ => deadline,
            };
            waiter.wait(seen, until.min(deadline));
        };
        let told = self.account.withdraw(posted, self.figures(), outcome.is_err());
        if let Err(error) = &outcome
            && !told
        {
            self.note_refusal(count, error);
        }
        outcome
    }

    /// One try, start to end.
    fn attempt(
        &self,
        count: u32,
        purpose: Purpose,
        asker: Asker<'_>,
        deadline: Instant,
        out: &mut Vec<BlockLease>,
    ) -> Result<(), PoolError> {
        let plan = self.plan(count, purpose)?;
        if plan.claims().is_empty() {
            return self.commit(plan, out);
        }
        let pages: Vec<PageId> = plan.claims().iter().map(|claim| claim.page).collect();
        let bytes = self.bytes_of(pages.len());
        let granted = self.account.reserve(bytes, self.figures(), asker, deadline);
        self.note_headroom();
        match granted {
            Ok(Grant::Granted) => {}
            Ok(Grant::Short { grantable }) => {
                let available_blocks = self.undo(plan);
                let shortage = Shortage::Budget { wanted: bytes, grantable };
                return Err(PoolError::Exhausted { wanted_blocks: count, available_blocks, shortage });
            }
            Err(error) => {
                self.undo(plan);
                return Err(PoolError::Ledger(error));
            }
        }
        assert_unlocked("a map");
        self.tell_idle();
        let mapped = self.memory.map_pages(&pages);
        self.note_headroom();
        if let Err(error) = mapped {
            let available_blocks = self.undo_granted(plan, bytes);
            if let Some(miss) = error.as_miss() {
                let shortage = match miss.at {
                    Some(at) => Shortage::Rank { at, wanted: bytes, grantable: miss.grantable },
                    None => Shortage::Device { wanted: bytes },
                };
                tracing::debug!(%error, "the device refused what the ledger granted");
                return Err(PoolError::Exhausted { wanted_blocks: count, available_blocks, shortage });
            }
            return Err(error.into());
        }
        self.account.tally.maps.fetch_add(pages.len() as u64, Relaxed);
        self.commit(plan, out)
    }

    fn plan(&self, count: u32, purpose: Purpose) -> Result<AllocPlan, PoolError> {
        let mut table = self.table.lock();
        let plan = match purpose {
            Purpose::Lease => table.blocks.plan_alloc(count),
            Purpose::SetAside => table.blocks.plan_reserve(count),
            Purpose::NullBlock => table.blocks.reserve_null_block(),
        }?;
        table.publish();
        Ok(plan)
    }

    fn commit(&self, plan: AllocPlan, out: &mut Vec<BlockLease>) -> Result<(), PoolError> {
        let mut table = self.table.lock();
        let committed = table.blocks.commit(plan, out).map_err(|CommitError { plan, why }| {
            table.abandon(plan);
            match why {
                CommitRefusal::Limit(exhausted) => exhausted.into(),
                // The claims of a plan are nobody else's until it ends, so this is a broken promise of the core.
                other => panic!("the claims of a plan stay in force until it ends: {other}"),
            }
        });
        table.publish();
        committed
    }

    /// Gives a plan up whose pages were never mapped. Says what is available then.
    fn undo(&self, plan: AllocPlan) -> u32 {
        let mut table = self.table.lock();
        table.blocks.abort(plan);
        table.publish();
        drop(table);
        self.table.available()
    }

    /// Gives a plan up whose map was refused, and what the ledger granted for it.
    fn undo_granted(&self, plan: AllocPlan, bytes: Bytes) -> u32 {
        let stuck = {
            let mut table = self.table.lock();
            let stuck = table.abort(plan, |page| self.memory.is_stuck(page));
            table.publish();
            stuck
        };
        self.account.undo(bytes.saturating_sub(self.bytes_of(stuck as usize)), self.figures());
        self.note_headroom();
        self.table.available()
    }

    /// Pages that a refill maps at a time.
    pub(crate) fn refill_pages(&self) -> u32 {
        u32::try_from(REFILL_CHUNK.0 / self.page_bytes().0).unwrap_or(u32::MAX).max(1)
    }

    /// Maps up to `count` pages ahead of demand. A refusal is no failure: says how many pages came.
    pub(crate) fn refill(&self, count: u32) -> u32 {
        let claims = {
            let mut table = self.table.lock();
            let possible = count.min(table.blocks.pages().claimable());
            let claims = table.blocks.claim_pages(possible).unwrap_or_default();
            table.publish();
            claims
        };
        if claims.is_empty() {
            return 0;
        }
        let bytes = self.bytes_of(claims.len());
        let deadline = Instant::now() + LEDGER_PATIENCE;
        let granted = self.account.reserve(bytes, self.figures(), Asker::Reserve, deadline);
        self.note_headroom();
        if !matches!(granted, Ok(Grant::Granted)) {
            self.refuse(&claims, Bytes::ZERO);
            return 0;
        }
        assert_unlocked("a map");
        let pages: Vec<PageId> = claims.iter().map(|claim| claim.page).collect();
        self.tell_idle();
        let mapped = self.memory.map_pages_ahead(&pages);
        self.note_headroom();
        if let Err(error) = mapped {
            tracing::debug!(%error, "the reserve was not refilled");
            self.refuse(&claims, bytes);
            return 0;
        }
        self.account.tally.maps.fetch_add(claims.len() as u64, Relaxed);
        let mut table = self.table.lock();
        let mapped = table.blocks.pages_mapped(&claims);
        debug_assert!(mapped.is_ok(), "claims in flight are nobody else's");
        table.publish();
        u32::try_from(claims.len()).unwrap_or(u32::MAX)
    }

    fn refuse(&self, claims: &[PageClaim], granted: Bytes) {
        let stuck = {
            let mut table = self.table.lock();
            let stuck = table.refuse(claims, |page| self.memory.is_stuck(page));
            table.publish();
            stuck
        };
        self.account.undo(granted.saturating_sub(self.bytes_of(stuck as usize)), self.figures());
        self.note_headroom();
    }
}

/// Tells waiting allocations that something changed: blocks were freed, a limit or the ledger moved.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    waiters: std::sync::atomic::AtomicU32,
    turn: Mutex<u64>,
    moved: Condvar,
}

impl Progress {
    /// Counts the caller as waiting until the guard is dropped.
    pub(crate) fn enter(&self) -> Waiter<'_> {
        self.waiters.fetch_add(1, Relaxed);
        Waiter(self)
    }

    /// Wakes all waiters. Without any it is one load: the table's lock, which both sides took before, orders it.
    pub(crate) fn announce(&self) {
        if self.waiters.load(Relaxed) > 0 {
            *self.turn.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            self.moved.notify_all();
        }
    }
}

#[derive(Debug)]
pub(crate) struct Waiter<'a>(&'a Progress);

impl Waiter<'_> {
    /// Taken before a try: what is announced after it ends the wait.
    pub(crate) fn seen(&self) -> u64 {
        *self.0.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wait(&self, seen: u64, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let turn = self.0.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.0.moved.wait_timeout_while(turn, left, |turn| *turn == seen);
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Relaxed);
    }
}
