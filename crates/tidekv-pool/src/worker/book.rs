//! A worker's book of one group: which pages have memory, and what each operation did that the scheduler may still ask
//! about. Pure: it says what to do, the hand does it and reports.
//!
//! ```text
//!   order          of a new epoch             of an epoch in the book
//!   -------------  -------------------------  ---------------------------------------------------------
//!   Map            map them, remember         the same map once more: done already
//!   Unmap          unmap them, remember       the same unmap once more: what it left behind, else done already
//!   Abort          remember: it never maps    a map: unmap what it mapped; an abort: what it left behind
//!   settled        --                         everything up to there is forgotten
//! ```
//!
//! So an order may come twice, and an abort before its map, and the pages are the same as if each had come once and in
//! order. What makes no sense in any order is refused and changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use tidekv_core::units::PageId;
use tidekv_ipc::message::RefusalKind;

/// What the hand should do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Map or unmap these, then report.
    Do(Vec<PageId>),
    /// It was done before.
    Nothing,
    /// It makes no sense.
    Refuse(RefusalKind, String),
}

/// What an epoch did.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Deal {
    /// Mapped these, all that it was asked for; or, where the device refused, left these behind.
    Map { asked: Vec<PageId>, has: Vec<PageId>, whole: bool },
    /// Unmapped pages; these are left.
    Unmap { left: Vec<PageId> },
    /// Undone; these are left.
    Aborted { left: Vec<PageId> },
}

#[derive(Clone, Debug, Default)]
pub(crate) struct WorkerBook {
    page_count: u32,
    /// Pages with memory, those included that the driver would not take back.
    held: BTreeSet<PageId>,
    epochs: BTreeMap<u64, Deal>,
    settled: u64,
}

impl WorkerBook {
    pub(crate) fn new(page_count: u32) -> Self {
        Self { page_count, ..Self::default() }
    }

    /// Pages with memory, sorted.
    pub(crate) fn held(&self) -> Vec<PageId> {
        self.held.iter().copied().collect()
    }

    /// How many those are.
    pub(crate) fn held_count(&self) -> usize {
        self.held.len()
    }

    /// Nobody will ask about these operations any more.
    pub(crate) fn settle(&mut self, settled: u64) {
        if settled > self.settled {
            self.settled = settled;
            self.epochs = self.epochs.split_off(&settled.saturating_add(1));
        }
    }

    pub(crate) fn plan_map(&self, epoch: u64, pages: &[PageId]) -> Plan {
        match self.epochs.get(&epoch) {
            Some(Deal::Map { asked, whole: true, .. }) if asked == pages => return Plan::Nothing,
            Some(deal) => return contradiction(epoch, deal),
            None => {}
        }
        self.check(epoch, pages, false).unwrap_or_else(|| Plan::Do(pages.to_vec()))
    }

    /// The device did it, or refused and left `stuck` pages behind.
    pub(crate) fn mapped(&mut self, epoch: u64, asked: &[PageId], outcome: Result<(), Vec<PageId>>) {
        let whole = outcome.is_ok();
        let has = outcome.err().unwrap_or_else(|| asked.to_vec());
        self.held.extend(&has);
        self.epochs.insert(epoch, Deal::Map { asked: asked.to_vec(), has, whole });
    }

    pub(crate) fn plan_unmap(&self, epoch: u64, pages: &[PageId]) -> Plan {
        match self.epochs.get(&epoch) {
            Some(Deal::Unmap { left }) => return again(left),
            Some(deal) => return contradiction(epoch, deal),
            None => {}
        }
        self.check(epoch, pages, true).unwrap_or_else(|| Plan::Do(pages.to_vec()))
    }

    pub(crate) fn plan_abort(&self, epoch: u64) -> Plan {
        match self.epochs.get(&epoch) {
            // What is settled was committed, or aborted here already: the first is a scheduler's mistake.
            None if epoch <= self.settled => refuse(format!("epoch {epoch} is settled and cannot be aborted")),
            None => Plan::Nothing,
            Some(Deal::Map { has: left, .. } | Deal::Aborted { left }) => again(left),
            Some(deal @ Deal::Unmap { .. }) => contradiction(epoch, deal),
        }
    }

    /// The memory of `pages` is back, except that of `left`.
    pub(crate) fn unmapped(&mut self, epoch: u64, pages: &[PageId], left: Vec<PageId>) {
        self.give(pages, &left);
        self.epochs.insert(epoch, Deal::Unmap { left });
    }

    /// The same, for an abort; also for one of an epoch that never came, which then never maps.
    pub(crate) fn aborted(&mut self, epoch: u64, pages: &[PageId], left: Vec<PageId>) {
        self.give(pages, &left);
        self.epochs.insert(epoch, Deal::Aborted { left });
    }

