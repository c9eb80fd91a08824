//! Pairs: by how much B differs from A where each run of B has its run of A.
//!
//! ```text
//!   changes of the pairs     -2   1   2   4                     logarithms of B / A
//!   Walsh averages           -2 -.5   0   1   1  1.5   2  2.5   3   4        every change with every change, itself too
//!                                └────────────┬──────────────┘
//!                                         interval; its middle is Hodges and Lehmann's estimate
//! ```
//!
//! Where the two sides do not differ, a pair falls to either side with the same probability and by the same amounts: that is
//! what taking turns is for, and all that is assumed. How far in from the ends of the averages the interval begins follows
//! from counting signs (Wilcoxon's signed ranks), so its confidence is exact for any number of pairs and any noise. A hiccup in
//! one pair moves the estimate little, as it does a median; but where noise is normal a median is a quarter wider, because it
//! looks at the order of the changes alone and not at their sizes.

use super::bootstrap::{Confidence, Estimate};
use super::normal;
use super::spread::{quantile_of_sorted, whole};

/// Up to this many pairs signs are counted; beyond, the normal distribution is as good.
const MAX_COUNTED: usize = 120;

/// The middle of all Walsh averages of `changes` and the interval around it. With so few changes that no interval has this
/// confidence ([`enough_pairs`](super::enough_pairs)) it spans all of them. `None` without any, or where one is no number.
pub fn hodges_lehmann(changes: &[f64], confidence: Confidence) -> Option<Estimate> {
    if changes.is_empty() || !changes.iter().all(|change| change.is_finite()) {
        return None;
    }
    let averages = walsh_averages(changes);
    let outside = averages_outside(changes.len(), confidence.risk() / 2.0);
    Some(Estimate {
        value: quantile_of_sorted(&averages, 0.5),
        low: averages[outside],
        high: averages[averages.len() - 1 - outside],
    })
}

/// B over A of runs that belong together two by two, `(a, b)` each. `None` without pairs, and where a value is not above zero.
pub fn paired_ratio(pairs: &[(f64, f64)], confidence: Confidence) -> Option<Estimate> {
    let change = |&(a, b): &(f64, f64)| (a > 0.0 && b > 0.0).then(|| (b / a).ln());
    let changes: Vec<f64> = pairs.iter().map(change).collect::<Option<_>>()?;
    hodges_lehmann(&changes, confidence).map(Estimate::exp)
}

/// Wilcoxon's signed-rank test, two-sided: the probability that sides which do not differ are as far apart as in these changes.
/// 1 without changes. It is at most the risk exactly where the interval of [`hodges_lehmann`] leaves out zero.
pub fn signed_rank(changes: &[f64]) -> f64 {
    let averages = walsh_averages(changes);
    // The rank sum of the positive changes is the number of positive averages. Zeros go against a finding, whichever way.
    let above = averages.iter().filter(|average| **average > 0.0).count();
    let below = averages.iter().filter(|average| **average < 0.0).count();
    let fewer = averages.len() - above.max(below);
    (2.0 * share_at_most(changes.len(), fewer)).min(1.0)
}

/// The mean of every change with every other and with itself, sorted.
fn walsh_averages(changes: &[f64]) -> Vec<f64> {
    let with_later = |(place, &change): (usize, &f64)| {
        let later = changes[place..].iter();
        later.map(move |&other| f64::midpoint(change, other)).collect::<Vec<f64>>()
    };
    let mut averages: Vec<f64> = changes.iter().enumerate().flat_map(with_later).collect();
    averages.sort_unstable_by(f64::total_cmp);
    averages
}

/// How many averages lie outside the interval at each end: the most that do so in no more than the share `tail` of all cases.
pub(super) fn averages_outside(pairs: usize, tail: f64) -> usize {
    // Shares grow with the number, so it is found by halving; half of all averages are too many.
    let (mut fits, mut too_many) = (0, pairs * (pairs + 1) / 4 + 1);
    while too_many - fits > 1 {
        let half = usize::midpoint(fits, too_many);
        if share_at_most(pairs, half) <= tail { fits = half } else { too_many = half }
    }
    fits
}

