//! The word of a block: the only truth about it. Everything else can be computed again from these words.
//!
//! ```text
//!   63                        34 33  32 31                              0
//!   |        generation         | state |            who                 |
//!
//!   state    who                          written by
//!   FREE     0                            the span's owner
//!   LIVE     member that has it           the span's owner (plain stores); FREED and SHARED by compare-and-swap
//!   SHARED   one bit for each member      compare-and-swap alone
//!   FREED    for runs: who takes it away  whoever freed it from afar; becomes FREE when the owner collects it
//! ```
//!
//! | from | event | to | by |
//! | --- | --- | --- | --- |
//! | FREE | allotted | LIVE, next generation | the owner of the span, a release store |
//! | LIVE | freed at home | FREE | the owner of the span, a release store |
//! | LIVE | freed from afar | FREED | anybody, one CAS; then one `fetch_or` tells the owner |
//! | LIVE | shared | SHARED {me} | a thread of the member that has it, one CAS |
//! | SHARED | retained, released | SHARED | one CAS |
//! | SHARED | released by the last | FREED | the same CAS |
//! | FREED | collected | FREE | the owner of the span, a release store |
//!
//! The two plain stores need no read-modify-write because of who may do what: only the owner of a span turns FREE into
//! anything, and a handle that is not shared has one holder. Two threads that free one unshared block at the same time
//! break that rule; then the later store wins, which is FREE either way, and the bit that announces the other free
//! is dropped when it is collected, because its word is not FREED.
//!
//! Ordering, for machines weaker than x86: whoever frees has finished with the bytes (Release), whoever takes the block
//! next must see that (Acquire). At home both are the same thread. From afar the CAS and the `fetch_or` release and the
//! owner's `swap` of the bitmap acquires; `fetch_or`s of several processes form one release sequence. When a span changes
//! hands, the CAS on its slot carries all of it. `model.rs` checks these claims with loom.

use std::sync::atomic::{AtomicU64, Ordering};

use super::error::HandleError;
use super::handle::GENERATION_MAX;

/// A 64-bit atomic: std's, or loom's where the protocol is checked.
pub(crate) trait Atomic {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn swap(&self, value: u64, order: Ordering) -> u64;
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64;
    /// AcqRel on success, Acquire on failure.
    fn replace(&self, old: u64, new: u64) -> Result<u64, u64>;
}

macro_rules! atomic {
    ($type:ty) => {
        impl Atomic for $type {
            #[inline]
            fn load(&self, order: Ordering) -> u64 {
                <$type>::load(self, order)
            }
            #[inline]
            fn store(&self, value: u64, order: Ordering) {
                <$type>::store(self, value, order);
            }
            #[inline]
            fn swap(&self, value: u64, order: Ordering) -> u64 {
                <$type>::swap(self, value, order)
            }
            #[inline]
            fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
                <$type>::fetch_or(self, bits, order)
            }
            #[inline]
            fn replace(&self, old: u64, new: u64) -> Result<u64, u64> {
                self.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire)
            }
        }
    };
}

atomic!(AtomicU64);
#[cfg(all(test, loom))]
atomic!(loom::sync::atomic::AtomicU64);

const STATE_SHIFT: u32 = 32;
const GENERATION_SHIFT: u32 = 34;
const WHO_MASK: u64 = u32::MAX as u64;

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    Live,
    Shared,
    Freed,
}

/// The contents of a block's word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Word(pub(super) u64);

impl Word {
    fn new(generation: u64, state: State, who: u32) -> Self {
        let state = match state {
            State::Free => 0,
            State::Live => 1,
            State::Shared => 2,
            State::Freed => 3,
        };
        Self(generation << GENERATION_SHIFT | state << STATE_SHIFT | u64::from(who))
    }

    pub(super) fn state(self) -> State {
        match (self.0 >> STATE_SHIFT) & 3 {
            0 => State::Free,
            1 => State::Live,
            2 => State::Shared,
            _ => State::Freed,
        }
    }

    #[inline]
    pub(super) fn generation(self) -> u64 {
        self.0 >> GENERATION_SHIFT
    }

    pub(super) fn who(self) -> u32 {
        (self.0 & WHO_MASK) as u32
    }

    /// Whether it is LIVE or SHARED under this generation: one subtraction and one comparison.
    #[inline]
    pub(super) fn is_held(self, generation: u32) -> bool {
        ((self.0 >> STATE_SHIFT) ^ (u64::from(generation) << 2)).wrapping_sub(1) < 2
    }

    /// Whether it is LIVE under this generation.
    #[inline]
    pub(super) fn is_live(self, generation: u32) -> bool {
        self.0 >> STATE_SHIFT == (u64::from(generation) << 2 | 1)
    }

