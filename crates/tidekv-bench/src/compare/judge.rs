//! From two values to a verdict. Nothing else in `compare` decides.
//!
//! A figure is *worse* when it moved the bad way by more than the tolerance, a share of the first value:
//!
//! ```text
//!   tolerance 10 %, lower is better
//!
//!              90        100        110
//!   ── better ──┤── same ─ A ─ same ──├── worse ──>  B
//! ```
//!
//! The test multiplies and never divides, so it also holds where a ratio does not exist: no percentage of
//! zero is more than zero, so any step away from zero counts. Exactly at the tolerance is not above it.
//!
//! One run a side is all this judges today. Several runs a side, with an interval for each figure, have
//! their place here: another `judge` over two lists, and another [`Verdict`] for runs that are too few.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::direction::Direction;

/// What the second value is, measured by the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Verdict {
    /// Moved the good way by more than the tolerance.
    Better,
    /// Moved the bad way by more than the tolerance.
    Worse,
    /// Within the tolerance.
    Same,
    /// Moved by more than the tolerance, and its name says no direction.
    Changed,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Same => "same",
            Self::Changed => "changed",
        })
    }
}

/// The share of the first value by which a figure may move and still be the same.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Tolerance(f64);

impl Tolerance {
    /// For the words of a comparison that is not asked to fail: below this, single runs differ by noise.
    pub const OF_ONE_RUN: Self = Self(0.05);

    /// The share: 0.1 for 10 %.
    pub const fn share(self) -> f64 {
        self.0
    }
}

impl fmt::Display for Tolerance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Rounded to a millionth of a percent: 0.07 * 100 is not 7 in floating point.
        write!(f, "{} %", (self.0 * 1e8).round() / 1e6)
    }
}

/// Why a text is not a tolerance.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a tolerance: write 10% or 0.1, and nothing below zero")]
pub struct ToleranceError {
    text: String,
}

impl FromStr for Tolerance {
    type Err = ToleranceError;

    /// `10%`, `10 %` and `0.1` are the same.
    fn from_str(text: &str) -> Result<Self, ToleranceError> {
        let error = || ToleranceError { text: text.to_owned() };
        let trimmed = text.trim();
        let (number, unit) = trimmed.strip_suffix('%').map_or((trimmed, 1.0), |number| (number.trim_end(), 100.0));
        let share = number.parse::<f64>().map_err(|_| error())? / unit;
        if share.is_finite() && share >= 0.0 { Ok(Self(share)) } else { Err(error()) }
    }
}

/// `b` over `a`, where that is a number.
pub fn ratio(a: f64, b: f64) -> Option<f64> {
    let ratio = b / a;
    (a != 0.0 && ratio.is_finite()).then_some(ratio)
}

/// What `b` is, measured by `a`.
pub fn judge(direction: Direction, a: f64, b: f64, tolerance: Tolerance) -> Verdict {
    // Absorbs the rounding of decimal figures, such as 1.1 - 1.0 > 0.1.
    let rounding = 1e-9 * a.abs().max(b.abs());
    let moved = b - a;
    if moved.abs() <= tolerance.share() * a.abs() + rounding {
        return Verdict::Same;
    }
    match (direction, moved > 0.0) {
        (Direction::Neutral, _) => Verdict::Changed,
        (Direction::Lower, true) | (Direction::Higher, false) => Verdict::Worse,
        (Direction::Lower, false) | (Direction::Higher, true) => Verdict::Better,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEN_PERCENT: Tolerance = Tolerance(0.1);

    #[test]
    fn tolerances_as_people_write_them() {
        for text in ["10%", "10 %", " 10% ", "0.1", "0.10", "1e-1"] {
            assert_eq!(text.parse(), Ok(TEN_PERCENT), "{text}");
        }
        assert_eq!("0".parse(), Ok(Tolerance(0.0)));
        assert_eq!("250%".parse(), Ok(Tolerance(2.5)));
        for text in ["", "%", "ten", "-1%", "nan", "inf", "10%%", "1e999"] {
            assert!(text.parse::<Tolerance>().is_err(), "{text}");
        }
    }

    #[test]
    fn tolerances_print_as_percent() {
        for (text, printed) in [("10%", "10 %"), ("0.07", "7 %"), ("2.5%", "2.5 %"), ("0", "0 %")] {
            assert_eq!(text.parse::<Tolerance>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn exactly_at_the_tolerance_is_not_above_it() {
        assert_eq!(judge(Direction::Lower, 1.0, 1.1, TEN_PERCENT), Verdict::Same);
        assert_eq!(judge(Direction::Lower, 1.0, 1.1001, TEN_PERCENT), Verdict::Worse);
        assert_eq!(judge(Direction::Higher, 10.0, 9.0, TEN_PERCENT), Verdict::Same);
        assert_eq!(judge(Direction::Higher, 10.0, 8.99, TEN_PERCENT), Verdict::Worse);
        assert_eq!(judge(Direction::Neutral, 10.0, 1.0, TEN_PERCENT), Verdict::Changed);
    }

    #[test]
    fn zero_has_no_ratio_and_still_a_verdict() {
        assert_eq!((ratio(0.0, 1.0), ratio(0.0, 0.0)), (None, None));
        assert_eq!(judge(Direction::Lower, 0.0, 0.0, TEN_PERCENT), Verdict::Same);
        assert_eq!(judge(Direction::Lower, 0.0, 4096.0, TEN_PERCENT), Verdict::Worse);
        assert_eq!(judge(Direction::Higher, 0.0, 1e-300, TEN_PERCENT), Verdict::Better);
        assert_eq!(judge(Direction::Lower, 4096.0, 0.0, TEN_PERCENT), Verdict::Better);
    }

    #[test]
    fn a_ratio_beyond_numbers_is_none() {
        assert_eq!(ratio(5e-324, 1e300), None);
        assert_eq!(judge(Direction::Lower, 5e-324, 1e300, TEN_PERCENT), Verdict::Worse);
        assert_eq!(ratio(-2.0, 1.0), Some(-0.5));
    }

    proptest! {
        #[test]
        fn a_value_is_the_same_as_itself(value in any::<f64>().prop_filter("finite", |v| v.is_finite()), share in 0.0..10.0f64) {
            for direction in [Direction::Lower, Direction::Higher, Direction::Neutral] {
                prop_assert_eq!(judge(direction, value, value, Tolerance(share)), Verdict::Same);
            }
        }

        /// For positive values the verdict is what the ratio says.
        #[test]
        fn the_verdict_agrees_with_the_ratio(a in 1e-6..1e6f64, factor in 0.01..10.0f64) {
            let b = a * factor;
            let change = ratio(a, b).unwrap() - 1.0;
            prop_assume!((change.abs() - 0.1).abs() > 1e-6);
            let expected = if change > 0.1 { Verdict::Worse } else if change < -0.1 { Verdict::Better } else { Verdict::Same };
            prop_assert_eq!(judge(Direction::Lower, a, b, TEN_PERCENT), expected);
        }

        /// What is worse where lower is better is better where higher is, and the other way round.
        #[test]
        fn directions_mirror(a in -1e6..1e6f64, b in -1e6..1e6f64) {
            let mirrored = match judge(Direction::Lower, a, b, TEN_PERCENT) {
                Verdict::Worse => Verdict::Better,
                Verdict::Better => Verdict::Worse,
                other => other,
            };
            prop_assert_eq!(judge(Direction::Higher, a, b, TEN_PERCENT), mirrored);
        }
    }
}
