//! The one lock of the hot path: the block table, and the numbers that everybody may read without it.
//!
//! ```text
//!   lock order         1. the ledger's lock        around a map or an unmap, with a deadline
//!                      2. limits                   a few words, may be taken inside 1 and inside the table's lock
//!                      -- table                    never together with 1, a driver call, a wait or a callback; on a fleet
//!                                                  inside its wires, and around its book: see `fleet/exchange.rs`
//! ```
//!
//! In debug builds the table's lock knows its holder, and [`assert_unlocked`] stands wherever the pool is about to wait
//! for somebody else: a wrong order fails the first test that walks the path, not the one that loses a race.
//!
//! The gauge is written while the lock is held, so it is never older than the last change, and read without it.
//! Next to it lies a *band*: while the number of idle pages stays inside, nobody has to wake the background thread,
//! and the hot path makes no system call.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use tidekv_core::blocks::{AllocPlan, BlockAllocator};
use tidekv_core::pages::{PageClaim, PageState};
use tidekv_core::units::PageId;
use tidekv_shm::Reason;

use crate::departures::{Cause, Departures};
use crate::owed::Owed;
use crate::reserve::Sample;

/// What the lock protects.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) blocks: BlockAllocator,
    /// Pages whose map failed halfway and whose memory the driver will not take back. They stay claimed, so they count
    /// as held and nobody is given them.
    pub(crate) stranded: Vec<PageClaim>,
    /// Pages that the shared budget would have granted at the last look.
    grantable_pages: u32,
    in_use_peak: u32,
    idle_trough: u32,
    /// Pages that the engine was asked to free and has not: the next ones that become empty leave at once.
    debt: u32,
    /// For whom.
    debt_cause: Cause,
    /// Pages that were sent on their way out, and why.
    pub(crate) departures: Departures,
}

/// How giving back went, as far as idle pages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settlement {
    /// Idle pages sent on their way out.
    pub(crate) retired: u32,
    /// Pages that only the engine can free.
    pub(crate) evict: u32,
    /// Those of them that it must free even if requests must make room.
    pub(crate) firm: u32,
    /// What of the last request the engine had not freed before.
    pub(crate) outstanding: u32,
}

impl Table {
    pub(crate) fn idle(&self) -> u32 {
        self.blocks.pages().count(PageState::Idle)
    }

    pub(crate) fn in_use(&self) -> u32 {
        self.blocks.pages().count(PageState::InUse)
    }

    /// Pages that are being mapped or unmapped at this moment: without those that the driver refused, whose state stays
    /// what it was until they are tried again.
    pub(crate) fn in_flight(&self) -> u32 {
        let counts = self.blocks.pages().counts();
        let stranded = u32::try_from(self.stranded.len()).unwrap_or(u32::MAX);
        (counts.mapping + counts.unmapping).saturating_sub(counts.unmap_failed).saturating_sub(stranded)
    }

    /// Blocks that an allocation may hope for: mapped ones, and those of pages that limit and budget allow.
    fn available(&self) -> u32 {
        let growth = self.blocks.pages().claimable().min(self.grantable_pages);
        self.blocks.leasable_blocks() + growth * self.blocks.blocks_per_page()
    }

    /// Pages that the engine was asked to free and has not.
    pub(crate) fn debt(&self) -> u32 {
        self.debt
    }

    /// Makes room for the limit and for what neighbours wait for, counting the pages that are on their way out already:
    /// sends idle pages after them, at most `chunk`, and remembers what only the engine can free. `peer` is the
    /// neighbour that waits for most. An operator asked for `trim` pages of cached prefixes, with all that is idle.
    pub(crate) fn settle(&mut self, owed: Owed, peer: Option<u32>, trim: u32, chunk: u32) -> Settlement {
        let counts = self.blocks.pages().counts();
        let limit = self.blocks.shrink_plan();
        let leaving = counts.draining + counts.unmapping;
        let (for_others, for_limit) = (owed.pages.saturating_sub(leaving), limit.retire + limit.evict);
        let for_trim = if trim > 0 { counts.idle + trim } else { 0 };
        let must_go = for_others.max(for_limit).max(for_trim);
        // A limit is firm, however much more neighbours would be glad to have.
        let must_go_firmly = owed.firm.saturating_sub(leaving).max(for_limit);
        self.debt_cause = match () {
            () if for_trim > for_others.max(for_limit) => Cause::Trim(Reason::Operator),
            () if for_others > for_limit => Cause::Owed { peer },
            () => Cause::Limit,
        };
        let retired = self.retire(must_go.min(chunk), self.debt_cause);
        let outstanding = std::mem::replace(&mut self.debt, must_go.saturating_sub(counts.idle));
        let firm = must_go_firmly.saturating_sub(counts.idle);
        Settlement { retired, evict: self.debt, firm, outstanding }
    }