    /// LIVE under this generation, for this member.
    #[inline]
    pub(super) fn live(generation: u32, member: u32) -> Self {
        Self(u64::from(generation) << GENERATION_SHIFT | 1 << STATE_SHIFT | u64::from(member))
    }

    fn with(self, state: State, who: u32) -> Self {
        Self::new(self.generation(), state, who)
    }

    /// The same generation, FREE.
    #[inline]
    pub(super) fn free(self) -> Self {
        Self(self.0 >> GENERATION_SHIFT << GENERATION_SHIFT)
    }

    /// What the next allocation of this FREE block makes of it.
    #[inline]
    pub(super) fn allotted(self, member: u32) -> Self {
        let next = (self.generation() + 1) & GENERATION_MAX;
        // Generation 0 is left out, so that no handle is 0.
        let next = next + u64::from(next == 0);
        Self(next << GENERATION_SHIFT | 1 << STATE_SHIFT | u64::from(member))
    }
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}({:#x}) generation {}", self.state(), self.who(), self.generation())
    }
}

pub(super) fn load(word: &impl Atomic) -> Word {
    Word(word.load(Ordering::Acquire))
}

/// Allots a FREE block of a span that the caller owns; gives its generation.
#[inline]
pub(super) fn allot(word: &impl Atomic, member: u32) -> u64 {
    // Relaxed: this thread wrote it, or acquired it when it collected the block or took the span over.
    let new = Word(word.load(Ordering::Relaxed)).allotted(member);
    word.store(new.0, Ordering::Release);
    new.generation()
}

/// A block freed from afar: by one CAS, then by telling the owner of its span, whose bitmap is `remote`.
pub(super) fn free_from_afar(
    word: &impl Atomic,
    remote: &impl Atomic,
    bit: u64,
    generation: u32,
) -> Result<(), HandleError> {
    make_freed(word, generation, 0)?;
    announce(remote, bit);
    Ok(())
}

/// LIVE -> FREED, for `who` to take away.
pub(super) fn make_freed(word: &impl Atomic, generation: u32, who: u32) -> Result<(), HandleError> {
    let now = load(word);
    if !now.is_live(generation) {
        return Err(HandleError::Stale);
    }
    word.replace(now.0, now.with(State::Freed, who).0).map(drop).map_err(|_| HandleError::Stale)
}

/// Tells the owner of a span that one of its blocks is FREED.
pub(super) fn announce(remote: &impl Atomic, bit: u64) {
    remote.fetch_or(bit, Ordering::Release);
}

/// Takes what others freed: FREED becomes FREE. Only the owner of the span calls it. Gives a bit for each block.
pub(super) fn collect<'a, A: Atomic + 'a>(remote: &A, word_of: impl Fn(u32) -> Option<&'a A>) -> u64 {
    let mut announced = remote.swap(0, Ordering::Acquire);
    let mut collected = 0;
    while announced != 0 {
        let block = announced.trailing_zeros();
        announced &= announced - 1;
        // An announcement may be late: the block was found FREED by other means and has another life by now.
        let Some(word) = word_of(block) else { continue };
        let now = load(word);
        if now.state() == State::Freed {
            word.store(now.free().0, Ordering::Release);
            collected |= 1 << block;
        }
    }
    collected
}

/// LIVE {member} -> SHARED {member}. Says whether it was shared already, with this member among its holders.
pub(super) fn share(word: &impl Atomic, generation: u32, member: u32) -> Result<bool, HandleError> {
    let mut now = load(word);
    loop {
        if !now.is_held(generation) {
            return Err(HandleError::Stale);
        }
        match now.state() {
            State::Shared if now.who() & (1 << member) != 0 => return Ok(true),
            State::Live if now.who() == member => {}
            _ => return Err(HandleError::NotHolder),
        }
        match word.replace(now.0, now.with(State::Shared, 1 << member).0) {
            Ok(_) => return Ok(false),
            Err(found) => now = Word(found),
        }
    }
}

/// Adds a member to the holders of a SHARED block.
pub(super) fn retain(word: &impl Atomic, generation: u32, member: u32) -> Result<(), HandleError> {
    let mut now = load(word);
    loop {
        if !now.is_held(generation) {
            return Err(HandleError::Stale);
        }
        if now.state() != State::Shared {
            return Err(HandleError::NotShared);
        }
        match word.replace(now.0, now.with(State::Shared, now.who() | 1 << member).0) {
            Ok(_) => return Ok(()),
            Err(found) => now = Word(found),
        }
    }
}

