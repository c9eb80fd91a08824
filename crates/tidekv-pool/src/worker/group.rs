//! One group of a worker: its reservation, its account in the ledger of its own device, its book.
//!
//! ```text
//!   map      ledger: reserve  ->  device: map        refused anywhere: undone, released, a refusal that says why
//!   unmap    device: unmap    ->  ledger: release    what the driver keeps stays counted
//! ```

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tidekv_core::units::{Bytes, PageId};
use tidekv_ipc::message::{Balance, Order, Refusal, RefusalKind, Verdict};
use tidekv_mem::{MapError, PageUse, Reservation, UnmapError};
use tidekv_shm::{EventKind, LedgerView, Note, Reason};

use super::book::{Plan, WorkerBook};
use crate::account::{Account, Asker, Figures, Grant, LEDGER_PATIENCE};
use crate::fleet::IdlePages;
use crate::owed::{Owed, pages_of};

/// What is owed and what is left is looked up no more often than this, unless what is idle changes.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Dead neighbours and the budget are looked after this often, as a pool does.
const MAINTAIN_EVERY: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct WorkerGroup {
    // In the order in which they must go: the memory, the account of it.
    reservation: Arc<Reservation>,
    account: Account,
    book: WorkerBook,
    owed: Owed,
    /// What the scheduler alone knows: as it last said.
    idle: IdlePages,
    looked: Option<Instant>,
    maintained: Option<Instant>,
}

impl WorkerGroup {
    pub(super) fn new(reservation: Arc<Reservation>, account: Account) -> Self {
        let book = WorkerBook::new(reservation.placement().page_count());
        Self {
            reservation,
            account,
            book,
            owed: Owed::default(),
            idle: IdlePages::default(),
            looked: None,
            maintained: None,
        }
    }

    pub(super) fn reservation(&self) -> &Arc<Reservation> {
        &self.reservation
    }

    pub(super) fn settle(&mut self, settled: u64) {
        self.book.settle(settled);
    }

    /// So many pages the scheduler could do without.
    pub(super) fn hear_idle(&mut self, order: &Order) {
        let idle = IdlePages { spare: order.spare_pages, evictable: order.evictable_pages };
        if std::mem::replace(&mut self.idle, idle) != idle {
            self.looked = None;
        }
    }

    fn figures(&self) -> Figures {
        let [spare, cached] = [self.idle.spare, self.idle.evictable].map(|pages| self.bytes_of(pages as usize));
        Figures { spare, cached, reclaim: Bytes::ZERO }
    }

    pub(super) fn held(&self) -> Vec<PageId> {
        self.book.held()
    }

    /// Maps pages, all or none. For those that are mapped ahead nobody waits: a refusal is no failure, and posts nothing.
    pub(super) fn map(&mut self, epoch: u64, pages: &[PageId], ahead: bool) -> Verdict {
        match self.book.plan_map(epoch, pages) {
            Plan::Nothing => Verdict::Done,
            Plan::Refuse(kind, reason) => refused(kind, reason),
            Plan::Do(pages) => match self.map_new(epoch, &pages, if ahead { Asker::Reserve } else { Asker::Passing }) {
                Ok(()) => Verdict::Done,
                Err(refusal) => {
                    self.account.tally.failures.fetch_add(u64::from(!ahead), Relaxed);
                    Verdict::Refused(refusal)
                }
            },
        }
    }

    fn map_new(&mut self, epoch: u64, pages: &[PageId], asker: Asker<'_>) -> Result<(), Refusal> {
        let bytes = self.bytes_of(pages.len());
        let deadline = Instant::now() + LEDGER_PATIENCE;
        match self.account.reserve(bytes, self.figures(), asker, deadline) {
            Ok(Grant::Granted) => {}
            Ok(Grant::Short { grantable }) => {
                let reason = format!("{bytes} more needed, {grantable} left on the device for this worker");
                return Err(Refusal { kind: RefusalKind::Exhausted, wanted: bytes, grantable, reason });
            }
            Err(error) => return Err(refusal(RefusalKind::Ledger, describe(&error))),
        }
        let Err(error) = self.reservation.map_pages(pages) else {
            self.account.tally.maps.fetch_add(pages.len() as u64, Relaxed);
            self.book.mapped(epoch, pages, Ok(()));
            return Ok(());
        };
        let is_stuck = |page: &&PageId| self.reservation.page_use(**page) == Some(PageUse::Stuck);
        let stuck: Vec<PageId> = match &error {
            MapError::Refused { stuck: 1.., .. } => pages.iter().filter(is_stuck).copied().collect(),
            _ => Vec::new(),
        };
        self.account.undo(bytes.saturating_sub(self.bytes_of(stuck.len())), self.figures());
        if !stuck.is_empty() {
            self.book.mapped(epoch, pages, Err(stuck));
        }
        let kind = match &error {
            error if error.is_out_of_memory() => RefusalKind::Device,
            MapError::Refused { .. } | MapError::Forked => RefusalKind::Driver,
            _ => RefusalKind::BadPage,
        };
        Err(Refusal { kind, wanted: bytes, grantable: Bytes::ZERO, reason: describe(&error) })
    }

    /// Gives pages back; `wait` is called first if there is something to unmap.
    pub(super) fn unmap(
        &mut self,
        epoch: u64,
        pages: &[PageId],
        wait: impl FnOnce() -> Result<(), Refusal>,
    ) -> Verdict {
        let pages = match self.book.plan_unmap(epoch, pages) {
            Plan::Nothing => return Verdict::Done,
            Plan::Refuse(kind, reason) => return refused(kind, reason),
            Plan::Do(pages) => pages,
        };
        if let Err(refusal) = wait() {
            return Verdict::Refused(refusal);
        }
        let left = self.give_back(&pages);
        self.book.unmapped(epoch, &pages, left.clone());
        stuck_or_done(&left)
    }