    /// Sends up to `count` of the longest idle pages on their way out, and says how many.
    pub(crate) fn retire(&mut self, count: u32, cause: Cause) -> u32 {
        let retired = self.blocks.retire(count);
        self.departures.sent(cause, retired);
        retired
    }

    /// Sends idle pages above the limit on their way out.
    pub(crate) fn retire_above_limit(&mut self) {
        let surplus = self.blocks.shrink_plan().retire;
        self.retire(surplus, Cause::Limit);
    }

    /// For what the engine was last asked to free pages.
    pub(crate) fn debt_cause(&self) -> Cause {
        self.debt_cause
    }

    /// Empty pages go where they were asked for, before an allocation can take them again. Says whether any did.
    fn pay_debt(&mut self) -> bool {
        let paid = self.retire(self.debt, self.debt_cause);
        self.debt -= paid;
        paid > 0
    }

    /// Takes the extremes since the last call.
    pub(crate) fn sample(&mut self) -> Sample {
        let (in_use, idle) = (self.in_use(), self.idle());
        let sample = Sample { in_use_peak: self.in_use_peak, in_use, idle_trough: self.idle_trough, idle };
        (self.in_use_peak, self.idle_trough) = (in_use, idle);
        sample
    }

    /// Gives a plan up whose map failed. Pages for which `is_stuck` holds keep memory and stay claimed; says how many.
    pub(crate) fn abort(&mut self, plan: AllocPlan, is_stuck: impl Fn(PageId) -> bool) -> u32 {
        let stuck = self.blocks.abort_keeping(plan, is_stuck);
        self.stranded.extend(&stuck);
        u32::try_from(stuck.len()).unwrap_or(u32::MAX)
    }

    /// Gives a plan up whose pages have memory: they are idle, and leave as far as they are above the limit.
    pub(crate) fn abandon(&mut self, plan: AllocPlan) {
        let claims = self.blocks.abort_keeping(plan, |_| true);
        let mapped = self.blocks.pages_mapped(&claims);
        debug_assert!(mapped.is_ok(), "claims in flight are nobody else's");
        self.retire_above_limit();
    }

    /// Gives claims up whose map failed, except the stuck ones; says how many those are.
    pub(crate) fn refuse(&mut self, claims: &[PageClaim], is_stuck: impl Fn(PageId) -> bool) -> u32 {
        let (stuck, undone): (Vec<_>, Vec<_>) = claims.iter().partition(|claim| is_stuck(claim.page));
        let refused = self.blocks.pages_refused(&undone);
        debug_assert!(refused.is_ok(), "claims in flight are nobody else's");
        self.stranded.extend(&stuck);
        u32::try_from(stuck.len()).unwrap_or(u32::MAX)
    }
}

/// The number for everybody, and the band of idle pages inside which the background thread may sleep.
#[derive(Debug)]
pub(crate) struct Gauges {
    available: AtomicU32,
    low: AtomicU32,
    high: AtomicU32,
}

/// The table, its lock and its gauges.
#[derive(Debug)]
pub(crate) struct TableLock {
    table: Mutex<Table>,
    gauges: Gauges,
}

impl TableLock {
    pub(crate) fn new(blocks: BlockAllocator) -> Self {
        let table = Table {
            blocks,
            stranded: Vec::new(),
            grantable_pages: u32::MAX,
            in_use_peak: 0,
            idle_trough: 0,
            debt: 0,
            debt_cause: Cause::Limit,
            departures: Departures::default(),
        };
        let gauges = Gauges {
            available: AtomicU32::new(table.available()),
            low: AtomicU32::new(0),
            high: AtomicU32::new(u32::MAX),
        };
        Self { table: Mutex::new(table), gauges }
    }

