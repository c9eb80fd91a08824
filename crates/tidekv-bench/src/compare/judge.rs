//! From values to a verdict. Nothing else in `compare` decides.
//!
//! **One run a side**: a figure is *worse* when it moved the bad way by more than the tolerance, a share of the first value.
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
//! **Several runs a side**: the change has an interval, and where all of it lies is the verdict.
//!
//! ```text
//!   tolerance 3 %, lower is better      0.97    1    1.03        B over A
//!                                         ┆     ┆     ┆
//!                                         ┆  ├──┼─┤   ┆          no difference: all within the tolerance
//!                                         ┆     ┆  ├──┼───┤      worse: all on one side, and ranks agree
//!                                    ├────┼──┤  ┆     ┆          better
//!                                         ┆ ├───┼─────┼──┤       underpowered: it could be either
//! ```
//!
//! Too few runs for any rank test to agree are underpowered wherever the interval lies. Runs that agree to the last
//! digit, as counts of bytes do, have no noise to be asked about and are judged as single values.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::direction::Direction;
use crate::statistics::{
    Bootstrap, Changes, Confidence, Estimate, enough_pairs, enough_runs, mann_whitney, median, paired_ratio,
    signed_rank,
};

/// What the second value is, measured by the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// Moved the good way: by more than the tolerance, or with several runs beyond doubt.
    Better,
    /// Moved the bad way, likewise.
    Worse,
    /// Single runs within the tolerance. What another pair of runs would say is not known.
    Same,
    /// Moved, and its name says no direction.
    Changed,
    /// Several runs: any difference is smaller than the tolerance, beyond doubt.
    NoDifference,
    /// Several runs, but too few or too noisy to tell.
    Underpowered,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Same => "same",
            Self::Changed => "changed",
            Self::NoDifference => "no difference",
            Self::Underpowered => "underpowered",
        })
    }
}

/// The share of the first value by which a figure may move and still be the same.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Tolerance(f64);

impl Tolerance {
    /// For the words of a comparison that is not asked to fail: below this, single runs differ by noise.
    pub const OF_ONE_RUN: Self = Self(0.05);

    /// Unless another is given, for several runs a side: what is smaller than this is no difference.
    pub const OF_RUNS: Self = Self(0.03);

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

/// Several runs a side, judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judged {
    /// What B is, measured by A.
    pub verdict: Verdict,
    /// B over A, where both are above zero throughout.
    pub ratio: Option<Estimate>,
    /// B minus A, where there is no ratio.
    pub difference: Option<Estimate>,
    /// Probability that sides which do not differ are as far apart as these.
    pub p_value: f64,
    /// Whether B may be worse by more than the tolerance, as far as these runs tell. What is not shown is not a pass.
    pub may_be_worse: bool,
}

/// Judges several runs a side.
pub fn judge_runs(direction: Direction, a: &[f64], b: &[f64], tolerance: Tolerance, bootstrap: &Bootstrap) -> Judged {
    let ratio = bootstrap.ratio(a, b);
    let difference = if ratio.is_none() { bootstrap.difference(a, b) } else { None };
    let p_value = mann_whitney(a, b);
    let risk = bootstrap.confidence.risk();
    let evidence = Evidence { enough: enough_runs(a.len(), b.len(), risk), p_value, risk };
    evidence.conclude(direction, (a, b), (ratio, difference), tolerance)
}

/// Judges runs of which the n-th of A and the n-th of B belong together: `(a, b)` each. What has no ratio is judged as
/// if they did not.
pub fn judge_pairs(direction: Direction, pairs: &[(f64, f64)], tolerance: Tolerance, confidence: Confidence) -> Judged {
    let (a, b): (Vec<f64>, Vec<f64>) = pairs.iter().copied().unzip();
    let Some(ratio) = paired_ratio(pairs, confidence) else {
        return judge_runs(direction, &a, &b, tolerance, &Bootstrap { confidence, ..Bootstrap::default() });
    };
    let changes: Vec<f64> = pairs.iter().map(|(a, b)| (b / a).ln()).collect();
    let risk = confidence.risk();
    let evidence = Evidence { enough: enough_pairs(pairs.len(), risk), p_value: signed_rank(&changes), risk };
    evidence.conclude(direction, (&a, &b), (Some(ratio), None), tolerance)
}

/// Judges what changed in groups: requests in runs, say. `None` where nothing did that is a number.
pub fn judge_changes(
    direction: Direction,
    changes: &Changes,
    tolerance: Tolerance,
    confidence: Confidence,
) -> Option<Judged> {
    let ratio = changes.median(confidence)?.exp();
    let risk = confidence.risk();
    let evidence = Evidence { enough: enough_pairs(changes.count(), risk), p_value: changes.test(), risk };
    Some(evidence.conclude(direction, (&[], &[]), (Some(ratio), None), tolerance))
}

/// What chance has to do with it.
struct Evidence {
    enough: bool,
    p_value: f64,
    risk: f64,
}

impl Evidence {
    fn conclude(
        &self,
        direction: Direction,
        (a, b): (&[f64], &[f64]),
        (ratio, difference): (Option<Estimate>, Option<Estimate>),
        tolerance: Tolerance,
    ) -> Judged {
        let judged = |verdict, may_be_worse| Judged { verdict, ratio, difference, p_value: self.p_value, may_be_worse };
        if let (Some(a), Some(b)) = (all_equal(a), all_equal(b)) {
            let verdict = match judge(direction, a, b, tolerance) {
                Verdict::Same => Verdict::NoDifference,
                moved => moved,
            };
            return judged(verdict, verdict == Verdict::Worse);
        }
        // No change is a ratio of 1, or a difference of 0; what is allowed is the tolerance on both sides of it.
        let margin = tolerance.share() * if ratio.is_some() { 1.0 } else { median(a).unwrap_or(0.0).abs() };
        let (Some(change), none) = (ratio.or(difference), if ratio.is_some() { 1.0 } else { 0.0 }) else {
            return judged(Verdict::Underpowered, direction != Direction::Neutral);
        };
        let may_be_worse = match direction {
            Direction::Neutral => false,
            Direction::Lower => !self.enough || change.high > none + margin,
            Direction::Higher => !self.enough || change.low < none - margin,
        };
        let is_decided = self.enough && self.p_value <= self.risk;
        let verdict = if self.enough && change.is_within(none - margin, none + margin) {
            Verdict::NoDifference
        } else if is_decided && (change.is_above(none) || change.is_below(none)) {
            // The tolerance had its say: here only the side counts.
            judge(direction, none, change.value, Tolerance(0.0))
        } else {
            Verdict::Underpowered
        };
        judged(verdict, may_be_worse)
    }
}

/// The value that all of them are, where there are several.
fn all_equal(values: &[f64]) -> Option<f64> {
    let (&first, rest) = values.split_first()?;
    // To the bit: nothing that is measured comes out so twice.
    #[expect(clippy::float_cmp, reason = "runs without any noise")]
    let agree = !rest.is_empty() && rest.iter().all(|value| *value == first);
    agree.then_some(first)
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
