//! Which limit is in force, when several hands write it.
//!
//! ```text
//!   writer                       where it writes                       carries a revision
//!   ---------------------------  ------------------------------------  ------------------
//!   KvPool::set_limit            here                                  yes, the caller's
//!   KvPool::resize               here                                  no: becomes the next one
//!   kvctl limit                  the segment's word, then the ledger   yes, in the ledger
//!   kvcached's own kvctl         the segment's word alone              no: becomes the next one
//! ```
//!
//! Revisions only grow, so every writer agrees on which order was last:
//!
//! | revision given   | bytes     | verdict    | effect                                   |
//! |------------------|-----------|------------|------------------------------------------|
//! | below the current| any       | stale      | none                                     |
//! | the current      | the same  | repeated   | none: answers with the present state     |
//! | the current      | different | conflict   | none                                     |
//! | above            | any       | new        | in force from now on                     |
//!
//! The limit at the start is nobody's order, so the first order is new whatever its revision is, 0 too.
//!
//! Pure: what a limit means for pages is decided by its users.

use tidekv_core::units::{Bytes, GroupId};

/// How an order for a new limit ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitStatus {
    /// In force, and the pool's use is within it.
    Applied,
    /// In force for new allocations, but more is in use: applied when enough was freed or evicted.
    Deferred,
    /// A later order is in force: this one changed nothing.
    Stale,
    /// The same revision was used for another limit: this order changed nothing.
    Conflict,
}

impl LimitStatus {
    /// As kvcached writes it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Deferred => "deferred",
            Self::Stale => "stale",
            Self::Conflict => "conflict",
        }
    }
}

/// The limit of a pool and what it has come to: kvcached's answer to `set_memory_limit`, field by field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitState {
    /// How the order ended.
    pub status: LimitStatus,
    /// Name of the pool.
    pub pool_name: String,
    /// Its group.
    pub group_id: GroupId,
    /// The limit in force, as it was ordered.
    pub limit_bytes: Bytes,
    /// The limit in whole pages, under the ceiling and under the size of the reservation.
    pub effective_limit_bytes: Bytes,
    /// What the pool could hold if there were no limit: its whole reservation.
    pub current_capacity_bytes: Bytes,
    /// Revision of the limit in force.
    pub revision: u64,
    /// Memory held now.
    pub mapped_bytes: Bytes,
    /// What the limit leaves to be mapped.
    pub remaining_bytes: Bytes,
    /// What is held above the limit.
    pub overage_bytes: Bytes,
    /// Why the order is not applied, for people.
    pub reason: Option<&'static str>,
}

/// What becomes of an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    New,
    Repeated,
    Stale,
    Conflict,
}

/// The limit in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    bytes: Bytes,
    revision: u64,
    /// Whether somebody ordered this limit: the one at the start has revision 0, and an order may have that too.
    is_ordered: bool,
    /// The segment's word when we last looked or wrote.
    segment_word: Bytes,
}

impl Limits {
    /// The limit a pool starts with has revision 0.
    pub(crate) fn new(start: Bytes) -> Self {
        Self { bytes: start, revision: 0, is_ordered: false, segment_word: start }
    }

    pub(crate) fn bytes(&self) -> Bytes {
        self.bytes
    }

    pub(crate) fn revision(&self) -> u64 {
        self.revision
    }

    /// An order that carries its revision.
    pub(crate) fn order(&mut self, bytes: Bytes, revision: u64) -> Verdict {
        if revision < self.revision {
            return Verdict::Stale;
        }
        if revision == self.revision && self.is_ordered {
            return if bytes == self.bytes { Verdict::Repeated } else { Verdict::Conflict };
        }
        self.put(bytes, revision);
        Verdict::New
    }

    fn put(&mut self, bytes: Bytes, revision: u64) {
        (self.bytes, self.revision, self.is_ordered) = (bytes, revision, true);
    }

    /// An order without a revision: it is the latest.
    pub(crate) fn order_next(&mut self, bytes: Bytes) {
        self.put(bytes, self.revision.saturating_add(1));
    }

    /// A look at the ledger entry, where `kvctl` writes. Says whether the limit changed.
    ///
    /// At an equal revision the entry is right: it was written under the ledger's lock. At revision 0 it is no news: `kvctl`
    /// counts from 1, so that is the limit at the start, read before an order of ours was written.
    pub(crate) fn see_ledger(&mut self, bytes: Bytes, revision: u64) -> bool {
        let differs = revision > self.revision || (revision == self.revision && revision > 0 && bytes != self.bytes);
        if differs {
            self.put(bytes, revision);
        }
        differs
    }

    /// A look at the segment's word. Says whether somebody wrote a new limit there.
    pub(crate) fn see_segment(&mut self, word: Bytes) -> bool {
        let written = word != self.segment_word;
        self.segment_word = word;
        if written && word != self.bytes {
            self.order_next(word);
            return true;
        }
        false
    }

