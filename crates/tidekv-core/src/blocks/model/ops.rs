//! What can happen to a pool, and how often.

use proptest::prelude::*;
use proptest::sample::Index;

/// A number of blocks, once the size of a page is known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Count {
    pub(super) scale: Index,
    pub(super) value: Index,
}

#[derive(Clone, Debug)]
pub(super) enum Op {
    Alloc(Count),
    Plan(Count, bool),
    PlanAndAbort(Count),
    Commit(Index),
    Abort(Index),
    Refill(Index),
    Mapped(Index, bool),
    LateReport(Index),
    Free { subset: Subset, fence: Option<u64>, by_index: bool },
    BadFree { subset: Subset, bad: Bad },
    Retire(Index),
    BeginUnmap { completed: u64, max_pages: u32 },
    Synchronised,
    Unmapped(Index, bool),
    RetryUnmap,
    SetLimit(Index),
    Reserve(Count),
    AllocReserved(Count),
    FreeReserved,
}

/// Some of the leases: every `stride`th of those from `first` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subset {
    pub(super) first: Index,
    pub(super) count: Index,
    pub(super) stride: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Bad {
    Repeated,
    Dead(u8),
    Foreign(u32),
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let index = any::<Index>;
    let count = || (index(), index()).prop_map(|(scale, value)| Count { scale, value });
    let subset =
        || {
            (index(), index(), prop::sample::select(vec![1usize, 1, 2, 3, 9]))
                .prop_map(|(first, count, stride)| Subset { first, count, stride })
        };
    let bad = prop_oneof![Just(Bad::Repeated), any::<u8>().prop_map(Bad::Dead), any::<u32>().prop_map(Bad::Foreign)];
    let fence = prop::option::of(0..6u64);
    prop_oneof![
        6 => count().prop_map(Op::Alloc),
        4 => (count(), any::<bool>()).prop_map(|(count, aside)| Op::Plan(count, aside)),
        2 => count().prop_map(Op::PlanAndAbort),
        4 => index().prop_map(Op::Commit),
        2 => index().prop_map(Op::Abort),
        2 => index().prop_map(Op::Refill),
        3 => (index(), prop::bool::weighted(0.7)).prop_map(|(which, good)| Op::Mapped(which, good)),
        1 => index().prop_map(Op::LateReport),
        8 => (subset(), fence, any::<bool>()).prop_map(|(subset, fence, by_index)| Op::Free { subset, fence, by_index }),
        2 => (subset(), bad).prop_map(|(subset, bad)| Op::BadFree { subset, bad }),
        3 => index().prop_map(Op::Retire),
        4 => (0..6u64, 1..4u32).prop_map(|(completed, max_pages)| Op::BeginUnmap { completed, max_pages }),
        2 => Just(Op::Synchronised),
        4 => (index(), prop::bool::weighted(0.7)).prop_map(|(which, good)| Op::Unmapped(which, good)),
        1 => Just(Op::RetryUnmap),
        2 => index().prop_map(Op::SetLimit),
        1 => count().prop_map(Op::Reserve),
        1 => count().prop_map(Op::AllocReserved),
        1 => Just(Op::FreeReserved),
    ]
}
