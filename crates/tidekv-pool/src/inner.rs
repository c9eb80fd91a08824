//! What a pool is made of, and the parts of it that are too small for a room of their own.
//!
//! ```text
//!   engine threads                              background thread (keeper)
//!   --------------                              --------------------------
//!   alloc, free  --> table <----------------->  refill, decay, limits, balloon
//!   slow path    --> account (ledger) <------>  give back, publish
//!                --> memory (driver, fleet) <>  unmap
//!                     bell  ------------------> wakes it
//!                     progress <--------------- wakes waiting allocations
//!                     mailbox  <--------------- asks the engine to evict
//! ```

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tidekv_core::geometry::Geometry;
use tidekv_core::pages::PageCounts;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_fork::Birth;
use tidekv_shm::{EventKind, LedgerEntry, LedgerView, Note, PoolName, PoolSegment, Reason};

use crate::account::{Account, Figures};
use crate::error::PoolError;
use crate::fleet::IdlePages;
use crate::grow::Progress;
use crate::limits::{LimitState, LimitStatus, Limits, Verdict};
use crate::memory::PoolMemory;
use crate::reclaim::Mailbox;
use crate::steps::Steps;
use crate::table::{Table, TableLock};
use crate::wake::Bell;

#[derive(Debug)]
pub(crate) struct Inner {
    // In the order in which they must go: the memory, the account of it, the sign on the door.
    pub(crate) memory: PoolMemory,
    pub(crate) account: Account,
    pub(crate) segment: PoolSegment,
    pub(crate) name: PoolName,
    pub(crate) group: GroupId,
    pub(crate) geometry: Geometry,
    /// Pages that are used: all of the geometry's, unless told otherwise.
    pub(crate) page_count: u32,
    pub(crate) table: TableLock,
    pub(crate) limits: Mutex<Limits>,
    /// Held around each look at the segment's limit and each write of it. An old word would otherwise be taken for an order.
    pub(crate) segment_limit: Mutex<()>,
    /// The ceiling in force, which operators may change in the ledger.
    pub(crate) ceiling: AtomicU64,
    pub(crate) bell: Bell,
    pub(crate) progress: Progress,
    pub(crate) mailbox: Mailbox,
    pub(crate) steps: Steps,
    /// Blocks that the engine keeps in case they are asked for again, and would evict for a neighbour that waits.
    pub(crate) evictable_blocks: AtomicU32,
    pub(crate) trimmed: AtomicBool,
    pub(crate) stopping: AtomicBool,
    pub(crate) birth: Birth,
}

impl Inner {
    pub(crate) fn check_birth(&self) -> Result<(), PoolError> {
        if self.birth.is_foreign() { Err(PoolError::Forked) } else { Ok(()) }
    }

    pub(crate) fn page_bytes(&self) -> Bytes {
        self.geometry.page_bytes()
    }

    pub(crate) fn bytes_of(&self, pages: usize) -> Bytes {
        Bytes(self.page_bytes().0 * pages as u64)
    }

    /// What the ledger should say of this pool.
    pub(crate) fn figures(&self) -> Figures {
        let (counts, cached) = self.page_counts_of(&self.table.lock());
        let spare = self.bytes_of((counts.idle + counts.draining + counts.unmapping) as usize);
        Figures { spare, cached: self.bytes_of(cached as usize), reclaim: self.mailbox.peek().bytes }
    }

    /// Where the pages are, and how many of those in use are there for what the engine only keeps: the part of the
    /// blocks in use that it said it keeps, of the pages in use. Exact where all blocks are kept, or none. Else a
    /// guess: nobody says which blocks are kept, and kept ones may lie beside others.
    pub(crate) fn page_counts_of(&self, table: &Table) -> (PageCounts, u32) {
        let kept = self.evictable_blocks.load(Relaxed);
        let counts = table.blocks.pages().counts();
        let blocks = table.blocks.live();
        let cached = u64::from(counts.in_use) * u64::from(kept.min(blocks)) / u64::from(blocks.max(1));
        (counts, u32::try_from(cached).unwrap_or(u32::MAX))
    }

    /// Pages that could be given back without losing anything, except those that are being given back already.
    pub(crate) fn spare_pages(&self) -> u32 {
        let counts = self.table.lock().blocks.pages().counts();
        counts.idle + counts.draining
    }

    /// Before anything is ordered of workers: what the order says of idle pages is true then.
    pub(crate) fn tell_idle(&self) {
        self.memory.tell_idle(|| {
            let (counts, evictable) = self.page_counts_of(&self.table.lock());
            IdlePages { spare: counts.idle + counts.draining, evictable }
        });
    }

    /// Lets the gauge know what the ledger said last, and what the workers said of theirs: the poorest device decides.
    pub(crate) fn note_headroom(&self) {
        let here = self.account.headroom().0 / self.page_bytes().0;
        let here = u32::try_from(here).unwrap_or(u32::MAX);
        self.table.set_grantable(here.min(self.memory.grantable_pages()));
    }

    pub(crate) fn limits(&self) -> MutexGuard<'_, Limits> {
        // A few words, always written whole.
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The limit in whole pages: the operator's, under the ceiling, under the reservation.
    fn limit_pages(&self) -> u32 {
        let bytes = self.limits().bytes().0.min(self.ceiling.load(Relaxed));
        u32::try_from(bytes / self.page_bytes().0).unwrap_or(u32::MAX).min(self.page_count)
    }