/// Takes a member from the holders of a SHARED block; `true` if it was the last, so that the block is FREED now, for
/// `freed_by` to take away or to announce.
pub(super) fn release(word: &impl Atomic, generation: u32, member: u32, freed_by: u32) -> Result<bool, HandleError> {
    let mut now = load(word);
    loop {
        if !now.is_held(generation) {
            return Err(HandleError::Stale);
        }
        if now.state() != State::Shared || now.who() & (1 << member) == 0 {
            return Err(HandleError::NotHolder);
        }
        let left = now.who() & !(1 << member);
        let new = if left == 0 { now.with(State::Freed, freed_by) } else { now.with(State::Shared, left) };
        match word.replace(now.0, new.0) {
            Ok(_) => return Ok(left == 0),
            Err(found) => now = Word(found),
        }
    }
}

/// What became of a block when a member was taken out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reaped {
    /// The member had no part in it.
    Untouched,
    /// Others hold it still.
    Kept,
    /// It was the member's alone.
    Freed,
}

/// Takes a dead member out of a block whose span may have a living owner. What was its alone becomes FREED.
pub(super) fn reap(word: &impl Atomic, member: u32, freed_by: u32) -> Reaped {
    let mut now = load(word);
    loop {
        let left = match now.state() {
            State::Live if now.who() == member => 0,
            State::Shared if now.who() & (1 << member) != 0 => now.who() & !(1 << member),
            _ => return Reaped::Untouched,
        };
        let new = if left == 0 { now.with(State::Freed, freed_by) } else { now.with(State::Shared, left) };
        match word.replace(now.0, new.0) {
            Ok(_) if left == 0 => return Reaped::Freed,
            Ok(_) => return Reaped::Kept,
            Err(found) => now = Word(found),
        }
    }
}

/// The same where nobody owns the span but whoever reaps, so that what is free can become FREE at once. Says whether the
/// block is FREE now.
#[inline]
pub(super) fn settle(word: &impl Atomic, member: u32) -> (bool, Reaped) {
    let now = load(word);
    match now.state() {
        State::Free => (true, Reaped::Untouched),
        State::Freed => {
            word.store(now.free().0, Ordering::Release);
            (true, Reaped::Untouched)
        }
        // Whoever frees it from afar at this moment wants the same.
        State::Live if now.who() == member => {
            word.store(now.free().0, Ordering::Release);
            (true, Reaped::Freed)
        }
        State::Live => (false, Reaped::Untouched),
        State::Shared => match reap(word, member, 0) {
            Reaped::Freed => {
                word.store(now.free().0, Ordering::Release);
                (true, Reaped::Freed)
            }
            // Others hold it, or freed it just now and are about to say so.
            other => (false, other),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_is_live_or_shared_under_the_same_generation() {
        let word = |generation, state| Word::new(generation, state, 5);
        for generation in [1, 2, 77, GENERATION_MAX] {
            let asked = generation as u32;
            assert!(word(generation, State::Live).is_held(asked) && word(generation, State::Shared).is_held(asked));
            assert!(word(generation, State::Live).is_live(asked) && !word(generation, State::Shared).is_live(asked));
            assert!(!word(generation, State::Free).is_held(asked) && !word(generation, State::Freed).is_held(asked));
            assert!(!word(generation - 1, State::Live).is_held(asked));
            assert!(!word(generation - 1, State::Freed).is_held(asked));
        }
    }

    #[test]
    fn generations_go_round_without_zero() {
        assert_eq!(Word(0).allotted(3), Word::new(1, State::Live, 3));
        assert_eq!(Word::new(GENERATION_MAX, State::Free, 0).allotted(0).generation(), 1);
    }

    #[test]
    fn a_late_announcement_is_dropped() {
        let (word, remote) = (AtomicU64::new(0), AtomicU64::new(0));
        let generation = allot(&word, 1) as u32;
        announce(&remote, 1);
        assert_eq!(collect(&remote, |_| Some(&word)), 0);
        assert!(load(&word).is_live(generation), "a live block stays");
        free_from_afar(&word, &remote, 1, generation).unwrap();
        assert_eq!(free_from_afar(&word, &remote, 1, generation), Err(HandleError::Stale), "a second free");
        assert_eq!(collect(&remote, |_| Some(&word)), 1);
    }

    #[test]
    fn the_last_holder_frees() {
        let word = AtomicU64::new(0);
        let generation = allot(&word, 2) as u32;
        assert_eq!(retain(&word, generation, 7), Err(HandleError::NotShared));
        assert_eq!(share(&word, generation, 7), Err(HandleError::NotHolder));
        assert_eq!(share(&word, generation, 2), Ok(false));
        assert_eq!(share(&word, generation, 2), Ok(true));
        retain(&word, generation, 31).unwrap();
        assert_eq!(release(&word, generation, 2, 0), Ok(false));
        assert_eq!(release(&word, generation, 2, 0), Err(HandleError::NotHolder));
        assert_eq!(reap(&word, 31, 9), Reaped::Freed);
        assert_eq!((load(&word).state(), load(&word).who()), (State::Freed, 9));
        assert_eq!(retain(&word, generation, 2), Err(HandleError::Stale));
    }
}
