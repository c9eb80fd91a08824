//! The bootstrap: draw as many runs as there are, with replacement, again and again, and see how far the answer moves.
//!
//! ```text
//!   runs of A   97 101 99 103 100   ── draw 5 ──>  99 99 103 97 100   median  99 ─┐
//!                                                                                 ├─ ratio 1.051, one of thousands
//!   runs of B  104 106 103 107 105  ── draw 5 ──> 104 107 104 103 106 median 104 ─┘
//!
//!   the middle 95 % of all those ratios is the interval
//! ```
//!
//! The draws come from a fixed sequence: the same runs give the same interval, today and on another machine.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use super::spread::quantile_of_sorted;
use crate::random::Random;

/// What a side is reduced to. It may reorder the values, of which there is at least one.
pub type Statistic = fn(&mut [f64]) -> f64;

/// A value and the interval in which it lies with the confidence that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Of the runs as they are.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Estimate {
    /// Of a logarithm: what it is the logarithm of.
    pub(crate) fn exp(self) -> Self {
        Self { value: self.value.exp(), low: self.low.exp(), high: self.high.exp() }
    }

    /// Whether all of the interval is above `bound`.
    pub fn is_above(&self, bound: f64) -> bool {
        self.low > bound
    }

    /// Whether all of the interval is below `bound`.
    pub fn is_below(&self, bound: f64) -> bool {
        self.high < bound
    }

    /// Whether all of the interval is between the bounds, which belong to what is allowed.
    pub fn is_within(&self, low: f64, high: f64) -> bool {
        self.low >= low && self.high <= high
    }
}

/// How sure an interval is: 0.95 when it holds what is true in 95 of 100 comparisons.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize)]
pub struct Confidence(f64);

impl Confidence {
    /// 95 %.
    pub const USUAL: Self = Self(0.95);

    /// The share: 0.95 for 95 %.
    pub const fn share(self) -> f64 {
        self.0
    }

    /// The share of comparisons that may go wrong: 0.05 for 95 %.
    pub const fn risk(self) -> f64 {
        1.0 - self.0
    }
}

impl fmt::Display for Confidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", (self.0 * 1e6).round() / 1e4)
    }
}

/// Why a text is no confidence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no confidence: write 95% or 0.95, at least 50% and less than 100%")]
pub struct ConfidenceError {
    text: String,
}

impl FromStr for Confidence {
    type Err = ConfidenceError;

    /// `95%`, `95 %` and `0.95` are the same.
    fn from_str(text: &str) -> Result<Self, ConfidenceError> {
        let error = || ConfidenceError { text: text.to_owned() };
        let trimmed = text.trim();
        let (number, unit) = trimmed.strip_suffix('%').map_or((trimmed, 1.0), |number| (number.trim_end(), 100.0));
        let share = number.parse::<f64>().map_err(|_| error())? / unit;
        // Nearer to 1 the ends of the interval are the most extreme draws, and more draws would move them.
        if (0.5..=0.9999).contains(&share) { Ok(Self(share)) } else { Err(error()) }
    }
}

/// How intervals are made.
#[derive(Clone, Copy, Debug)]
pub struct Bootstrap {
    /// How often is drawn.
    pub draws: usize,
    /// How sure the interval is.
    pub confidence: Confidence,
    /// What a side of a comparison is reduced to.
    pub statistic: Statistic,
}

impl Default for Bootstrap {
    /// Medians, 2,000 draws, 95 %.
    fn default() -> Self {
        Self { draws: 2000, confidence: Confidence::USUAL, statistic: median_of }
    }
}

impl Bootstrap {
    /// B over A, for values above zero: with others a ratio means nothing, and the answer is `None`, as it is for a
    /// side without values.
    pub fn ratio(&self, a: &[f64], b: &[f64]) -> Option<Estimate> {
        let all_positive = a.iter().chain(b).all(|value| value.is_finite() && *value > 0.0);
        if all_positive { self.two_sides(a, b, |a, b| b / a) } else { None }
    }

    /// B minus A, for finite values. `None` for a side without values.
    pub fn difference(&self, a: &[f64], b: &[f64]) -> Option<Estimate> {
        let all_finite = a.iter().chain(b).all(|value| value.is_finite());
        if all_finite { self.two_sides(a, b, |a, b| b - a) } else { None }
    }

    fn two_sides(&self, a: &[f64], b: &[f64], answer: impl Fn(f64, f64) -> f64) -> Option<Estimate> {
        if a.is_empty() || b.is_empty() {
            return None;
        }
        let (mut of_a, mut of_b) = (Draw::of(a), Draw::of(b));
        let mut random = Random::new();
        let mut once = |_| {
            let a = (self.statistic)(of_a.again(&mut random));
            answer(a, (self.statistic)(of_b.again(&mut random)))
        };
        let drawn = (0..self.draws).map(&mut once).collect();
        self.estimate(answer((self.statistic)(of_a.as_is()), (self.statistic)(of_b.as_is())), drawn)
    }

