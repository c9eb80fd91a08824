//! What a model's requests were like lately: counts for each second, and the times of the latest answers.
//!
//! ```text
//!   seconds  [ 57 | 58 | 59 | 60 ]      started, succeeded, failed, time of those that ended; an hour of them
//!   samples  (when, first token) ...    the latest 1,024; percentiles are of those within a minute
//! ```
//!
//! Time is given, never asked for: [`Traffic`] counts from the instant it was made at. What it holds is bounded, whatever comes.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The longest window that can be asked about, in seconds.
pub(crate) const HISTORY_SECONDS: u64 = 3600;
/// Times of answers that are kept for percentiles.
const SAMPLES: usize = 1024;
/// Percentiles are of samples younger than this.
const FRESH: Duration = Duration::from_secs(60);

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Below 400, to its last byte.
    Good,
    /// Refused or broken off, by us, by the engine or by the client.
    Bad,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Second {
    started: u32,
    good: u32,
    bad: u32,
    micros: u64,
}

/// Counts over a window, or over all time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Counts {
    pub(crate) started: u64,
    pub(crate) good: u64,
    pub(crate) bad: u64,
    /// Time of all that ended, together.
    pub(crate) seconds: f64,
}

impl Counts {
    /// Mean time of an answer.
    pub(crate) fn mean_seconds(&self) -> f64 {
        let ended = self.good + self.bad;
        if ended == 0 { 0.0 } else { self.seconds / to_f64(ended) }
    }
}

/// Two percentiles in milliseconds; none where nothing was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub(crate) struct Percentiles {
    pub(crate) p50: Option<f64>,
    pub(crate) p99: Option<f64>,
}

/// One model's.
#[derive(Debug)]
pub(crate) struct Traffic {
    origin: Instant,
    /// The latest seconds, the last of them `newest` seconds after the origin.
    seconds: VecDeque<Second>,
    newest: u64,
    all: Counts,
    first_token: VecDeque<(Instant, Duration)>,
    between_tokens: VecDeque<(Instant, Duration)>,
}

impl Traffic {
    pub(crate) fn new(origin: Instant) -> Self {
        Self {
            origin,
            seconds: VecDeque::from([Second::default()]),
            newest: 0,
            all: Counts::default(),
            first_token: VecDeque::new(),
            between_tokens: VecDeque::new(),
        }
    }

    pub(crate) fn started(&mut self, now: Instant) {
        self.all.started += 1;
        self.second(now).started += 1;
    }

    pub(crate) fn ended(&mut self, now: Instant, took: Duration, ending: Ending) {
        let second = self.second(now);
        second.micros = second.micros.saturating_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX));
        match ending {
            Ending::Good => second.good += 1,
            Ending::Bad => second.bad += 1,
        }
        match ending {
            Ending::Good => self.all.good += 1,
            Ending::Bad => self.all.bad += 1,
        }
        self.all.seconds += took.as_secs_f64();
    }

    /// An answer began so long after its request.
    pub(crate) fn first_token(&mut self, now: Instant, took: Duration) {
        keep(&mut self.first_token, now, took);
    }

    /// An answer went on so long after its last piece.
    pub(crate) fn next_token(&mut self, now: Instant, took: Duration) {
        keep(&mut self.between_tokens, now, took);
    }

    pub(crate) fn all(&self) -> Counts {
        self.all
    }

    /// Counts of the last `window` seconds, the current one among them.
    pub(crate) fn window(&mut self, now: Instant, window: u64) -> Counts {
        self.second(now);
        let window = usize::try_from(window.clamp(1, HISTORY_SECONDS)).unwrap_or(usize::MAX);
        self.seconds.iter().rev().take(window).fold(Counts::default(), |sum, second| Counts {
            started: sum.started + u64::from(second.started),
            good: sum.good + u64::from(second.good),
            bad: sum.bad + u64::from(second.bad),
            seconds: sum.seconds + to_f64(second.micros) / 1e6,
        })
    }

    /// Requests in a second, over the last `window` seconds or for as long as there was anything to count.
    pub(crate) fn rate(&mut self, now: Instant, window: u64) -> f64 {
        let counts = self.window(now, window);
        let age = now.saturating_duration_since(self.origin).as_secs_f64();
        to_f64(counts.started) / age.clamp(1.0, to_f64(window.clamp(1, HISTORY_SECONDS)))
    }

    pub(crate) fn ttft_ms(&self, now: Instant) -> Percentiles {
        percentiles(&self.first_token, now)
    }

    pub(crate) fn itl_ms(&self, now: Instant) -> Percentiles {
        percentiles(&self.between_tokens, now)
    }

    /// The second that `now` is in. A clock that is a little behind counts into the newest.
    fn second(&mut self, now: Instant) -> &mut Second {
        let at = now.saturating_duration_since(self.origin).as_secs();
        if at > self.newest {
            let missing = usize::try_from(at - self.newest).unwrap_or(usize::MAX);
            let history = usize::try_from(HISTORY_SECONDS).unwrap_or(usize::MAX);
            if missing >= history {
                self.seconds.clear();
            }
            self.seconds.extend(std::iter::repeat_n(Second::default(), missing.min(history)));
            let over = self.seconds.len().saturating_sub(history);
            self.seconds.drain(..over);
            self.newest = at;
        }
        self.seconds.back_mut().expect("there is always the newest second")
    }
}

