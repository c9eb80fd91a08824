//! When requests are sent: pure arithmetic, nanoseconds from the start of the stream.
//!
//! ```text
//!   gaps:    gamma with mean 1 and shape `burstiness`     1 is Poisson, infinity a metronome, below 1 comes in bursts
//!   rate:    constant, ramp, square wave                  the gaps are stretched by whatever the rate is meanwhile
//!
//!   square wave   high  ┌──┐  ┌──┐      period, share of it that is high, and where in it the stream begins
//!                 low ──┘  └──┘  └──
//! ```
//!
//! Gaps are as they were drawn. vLLM stretches them so that n requests always take n/rate seconds, which hides how much
//! bursts differ from seed to seed.

mod shapes;

use std::fmt;
use std::time::Duration;

use crate::random::Random;
use shapes::{Gaps, Wave};

/// An arrival process.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    /// All at once. With a cap this is a closed loop: the next request is meant to go when an answer is over.
    Immediately,
    /// So many a second.
    Rate {
        /// Requests a second.
        per_s: f64,
        /// Shape of the gaps.
        burstiness: f64,
    },
    /// From one rate to another over the requests of the stream, or over its time.
    Ramp {
        /// How the rate changes.
        strategy: RampStrategy,
        /// At the beginning.
        start_per_s: f64,
        /// At the end.
        end_per_s: f64,
        /// Shape of the gaps.
        burstiness: f64,
    },
    /// Two rates in turn.
    SquareWave {
        /// The lower rate; 0 for silence.
        low_per_s: f64,
        /// The higher one.
        high_per_s: f64,
        /// Both together.
        period: Duration,
        /// Share of the period that is high: above 0 and below 1.
        duty: f64,
        /// Where in the period the stream begins. A period begins with its high part.
        phase: Duration,
        /// Shape of the gaps.
        burstiness: f64,
    },
    /// When the data say, and so many times as fast.
    Trace {
        /// 2 replays an hour in half of one.
        speed: f64,
    },
}

/// How a ramp rises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RampStrategy {
    /// By the same amount with every request, or second.
    Linear,
    /// By the same factor with every request, or second.
    Exponential,
}

/// Over what a rate changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// From the first of so many requests to the last, as vLLM has it.
    Requests(usize),
    /// From the start of the stream to its end.
    Time(Duration),
}

impl Course {
    /// How much of it is over, with request `index` at `at_s`.
    #[expect(clippy::cast_precision_loss, reason = "a share of the requests")]
    fn share(self, index: usize, at_s: f64) -> f64 {
        match self {
            Self::Requests(count) => index as f64 / count.saturating_sub(1).max(1) as f64,
            Self::Time(duration) => (at_s / duration.as_secs_f64().max(f64::MIN_POSITIVE)).min(1.0),
        }
    }
}

/// The most that a second can hold; a clock has no more moments.
const MAX_PER_S: f64 = 1e6;

/// A wave is followed from edge to edge.
const SHORTEST_PERIOD: Duration = Duration::from_millis(1);

impl Arrivals {
    /// Poisson.
    pub const fn poisson(per_s: f64) -> Self {
        Self::Rate { per_s, burstiness: 1.0 }
    }

    /// Equal gaps.
    pub const fn constant(per_s: f64) -> Self {
        Self::Rate { per_s, burstiness: f64::INFINITY }
    }

    /// What is wrong with it, if anything is.
    pub(super) fn check(&self) -> Result<(), ArrivalsError> {
        let rate = |name, value: f64| {
            let fits = value > 0.0 && value <= MAX_PER_S;
            if fits { Ok(()) } else { Err(ArrivalsError::Rate { name, value }) }
        };
        let shape = |value: f64| if value > 0.0 { Ok(()) } else { Err(ArrivalsError::Burstiness { value }) };
        match *self {
            Self::Immediately => Ok(()),
            Self::Rate { per_s, burstiness } => rate("the rate", per_s).and(shape(burstiness)),
            Self::Ramp { start_per_s, end_per_s, burstiness, .. } => {
                rate("the rate at the start", start_per_s)?;
                rate("the rate at the end", end_per_s)?;
                shape(burstiness)
            }
            Self::SquareWave { low_per_s, high_per_s, period, duty, burstiness, .. } => {
                rate("the high rate", high_per_s)?;
                if low_per_s != 0.0 {
                    rate("the low rate", low_per_s)?;
                }
                if period < SHORTEST_PERIOD || !(duty > 0.0 && duty < 1.0) {
                    return Err(ArrivalsError::Wave { period, duty });
                }
                shape(burstiness)
            }
            Self::Trace { speed } => {
                if speed > 0.0 && speed.is_finite() {
                    Ok(())
                } else {
                    Err(ArrivalsError::Speed { value: speed })
                }
            }
        }
    }

