//! The word of a slot: what 64 grains are used for, and who answers for it.
//!
//! ```text
//!   63   61 60   56 55          40 39              16 15            0
//!   | state | class |    owner    |      index       |     reach      |
//!
//!   state     owner                         reach
//!   FREE      0                             0
//!   CLAIMED   who takes or gives it back    0 while a run is being claimed, its slots while it is given back
//!   HEAD      the cache whose span it is    slots of the span
//!   TAIL      the same, as a hint           slots back to the head
//!   BIG       0                             slots of the run that is one block
//! ```
//!
//! `index` is the owner's own number for the span. Every word that is neither FREE nor without owner names somebody who
//! answers for it; when that one dies, whoever recovers knows what was going on:
//!
//! | died while | left behind | recovery |
//! | --- | --- | --- |
//! | claiming slots one by one | CLAIMED, reach 0 | FREE |
//! | writing tails, before the head | TAIL without a head that reaches it | FREE |
//! | using a span | HEAD | blocks settled, then given back or left without owner |
//! | giving slots back | CLAIMED, reach n | the tails that are left, then itself |
//!
//! The head is written last when a span is made and first when it goes. No run is claimed over a slot that is not FREE,
//! so a tail that was left behind cannot come to lie inside another run.

use std::sync::atomic::Ordering;

use super::class::BIG;
use super::word::Atomic;

/// The owner of what nobody owns.
pub(super) const NOBODY: u16 = 0;
/// Set in owners that are a member, for what is done on behalf of one that died.
pub(super) const FOR_MEMBER: u16 = 1 << 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    Free,
    Claimed,
    Head,
    Tail,
    Big,
    /// Written by nobody of ours.
    Damaged,
}

/// The contents of a slot's word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot(pub(super) u64);

impl Slot {
    pub(super) const FREE: Self = Self(0);

    fn new(state: u64, class: u8, owner: u16, index: u32, reach: u16) -> Self {
        debug_assert!(index < 1 << 24 && class < 32);
        Self(state << 61 | u64::from(class) << 56 | u64::from(owner) << 40 | u64::from(index) << 16 | u64::from(reach))
    }

    pub(super) fn claimed(owner: u16, class: u8, reach: u16) -> Self {
        Self::new(1, class, owner, 0, reach)
    }

    pub(super) fn head(class: u8, owner: u16, index: u32, reach: u16) -> Self {
        Self::new(2, class, owner, index, reach)
    }

    pub(super) fn tail(class: u8, owner: u16, index: u32, distance: u16) -> Self {
        Self::new(3, class, owner, index, distance)
    }

    pub(super) fn big(reach: u16) -> Self {
        Self::new(4, BIG, NOBODY, 0, reach)
    }

    pub(super) fn state(self) -> SlotState {
        match self.0 >> 61 {
            0 if self.0 == 0 => SlotState::Free,
            1 => SlotState::Claimed,
            2 => SlotState::Head,
            3 => SlotState::Tail,
            4 => SlotState::Big,
            _ => SlotState::Damaged,
        }
    }

    #[inline]
    pub(super) fn class(self) -> u8 {
        // 5 bits.
        (self.0 >> 56 & 31) as u8
    }

    #[inline]
    pub(super) fn owner(self) -> u16 {
        (self.0 >> 40) as u16
    }

    /// The owner's number for the span.
    #[inline]
    pub(super) fn index(self) -> usize {
        // 24 bits.
        (self.0 >> 16 & 0xff_ffff) as usize
    }

    #[inline]
    pub(super) fn reach(self) -> u16 {
        self.0 as u16
    }

    /// The same span or part of one under another owner.
    pub(super) fn owned_by(self, owner: u16, index: u32) -> Self {
        let kept = self.0 & !(0xffff_u64 << 40 | 0xff_ffff << 16);
        Self(kept | u64::from(owner) << 40 | u64::from(index) << 16)
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (state, class, owner, reach) = (self.state(), self.class(), self.owner(), self.reach());
        write!(f, "{state:?} class {class} owner {owner} reach {reach}")
    }
}

pub(super) fn load(slot: &impl Atomic) -> Slot {
    Slot(slot.load(Ordering::Acquire))
}

pub(super) fn store(slot: &impl Atomic, value: Slot) {
    slot.store(value.0, Ordering::Release);
}

/// Claims all slots of a run, or none. Afterwards they are CLAIMED by the owner.
pub(super) fn claim_run<A: Atomic>(run: &[A], owner: u16) -> bool {
    for (at, slot) in run.iter().enumerate() {
        if slot.replace(Slot::FREE.0, Slot::claimed(owner, 0, 0).0).is_err() {
            for claimed in &run[..at] {
                store(claimed, Slot::FREE);
            }
            return false;
        }
    }
    true
}

/// Makes a run that `owner` claimed a span, or one block: the tails, then the head. Tails always name who made them, so
/// that those of a run whose head was never written are found.
pub(super) fn make_span<A: Atomic>(run: &[A], owner: u16, head: Slot) {
    write_tails(run, 1, owner, head);
    if let Some(first) = run.first() {
        store(first, head);
    }
}

/// Writes the tails of a run from the given one on.
pub(super) fn write_tails<A: Atomic>(run: &[A], from: usize, owner: u16, head: Slot) {
    for (at, slot) in run.iter().enumerate().skip(from) {
        // At most 2^14 slots in a segment.
        store(slot, Slot::tail(head.class(), owner, head.index() as u32, at as u16));
    }
}