    /// Undoes a map. Nothing waits for the device: no step was ever given these pages.
    pub(super) fn abort(&mut self, epoch: u64) -> Verdict {
        let pages = match self.book.plan_abort(epoch) {
            Plan::Nothing => Vec::new(),
            Plan::Refuse(kind, reason) => return refused(kind, reason),
            Plan::Do(pages) => pages,
        };
        let left = self.give_back(&pages);
        self.book.aborted(epoch, &pages, left.clone());
        stuck_or_done(&left)
    }

    /// Whether anything would have to be given back if the scheduler were gone.
    pub(super) fn holds_any(&self) -> bool {
        self.book.held_count() > 0
    }

    /// The scheduler is gone: everything goes back, now and whenever this is called again.
    pub(super) fn give_all_back(&mut self) {
        let held = self.book.held();
        let left = self.give_back(&held);
        self.book.forget(left);
        (self.owed, self.idle) = (Owed::default(), IdlePages::default());
    }

    /// Unmaps and tells the ledger. Says what the driver would not take back.
    fn give_back(&mut self, pages: &[PageId]) -> Vec<PageId> {
        if pages.is_empty() {
            return Vec::new();
        }
        let left = match self.reservation.unmap_pages(pages) {
            Ok(()) => Vec::new(),
            Err(error) => {
                tracing::warn!(%error, "memory could not be given back; it is tried again");
                self.account.tally.failures.fetch_add(1, Relaxed);
                match error {
                    UnmapError::Stuck { stuck, .. } => stuck,
                    _ => pages.to_vec(),
                }
            }
        };
        let gone = pages.len() - left.len();
        self.account.tally.unmaps.fetch_add(gone as u64, Relaxed);
        let bytes = self.bytes_of(gone);
        // Why the scheduler ordered it stands in the events of its own pool.
        let notes = vec![Note::new(EventKind::Trimmed, Reason::Engine, bytes)];
        self.account.release(bytes, self.figures(), notes);
        // Paid at once: a scheduler that heard the old figure with this answer would evict for it.
        let gone = u32::try_from(gone).unwrap_or(u32::MAX);
        self.owed = Owed { pages: self.owed.pages.saturating_sub(gone), firm: self.owed.firm.saturating_sub(gone) };
        left
    }

    /// Pages that neighbours on the device are owed, or that the entry's limit forbids; and pages that are left there.
    pub(super) fn balance(&mut self) -> Balance {
        if self.looked.is_none_or(|at| at.elapsed() >= LOOK_EVERY) {
            self.looked = Some(Instant::now());
            self.owed = self.account.look().map_or(Owed::default(), |(view, me)| self.weigh(&view, me));
        }
        // Every update of the ledger notes it too, so it is never older than our own last grant.
        let grantable = self.account.headroom().0 / self.bytes_of(1).0;
        let grantable_pages = u32::try_from(grantable).unwrap_or(u32::MAX);
        Balance { owed_pages: self.owed.pages, firm_pages: self.owed.firm, grantable_pages }
    }

    /// What is owed, in pages; what could be had is noted.
    fn weigh(&self, view: &LedgerView, me: usize) -> Owed {
        let entry = &view.entries[me];
        let mut claims = view.pool_claims();
        claims[me] = self.account.claim(entry, self.figures());
        self.account.note_headroom(view.header.budget, claims.clone(), me);
        let over = pages_of(claims[me].held.saturating_sub(entry.limit.min(entry.ceiling)), self.bytes_of(1));
        // A limit is firm.
        let is_above = self.account.is_above_given_budget(view);
        Owed::on_device(view.header.budget, is_above, &claims, me, self.bytes_of(1))
            .max(Owed { pages: over, firm: over })
    }

    /// What a pool's background thread does for its entry: expired demand, dead neighbours, figures.
    pub(super) fn tend(&mut self) {
        let expired = self.account.expire_demand();
        if self.maintained.is_none_or(|at| at.elapsed() >= MAINTAIN_EVERY) {
            self.maintained = Some(Instant::now());
            if let Err(error) = self.account.maintain() {
                tracing::debug!(%error, "the ledger is looked after later");
            }
        }
        let Some((view, me)) = self.account.look() else {
            self.publish();
            return;
        };
        let entry = &view.entries[me];
        let applied = entry.applied_revision == entry.limit_revision || entry.reserved > entry.limit;
        if expired || !applied || self.account.differs(entry, self.figures()) {
            self.publish();
        }
    }

    fn publish(&self) {
        let obey = |view: &mut LedgerView, me: usize| {
            let entry = &mut view.entries[me];
            if entry.reserved <= entry.limit {
                entry.applied_revision = entry.limit_revision;
            }
        };
        if let Err(error) = self.account.publish(self.figures(), obey) {
            tracing::debug!(%error, "the ledger hears of us later");
        }
    }

    fn bytes_of(&self, pages: usize) -> Bytes {
        Bytes(self.reservation.placement().page_bytes().0 * pages as u64)
    }
}

pub(super) fn refusal(kind: RefusalKind, reason: String) -> Refusal {
    Refusal { kind, wanted: Bytes::ZERO, grantable: Bytes::ZERO, reason }
}

fn refused(kind: RefusalKind, reason: String) -> Verdict {
    Verdict::Refused(refusal(kind, reason))
}

fn stuck_or_done(left: &[PageId]) -> Verdict {
    match left.first() {
        None => Verdict::Done,
        Some(first) => {
            refused(RefusalKind::Stuck, format!("{} pages could not be given back, first {first}", left.len()))
        }
    }
}

/// An error and its causes, as one line.
pub(super) fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