    /// When each request is sent: `count` of them, or as many as fit before `end_ns`. A trace has its own times.
    pub(super) fn times_ns(&self, course: Course, count: usize, end_ns: u64, seed: u64) -> Vec<u64> {
        let mut gaps = Gaps { random: Random::seeded(seed), shape: self.burstiness() };
        // A wave may begin in silence.
        let mut at_s = self.after(0.0, 0.0, 0, course);
        let mut times = Vec::new();
        while times.len() < count {
            let at_ns = to_ns(at_s);
            if at_ns >= end_ns {
                break;
            }
            times.push(at_ns);
            at_s = self.after(at_s, gaps.next(), times.len() - 1, course);
        }
        times
    }

    /// Shape of the gaps; infinite where there is nothing random about them.
    pub fn burstiness(&self) -> f64 {
        match *self {
            Self::Rate { burstiness, .. } | Self::Ramp { burstiness, .. } | Self::SquareWave { burstiness, .. } => {
                burstiness
            }
            Self::Immediately | Self::Trace { .. } => f64::INFINITY,
        }
    }

    /// The moment that lies `gap` mean gaps behind `at_s`, which was that of request `index`.
    fn after(&self, at_s: f64, gap: f64, index: usize, course: Course) -> f64 {
        match *self {
            Self::Immediately | Self::Trace { .. } => at_s,
            Self::Rate { per_s, .. } => at_s + gap / per_s,
            Self::Ramp { .. } => at_s + gap / self.ramp_rate(course, index, at_s).unwrap_or(MAX_PER_S),
            Self::SquareWave { low_per_s, high_per_s, period, duty, phase, .. } => {
                let wave = Wave { low: low_per_s, high: high_per_s, period: period.as_secs_f64(), duty };
                wave.after(at_s + phase.as_secs_f64(), gap) - phase.as_secs_f64()
            }
        }
    }

    /// The rate at which request `index` is sent at `at_s`, on a ramp.
    pub fn ramp_rate(&self, course: Course, index: usize, at_s: f64) -> Option<f64> {
        let Self::Ramp { strategy, start_per_s, end_per_s, .. } = *self else { return None };
        let share = course.share(index, at_s);
        Some(match strategy {
            RampStrategy::Linear => start_per_s + (end_per_s - start_per_s) * share,
            RampStrategy::Exponential => start_per_s * (end_per_s / start_per_s).powf(share),
        })
    }
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Immediately => f.write_str("at once"),
            Self::Rate { per_s, .. } => write!(f, "{per_s} a second"),
            Self::Ramp { strategy, start_per_s, end_per_s, .. } => {
                let how = match strategy {
                    RampStrategy::Linear => "linearly",
                    RampStrategy::Exponential => "exponentially",
                };
                write!(f, "from {start_per_s} to {end_per_s} a second, {how}")
            }
            Self::SquareWave { low_per_s, high_per_s, period, duty, phase, .. } => write!(
                f,
                "{high_per_s} a second for {duty} of every {period:?} and {low_per_s} for the rest, from {phase:?} on"
            ),
            Self::Trace { speed } => write!(f, "as the trace says, {speed} times as fast"),
        }?;
        match self.burstiness() {
            shape if shape.is_infinite() => Ok(()),
            shape => write!(f, ", burstiness {shape}"),
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rounded, and saturating in both directions"
)]
fn to_ns(seconds: f64) -> u64 {
    (seconds * 1e9).round() as u64
}

/// Why there is no such process.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ArrivalsError {
    /// Not a rate.
    #[error("{name} is {value}: give requests a second, above 0 and at most {MAX_PER_S}")]
    Rate {
        /// Which one.
        name: &'static str,
        /// As given.
        value: f64,
    },
    /// Not a shape.
    #[error("the burstiness is {value}: give a number above 0 (1 is Poisson, inf equal gaps)")]
    Burstiness {
        /// As given.
        value: f64,
    },
    /// Not a wave.
    #[error(
        "a square wave of {period:?} with a high share of {duty}: the period must be 1 ms or more and the share between 0 and 1"
    )]
    Wave {
        /// As given.
        period: Duration,
        /// As given.
        duty: f64,
    },
    /// Not a speed.
    #[error("the speed of the trace is {value}: give a number above 0")]
    Speed {
        /// As given.
        value: f64,
    },
}

#[cfg(test)]
mod tests;
