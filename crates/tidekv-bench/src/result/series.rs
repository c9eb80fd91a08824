//! One named list of measurements inside a result.
//!
//! ```text
//!   { "unit": "ns", "count": 100000, "min": .., "avg": .., "p50": .., "p90": .., "p99": .., "max": ..,
//!     "thinned": true, "values": [ 3120, 3098, ... ] }
//!       of all 100,000 samples ──┘    └── every 25th or so of them, in the order of recording
//! ```

use serde::{Deserialize, Serialize};

use crate::stats::{Percentiles, Samples};

/// Measurements of one operation: exact figures of all samples, and the raw values as far as they fit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Unit of every figure but `count`; `ns` for times.
    pub unit: String,
    /// Figures of all samples, whether or not their values are still here.
    #[serde(flatten)]
    pub percentiles: Percentiles,
    /// Whether `values` is a selection. The number of samples measured is `percentiles.count`.
    #[serde(default)]
    pub thinned: bool,
    /// Raw values in the order of recording.
    #[serde(default)]
    pub values: Vec<u64>,
}

impl Series {
    /// The series of some times, or `None` when nothing was recorded.
    pub fn of_times(times: &Samples) -> Option<Self> {
        let percentiles = times.percentiles()?;
        Some(Self { unit: "ns".to_owned(), percentiles, thinned: false, values: times.values_ns().to_vec() })
    }

    /// The same series with at most `max_values` raw values, evenly spread over the run.
    pub(super) fn thinned(&self, max_values: usize) -> Self {
        let values = spread(&self.values, max_values);
        let thinned = self.thinned || values.len() < self.values.len();
        Self { unit: self.unit.clone(), percentiles: self.percentiles, thinned, values }
    }
}

/// `max` values at even distances, the first and the last among them; all of them if they are no more.
fn spread(values: &[u64], max: usize) -> Vec<u64> {
    let last = values.len().saturating_sub(1);
    match max {
        _ if values.len() <= max => values.to_vec(),
        0 => Vec::new(),
        1 => vec![values[0]],
        _ => (0..max).map(|i| values[i * last / (max - 1)]).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn thinning_keeps_the_figures_and_says_so() {
        let whole = Series::of_times(&(0..1000).collect()).unwrap();
        let thin = whole.thinned(11);
        assert_eq!(thin.percentiles, whole.percentiles);
        assert!(thin.thinned && !whole.thinned);
        assert_eq!(thin.values, [0, 99, 199, 299, 399, 499, 599, 699, 799, 899, 999]);
        assert!(!whole.thinned(1000).thinned);
        assert!(thin.thinned(100).thinned, "a selection stays a selection");
    }

    #[test]
    fn nothing_recorded_is_no_series() {
        assert_eq!(Series::of_times(&Samples::new()), None);
    }

    proptest! {
        #[test]
        fn a_spread_is_even_ordered_and_within_its_bound(count in 0..3000usize, max in 0..500usize) {
            let values: Vec<u64> = (0..count as u64).collect();
            let kept = spread(&values, max);
            prop_assert_eq!(kept.len(), count.min(max));
            let gaps: Vec<u64> = kept.windows(2).map(|pair| pair[1] - pair[0]).collect();
            if let (Some(narrow), Some(wide)) = (gaps.iter().min(), gaps.iter().max()) {
                prop_assert!(*narrow >= 1 && wide - narrow <= 1, "gaps from {} to {}", narrow, wide);
                prop_assert_eq!((kept[0], kept[kept.len() - 1]), (0, count as u64 - 1));
            }
        }
    }
}
