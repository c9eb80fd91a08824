//! Time: a clock that all processes of a machine read alike, and waiting that ends.

use std::time::{Duration, Instant};

use rustix::thread::{NanosleepRelativeResult, nanosleep};
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Milliseconds since the machine started: what the ledger's times are written in. It never goes back, and every
/// process of the machine reads the same value.
pub fn now_ms() -> u64 {
    u64::try_from(read_ns(ClockId::Monotonic) / 1_000_000).unwrap_or(0)
}

/// The time of day, in milliseconds since 1970, that it was when [`now_ms`] was `at_ms`: for people. It jumps when somebody
/// sets the clock, so nothing is decided by it.
pub(crate) fn wall_ms(at_ms: u64) -> u64 {
    // The difference of the clocks in full: if each were rounded first, times would go back now and then.
    let offset = read_ns(ClockId::Realtime) - read_ns(ClockId::Monotonic);
    u64::try_from((i128::from(at_ms) * 1_000_000 + offset) / 1_000_000).unwrap_or(0)
}

fn read_ns(clock: ClockId) -> i128 {
    let now = clock_gettime(clock);
    i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
}

/// How long to wait between tries for a lock whose holder is done within microseconds, unless it is stopped.
///
/// | try | pause before the next |
/// | --- | --- |
/// | 1 to 4 | none, other threads may run |
/// | 5, 6, 7, ... | 20 us, 40 us, 80 us, ... 1 ms |
#[derive(Debug)]
pub(crate) struct Backoff {
    started: Instant,
    deadline: Instant,
    tries: u32,
}

const SPINS: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

impl Backoff {
    pub(crate) fn until(deadline: Instant) -> Self {
        Self { started: Instant::now(), deadline, tries: 0 }
    }

    /// Pauses, or answers `Err` with the time waited when the deadline has passed.
    pub(crate) fn pause(&mut self) -> Result<(), Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(self.started.elapsed());
        }
        self.tries += 1;
        match self.tries.checked_sub(SPINS) {
            None | Some(0) => std::thread::yield_now(),
            Some(pauses) => sleep((FIRST_PAUSE * (1 << (pauses - 1).min(6))).min(LONGEST_PAUSE).min(left)),
        }
        Ok(())
    }
}

/// Sleeps once; a signal may end it early, which here only means one try more.
fn sleep(duration: Duration) {
    let request = Timespec { tv_sec: 0, tv_nsec: duration.subsec_nanos().into() };
    match nanosleep(&request) {
        NanosleepRelativeResult::Ok | NanosleepRelativeResult::Interrupted(_) | NanosleepRelativeResult::Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_ends_at_the_deadline() {
        let deadline = Instant::now() + Duration::from_millis(20);
        let mut backoff = Backoff::until(deadline);
        let mut tries = 0;
        let waited = loop {
            match backoff.pause() {
                Ok(()) => tries += 1,
                Err(waited) => break waited,
            }
        };
        assert!(Instant::now() >= deadline && waited >= Duration::from_millis(20));
        // A busy machine may leave room for few; a loop without pauses would make many thousands.
        assert!((1..2000).contains(&tries), "{tries} tries in 20 ms");
        assert!(Backoff::until(Instant::now()).pause().is_err(), "a deadline that has passed allows no pause");
    }

    #[test]
    fn the_clock_goes_forward() {
        let first = now_ms();
        assert!(first > 0 && now_ms() >= first);
        assert!(wall_ms(first) > 1_700_000_000_000, "after 2023");
        assert!(wall_ms(first + 5) - wall_ms(first) <= 6);
    }
}
