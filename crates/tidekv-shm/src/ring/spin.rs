//! How long to look at a word before sleeping on it.
//!
//! Sleeping and being woken costs 5 to 50 us, most of it waiting for a processor. When the answer comes sooner than
//! that, looking is cheaper; when it does not, looking is waste, and on a machine with few processors it is worse than
//! waste: it keeps the other side from running. So:
//!
//! ```text
//!   under two processors per party     never spin
//!   else                               spin for `budget`; found something: budget x 2, up to LONGEST
//!                                      in vain: budget / 2, down to SHORTEST, which costs next to nothing
//! ```
//!
//! Two, because engines have other threads. On two busy processors a round to one worker took 6.2 us without spinning and
//! 7.5 us with it, one to four workers 26 us and 30 us.

use std::hint::spin_loop;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

const SHORTEST: Duration = Duration::from_nanos(500);
const LONGEST: Duration = Duration::from_micros(50);
/// Looks between two looks at the clock.
const LOOKS: u32 = 32;

#[derive(Debug)]
pub(super) struct Spin {
    /// `None`: never.
    budget: Option<Duration>,
}

impl Spin {
    pub(super) fn new(parties: u32) -> Self {
        let processors = available_parallelism().map_or(1, usize::from);
        Self::with_processors(processors, parties)
    }

    fn with_processors(processors: usize, parties: u32) -> Self {
        let has_room = usize::try_from(parties).is_ok_and(|parties| processors / 2 >= parties);
        Self { budget: has_room.then_some(LONGEST / 4) }
    }

    /// Looks for a while; says whether it came to be.
    pub(super) fn until(&mut self, mut is_there: impl FnMut() -> bool) -> bool {
        let Some(budget) = self.budget else { return is_there() };
        let start = Instant::now();
        let found = loop {
            if (0..LOOKS).any(|_| {
                spin_loop();
                is_there()
            }) {
                break true;
            }
            if start.elapsed() >= budget {
                break false;
            }
        };
        self.budget = Some(if found { (budget * 2).min(LONGEST) } else { (budget / 2).max(SHORTEST) });
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_spins_where_it_would_keep_the_other_side_from_running() {
        assert!(Spin::with_processors(2, 5).budget.is_none());
        assert!(Spin::with_processors(3, 2).budget.is_none());
        assert!(Spin::with_processors(4, 2).budget.is_some());
        let mut looks = 0;
        Spin::with_processors(2, 5).until(|| {
            looks += 1;
            false
        });
        assert_eq!(looks, 1);
    }

    #[test]
    fn success_lengthens_and_failure_shortens() {
        let mut spin = Spin::with_processors(8, 2);
        for _ in 0..20 {
            assert!(!spin.until(|| false));
        }
        assert_eq!(spin.budget, Some(SHORTEST));
        for _ in 0..20 {
            assert!(spin.until(|| true));
        }
        assert_eq!(spin.budget, Some(LONGEST));
    }
}
