//! Percentiles from raw samples.
//!
//! Every time is kept until the end of the run, in nanoseconds and in the order of recording, and every
//! percentile is one of the recorded times (nearest rank): the smallest sample with at least p % of all
//! samples at or below it.
//!
//! ```text
//!   5 samples, sorted    10   20   30   40   1000
//!   rank                  1    2    3    4      5
//!   p50: rank ceil(2.5) = 3 -> 30      p90: ceil(4.5) = 5 -> 1000      p99: ceil(4.95) = 5 -> 1000
//! ```
//!
//! Nothing is ever averaged before a percentile is taken: the p99 of means hides exactly the pauses that a
//! p99 is there to show. With fewer than 100 samples p99 is the maximum, which is what was seen.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Times of one operation, in nanoseconds, in the order in which they were taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Samples {
    values_ns: Vec<u64>,
}

impl Samples {
    /// No samples yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// No samples yet, and room for `count`, so that recording does not allocate while it measures.
    pub fn with_capacity(count: usize) -> Self {
        Self { values_ns: Vec::with_capacity(count) }
    }

    /// Records one time in nanoseconds.
    pub fn push(&mut self, value_ns: u64) {
        self.values_ns.push(value_ns);
    }

    /// Records one time. Longer than 584 years is recorded as that.
    pub fn push_duration(&mut self, duration: Duration) {
        self.push(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds all samples of `other`, for instance those of another thread.
    pub fn extend(&mut self, other: &Self) {
        self.values_ns.extend_from_slice(&other.values_ns);
    }

    /// How many samples there are.
    pub fn len(&self) -> usize {
        self.values_ns.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.values_ns.is_empty()
    }

    /// The raw samples in the order of recording.
    pub fn values_ns(&self) -> &[u64] {
        &self.values_ns
    }

    /// One percentile, of those that [`Percentiles`] does not have, or `None` when there are no samples.
    pub fn percentile(&self, percent: usize) -> Option<u64> {
        let mut sorted = self.values_ns.clone();
        sorted.sort_unstable();
        (!sorted.is_empty()).then(|| nearest_rank(&sorted, percent))
    }

    /// What the samples say, or `None` when there are none: no samples have no median.
    pub fn percentiles(&self) -> Option<Percentiles> {
        let mut sorted = self.values_ns.clone();
        sorted.sort_unstable();
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        Some(Percentiles {
            count: sorted.len(),
            min,
            avg: average(&sorted),
            p50: nearest_rank(&sorted, 50),
            p90: nearest_rank(&sorted, 90),
            p99: nearest_rank(&sorted, 99),
            max,
        })
    }
}

impl FromIterator<u64> for Samples {
    fn from_iter<I: IntoIterator<Item = u64>>(values_ns: I) -> Self {
        Self { values_ns: values_ns.into_iter().collect() }
    }
}

/// What is reported of a set of samples. All but `count` are in the unit of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// How many samples the figures are from.
    pub count: usize,
    /// The smallest sample.
    pub min: u64,
    /// The mean. The only figure here that need not be one of the samples.
    pub avg: f64,
    /// The median, by nearest rank.
    pub p50: u64,
    /// The 90th percentile, by nearest rank.
    pub p90: u64,
    /// The 99th percentile, by nearest rank.
    pub p99: u64,
    /// The largest sample.
    pub max: u64,
}

/// Median of `ours` over median of `raw`: how many times slower the first is. `None` when either has no
/// samples or the raw median is zero, because then there is no such number.
pub fn median_ratio(ours: &Samples, raw: &Samples) -> Option<f64> {
    let ours_p50 = ours.percentiles()?.p50;
    let raw_p50 = raw.percentiles()?.p50;
    (raw_p50 != 0).then(|| to_f64(ours_p50) / to_f64(raw_p50))
}

/// A time or a count as a figure. Exact up to 2^53, which is 104 days in nanoseconds.
#[expect(clippy::cast_precision_loss, reason = "a figure for people and for ratios: 53 bits are plenty")]
pub const fn to_f64(value: u64) -> f64 {
    value as f64
}

/// The smallest sample with at least `percent` % of all samples at or below it. `sorted` is not empty.
fn nearest_rank(sorted: &[u64], percent: usize) -> u64 {
    debug_assert!(!sorted.is_empty() && percent <= 100);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted[rank - 1]
}

#[expect(clippy::cast_precision_loss, reason = "a mean: its own rounding is far below what a clock can tell")]
fn average(values: &[u64]) -> f64 {
    let sum: u128 = values.iter().copied().map(u128::from).sum();
    sum as f64 / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samples(values: &[u64]) -> Samples {
        values.iter().copied().collect()
    }

    #[test]
    fn the_example_of_the_module_page() {
        let p = samples(&[40, 10, 1000, 30, 20]).percentiles().unwrap();
        assert_eq!((p.count, p.min, p.p50, p.p90, p.p99, p.max), (5, 10, 30, 1000, 1000, 1000));
        assert!((p.avg - 220.0).abs() < 1e-9);
    }

    #[test]
    fn ranks_at_round_counts() {
        let p = (1..=100).collect::<Samples>().percentiles().unwrap();
        assert_eq!((p.p50, p.p90, p.p99, p.max), (50, 90, 99, 100));
        assert_eq!(
            [90, 95, 100].map(|percent| (1..=100).collect::<Samples>().percentile(percent)),
            [Some(90), Some(95), Some(100)]
        );
        let p = (1..=101).collect::<Samples>().percentiles().unwrap();
        assert_eq!((p.p50, p.p90, p.p99, p.max), (51, 91, 100, 101));
    }

    #[test]
    fn nothing_recorded_has_no_percentiles() {
        assert_eq!(Samples::new().percentiles(), None);
        assert_eq!(Samples::new().percentile(95), None);
        assert_eq!(median_ratio(&Samples::new(), &samples(&[1])), None);
        assert_eq!(median_ratio(&samples(&[1]), &Samples::new()), None);
        assert_eq!(median_ratio(&samples(&[1]), &samples(&[0])), None);
    }

    #[test]
    fn the_ratio_is_of_medians_not_of_means() {
        let ours = samples(&[30, 30, 30]);
        let raw = samples(&[20, 20, 1_000_000]);
        assert!((median_ratio(&ours, &raw).unwrap() - 1.5).abs() < 1e-12);
    }

    #[test]
    fn sums_beyond_64_bits_do_not_overflow() {
        let p = samples(&[u64::MAX, u64::MAX]).percentiles().unwrap();
        assert!((p.avg / to_f64(u64::MAX) - 1.0).abs() < 1e-12);
    }

    proptest! {
        /// The definition itself, by counting: no formula for ranks in sight.
        #[test]
        fn every_percentile_meets_its_definition(values in prop::collection::vec(0..1000u64, 1..400)) {
            let p = samples(&values).percentiles().unwrap();
            for (percent, value) in [(50, p.p50), (90, p.p90), (99, p.p99)] {
                let at_or_below = |limit| values.iter().filter(|&&v| v <= limit).count();
                prop_assert!(values.contains(&value));
                prop_assert!(at_or_below(value) * 100 >= percent * values.len());
                let smaller = values.iter().copied().filter(|&v| v < value).max();
                if let Some(smaller) = smaller {
                    prop_assert!(at_or_below(smaller) * 100 < percent * values.len(), "p{} is not the smallest", percent);
                }
            }
        }

        #[test]
        fn order_of_recording_is_kept_and_does_not_matter(values in prop::collection::vec(any::<u64>(), 1..200)) {
            let recorded = samples(&values);
            let p = recorded.percentiles().unwrap();
            let mut sorted = values.clone();
            sorted.sort_unstable();
            prop_assert_eq!(samples(&sorted).percentiles().unwrap(), p);
            prop_assert_eq!(recorded.values_ns(), &values[..]);
            prop_assert_eq!((p.min, p.max), (sorted[0], sorted[sorted.len() - 1]));
            prop_assert!(p.min <= p.p50 && p.p50 <= p.p90 && p.p90 <= p.p99 && p.p99 <= p.max);
        }

        #[test]
        fn merging_is_the_same_as_recording_in_one(a in prop::collection::vec(any::<u64>(), 0..50),
                                                   b in prop::collection::vec(any::<u64>(), 0..50)) {
            let mut merged = samples(&a);
            merged.extend(&samples(&b));
            prop_assert_eq!(merged, samples(&[a, b].concat()));
        }
    }
}