    /// Makes the table obey the limit in force: from here on nothing is leased beyond it. Says whether that changed anything.
    pub(crate) fn apply_limit(&self) -> bool {
        let mut table = self.table.lock();
        // Read under the lock: of two that apply limits at the same moment, the second applies the one in force.
        let pages = self.limit_pages();
        let changed = table.blocks.pages().limit() != pages;
        if changed {
            table.blocks.set_limit(pages);
            table.retire_above_limit();
            table.publish();
        }
        changed
    }

    /// Whether the table obeys the limit in force and no more is held. Says which revision that is.
    pub(crate) fn carried_out_revision(&self) -> Option<u64> {
        let table = self.table.lock();
        let pages = table.blocks.pages();
        (pages.limit() == self.limit_pages() && pages.overage() == 0).then(|| self.limits().revision())
    }

    /// Looks at the ledger entry and at the segment for a new limit. Says whether there was one.
    pub(crate) fn see_limit(&self, entry: &LedgerEntry) -> bool {
        let _alone = self.segment_limit.lock().unwrap_or_else(PoisonError::into_inner);
        let word = self.segment.limit();
        let mut limits = self.limits();
        // The ledger first: a word in the segment that differs from it then is newer.
        let by_ledger = limits.see_ledger(entry.limit, entry.limit_revision);
        let by_segment = word.is_some_and(|word| limits.see_segment(word));
        by_ledger || by_segment
    }

    /// Writes the limit into the segment, where it shows another.
    pub(crate) fn show_limit(&self) {
        let _alone = self.segment_limit.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(bytes) = self.limits().segment_update() else { return };
        match self.segment.set_limit(bytes) {
            Ok(()) => self.limits().segment_written(bytes),
            Err(error) => tracing::debug!(%error, "the segment shows the new limit later"),
        }
    }

    /// An order for a limit, from inside this process. It is settled under the ledger's lock, where `kvctl` writes too.
    pub(crate) fn order_limit(&self, order: impl FnOnce(&mut Limits) -> Verdict) -> Result<LimitState, PoolError> {
        let mut verdict = Verdict::Stale;
        let mut undo = None;
        let settle = |view: &mut LedgerView, me: usize| {
            let mut limits = self.limits();
            let before = *limits;
            let entry = &mut view.entries[me];
            limits.see_ledger(entry.limit, entry.limit_revision);
            verdict = order(&mut limits);
            (entry.limit, entry.limit_revision) = (limits.bytes(), limits.revision());
            if verdict == Verdict::New {
                let slot = entry.slot;
                view.note(slot, Note::new(EventKind::LimitSet, Reason::Engine, limits.bytes()));
            }
            undo = Some((before, *limits));
        };
        if let Err(error) = self.account.publish(self.figures(), settle) {
            if let Some((before, after)) = undo {
                let mut limits = self.limits();
                // Unless another order came meanwhile.
                *limits = if *limits == after { before } else { *limits };
            }
            self.bell.ring();
            return Err(PoolError::Ledger(error));
        }
        if verdict == Verdict::New {
            tracing::info!(pool = %self.name, limit = %self.limits().bytes(), "new limit");
        }
        self.apply_limit();
        self.show_limit();
        self.bell.ring();
        self.progress.announce();
        Ok(self.limit_state(verdict))
    }

    /// Sets the floor in the ledger, from inside this process. Says what it was.
    pub(crate) fn set_floor(&self, bytes: Bytes) -> Result<Bytes, PoolError> {
        let mut before = bytes;
        let write = |view: &mut LedgerView, me: usize| {
            let entry = &mut view.entries[me];
            before = std::mem::replace(&mut entry.floor, bytes);
            let slot = entry.slot;
            if before != bytes {
                view.note(slot, Note::new(EventKind::ShareSet, Reason::Engine, bytes));
            }
        };
        self.account.publish(self.figures(), write).map_err(PoolError::Ledger)?;
        Ok(before)
    }

    pub(crate) fn limit_state(&self, verdict: Verdict) -> LimitState {
        let (limits, counts, limit_pages) = if self.birth.is_foreign() {
            // Whoever held a lock at the fork does not exist here to give it back.
            (Limits::new(Bytes::ZERO), PageCounts::default(), 0)
        } else {
            let limits = *self.limits();
            let table = self.table.lock();
            (limits, table.blocks.pages().counts(), table.blocks.pages().limit())
        };
        let needed = counts.in_use + counts.mapping;
        let (status, reason) = match verdict {
            Verdict::Stale => (LimitStatus::Stale, Some("a later revision is in force")),
            Verdict::Conflict => (LimitStatus::Conflict, Some("the revision was used for another limit")),
            Verdict::New | Verdict::Repeated if needed > limit_pages => {
                (LimitStatus::Deferred, Some("more is in use than the limit allows"))
            }
            Verdict::New | Verdict::Repeated => (LimitStatus::Applied, None),
        };
        let bytes = |pages: u32| self.bytes_of(pages as usize);
        LimitState {
            status,
            pool_name: self.name.as_str().to_owned(),
            group_id: self.group,
            limit_bytes: limits.bytes(),
            effective_limit_bytes: bytes(limit_pages),
            current_capacity_bytes: bytes(self.page_count),
            revision: limits.revision(),
            mapped_bytes: bytes(counts.held()),
            remaining_bytes: bytes(limit_pages.saturating_sub(counts.held())),
            overage_bytes: bytes(counts.held().saturating_sub(limit_pages)),
            reason,
        }
    }

    /// Takes over the terms that an operator set in the ledger. Says whether they changed.
    pub(crate) fn see_ceiling(&self, entry: &LedgerEntry) -> bool {
        self.ceiling.swap(entry.ceiling.0, Relaxed) != entry.ceiling.0
    }
}
