//! `seq`: one worker after another. The simplest strategy, and what the others are compared with.
//!
//! A worker that does not answer must not take all the time from those behind it, so each gets its share of what is
//! left. Whoever has not answered after the first round is waited for until the deadline in a second.

use std::time::Instant;

use crate::broadcast::{Lane, Strategy};

/// One after another.
#[derive(Debug, Default)]
pub(super) struct Sequential;

impl Strategy for Sequential {
    fn exchange(&mut self, lanes: &mut Vec<Lane>, deadline: Instant) {
        let mut left = u32::try_from(lanes.len()).unwrap_or(u32::MAX);
        for lane in &mut *lanes {
            let now = Instant::now();
            let share = now + deadline.saturating_duration_since(now) / left.max(1);
            lane.send(share);
            lane.receive(share);
            left -= 1;
        }
        for lane in lanes {
            lane.send(deadline);
            lane.receive(deadline);
        }
    }
}
