//! When the device is done with a page.
//!
//! A freed block may be leased again at once, because the device runs its work in order. Its page may be
//! *unmapped* only once no running kernel can read it, and two clocks tell when that is:
//!
//! ```text
//!   clock           a free notes            it has passed once
//!   --------------  ----------------------  -------------------------------------------------------
//!   engine's steps  Fence::Step(s)          step s is over (the caller says which steps are)
//!   device syncs    Fence::Unknown, stamped a device synchronise that *began after* the free is over
//!                   with the current round
//! ```
//!
//! Both only move forward, so a page needs no list of its frees: the latest reading of each clock covers all of
//! them. Rounds exist because a synchronise runs without a lock: a free that arrives while it runs is not covered
//! by it, and belongs to the next round.

use crate::units::Step;

/// What a free says about the device work that may still touch the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fence {
    /// The page may be unmapped once this step is over. Steps count from 1: `Step(0)` is over before the first
    /// one, so it stands for "no device work ever saw these blocks".
    Step(Step),
    /// Nobody knows: the device must be synchronised before the page is unmapped.
    Unknown,
}

/// Permission to say that the device has been synchronised, for every free up to now.
///
/// Take it, synchronise the device, then hand it to [`PageTable::synchronised`](super::PageTable::synchronised).
/// Taking it before synchronising is what makes frees that arrive meanwhile wait for the next round.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "synchronise the device, then hand the ticket to `synchronised`"]
pub struct SyncTicket {
    round: u64,
}

/// The fences of all frees of one page since it was last unmapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageFence {
    /// Step 0 where no free named a step: it is always over.
    step: Step,
    /// Round 0 where every free named a step: it is always over.
    sync_round: u64,
}

impl PageFence {
    pub(super) const NONE: Self = Self { step: Step(0), sync_round: 0 };

    /// As one free that waits for no less than all of them.
    pub(super) fn strictest(self) -> Fence {
        if self.sync_round > 0 { Fence::Unknown } else { Fence::Step(self.step) }
    }
}

/// The clock of device synchronises, by which [`Fence::Unknown`] is measured.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct SyncClock {
    /// Unknown frees of this moment are covered by the synchronise of this round.
    round: u64,
    /// Synchronises of all rounds up to this one are over.
    over: u64,
}

impl SyncClock {
    pub(super) const fn new() -> Self {
        Self { round: 1, over: 0 }
    }

    /// Adds one free to what a page remembers.
    pub(super) fn note(&self, page: &mut PageFence, fence: Fence) {
        match fence {
            Fence::Step(step) => page.step = page.step.max(step),
            Fence::Unknown => page.sync_round = self.round,
        }
    }

    /// Closes the current round.
    pub(super) fn begin_synchronise(&mut self) -> SyncTicket {
        let round = self.round;
        self.round += 1;
        SyncTicket { round }
    }

    pub(super) fn synchronised(&mut self, ticket: SyncTicket) {
        // Tickets may come back out of order; a later synchronise covers the earlier rounds too.
        self.over = self.over.max(ticket.round);
    }

    pub(super) fn wait_of(&self, page: PageFence, completed: Step) -> Wait {
        if page.step > completed {
            Wait::ForStep(page.step)
        } else if page.sync_round > self.over {
            Wait::ForSynchronise
        } else {
            Wait::Over
        }
    }
}

/// What still stands between a page and its unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Nothing: the device is done with the page.
    Over,
    /// The engine's stream. Looked at first: while the step runs, a synchronise alone would not free the page.
    ForStep(Step),
    /// Nothing but a synchronise.
    ForSynchronise,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_step_wins_whatever_the_order_of_frees() {
        let clock = SyncClock::new();
        let mut page = PageFence::NONE;
        for step in [4, 9, 7] {
            clock.note(&mut page, Fence::Step(Step(step)));
        }
        assert_eq!(clock.wait_of(page, Step(8)), Wait::ForStep(Step(9)));
        assert_eq!(clock.wait_of(page, Step(9)), Wait::Over);
    }

    #[test]
    fn all_frees_of_a_page_are_as_one() {
        let clock = SyncClock::new();
        let mut page = PageFence::NONE;
        assert_eq!(page.strictest(), Fence::Step(Step(0)));
        clock.note(&mut page, Fence::Step(Step(9)));
        clock.note(&mut page, Fence::Step(Step(7)));
        assert_eq!(page.strictest(), Fence::Step(Step(9)));
        clock.note(&mut page, Fence::Unknown);
        assert_eq!(page.strictest(), Fence::Unknown);
    }

    #[test]
    fn an_unknown_free_outlives_later_known_ones() {
        let mut clock = SyncClock::new();
        let mut page = PageFence::NONE;
        clock.note(&mut page, Fence::Unknown);
        clock.note(&mut page, Fence::Step(Step(2)));
        assert_eq!(clock.wait_of(page, Step(1)), Wait::ForStep(Step(2)));
        assert_eq!(clock.wait_of(page, Step(5)), Wait::ForSynchronise);
        let ticket = clock.begin_synchronise();
        clock.synchronised(ticket);
        assert_eq!(clock.wait_of(page, Step(5)), Wait::Over);
    }

    #[test]
    fn a_free_during_a_synchronise_is_not_covered_by_it() {
        let mut clock = SyncClock::new();
        let mut page = PageFence::NONE;
        let running = clock.begin_synchronise();
        clock.note(&mut page, Fence::Unknown);
        clock.synchronised(running);
        assert_eq!(clock.wait_of(page, Step(0)), Wait::ForSynchronise);
    }

    #[test]
    fn tickets_may_come_back_out_of_order() {
        let mut clock = SyncClock::new();
        let mut page = PageFence::NONE;
        let early = clock.begin_synchronise();
        clock.note(&mut page, Fence::Unknown);
        let late = clock.begin_synchronise();
        clock.synchronised(late);
        clock.synchronised(early);
        assert_eq!(clock.wait_of(page, Step(0)), Wait::Over);
    }
}