    pub(crate) fn lock(&self) -> TableGuard<'_> {
        held::enter();
        let table = match self.table.try_lock() {
            Ok(table) => table,
            Err(_) => self.lock_contended(),
        };
        TableGuard { table, gauges: &self.gauges }
    }

    /// Who finds the lock taken steps back for a moment, longer each time, before it waits in the kernel. The lock is
    /// held for tens of nanoseconds; if it changed hands each time, moving the table's cache lines from core to core
    /// would cost several times the work. So one thread does many turns before the next has its own.
    #[cold]
    fn lock_contended(&self) -> MutexGuard<'_, Table> {
        for pauses in [16, 32, 64, 128, 256] {
            (0..pauses).for_each(|_| std::hint::spin_loop());
            match self.table.try_lock() {
                Ok(table) => return table,
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        // The allocator's own asserts are the only panics inside; a table that broke one is still the best there is.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn available(&self) -> u32 {
        self.gauges.available.load(Relaxed)
    }

    /// Inside these the background thread need not be woken.
    pub(crate) fn set_band(&self, low: u32, high: u32) {
        self.gauges.low.store(low, Relaxed);
        self.gauges.high.store(high, Relaxed);
    }

    /// What the shared budget would grant, for [`available`](Self::available).
    pub(crate) fn set_grantable(&self, pages: u32) {
        let mut table = self.lock();
        if table.grantable_pages != pages {
            table.grantable_pages = pages;
            table.publish();
        }
    }
}

/// The table, locked.
#[derive(Debug)]
pub(crate) struct TableGuard<'a> {
    table: MutexGuard<'a, Table>,
    gauges: &'a Gauges,
}

impl TableGuard<'_> {
    /// Writes the gauges after a change. Says whether the background thread should have a look.
    pub(crate) fn publish(&mut self) -> bool {
        let table = &mut *self.table;
        let paid = table.debt > 0 && table.pay_debt();
        let (in_use, idle) = (table.in_use(), table.idle());
        table.in_use_peak = table.in_use_peak.max(in_use);
        table.idle_trough = table.idle_trough.min(idle);
        self.gauges.available.store(table.available(), Relaxed);
        paid || idle < self.gauges.low.load(Relaxed) || idle > self.gauges.high.load(Relaxed)
    }
}

impl Deref for TableGuard<'_> {
    type Target = Table;

    fn deref(&self) -> &Table {
        &self.table
    }
}

impl DerefMut for TableGuard<'_> {
    fn deref_mut(&mut self) -> &mut Table {
        &mut self.table
    }
}

impl Drop for TableGuard<'_> {
    fn drop(&mut self) {
        held::leave();
    }
}

/// Stands before every wait for somebody else.
pub(crate) fn assert_unlocked(before: &str) {
    assert!(!held::is_held(), "the table's lock is held before {before}");
}

/// Whether this thread holds a table's lock; known in debug builds alone.
#[cfg(debug_assertions)]
mod held {
    use std::cell::Cell;

    thread_local!(static HELD: Cell<bool> = const { Cell::new(false) });

    pub(super) fn enter() {
        assert!(!HELD.replace(true), "a table's lock is taken while one is held");
    }

    pub(super) fn leave() {
        HELD.set(false);
    }

    pub(super) fn is_held() -> bool {
        HELD.get()
    }
}

#[cfg(not(debug_assertions))]
mod held {
    pub(super) fn enter() {}

    pub(super) fn leave() {}

    pub(super) fn is_held() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stuck_page_of_a_failed_plan_stays_claimed() {
        let lock = TableLock::new(BlockAllocator::new(8, 4).unwrap());
        let mut table = lock.lock();
        let plan = table.blocks.plan_alloc(10).unwrap();
        table.blocks.set_limit(0);
        let stuck = plan.claims()[1].page;
        assert_eq!(table.abort(plan, |page| page == stuck), 1);
        assert_eq!(table.stranded.len(), 1);
        assert_eq!(table.stranded[0].page, stuck);
        assert_eq!((table.blocks.pages().held(), table.blocks.pages().limit()), (1, 0));
        table.blocks.set_limit(8);
        let plan = table.blocks.plan_alloc(28).unwrap();
        assert!(plan.claims().iter().all(|claim| claim.page != stuck));
        table.blocks.abort(plan);
        table.blocks.check_invariants();
    }

    /// They counted as being mapped, and every refusal at the limit waited for them.
    #[test]
    fn what_the_driver_refused_is_not_in_flight() {
        let lock = TableLock::new(BlockAllocator::new(8, 4).unwrap());
        let mut table = lock.lock();
        let plan = table.blocks.plan_alloc(10).unwrap();
        assert_eq!(table.in_flight(), 3);
        let stuck = plan.claims()[1].page;
        table.abort(plan, |page| page == stuck);
        assert_eq!((table.blocks.pages().counts().mapping, table.in_flight()), (1, 0));
        let stranded = std::mem::take(&mut table.stranded);
        assert_eq!(table.in_flight(), 1, "it is tried again just now");
        table.refuse(&stranded, |_| false);
        let claims = table.blocks.claim_pages(2).unwrap();
        table.blocks.pages_mapped(&claims).unwrap();
        table.retire(2, Cause::Decay);
        let plan = table.blocks.begin_unmap(tidekv_core::units::Step(0), 2);
        assert_eq!(table.in_flight(), 2);
        table.blocks.unmap_failed(plan.pages[0]).unwrap();
        table.blocks.unmapped(&plan.pages[1..]).unwrap();
        assert_eq!((table.blocks.pages().counts().unmapping, table.in_flight()), (1, 0));
    }