fn keep(samples: &mut VecDeque<(Instant, Duration)>, now: Instant, took: Duration) {
    if samples.len() == SAMPLES {
        samples.pop_front();
    }
    samples.push_back((now, took));
}

fn percentiles(samples: &VecDeque<(Instant, Duration)>, now: Instant) -> Percentiles {
    let fresh = samples.iter().filter(|(at, _)| now.saturating_duration_since(*at) < FRESH);
    let mut fresh: Vec<Duration> = fresh.map(|(_, took)| *took).collect();
    fresh.sort_unstable();
    let at = |percent: usize| {
        let last = fresh.len().checked_sub(1)?;
        // The smallest sample that so many of a hundred are not above.
        let rank = (fresh.len() * percent).div_ceil(100).saturating_sub(1).min(last);
        Some(fresh[rank].as_secs_f64() * 1e3)
    };
    Percentiles { p50: at(50), p99: at(99) }
}

#[expect(clippy::cast_precision_loss, reason = "counts for people, far below 2^53")]
pub(crate) fn to_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentiles_are_samples_and_the_old_ones_do_not_count() {
        let origin = Instant::now();
        let mut traffic = Traffic::new(origin);
        assert_eq!(traffic.ttft_ms(origin), Percentiles::default());
        traffic.first_token(origin, Duration::from_secs(9));
        let later = origin + FRESH;
        for ms in 1..=100 {
            traffic.first_token(later, Duration::from_millis(ms));
        }
        assert_eq!(traffic.ttft_ms(later), Percentiles { p50: Some(50.0), p99: Some(99.0) });
        for _ in 0..5000 {
            traffic.first_token(later, Duration::from_millis(7));
        }
        assert_eq!(traffic.ttft_ms(later), Percentiles { p50: Some(7.0), p99: Some(7.0) });
        assert_eq!(traffic.first_token.len(), SAMPLES);
    }

    #[test]
    fn a_rate_is_over_the_time_there_was() {
        let origin = Instant::now();
        let mut traffic = Traffic::new(origin);
        for _ in 0..30 {
            traffic.started(origin + Duration::from_secs(1));
        }
        assert!((traffic.rate(origin + Duration::from_secs(10), 60) - 3.0).abs() < 1e-9);
        assert!((traffic.rate(origin + Duration::from_secs(600), 60)).abs() < 1e-9);
    }

    proptest! {
        /// Against a list of everything that ever happened.
        #[test]
        fn windows_agree_with_a_list(
            happened in prop::collection::vec((0u64..5000, 0u8..3), 1..300),
            window in 1u64..4000,
        ) {
            let origin = Instant::now();
            let mut traffic = Traffic::new(origin);
            let mut happened = happened;
            happened.sort_unstable();
            for &(at, what) in &happened {
                let now = origin + Duration::from_secs(at);
                match what {
                    0 => traffic.started(now),
                    1 => traffic.ended(now, Duration::from_secs(2), Ending::Good),
                    _ => traffic.ended(now, Duration::from_secs(4), Ending::Bad),
                }
            }
            let last = happened.last().map_or(0, |(at, _)| *at);
            let counts = traffic.window(origin + Duration::from_secs(last), window);
            let kept = window.min(HISTORY_SECONDS);
            let count = |wanted: u8| happened.iter().filter(|&&(at, what)| what == wanted && at + kept > last).count() as u64;
            prop_assert_eq!((counts.started, counts.good, counts.bad), (count(0), count(1), count(2)));
            prop_assert!((counts.seconds - to_f64(count(1) * 2 + count(2) * 4)).abs() < 1e-6);
            prop_assert!(traffic.seconds.len() as u64 <= HISTORY_SECONDS);
            prop_assert_eq!(traffic.all().started, happened.iter().filter(|(_, what)| *what == 0).count() as u64);
        }
    }
}