    /// The scheduler is gone and with it everything it may ask about; the memory is back, except that of `left`.
    pub(crate) fn forget(&mut self, left: Vec<PageId>) {
        *self = Self { held: left.into_iter().collect(), ..Self::new(self.page_count) };
    }

    /// These are gone, so no earlier epoch has them to undo.
    fn give(&mut self, pages: &[PageId], left: &[PageId]) {
        for page in pages.iter().filter(|page| !left.contains(page)) {
            self.held.remove(page);
        }
        for deal in self.epochs.values_mut() {
            if let Deal::Map { has, .. } = deal {
                has.retain(|page| !pages.contains(page));
            }
        }
    }

    /// Why these pages cannot be mapped (or, where they must be `held`, unmapped).
    fn check(&self, epoch: u64, pages: &[PageId], held: bool) -> Option<Plan> {
        if epoch <= self.settled {
            return Some(refuse(format!("epoch {epoch} is settled, up to {}", self.settled)));
        }
        let bad = |page: PageId, why: &str| Some(Plan::Refuse(RefusalKind::BadPage, format!("page {page} {why}")));
        let mut named = BTreeSet::new();
        for &page in pages {
            if page.0 >= self.page_count {
                let range = format!("is outside the reservation: valid page ids are 0..{}", self.page_count);
                return bad(page, &range);
            }
            if self.held.contains(&page) != held {
                return bad(page, if held { "is not mapped" } else { "is mapped already" });
            }
            if !named.insert(page) {
                return bad(page, "is named twice");
            }
        }
        None
    }
}

fn again(left: &[PageId]) -> Plan {
    if left.is_empty() { Plan::Nothing } else { Plan::Do(left.to_vec()) }
}

fn refuse(reason: String) -> Plan {
    Plan::Refuse(RefusalKind::Protocol, reason)
}

