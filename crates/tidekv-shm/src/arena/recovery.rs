//! Taking back what a member left behind that died at whatever instruction.
//!
//! Whoever recovers holds the lock of the dead member, so it is one at a time, and nobody can become that member again
//! before the work is done and its record is erased, which is the last step. Whoever dies at it leaves the record, and
//! the next one starts over: every step can be repeated. What is done on behalf of the dead is marked with the dead
//! one's numbers, never with those of whoever recovers.
//!
//! | found | owner | then |
//! | --- | --- | --- |
//! | slot CLAIMED or TAIL without head | the dead one | FREE; a run that was being given back is given back |
//! | span | one of its caches, or nobody | taken over; blocks that were its alone become FREE with plain stores, then the span is given back or left without owner |
//! | span | somebody who lives | its blocks become FREED by compare-and-swap, and the owner is told |
//! | run of one block | - | the same; whoever was taking it away is finished for |
//!
//! | slot that fits no run | - | set aside: what the dead held in it is let go, and nobody uses the slot again |
//!
//! No list is kept of what belongs to whom, so none can be wrong: one pass over the slots, and over the words of the
//! blocks in them, about a nanosecond each. What is done to a run is done only if each of its slots says that it is part
//! of it, so a damaged word costs its own run and no other.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

use super::class::{LARGEST, SLOT_GRAINS, Shape};
use super::slot::{self, FOR_MEMBER, NOBODY, Slot, SlotState};
use super::tables::Tables;
use super::word::{self, Atomic, Reaped, State};

/// What came back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovered {
    /// Processes that were gone.
    pub members: u32,
    /// Blocks that were theirs alone and are free now.
    pub blocks: u64,
    /// Shared blocks that others hold still.
    pub kept: u64,
    /// Spans that were theirs: given back or left for others.
    pub spans: u64,
    /// Slots whose words were damaged, met on the way: left as they are, and nobody uses them again.
    pub damaged: u64,
}

impl AddAssign for Recovered {
    fn add_assign(&mut self, other: Self) {
        self.members += other.members;
        self.blocks += other.blocks;
        self.kept += other.kept;
        self.spans += other.spans;
        self.damaged += other.damaged;
    }
}

/// Recovers one member. Its lock is held by whoever makes this.
pub(super) struct Reaper<'a> {
    tables: &'a Tables,
    /// Segments that exist.
    segments: u32,
    member: u32,
    /// The owner under which things are done on behalf of the dead.
    deputy: u16,
    found: Recovered,
}

impl<'a> Reaper<'a> {
    pub(super) fn new(tables: &'a Tables, segments: u32, member: u32) -> Self {
        // Members are below 32.
        let deputy = FOR_MEMBER | member as u16;
        Self { tables, segments, member, deputy, found: Recovered { members: 1, ..Recovered::default() } }
    }

    pub(super) fn run(mut self) -> Recovered {
        let end = (self.segments as usize) << self.tables.geometry.slot_bits();
        let mut at = 0;
        while at < end {
            let now = slot::load(&self.tables.slots()[at]);
            at += match (now.state(), self.tables.run(at, now)) {
                (SlotState::Head, Some(run)) => {
                    self.span(at, now, run);
                    run.len()
                }
                (SlotState::Big, Some(run)) => {
                    self.big(at, now, run);
                    run.len()
                }
                (SlotState::Claimed, _) if self.is_dead(now.owner()) => {
                    self.claimed(at, now);
                    1
                }
                (SlotState::Tail, _) => {
                    self.tail(at, now);
                    1
                }
                (SlotState::Free | SlotState::Claimed, _) => 1,
                (SlotState::Head | SlotState::Big | SlotState::Damaged, _) => {
                    // Unless it is another by now: somebody lives there.
                    if slot::load(&self.tables.slots()[at]) == now {
                        self.set_aside(at);
                    }
                    1
                }
            };
        }
        self.tables.add_orphan();
        for cache in self.tables.caches() {
            if cache.load(Ordering::Acquire) == u64::from(self.member) + 1 {
                cache.store(0, Ordering::Release);
            }
        }
        self.tables.set_member(self.member, None);
        self.found
    }

    fn is_dead(&self, owner: u16) -> bool {
        if owner == NOBODY || owner & FOR_MEMBER != 0 {
            return owner == self.deputy;
        }
        let cache = self.tables.caches().get(usize::from(owner) - 1);
        cache.is_some_and(|cache| cache.load(Ordering::Acquire) == u64::from(self.member) + 1)
    }

    /// It was claiming a run, or giving one back.
    fn claimed(&self, at: usize, now: Slot) {
        if let Some(run) = self.tables.reached(at, now) {
            give_back_run(self.tables, at, run, now, now.owner());
            return;
        }
        // The tails first, as long as their head tells that they are its.
        let slots = self.tables.slots();
        let per_segment = self.tables.geometry.segment_slots() as usize;
        for distance in 1..per_segment - at % per_segment {
            let tail = slot::load(&slots[at + distance]);
            if tail.owner() != now.owner() || !slot::free_tail(&slots[at + distance], distance) {
                break;
            }
        }
        // The word of a block that is a run is written before its head.
        word::settle(&self.tables.words()[at * SLOT_GRAINS as usize], self.member);
        slot::store(&slots[at], Slot::FREE);
    }