    /// The word to write into the segment, where it does not show the limit in force.
    pub(crate) fn segment_update(&self) -> Option<Bytes> {
        (self.segment_word != self.bytes).then_some(self.bytes)
    }

    /// The segment's word is ours again.
    pub(crate) fn segment_written(&mut self, word: Bytes) {
        self.segment_word = word;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const START: Bytes = Bytes(1000);

    #[test]
    fn the_table_row_by_row() {
        let mut limits = Limits::new(START);
        assert_eq!(limits.order(Bytes(500), 7), Verdict::New);
        assert_eq!(limits.order(Bytes(400), 6), Verdict::Stale);
        assert_eq!(limits.order(Bytes(500), 7), Verdict::Repeated);
        assert_eq!(limits.order(Bytes(400), 7), Verdict::Conflict);
        assert_eq!((limits.bytes(), limits.revision()), (Bytes(500), 7));
    }

    #[test]
    fn the_first_order_is_new_whatever_its_revision_is() {
        for (bytes, revision) in [(Bytes(500), 0), (START, 0), (Bytes(500), 1)] {
            let mut limits = Limits::new(START);
            assert_eq!(limits.order(bytes, revision), Verdict::New);
            assert_eq!((limits.bytes(), limits.revision()), (bytes, revision));
            assert_eq!(limits.order(bytes, revision), Verdict::Repeated);
            assert_eq!(limits.order(Bytes(400), revision), Verdict::Conflict);
        }
        // A look at the ledger from before it does not undo it.
        let mut limits = Limits::new(START);
        limits.order(Bytes(500), 0);
        assert!(!limits.see_ledger(START, 0));
        assert_eq!(limits.bytes(), Bytes(500));
        // kvctl was first, and its orders begin at 1.
        let mut limits = Limits::new(START);
        assert!(limits.see_ledger(Bytes(300), 1));
        assert_eq!(limits.order(Bytes(500), 0), Verdict::Stale);
    }

    #[test]
    fn the_start_up_value_can_be_restored_and_zero_is_a_limit() {
        let mut limits = Limits::new(START);
        assert!(limits.see_segment(Bytes(0)));
        assert_eq!((limits.bytes(), limits.revision()), (Bytes(0), 1));
        assert!(limits.see_segment(START));
        assert_eq!((limits.bytes(), limits.revision()), (START, 2));
    }

    #[test]
    fn a_word_written_before_its_revision_is_one_order_in_the_end() {
        // kvctl writes the word; we see it before the entry and give it a revision; then its own arrives.
        let mut limits = Limits::new(START);
        assert!(limits.see_segment(Bytes(300)));
        assert!(limits.see_ledger(Bytes(300), 2));
        assert_eq!((limits.bytes(), limits.revision()), (Bytes(300), 2));
        assert!(!limits.see_segment(Bytes(300)));
    }

    #[test]
    fn an_order_of_ours_goes_to_the_segment_and_is_not_taken_for_somebody_elses() {
        let mut limits = Limits::new(START);
        limits.order(Bytes(300), 1);
        assert_eq!(limits.segment_update(), Some(Bytes(300)));
        // Not yet written: the old word there is no news.
        assert!(!limits.see_segment(START));
        limits.segment_written(Bytes(300));
        assert!(!limits.see_segment(Bytes(300)));
        assert_eq!((limits.bytes(), limits.revision()), (Bytes(300), 1));
    }

    #[derive(Clone, Debug)]
    enum Order {
        Revised(u64, u64),
        Next(u64),
        Ledger(u64, u64),
        Segment(u64),
    }

    fn order() -> impl Strategy<Value = Order> {
        let (bytes, revision) = (0u64..4, 0u64..12);
        prop_oneof![
            (bytes.clone(), revision.clone()).prop_map(|(bytes, revision)| Order::Revised(bytes, revision)),
            bytes.clone().prop_map(Order::Next),
            (bytes.clone(), revision).prop_map(|(bytes, revision)| Order::Ledger(bytes, revision)),
            bytes.prop_map(Order::Segment),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn revisions_only_grow_and_refusals_change_nothing(orders in prop::collection::vec(order(), 1..60)) {
            let mut limits = Limits::new(START);
            for order in orders {
                let before = limits;
                let changed = match order {
                    Order::Revised(bytes, revision) => {
                        let verdict = limits.order(Bytes(bytes), revision);
                        let first = !before.is_ordered && revision == 0;
                        prop_assert_eq!(verdict == Verdict::New, first || revision > before.revision);
                        verdict == Verdict::New
                    }
                    Order::Next(bytes) => {
                        limits.order_next(Bytes(bytes));
                        true
                    }
                    Order::Ledger(bytes, revision) => limits.see_ledger(Bytes(bytes), revision),
                    Order::Segment(word) => limits.see_segment(Bytes(word)),
                };
                prop_assert!(limits.revision >= before.revision);
                if !changed {
                    prop_assert_eq!((limits.bytes, limits.revision), (before.bytes, before.revision));
                }
            }
        }
    }
}