    /// The middle of what was drawn. `None` where something overflowed.
    fn estimate(&self, value: f64, mut drawn: Vec<f64>) -> Option<Estimate> {
        if drawn.is_empty() || !drawn.iter().chain([&value]).all(|number| number.is_finite()) {
            return None;
        }
        drawn.sort_unstable_by(f64::total_cmp);
        let outside = self.confidence.risk() / 2.0;
        // With an even number of runs the median of the draws may lie to one side of the median of the runs.
        let low = quantile_of_sorted(&drawn, outside).min(value);
        let high = quantile_of_sorted(&drawn, 1.0 - outside).max(value);
        Some(Estimate { value, low, high })
    }
}

/// The median of values that may be reordered.
fn median_of(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    quantile_of_sorted(values, 0.5)
}

/// Runs, and room for as many drawn from them.
struct Draw<'a> {
    runs: &'a [f64],
    room: Vec<f64>,
}

impl<'a> Draw<'a> {
    fn of(runs: &'a [f64]) -> Self {
        Self { runs, room: runs.to_vec() }
    }

    fn as_is(&mut self) -> &mut [f64] {
        self.room.copy_from_slice(self.runs);
        &mut self.room
    }

    fn again(&mut self, random: &mut Random) -> &mut [f64] {
        for place in &mut self.room {
            *place = self.runs[random.below(self.runs.len())];
        }
        &mut self.room
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn confidences_as_people_write_them() {
        for text in ["95%", "95 %", "0.95", " 0.950 "] {
            assert_eq!(text.parse(), Ok(Confidence::USUAL), "{text}");
        }
        assert_eq!("99.9%".parse::<Confidence>().unwrap().to_string(), "99.9 %");
        for text in ["", "95", "1", "100%", "0.2", "nan", "-0.95", "sure"] {
            assert!(text.parse::<Confidence>().is_err(), "{text}");
        }
    }

    #[test]
    fn runs_that_agree_have_no_interval() {
        let estimate = Bootstrap::default().ratio(&[100.0; 5], &[105.0; 5]).unwrap();
        assert_eq!(estimate, Estimate { value: 1.05, low: 1.05, high: 1.05 });
        assert!(estimate.is_above(1.0) && !estimate.is_below(1.0) && estimate.is_within(1.05, 1.05));
        let difference = Bootstrap::default().difference(&[0.0; 3], &[4096.0; 3]).unwrap();
        assert_eq!((difference.low, difference.high), (4096.0, 4096.0));
    }

    #[test]
    fn what_has_no_ratio_has_none() {
        let bootstrap = Bootstrap::default();
        assert_eq!(bootstrap.ratio(&[], &[1.0]), None);
        assert_eq!(bootstrap.ratio(&[0.0, 1.0], &[1.0]), None);
        assert_eq!(bootstrap.ratio(&[1.0], &[f64::NAN]), None);
        assert_eq!(bootstrap.difference(&[1.0], &[f64::INFINITY]), None);
        assert_eq!(bootstrap.difference(&[f64::MAX], &[-f64::MAX]), None, "an overflow is no number");
    }

    #[test]
    fn more_confidence_is_a_wider_interval() {
        let a = [97.0, 101.0, 99.0, 103.0, 100.0, 102.0, 98.0];
        let b = [104.0, 106.0, 103.0, 107.0, 105.0, 101.0, 104.5];
        let at = |text: &str| {
            let bootstrap = Bootstrap { confidence: text.parse().unwrap(), ..Bootstrap::default() };
            bootstrap.ratio(&a, &b).unwrap()
        };
        let (narrow, wide) = (at("80%"), at("99%"));
        assert!(wide.low < narrow.low && narrow.high < wide.high, "{narrow:?} {wide:?}");
    }

    proptest! {
        /// The interval holds the value, lies within what the runs could give, and does not depend on the hour.
        #[test]
        fn an_interval_is_sound(a in prop::collection::vec(1.0..1e3f64, 1..9),
                                b in prop::collection::vec(1.0..1e3f64, 1..9)) {
            let bootstrap = Bootstrap { draws: 200, ..Bootstrap::default() };
            let estimate = bootstrap.ratio(&a, &b).unwrap();
            prop_assert_eq!(Some(estimate), bootstrap.ratio(&a, &b));
            prop_assert!(estimate.low <= estimate.value && estimate.value <= estimate.high);
            let extremes = |values: &[f64]| values.iter().fold((f64::MAX, 0.0f64), |(l, h), &v| (l.min(v), h.max(v)));
            let ((a_low, a_high), (b_low, b_high)) = (extremes(&a), extremes(&b));
            prop_assert!(estimate.low >= b_low / a_high * 0.999_999 && estimate.high <= b_high / a_low * 1.000_001);
        }
    }
}
