//! Times and what is said of them, as numpy says it.

use crate::stats::{Samples, to_f64};

const NS_PER_MS: f64 = 1e6;

/// Some times, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    recorded_ns: Vec<u64>,
    sorted_ns: Vec<u64>,
}

impl FromIterator<u64> for Distribution {
    fn from_iter<I: IntoIterator<Item = u64>>(times_ns: I) -> Self {
        let recorded_ns: Vec<u64> = times_ns.into_iter().collect();
        let mut sorted_ns = recorded_ns.clone();
        sorted_ns.sort_unstable();
        Self { recorded_ns, sorted_ns }
    }
}

impl Distribution {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.recorded_ns.len()
    }

    /// Whether there is none: then nothing can be said of them.
    pub fn is_empty(&self) -> bool {
        self.recorded_ns.is_empty()
    }

    /// In the order in which they were recorded.
    pub fn samples(&self) -> Samples {
        self.recorded_ns.iter().copied().collect()
    }

    /// The mean.
    pub fn mean_ms(&self) -> Option<f64> {
        let sum: u128 = self.recorded_ns.iter().copied().map(u128::from).sum();
        #[expect(clippy::cast_precision_loss, reason = "a mean: its own rounding is far below what a clock can tell")]
        let mean = |count: usize| sum as f64 / count as f64 / NS_PER_MS;
        (!self.is_empty()).then(|| mean(self.len()))
    }

    /// The deviation of the population, as numpy's `std`.
    pub fn std_ms(&self) -> Option<f64> {
        let mean = self.mean_ms()?;
        let squares = self.recorded_ns.iter().map(|&ns| (to_f64(ns) / NS_PER_MS - mean).powi(2));
        Some((squares.sum::<f64>() / super::count_f64(self.len())).sqrt())
    }

    /// The median.
    pub fn median_ms(&self) -> Option<f64> {
        self.percentile_ms(50.0)
    }

    /// The largest.
    pub fn max_ms(&self) -> Option<f64> {
        self.sorted_ns.last().map(|&ns| to_f64(ns) / NS_PER_MS)
    }

    /// A percentile from 0 to 100, linear between the two nearest ranks.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rank below the number of times")]
    pub fn percentile_ms(&self, percent: f64) -> Option<f64> {
        let last = self.sorted_ns.len().checked_sub(1)?;
        let rank = percent.clamp(0.0, 100.0) / 100.0 * super::count_f64(last);
        let (below, share) = (rank.floor() as usize, rank.fract());
        let at = |index: usize| to_f64(self.sorted_ns[index.min(last)]) / NS_PER_MS;
        Some(at(below) + (at(below + 1) - at(below)) * share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of_ms(times: &[u64]) -> Distribution {
        times.iter().map(|ms| ms * 1_000_000).collect()
    }

    /// What `numpy.percentile`, `mean` and `std` say of the same numbers.
    #[test]
    fn as_numpy_says() {
        let times = of_ms(&[3, 1, 4, 1, 5, 9, 2, 6]);
        let close =
            |found: Option<f64>, wanted: f64| assert!((found.unwrap() - wanted).abs() < 1e-12, "{found:?}, {wanted}");
        close(times.mean_ms(), 3.875);
        close(times.std_ms(), 2.570_870_475_150_391_7);
        close(times.median_ms(), 3.5);
        close(times.percentile_ms(90.0), 6.9);
        close(times.percentile_ms(99.0), 8.79);
        close(times.percentile_ms(0.0), 1.0);
        close(times.percentile_ms(100.0), 9.0);
        close(of_ms(&[7]).percentile_ms(99.9), 7.0);
        close(of_ms(&[7]).std_ms(), 0.0);
    }

    #[test]
    fn of_nothing_nothing_is_said() {
        let none = Distribution::default();
        assert_eq!([none.mean_ms(), none.std_ms(), none.median_ms(), none.max_ms()], [None; 4]);
    }

    proptest! {
        #[test]
        fn percentiles_rise_and_stay_inside(times in prop::collection::vec(0..1_000_000_000u64, 1..50),
                                            a in 0.0..=100.0f64, b in 0.0..=100.0f64) {
            let times: Distribution = times.into_iter().collect();
            let (low, high) = (times.percentile_ms(a.min(b)).unwrap(), times.percentile_ms(a.max(b)).unwrap());
            prop_assert!(low <= high + 1e-9);
            prop_assert!(high <= times.max_ms().unwrap() + 1e-9 && low >= times.percentile_ms(0.0).unwrap() - 1e-9);
        }
    }
}
