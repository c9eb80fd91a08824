//! When to give way: an engine waits for memory, so do its neighbours, and nobody has what they wait for.
//!
//! ```text
//!   [ a: 24 of 47 pages it needs | b: 24 of 47 pages it needs ]    each has its share, and both would wait for ever
//!   [ a: 47 pages                                    | b rests ]   b lost patience first; what it computed is only cached now
//!   [ a rests or is done | b: 47 pages                         ]
//! ```
//!
//! Shares are kept to the page, so two requests that each need more than one share stop each other. Nobody decides for all. Each
//! engine draws how long it waits, anew each time; whoever is first sends its requests back to the queue and takes its demand
//! back ([`KvPool::give_way`](tidekv_pool::KvPool::give_way): of two at the same moment one stays). Then it rests: it asks
//! for nothing that others must stop a request for, until there is enough for its oldest request or the rest is over. Rests
//! double until a token comes out, so that whoever was let past can end.
//!
//! An engine below its share gives no way: what it waits for is owed to it, and whoever holds it and waits too is above its own.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

/// The first rest is so many times as long as an engine waits before. Whoever was let past needs time to compute: a rest that ends sooner
/// stops it halfway, and both begin again.
const REST: f64 = 5.0;

/// The longest is so many times the first.
const LONGEST_REST: u32 = 4;

/// See the [module](self). Time and patience are the caller's.
#[derive(Debug, Default)]
pub(super) struct GivingWay {
    state: State,
    /// Rests since a token came out.
    rests: u32,
    draws: u64,
    dice: RandomState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Working,
    Waiting {
        until: Instant,
    },
    Resting {
        until: Instant,
    },
}

impl GivingWay {
    /// Nothing can be computed for want of memory. Says whether it is time to look for others who wait too; if there are none, the next
    /// time is drawn.
    pub(super) fn is_due(&mut self, now: Instant, patience: Duration) -> bool {
        match self.state {
            State::Waiting { until } if now < until => return false,
            State::Resting { .. } => return false,
            State::Working | State::Waiting { .. } => {}
        }
        let is_due = self.state != State::Working;
        let wait = patience.mul_f64(1.0 + self.draw());
        self.state = State::Waiting { until: now + wait };
        is_due
    }

    /// The way was given.
    pub(super) fn rest(&mut self, now: Instant, patience: Duration) {
        let times = 1u32.checked_shl(self.rests).unwrap_or(LONGEST_REST).min(LONGEST_REST);
        let rest = patience.mul_f64(REST * (1.0 + self.draw()) * f64::from(times));
        self.rests = self.rests.saturating_add(1);
        self.state = State::Resting { until: now + rest };
    }

    /// Whether nothing is to be asked for yet, unless there is enough.
    pub(super) fn is_resting(&mut self, now: Instant, has_enough: impl FnOnce() -> bool) -> bool {
        let State::Resting { until } = self.state else { return false };
        let is_over = now >= until || has_enough();
        if is_over {
            self.state = State::Working;
        }
        !is_over
    }

    /// Something was computed.
    pub(super) fn stepped(&mut self) {
        self.state = State::Working;
    }

    /// A token came out, or there is nothing to do: whatever there was is over.
    pub(super) fn forget(&mut self) {
        (self.state, self.rests) = (State::Working, 0);
    }

    /// Whether what is computed may be what was computed before.
    pub(super) fn has_rested(&self) -> bool {
        self.rests > 0
    }

    /// Between 0 and 1.
    fn draw(&mut self) -> f64 {
        self.draws += 1;
        let bits = u32::try_from(self.dice.hash_one(self.draws) >> 32).unwrap_or(0);
        f64::from(bits) / f64::from(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn patience_ends_at_a_moment_of_its_own() {
        let start = Instant::now();
        let mut ends = Vec::new();
        for _ in 0..100 {
            let mut way = GivingWay::default();
            assert!(!way.is_due(start, SECOND), "it has only begun to wait");
            assert!(!way.is_due(start + SECOND.mul_f64(0.99), SECOND));
            let due =
                (100..=200).find(|percent| way.is_due(start + SECOND.mul_f64(f64::from(*percent) / 100.0), SECOND));
            ends.push(due.expect("within two patiences"));
            assert!(!way.is_due(start + 2 * SECOND, SECOND), "nobody else waited: the next look is later");
            way.stepped();
            assert!(!way.is_due(start + 9 * SECOND, SECOND), "another wait");
        }
        ends.sort_unstable();
        ends.dedup();
        assert!(ends.len() > 30, "they are drawn: {ends:?}");
    }

    #[test]
    fn rests_double_until_a_token_comes_out() {
        let start = Instant::now();
        let mut way = GivingWay::default();
        for round in 0..40 {
            let shortest = SECOND.mul_f64(REST) * LONGEST_REST.min(1 << round.min(9));
            way.rest(start, SECOND);
            assert!(way.is_resting(start + shortest.mul_f64(0.99), || false) && way.has_rested());
            assert!(!way.is_due(start + 2 * shortest, SECOND), "who rests gives way already");
            assert!(!way.is_resting(start + 2 * shortest, || false));
            way.stepped();
        }
        way.forget();
        assert!(!way.has_rested());
        way.rest(start, SECOND);
        assert!(!way.is_resting(start + SECOND.mul_f64(2.0 * REST), || false));
        way.rest(start, SECOND);
        assert!(!way.is_resting(start, || true), "there is enough");
    }
}