/// Whether the slots of a run, from the given one on, are tails of its head.
pub(super) fn are_tails<A: Atomic>(run: &[A], from: usize, head: Slot) -> bool {
    run.iter().enumerate().skip(from).all(|(at, slot)| {
        let now = load(slot);
        now.state() == SlotState::Tail && usize::from(now.reach()) == at && now.class() == head.class()
    })
}

/// Gives a run back whose blocks are all FREE and whose head is `head`: `owner` answers for it until it is done. Can be
/// repeated by whoever finds the head CLAIMED with a reach. `last` runs when only the head is left. If the head was
/// written over, nothing is given back: the slot may be another's.
pub(super) fn give_back<A: Atomic>(run: &[A], head: Slot, owner: u16, last: impl FnOnce()) -> bool {
    let Some(first) = run.first() else { return false };
    let claimed = Slot::claimed(owner, head.class(), run.len() as u16);
    if first.replace(head.0, claimed.0).is_err() {
        return false;
    }
    for (at, slot) in run.iter().enumerate().skip(1) {
        free_tail(slot, at);
    }
    last();
    first.replace(claimed.0, Slot::FREE.0).is_ok()
}

/// Frees a slot if it is still the tail of the run that begins `at` slots before it; one that was given back before may
/// be another's already.
pub(super) fn free_tail(slot: &impl Atomic, at: usize) -> bool {
    let now = load(slot);
    let ours = now.state() == SlotState::Tail && usize::from(now.reach()) == at;
    ours && slot.replace(now.0, Slot::FREE.0).is_ok()
}

/// Takes over a span that nobody owns. The caller has made sure that it is whole.
pub(super) fn adopt<A: Atomic>(run: &[A], owner: u16, index: u32) -> bool {
    let Some(first) = run.first() else { return false };
    let now = load(first);
    let free = now.state() == SlotState::Head && now.owner() == NOBODY && usize::from(now.reach()) == run.len();
    if !free || first.replace(now.0, now.owned_by(owner, index).0).is_err() {
        return false;
    }
    for tail in &run[1..] {
        store(tail, load(tail).owned_by(owner, index));
    }
    true
}

/// Leaves a span without owner whose head is `head`. Its tails go first: while one of them names an owner, that owner
/// exists. A span that is not whole any more is set aside as it is.
pub(super) fn abandon<A: Atomic>(run: &[A], head: Slot) -> bool {
    let Some(first) = run.first() else { return false };
    if load(first) != head || !are_tails(run, 1, head) {
        return false;
    }
    for slot in &run[1..] {
        store(slot, load(slot).owned_by(NOBODY, 0));
    }
    first.replace(head.0, head.owned_by(NOBODY, 0).0).is_ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    fn run(slots: usize) -> Vec<AtomicU64> {
        (0..slots).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn the_fields_come_back() {
        let slot = Slot::head(27, 1024, 0xff_fffe, 16_384);
        assert_eq!((slot.state(), slot.class(), slot.owner()), (SlotState::Head, 27, 1024));
        assert_eq!((slot.index(), slot.reach()), (0xff_fffe, 16_384));
        assert_eq!(slot.owned_by(7, 9), Slot::head(27, 7, 9, 16_384));
        assert_eq!(Slot(5).state(), SlotState::Damaged, "FREE is zero and nothing else");
    }

    #[test]
    fn a_run_is_claimed_whole_or_not_at_all() {
        let slots = run(4);
        store(&slots[2], Slot::claimed(9, 0, 0));
        assert!(!claim_run(&slots, 5));
        assert_eq!(load(&slots[0]), Slot::FREE);
        assert!(claim_run(&slots[..2], 5));
    }

    #[test]
    fn a_span_lives_changes_hands_and_goes() {
        let slots = run(3);
        assert!(claim_run(&slots, 5));
        make_span(&slots, 5, Slot::head(2, 5, 8, 3));
        assert_eq!(load(&slots[2]), Slot::tail(2, 5, 8, 2));
        assert!(!adopt(&slots, 6, 1), "it has an owner");
        assert!(abandon(&slots, Slot::head(2, 5, 8, 3)));
        assert!(adopt(&slots, 6, 1) && !adopt(&slots, 7, 1));
        assert_eq!(load(&slots[1]), Slot::tail(2, 6, 1, 1));
        assert!(give_back(&slots, Slot::head(2, 6, 1, 3), 6, || {}));
        assert!(slots.iter().all(|slot| load(slot) == Slot::FREE));
    }

    #[test]
    fn giving_back_again_leaves_what_is_anothers_by_now() {
        let slots = run(3);
        assert!(claim_run(&slots, 5));
        make_span(&slots, 5, Slot::head(2, 5, 0, 3));
        // Died after the first tail, which somebody claimed since.
        store(&slots[0], Slot::claimed(5, 2, 3));
        store(&slots[1], Slot::claimed(8, 0, 0));
        assert!(give_back(&slots, Slot::claimed(5, 2, 3), 5, || {}));
        assert_eq!(load(&slots[1]), Slot::claimed(8, 0, 0));
        assert_eq!(load(&slots[2]), Slot::FREE);
    }
}
