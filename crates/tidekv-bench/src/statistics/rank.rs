//! Rank tests: could chance alone have put the values of two sides in this order?
//!
//! They ask nothing about how the values are distributed, and for few values their answer is exact: with m values on
//! one side and n on the other, all C(m + n, m) orders are equally likely where the sides do not differ.

use super::normal;
use super::spread::{count, whole};

/// Up to this many orders of two sides are counted; beyond, and with ties, the normal distribution is near enough.
const MAX_COUNTED: usize = 400;

/// The Mann-Whitney test, two-sided: the probability that sides which do not differ are as far apart as these. 1 where
/// a side has no values.
pub fn mann_whitney(a: &[f64], b: &[f64]) -> f64 {
    if a.is_empty() || b.is_empty() {
        return 1.0;
    }
    // How many pairs have their larger value in B; a tie is half of one, hence everything doubled.
    let doubled: usize =
        a.iter().map(|x| b.iter().map(|y| 1 + usize::from(y > x) - usize::from(y < x)).sum::<usize>()).sum();
    let all = 2 * a.len() * b.len();
    let extreme = doubled.min(all - doubled);
    let ties = tied_groups(a, b);
    if ties.is_empty() && a.len() * b.len() <= MAX_COUNTED {
        return (2.0 * share_at_most(a.len(), b.len(), extreme / 2)).min(1.0);
    }
    let (m, n) = (count(a), count(b));
    let tied: f64 = ties.iter().map(|&size| size * (size * size - 1.0)).sum();
    let variance = m * n / 12.0 * ((m + n + 1.0) - tied / ((m + n) * (m + n - 1.0)));
    if variance <= 0.0 {
        return 1.0;
    }
    let extreme = whole(extreme) / 2.0;
    // Half a step towards the middle: the distribution is one of whole numbers.
    let distance = (m * n / 2.0 - extreme - 0.5).max(0.0);
    (2.0 * normal::below(-distance / variance.sqrt())).min(1.0)
}

/// Whether a rank test of so many runs could find anything at all: whether its smallest probability, that of every
/// value of one side above every value of the other, is at most `risk`. At 5 % that takes 4 runs a side, at 1 % 5.
pub fn enough_runs(a_runs: usize, b_runs: usize, risk: f64) -> bool {
    // 1 / C(m + n, m), factor by factor; it only ever falls.
    let smaller = a_runs.min(b_runs);
    let larger = a_runs.max(b_runs);
    let mut probability = 2.0;
    for i in 1..=smaller {
        probability *= whole(i) / whole(larger + i);
    }
    smaller > 0 && probability <= risk
}

/// The same for pairs: all of them one way has the probability 2 / 2^n. At 5 % that takes 6 pairs.
pub fn enough_pairs(pairs: usize, risk: f64) -> bool {
    let exponent = i32::try_from(pairs).unwrap_or(i32::MAX);
    pairs > 0 && 2.0 * 0.5f64.powi(exponent) <= risk
}

/// Share of all orders of m and n distinct values in which at most `u` pairs have their larger value on the second
/// side. `ways[j][k]` counts, for the values looked at so far, those with j of the first side and k such pairs.
fn share_at_most(m: usize, n: usize, u: usize) -> f64 {
    let mut ways = vec![vec![0.0f64; m * n + 1]; m + 1];
    ways[0][0] = 1.0;
    for placed in 0..m + n {
        for taken in (0..=m.min(placed)).rev() {
            let of_second = placed - taken;
            if of_second > n {
                ways[taken].iter_mut().for_each(|way| *way = 0.0);
                continue;
            }
            // The next larger value is the first side's: no pair is added. Or the second's: it is above `taken` values.
            let here = std::mem::take(&mut ways[taken]);
            let mut shifted = vec![0.0; m * n + 1];
            if of_second < n {
                shifted[taken..].copy_from_slice(&here[..here.len() - taken]);
            }
            if taken < m {
                for (next, way) in ways[taken + 1].iter_mut().zip(&here) {
                    *next += way;
                }
            }
            ways[taken] = shifted;
        }
    }
    let orders = &ways[m];
    orders[..=u.min(m * n)].iter().sum::<f64>() / orders.iter().sum::<f64>()
}