fn contradiction(epoch: u64, deal: &Deal) -> Plan {
    let was = match deal {
        Deal::Map { whole: true, .. } => "a map of other pages",
        Deal::Map { .. } => "a map that was refused",
        Deal::Unmap { .. } => "an unmap",
        Deal::Aborted { .. } => "aborted",
    };
    refuse(format!("epoch {epoch} was {was}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGES: u32 = 6;

    fn ids(pages: &[u32]) -> Vec<PageId> {
        pages.iter().copied().map(PageId).collect()
    }

    fn map(book: &mut WorkerBook, epoch: u64, pages: &[u32]) -> Plan {
        let plan = book.plan_map(epoch, &ids(pages));
        if let Plan::Do(pages) = &plan {
            book.mapped(epoch, pages, Ok(()));
        }
        plan
    }

    fn unmap(book: &mut WorkerBook, epoch: u64, pages: &[u32], left: &[u32]) -> Plan {
        let plan = book.plan_unmap(epoch, &ids(pages));
        if let Plan::Do(pages) = &plan {
            book.unmapped(epoch, pages, ids(left));
        }
        plan
    }

    fn abort(book: &mut WorkerBook, epoch: u64) -> Plan {
        let plan = book.plan_abort(epoch);
        match &plan {
            Plan::Do(pages) => book.aborted(epoch, pages, Vec::new()),
            Plan::Nothing => book.aborted(epoch, &[], Vec::new()),
            Plan::Refuse(..) => {}
        }
        plan
    }

    fn is_refused(plan: &Plan, kind: RefusalKind) -> bool {
        matches!(plan, Plan::Refuse(refused, _) if *refused == kind)
    }

    #[test]
    fn an_order_that_comes_twice_is_done_once() {
        let mut book = WorkerBook::new(PAGES);
        assert_eq!(map(&mut book, 1, &[0, 1]), Plan::Do(ids(&[0, 1])));
        assert_eq!(map(&mut book, 1, &[0, 1]), Plan::Nothing);
        assert!(is_refused(&map(&mut book, 1, &[0, 2]), RefusalKind::Protocol), "the same epoch, other pages");
        assert!(is_refused(&map(&mut book, 2, &[1]), RefusalKind::BadPage), "another epoch, the same page");
        assert_eq!(unmap(&mut book, 3, &[0], &[]), Plan::Do(ids(&[0])));
        assert_eq!(unmap(&mut book, 3, &[0], &[]), Plan::Nothing);
        assert!(is_refused(&unmap(&mut book, 4, &[0], &[]), RefusalKind::BadPage));
        assert_eq!(book.held(), ids(&[1]));
    }

    #[test]
    fn an_abort_undoes_its_epoch_whenever_it_comes() {
        let mut book = WorkerBook::new(PAGES);
        map(&mut book, 1, &[4]);
        map(&mut book, 2, &[0, 1]);
        assert_eq!(abort(&mut book, 2), Plan::Do(ids(&[0, 1])));
        assert_eq!(abort(&mut book, 2), Plan::Nothing, "twice");
        assert_eq!(abort(&mut book, 3), Plan::Nothing, "before its map");
        assert!(is_refused(&map(&mut book, 3, &[2]), RefusalKind::Protocol), "which is refused then");
        assert_eq!(book.held(), ids(&[4]));
        book.settle(3);
        assert!(is_refused(&abort(&mut book, 1), RefusalKind::Protocol), "settled: nobody aborts it any more");
        assert!(is_refused(&map(&mut book, 3, &[2]), RefusalKind::Protocol));
        assert!(book.epochs.is_empty(), "what is settled is forgotten");
    }

    #[test]
    fn what_the_driver_keeps_is_held_and_tried_again_by_the_same_order() {
        let mut book = WorkerBook::new(PAGES);
        map(&mut book, 1, &[0, 1, 2]);
        unmap(&mut book, 2, &[0, 1], &[1]);
        assert_eq!(book.held(), ids(&[1, 2]));
        assert_eq!(unmap(&mut book, 2, &[0, 1], &[]), Plan::Do(ids(&[1])), "only what was left");
        assert_eq!(book.held(), ids(&[2]));
        // A map that the device refused, and that could not be undone whole.
        book.mapped(3, &ids(&[3, 4]), Err(ids(&[3])));
        assert_eq!(book.held(), ids(&[2, 3]));
        assert_eq!(abort(&mut book, 3), Plan::Do(ids(&[3])));
        book.forget(ids(&[2]));
        assert_eq!((book.held(), book.held_count()), (ids(&[2]), 1));
    }

    #[test]
    fn pages_beyond_the_reservation_or_named_twice_are_refused() {
        let mut book = WorkerBook::new(PAGES);
        assert!(is_refused(&map(&mut book, 1, &[PAGES]), RefusalKind::BadPage));
        assert!(is_refused(&map(&mut book, 1, &[2, 2]), RefusalKind::BadPage));
        assert!(is_refused(&unmap(&mut book, 1, &[0], &[]), RefusalKind::BadPage));
        assert_eq!(book.held_count(), 0);
    }

    #[derive(Clone, Debug)]
    enum Order {
        Map(u64, Vec<u32>),
        Unmap(u64, Vec<u32>),
        Abort(u64),
    }

    fn orders() -> impl Strategy<Value = Order> {
        let pages =
            || prop::collection::btree_set(0..PAGES, 1..3).prop_map(|pages| pages.into_iter().collect::<Vec<_>>());
        prop_oneof![
            (1..8u64, pages()).prop_map(|(epoch, pages)| Order::Map(epoch, pages)),
            (1..8u64, pages()).prop_map(|(epoch, pages)| Order::Unmap(epoch, pages)),
            (1..8u64).prop_map(Order::Abort),
        ]
    }

    proptest! {
        /// The dullest worker: which epoch mapped each page, and each epoch's first order. Whatever comes, a page is held
        /// exactly if an epoch that was not aborted mapped it and none unmapped it since.
        #[test]
        fn any_order_of_orders_is_what_a_dull_worker_does(orders in prop::collection::vec(orders(), 1..60)) {
            let mut book = WorkerBook::new(PAGES);
            let mut mapped_by: BTreeMap<u32, u64> = BTreeMap::new();
            let mut first: BTreeMap<u64, Order> = BTreeMap::new();
            for order in orders {
                match order {
                    Order::Map(epoch, pages) => {
                        let fresh = !first.contains_key(&epoch) && pages.iter().all(|page| !mapped_by.contains_key(page));
                        prop_assert_eq!(matches!(map(&mut book, epoch, &pages), Plan::Do(_)), fresh);
                        if fresh {
                            mapped_by.extend(pages.iter().map(|&page| (page, epoch)));
                            first.insert(epoch, Order::Map(epoch, pages));
                        }
                    }
                    Order::Unmap(epoch, pages) => {
                        let fresh = !first.contains_key(&epoch) && pages.iter().all(|page| mapped_by.contains_key(page));
                        prop_assert_eq!(matches!(unmap(&mut book, epoch, &pages, &[]), Plan::Do(_)), fresh);
                        if fresh {
                            mapped_by.retain(|page, _| !pages.contains(page));
                            first.insert(epoch, Order::Unmap(epoch, pages));
                        }
                    }
                    Order::Abort(epoch) if matches!(first.get(&epoch), Some(Order::Unmap(..))) => {
                        prop_assert!(is_refused(&abort(&mut book, epoch), RefusalKind::Protocol));
                    }
                    Order::Abort(epoch) => {
                        abort(&mut book, epoch);
                        mapped_by.retain(|_, by| *by != epoch);
                        first.insert(epoch, Order::Abort(epoch));
                    }
                }
                prop_assert_eq!(book.held(), mapped_by.keys().copied().map(PageId).collect::<Vec<_>>());
            }
        }
    }
}
