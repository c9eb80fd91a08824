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
//! No list is kept of what belongs to whom, so none can be wrong: one pass over the slots, and over the words of the
//! blocks in them, about a nanosecond each.

use std::ops::AddAssign;
use std::sync::atomic::Ordering;

use super::class::{CLASSES, SLOT_GRAINS, Shape};
use super::geometry::Geometry;
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
}

impl AddAssign for Recovered {
    fn add_assign(&mut self, other: Self) {
        self.members += other.members;
        self.blocks += other.blocks;
        self.kept += other.kept;
        self.spans += other.spans;
    }
}

/// Recovers one member. Its lock is held by whoever makes this.
pub(super) struct Reaper<'a> {
    tables: &'a Tables,
    geometry: &'a Geometry,
    shapes: &'a [Shape; CLASSES],
    member: u32,
    /// The owner under which things are done on behalf of the dead.
    deputy: u16,
    found: Recovered,
}

impl<'a> Reaper<'a> {
    pub(super) fn new(tables: &'a Tables, geometry: &'a Geometry, shapes: &'a [Shape; CLASSES], member: u32) -> Self {
        // Members are below 32.
        let deputy = FOR_MEMBER | member as u16;
        Self { tables, geometry, shapes, member, deputy, found: Recovered { members: 1, ..Recovered::default() } }
    }

    pub(super) fn run(mut self) -> Recovered {
        let per_segment = self.geometry.segment_slots() as usize;
        let end = (self.tables.segments() as usize) << self.geometry.slot_bits();
        let mut at = 0;
        while at < end {
            let now = slot::load(&self.tables.slots()[at]);
            let left_in_segment = per_segment - at % per_segment;
            let reach = usize::from(now.reach());
            // A word that nobody of ours wrote is left for the verifier to name.
            let is_run = (1..=left_in_segment).contains(&reach);
            at += match now.state() {
                SlotState::Head if is_run && usize::from(now.class()) < CLASSES => {
                    self.span(at, now);
                    reach
                }
                SlotState::Big if is_run => {
                    self.big(at, reach);
                    reach
                }
                SlotState::Claimed if self.is_dead(now.owner()) => {
                    self.claimed(at, now, is_run);
                    1
                }
                SlotState::Tail if self.is_dead(now.owner()) => {
                    self.tail(at, now);
                    1
                }
                _ => 1,
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
    fn claimed(&self, at: usize, now: Slot, is_run: bool) {
        if is_run {
            self.give_back(at, usize::from(now.reach()), now.owner());
        } else {
            // The word of a block that is a run is written before its head.
            word::settle(&self.tables.words()[at * SLOT_GRAINS as usize], self.member);
            slot::store(&self.tables.slots()[at], Slot::FREE);
        }
    }

    /// It was making a span whose head it did not come to write. Tails of whole runs are reached from their heads.
    fn tail(&self, at: usize, now: Slot) {
        let distance = usize::from(now.reach());
        let slots = self.tables.slots();
        let head = at.checked_sub(distance).map(|head| slot::load(&slots[head]));
        let reached = head.is_some_and(|head| {
            let is_head = matches!(head.state(), SlotState::Head | SlotState::Big | SlotState::Claimed);
            is_head && usize::from(head.reach()) > distance
        });
        if !reached {
            slot::free_tail(&slots[at], distance);
        }
    }

    fn span(&mut self, head: usize, now: Slot) {
        let shape = self.shapes[usize::from(now.class())];
        let first = &self.tables.slots()[head];
        let ours = self.is_dead(now.owner())
            || (now.owner() == NOBODY && first.replace(now.0, now.owned_by(self.deputy, 0).0).is_ok());
        if ours {
            self.settle(head, usize::from(now.reach()), shape);
        } else {
            self.reap_from_afar(head, shape);
        }
    }

    /// A span that has no owner but us.
    fn settle(&mut self, head: usize, slots: usize, shape: Shape) {
        let first = head * SLOT_GRAINS as usize;
        let words = &self.tables.words()[first..first + slots * SLOT_GRAINS as usize];
        let mut held = 0;
        for word in words.iter().step_by(shape.grains as usize).take(shape.blocks as usize) {
            let (is_free, reaped) = word::settle(word, self.member);
            held += u32::from(!is_free);
            self.count(reaped);
        }
        self.found.spans += 1;
        if held == 0 {
            self.give_back(head, slots, self.deputy);
        } else {
            slot::abandon(self.tables.run(head, slots));
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

    fn big(&mut self, head: usize, slots: usize) {
        let word = &self.tables.words()[head * SLOT_GRAINS as usize];
        let reaped = word::reap(word, self.member, u32::from(self.deputy));
        let now = word::load(word);
        let unfinished = now.state() == State::Freed && u16::try_from(now.who()).is_ok_and(|who| self.is_dead(who));
        if unfinished {
            self.give_back(head, slots, self.deputy);
        }
        self.count(reaped);
    }

    fn give_back(&self, head: usize, slots: usize, owner: u16) {
        give_back_run(self.tables, head, slots, owner);
    }

    fn count(&mut self, reaped: Reaped) {
        match reaped {
            Reaped::Untouched => {}
            Reaped::Kept => self.found.kept += 1,
            Reaped::Freed => self.found.blocks += 1,
        }
    }
}

/// Gives a run back; if it is one block that was FREED, that is FREE before anybody can use the place again.
pub(super) fn give_back_run(tables: &Tables, head: usize, slots: usize, owner: u16) {
    slot::give_back(tables.run(head, slots), owner, || {
        let word = &tables.words()[head * SLOT_GRAINS as usize];
        let now = word::load(word);
        if now.state() == State::Freed {
            Atomic::store(word, now.free().0, Ordering::Release);
        }
    });
}