/// The sizes of the groups of equal values among both sides.
fn tied_groups(a: &[f64], b: &[f64]) -> Vec<f64> {
    let mut all: Vec<f64> = a.iter().chain(b).copied().collect();
    all.sort_unstable_by(f64::total_cmp);
    all.chunk_by(|x, y| x == y).map(count).filter(|&size| size > 1.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every order of the values, one by one.
    fn by_enumeration(a: &[f64], b: &[f64]) -> f64 {
        let all: Vec<f64> = a.iter().chain(b).copied().collect();
        let above = |first: u32| {
            let of = |side: bool| (0..all.len()).filter(move |i| (first >> i & 1 == 1) == side);
            of(true).flat_map(|i| of(false).map(move |j| (i, j))).filter(|&(i, j)| all[j] > all[i]).count()
        };
        let middle = a.len() * b.len();
        let distance = |u: usize| (2 * u).abs_diff(middle);
        let seen = distance(above((1 << a.len()) - 1));
        let choices: Vec<u32> = (0..1u32 << all.len()).filter(|c| c.count_ones() as usize == a.len()).collect();
        let as_far = choices.iter().filter(|&&choice| distance(above(choice)) >= seen).count();
        as_far as f64 / choices.len() as f64
    }

    #[test]
    fn values_of_the_tables() {
        let five = [1.0, 2.0, 3.0, 4.0, 5.0];
        let apart = mann_whitney(&five, &five.map(|value| value + 10.0));
        assert!((apart - 2.0 / 252.0).abs() < 1e-12, "{apart}");
        // Three pairs the other way, in 1 + 1 + 2 + 3 of all orders at most three: one pair too many for 5 %.
        let nearly = mann_whitney(&five, &[2.5, 6.0, 7.0, 8.0, 9.0].map(|value| value + 0.1));
        assert!((nearly - 2.0 * 7.0 / 252.0).abs() < 1e-12, "{nearly}");
        assert!((mann_whitney(&five, &five) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn nothing_and_equal_values_are_no_evidence() {
        assert_eq!(mann_whitney(&[], &[1.0]), 1.0);
        assert_eq!(mann_whitney(&[2.0; 6], &[2.0; 6]), 1.0);
    }

    #[test]
    fn how_many_runs_it_takes() {
        let fewest = |risk| (1..20).find(|&n| enough_runs(n, n, risk));
        assert_eq!((fewest(0.05), fewest(0.01), fewest(0.1)), (Some(4), Some(5), Some(3)));
        assert!(!enough_runs(1, 30, 0.05) && enough_runs(1, 39, 0.05) && !enough_runs(0, 100, 0.05));
        let fewest = |risk| (1..20).find(|&n| enough_pairs(n, risk));
        assert_eq!((fewest(0.05), fewest(0.01)), (Some(6), Some(8)));
        assert!(enough_runs(10_000, 10_000, 1e-9) && enough_pairs(usize::MAX, 0.05));
    }

    #[test]
    fn many_values_and_ties_take_the_normal_distribution() {
        let low: Vec<f64> = (0..40).map(f64::from).collect();
        let high: Vec<f64> = low.iter().map(|value| value + 8.0).collect();
        let p = mann_whitney(&low, &high);
        assert!((0.002..0.03).contains(&p), "{p}");
        let equal = mann_whitney(&low, &low);
        assert!(equal > 0.99, "{equal}");
    }

    proptest! {
        #[test]
        fn counting_agrees_with_enumeration(mut values in prop::collection::hash_set(0..10_000u32, 4..10), split in 1..4usize) {
            let values: Vec<f64> = values.drain().map(f64::from).collect();
            let (a, b) = values.split_at(split.min(values.len() - 1));
            let (counted, enumerated) = (mann_whitney(a, b), by_enumeration(a, b));
            prop_assert!((counted - enumerated).abs() < 1e-9, "{} and {}", counted, enumerated);
            prop_assert!((counted - mann_whitney(b, a)).abs() < 1e-12);
        }
    }
}
