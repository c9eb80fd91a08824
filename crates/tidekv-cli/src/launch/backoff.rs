//! When an instance that ended is started again, and when not any more.
//!
//! ```text
//!   ended after a minute of service   ──> half a second
//!   ended again before that           ──> 1 s, 2 s, 4 s, ... 30 s
//!   never once ready, five times      ──> not again: what is wrong with it does not mend itself
//! ```

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(30);
/// Service for so long is a success, whatever ended it.
const STEADY: Duration = Duration::from_secs(60);
const HOPELESS: u32 = 5;

/// One instance's.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    /// Ends in a row without steady service.
    short_lives: u32,
    was_ever_ready: bool,
}

impl Backoff {
    /// How long to wait now that it ended, having been ready for so long; none if it is not to be started again.
    pub(super) fn after(&mut self, ready_for: Option<Duration>) -> Option<Duration> {
        self.was_ever_ready |= ready_for.is_some();
        self.short_lives = match ready_for {
            Some(time) if time >= STEADY => 0,
            _ => self.short_lives.saturating_add(1),
        };
        if !self.was_ever_ready && self.short_lives >= HOPELESS {
            return None;
        }
        let doublings = self.short_lives.saturating_sub(1).min(16);
        Some((FIRST * 2u32.pow(doublings)).min(LONGEST))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_and_service_forgives() {
        let mut backoff = Backoff::default();
        let short = Some(Duration::from_secs(1));
        let waits: Vec<_> = (0..8).map(|_| backoff.after(short).unwrap().as_millis()).collect();
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        assert_eq!(backoff.after(Some(STEADY)), Some(FIRST));
        assert_eq!(backoff.after(None), Some(FIRST), "the next one counts from there");
        for _ in 0..1000 {
            assert!(backoff.after(None).is_some(), "it was ready once, so it may be again");
        }
    }

    #[test]
    fn what_never_was_ready_is_given_up() {
        let mut backoff = Backoff::default();
        let waits: Vec<_> = (0..5).map(|_| backoff.after(None)).collect();
        assert_eq!(waits.iter().filter(|wait| wait.is_some()).count(), 4);
        assert_eq!(waits[4], None);
    }
}