/// Share of all signs of `pairs` changes for which the ranks of the positive ones add up to at most `sum`.
fn share_at_most(pairs: usize, sum: usize) -> f64 {
    let all = pairs * (pairs + 1) / 2;
    if sum >= all {
        return 1.0;
    }
    if pairs > MAX_COUNTED {
        let n = whole(pairs);
        let deviation = (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
        // Half a step: the distribution is one of whole numbers.
        return normal::below((whole(sum) + 0.5 - whole(all) / 2.0) / deviation);
    }
    // `shares[s]`: of the signs of the ranks so far, the share of those whose positive ones add up to s.
    let mut shares = vec![0.0f64; sum + 1];
    shares[0] = 1.0;
    for rank in 1..=pairs {
        for s in (0..=sum).rev() {
            let with_it = if s >= rank { shares[s - rank] } else { 0.0 };
            shares[s] = f64::midpoint(shares[s], with_it);
        }
    }
    shares.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::enough_pairs;
    use crate::statistics::simulation::Machine;
    use proptest::prelude::*;

    fn changes(pairs: usize, mut change: impl FnMut() -> f64) -> Vec<f64> {
        (0..pairs).map(|_| change()).collect()
    }

    #[test]
    fn values_of_the_tables() {
        let outside = |pairs| averages_outside(pairs, 0.025);
        assert_eq!([5, 6, 7, 10, 12, 25].map(outside), [0, 0, 2, 8, 13, 89]);
        assert!((share_at_most(10, 8) - 25.0 / 1024.0).abs() < 1e-12, "{}", share_at_most(10, 8));
        assert_eq!(signed_rank(&[]), 1.0);
        assert!((signed_rank(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) - 2.0 / 64.0).abs() < 1e-12);
        assert_eq!(signed_rank(&[0.0; 9]), 1.0);
    }

    #[test]
    fn the_example_of_the_module_page() {
        let estimate = hodges_lehmann(&[-2.0, 1.0, 2.0, 4.0], "75%".parse().unwrap()).unwrap();
        assert_eq!(estimate, Estimate { value: 1.25, low: -0.5, high: 3.0 });
        let few = hodges_lehmann(&[-2.0, 1.0, 2.0, 4.0], Confidence::USUAL).unwrap();
        assert_eq!((few.low, few.high), (-2.0, 4.0), "four pairs have no interval of 95 %");
    }

    #[test]
    fn what_has_no_ratio_has_none() {
        for pairs in [&[][..], &[(1.0, -1.0)], &[(0.0, 1.0)], &[(1.0, f64::NAN)], &[(1.0, f64::INFINITY)]] {
            assert_eq!(paired_ratio(pairs, Confidence::USUAL), None, "{pairs:?}");
        }
        assert_eq!(hodges_lehmann(&[], Confidence::USUAL), None);
    }

    #[test]
    fn pairs_cancel_what_moved_both() {
        // The machine slows down by the hour; B takes 2 % longer than A at every hour.
        let hours = [100.0, 110.0, 125.0, 140.0, 160.0, 190.0, 230.0, 280.0];
        let pairs: Vec<(f64, f64)> = hours.iter().map(|&hour| (hour, hour * 1.02)).collect();
        let ratio = paired_ratio(&pairs, Confidence::USUAL).unwrap();
        assert!(ratio.is_within(1.0199, 1.0201), "{ratio:?}");
    }

    #[test]
    fn counting_and_the_normal_distribution_meet() {
        let n = MAX_COUNTED;
        let (counted, beyond) = (averages_outside(n, 0.025), averages_outside(n + 1, 0.025));
        assert!(beyond > counted && beyond - counted < n, "{counted} and {beyond}");
    }

    /// The kinds of noise that ratios of slices have: even, now and then a hiccup on one side, and tails without a variance.
    /// A sort of noise, and a draw of it.
    type Noise = (&'static str, fn(&mut Machine) -> f64);

    fn noises() -> [Noise; 4] {
        [
            ("normal", |machine| 0.02 * machine.normal()),
            ("hiccups", |machine| (machine.with_hiccups(1, 1.0, 0.02)[0] / machine.with_hiccups(1, 1.0, 0.02)[0]).ln()),
            ("heavy tails", |machine| 0.02 * machine.normal() / machine.normal().abs().max(0.05)),
            // Each side is skewed, and the difference of two that are alike is not.
            ("skewed", |machine| 0.05 * (machine.uniform().ln() - machine.uniform().ln())),
        ]
    }

    #[test]
    fn an_interval_of_95_percent_holds_the_truth_in_95_of_100_comparisons_whatever_the_noise() {
        for (name, noise) in noises() {
            for pairs in [6, 12, 30] {
                let mut machine = Machine::new(23);
                let truth = 0.03;
                let held = (0..2000).filter(|_| {
                    let seen = changes(pairs, || truth + noise(&mut machine));
                    let estimate = hodges_lehmann(&seen, Confidence::USUAL).unwrap();
                    estimate.low <= truth && truth <= estimate.high
                });
                let share = held.count() as f64 / 2000.0;
                // Exact up to steps: 6 pairs give 96.9 %. One standard error is 0.5 %.
                assert!((0.935..=0.985).contains(&share), "{pairs} pairs, {name}: {share}");
            }
        }
    }

    #[test]
    fn it_is_sharper_than_a_median_where_noise_is_even_and_as_robust_where_it_is_not() {
        let width = |noise: fn(&mut Machine) -> f64, of: fn(&[f64]) -> f64| {
            let mut machine = Machine::new(29);
            let centres: Vec<f64> = (0..2000).map(|_| of(&changes(15, || noise(&mut machine)))).collect();
            let square: f64 = centres.iter().map(|centre| centre * centre).sum();
            (square / 2000.0).sqrt()
        };
        let ours: fn(&[f64]) -> f64 = |seen| hodges_lehmann(seen, Confidence::USUAL).unwrap().value;
        let median: fn(&[f64]) -> f64 = |seen| crate::statistics::median(seen).unwrap();
        let mean: fn(&[f64]) -> f64 = |seen| crate::statistics::mean(seen).unwrap();
        let [(_, normal), (_, hiccups), (_, tails), _] = noises();
        // A median scatters 1.25 times as much as a mean, and this 1.02 times.
        assert!(width(normal, ours) < 0.9 * width(normal, median));
        assert!(width(normal, ours) < 1.06 * width(normal, mean));
        assert!(width(hiccups, ours) < 0.85 * width(hiccups, mean));
        assert!(width(tails, ours) < 0.6 * width(tails, mean));
    }

    proptest! {
        /// The rank sum by its definition: rank the sizes, add up the ranks of the positive ones, try all signs.
        #[test]
        fn the_test_agrees_with_enumeration(sizes in prop::collection::hash_set(1..1000u32, 1..10), signs in any::<u32>()) {
            let mut sizes: Vec<u32> = sizes.into_iter().collect();
            sizes.sort_unstable();
            let n = sizes.len();
            let sum = |signs: u32| (0..n).filter(|i| signs >> i & 1 == 1).map(|i| i + 1).sum::<usize>();
            let middle = n * (n + 1) / 2;
            let distance = |sum: usize| (2 * sum).abs_diff(middle);
            let seen = distance(sum(signs));
            let as_far = (0..1u32 << n).filter(|&signs| distance(sum(signs)) >= seen).count();
            let changes: Vec<f64> =
                sizes.iter().enumerate().map(|(i, &size)| f64::from(size) * if signs >> i & 1 == 1 { 1.0 } else { -1.0 }).collect();
            let expected = as_far as f64 / f64::from(1u32 << n);
            prop_assert!((signed_rank(&changes) - expected).abs() < 1e-9, "{} and {}", signed_rank(&changes), expected);
        }

        /// The interval leaves out zero exactly where the test finds a difference, and follows whatever is done to the changes.
        #[test]
        fn interval_and_test_agree(values in prop::collection::hash_set(-1000..1000i32, 1..25), shift in -50..50i32) {
            let changes: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
            let estimate = hodges_lehmann(&changes, Confidence::USUAL).unwrap();
            prop_assert!(estimate.low <= estimate.value && estimate.value <= estimate.high);
            let is_found = enough_pairs(changes.len(), 0.05) && (estimate.low > 0.0 || estimate.high < 0.0);
            prop_assert_eq!(is_found, signed_rank(&changes) <= 0.05);
            let shifted: Vec<f64> = changes.iter().map(|change| change + f64::from(shift)).collect();
            let moved = hodges_lehmann(&shifted, Confidence::USUAL).unwrap();
            prop_assert!((moved.low - estimate.low - f64::from(shift)).abs() < 1e-9);
            let mirrored: Vec<f64> = changes.iter().map(|change| -change).collect();
            prop_assert_eq!(hodges_lehmann(&mirrored, Confidence::USUAL).unwrap().high, -estimate.low);
        }
    }
}