    /// A tail that was not passed over with its head. Whoever makes a run longer or shorter leaves such tails if he dies
    /// before the head reaches them, or when it does not any more. Where the head was damaged, a block may lie here.
    fn tail(&mut self, at: usize, now: Slot) {
        let distance = usize::from(now.reach());
        let slots = self.tables.slots();
        let head = at.checked_sub(distance).unwrap_or(at);
        let head_now = slot::load(&slots[head]);
        let run = self.tables.run(head, head_now).map(<[AtomicU64]>::len);
        let claimed = head_now.state() == SlotState::Claimed;
        if run.is_some_and(|slots| slots > distance) || (claimed && usize::from(head_now.reach()) > distance) {
            return;
        }
        if !self.is_dead(now.owner()) {
            // With a head, somebody who lives is at work; without one, it is set aside. Unless it is another by now.
            if run.is_none() && !claimed && slot::load(&slots[at]) == now {
                self.set_aside(at);
            }
            return;
        }
        let begin = head + run.unwrap_or(0);
        let mut free = true;
        for word in self.words_of(at) {
            let (is_free, reaped) = word::settle(word, self.member);
            free &= is_free;
            self.count(reaped);
        }
        // Blocks begin at most that many slots before, but for runs, which begin with their heads.
        let earlier = begin.max(at.saturating_sub((LARGEST / SLOT_GRAINS) as usize))..at;
        let is_held = |word| matches!(word::load(word).state(), State::Live | State::Shared);
        free &= !earlier.chain([begin.min(at)]).any(|slot| self.words_of(slot).iter().any(is_held));
        if !free || !slot::free_tail(&slots[at], distance) {
            self.found.damaged += 1;
        }
    }

    /// A slot that fits no run. Its words are not needed to let go of what the dead held.
    fn set_aside(&mut self, at: usize) {
        self.found.damaged += 1;
        for word in self.words_of(at) {
            let reaped = word::reap(word, self.member, 0);
            self.count(reaped);
        }
    }

    /// The words of a slot's grains.
    fn words_of(&self, slot: usize) -> &'a [AtomicU64] {
        &self.tables.words()[slot * SLOT_GRAINS as usize..][..SLOT_GRAINS as usize]
    }

    fn span(&mut self, head: usize, now: Slot, run: &[AtomicU64]) {
        let shape = self.tables.shapes[usize::from(now.class())];
        let taken = if now.owner() == NOBODY { now.owned_by(self.deputy, 0) } else { now };
        let ours = self.is_dead(now.owner()) || (now.owner() == NOBODY && run[0].replace(now.0, taken.0).is_ok());
        if ours {
            self.settle(head, taken, run, shape);
        } else {
            self.reap_from_afar(head, shape);
        }
    }

    /// A span that has no owner but us.
    fn settle(&mut self, head: usize, now: Slot, run: &[AtomicU64], shape: Shape) {
        let first = head * SLOT_GRAINS as usize;
        let words = &self.tables.words()[first..first + run.len() * SLOT_GRAINS as usize];
        let mut held = 0;
        for word in words.iter().step_by(shape.grains as usize).take(shape.blocks as usize) {
            let (is_free, reaped) = word::settle(word, self.member);
            held += u32::from(!is_free);
            self.count(reaped);
        }
        self.found.spans += 1;
        if held == 0 {
            give_back_run(self.tables, head, run, now, self.deputy);
        } else {
            slot::abandon(run, now);
        }
    }

    fn reap_from_afar(&mut self, head: usize, shape: Shape) {
        let first = head * SLOT_GRAINS as usize;
        let bitmap = &self.tables.bitmaps()[head];
        for block in 0..shape.blocks {
            let word = &self.tables.words()[first + (block * shape.grains) as usize];
            let reaped = word::reap(word, self.member, 0);
            // Also what it had freed without coming to say so.
            if reaped == Reaped::Freed || word::load(word).state() == State::Freed {
                word::announce(bitmap, 1 << block);
            }
            self.count(reaped);
        }
    }

    fn big(&mut self, head: usize, now: Slot, run: &[AtomicU64]) {
        let word = &self.tables.words()[head * SLOT_GRAINS as usize];
        let reaped = word::reap(word, self.member, u32::from(self.deputy));
        let block = word::load(word);
        let unfinished = block.state() == State::Freed && u16::try_from(block.who()).is_ok_and(|who| self.is_dead(who));
        if unfinished {
            give_back_run(self.tables, head, run, now, self.deputy);
        }
        self.count(reaped);
    }

    fn count(&mut self, reaped: Reaped) {
        match reaped {
            Reaped::Untouched => {}
            Reaped::Kept => self.found.kept += 1,
            Reaped::Freed => self.found.blocks += 1,
        }
    }
}

/// Gives a run back whose head is `now`; if it is one block that was FREED, that is FREE before anybody can use the place
/// again.
pub(super) fn give_back_run(tables: &Tables, head: usize, run: &[AtomicU64], now: Slot, owner: u16) {
    slot::give_back(run, now, owner, || {
        let word = &tables.words()[head * SLOT_GRAINS as usize];
        let now = word::load(word);
        if now.state() == State::Freed {
            Atomic::store(word, now.free().0, Ordering::Release);
        }
    });
}