    #[test]
    fn the_band_tells_when_to_wake() {
        let lock = TableLock::new(BlockAllocator::new(8, 4).unwrap());
        lock.set_band(1, 2);
        let mut table = lock.lock();
        assert!(table.publish(), "no idle page");
        let claims = table.blocks.claim_pages(3).unwrap();
        table.blocks.pages_mapped(&claims[..2]).unwrap();
        assert!(!table.publish());
        table.blocks.pages_mapped(&claims[2..]).unwrap();
        assert!(table.publish(), "one idle page too many");
    }

    fn firm(pages: u32) -> Owed {
        Owed { pages, firm: pages }
    }

    #[test]
    fn pages_that_were_asked_for_leave_as_they_become_empty() {
        let lock = TableLock::new(BlockAllocator::new(8, 4).unwrap());
        let mut table = lock.lock();
        let plan = table.blocks.plan_alloc(20).unwrap();
        let mut leases = Vec::new();
        table.blocks.commit(plan, &mut leases).unwrap();
        assert_eq!(table.settle(firm(2), None, 0, 8), Settlement { retired: 0, evict: 2, firm: 2, outstanding: 0 });
        let none = tidekv_core::pages::Fence::Step(tidekv_core::units::Step(0));
        table.blocks.free(&leases[..4], none).unwrap();
        assert!(table.publish(), "somebody should unmap it");
        assert_eq!((table.debt(), table.idle()), (1, 0));
        // Two are owed still, one is on its way.
        assert_eq!(table.settle(firm(2), None, 0, 8), Settlement { retired: 0, evict: 1, firm: 1, outstanding: 1 });
        // The limit counts the same pages, it does not ask for more.
        table.blocks.set_limit(3);
        assert_eq!(table.settle(firm(2), None, 0, 8), Settlement { retired: 0, evict: 1, firm: 1, outstanding: 1 });
        table.blocks.free(&leases[4..], none).unwrap();
        table.publish();
        assert_eq!((table.debt(), table.idle()), (0, 3));
        assert_eq!(table.settle(firm(4), None, 0, 1), Settlement { retired: 1, evict: 0, firm: 0, outstanding: 0 });
    }

    /// The numbers of a pool in use up to the last page, while a neighbour wishes for half of them.
    #[test]
    fn a_limit_is_firm_whatever_neighbours_wish_for() {
        let lock = TableLock::new(BlockAllocator::new(8, 4).unwrap());
        let mut table = lock.lock();
        let plan = table.blocks.plan_alloc(32).unwrap();
        let mut leases = Vec::new();
        table.blocks.commit(plan, &mut leases).unwrap();
        let wish = Owed { pages: 4, firm: 0 };
        assert_eq!(table.settle(wish, None, 0, 8), Settlement { retired: 0, evict: 4, firm: 0, outstanding: 0 });
        table.blocks.set_limit(6);
        assert_eq!(table.settle(wish, None, 0, 8), Settlement { retired: 0, evict: 4, firm: 2, outstanding: 4 });
        // The firmer of the two, never both: they count the same pages.
        let claim = Owed { pages: 4, firm: 3 };
        assert_eq!(table.settle(claim, None, 0, 8), Settlement { retired: 0, evict: 4, firm: 3, outstanding: 4 });
        let none = tidekv_core::pages::Fence::Step(tidekv_core::units::Step(0));
        table.blocks.free(&leases[..4], none).unwrap();
        table.publish();
        assert_eq!(table.settle(wish, None, 0, 8), Settlement { retired: 0, evict: 3, firm: 1, outstanding: 3 });
    }

    #[cfg(debug_assertions)]
    #[test]
    #[should_panic(expected = "held before a ledger update")]
    fn waiting_for_others_under_the_lock_is_found() {
        let lock = TableLock::new(BlockAllocator::new(8, 4).unwrap());
        let _guard = lock.lock();
        assert_unlocked("a ledger update");
    }
}
