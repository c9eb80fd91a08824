//! Shares: k of n answers were right; the same n questions asked twice.

use serde::Serialize;

use super::bootstrap::Confidence;
use super::normal;
use super::spread::whole;

/// A share and its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Proportion {
    /// k over n.
    pub value: f64,
    /// Lower end, never below 0.
    pub low: f64,
    /// Upper end, never above 1.
    pub high: f64,
}

/// Wilson's interval for `hits` of `trials`: unlike the textbook's it stays within 0 and 1 and is right for few trials
/// and for shares near the ends. `None` without trials.
pub fn wilson(hits: usize, trials: usize, confidence: Confidence) -> Option<Proportion> {
    if trials == 0 || hits > trials {
        return None;
    }
    let (k, n) = (whole(hits), whole(trials));
    let z = normal::quantile(1.0 - confidence.risk() / 2.0);
    let value = k / n;
    let middle = (value + z * z / (2.0 * n)) / (1.0 + z * z / n);
    let half = z / (1.0 + z * z / n) * (value * (1.0 - value) / n + z * z / (4.0 * n * n)).sqrt();
    // The ends are exact where all or nothing was hit; rounding must not exclude the share itself.
    Some(Proportion { value, low: (middle - half).clamp(0.0, value), high: (middle + half).clamp(value, 1.0) })
}

/// The same questions with A and with B.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Mcnemar {
    /// Right with A and wrong with B.
    pub only_a: usize,
    /// Wrong with A and right with B.
    pub only_b: usize,
    /// Probability that two which are equally good disagree so one-sidedly, exact.
    pub p_value: f64,
}

/// McNemar's test, exact: questions on which both agree say nothing, and those on which they disagree are a coin that
/// ought to be fair.
pub fn mcnemar(only_a: usize, only_b: usize) -> Mcnemar {
    Mcnemar { only_a, only_b, p_value: sign_test(only_a, only_b) }
}

/// Two-sided probability that a fair coin falls at least so one-sidedly.
pub fn sign_test(heads: usize, tails: usize) -> f64 {
    let (n, fewer) = (heads + tails, heads.min(tails));
    // Logarithms of C(n, k) / 2^n, from k = 0 up: 2^-n itself is too small for thousands of throws.
    let mut log_term = whole(n) * 0.5f64.ln();
    let mut sum = 0.0;
    for k in 0..=fewer {
        sum += log_term.exp();
        log_term += (whole(n - k) / whole(k + 1)).ln();
    }
    (2.0 * sum).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn values_of_the_tables() {
        // 70 of 100: 0.604 to 0.781, which is why a hundred questions cannot show a loss of five points.
        let share = wilson(70, 100, Confidence::USUAL).unwrap();
        assert!((share.low - 0.6042).abs() < 1e-4 && (share.high - 0.7811).abs() < 1e-4, "{share:?}");
        let none = wilson(0, 10, Confidence::USUAL).unwrap();
        assert!(none.low == 0.0 && (none.high - 0.2775).abs() < 1e-4, "{none:?}");
        assert_eq!(wilson(10, 10, Confidence::USUAL).unwrap().high, 1.0);
        assert_eq!((wilson(0, 0, Confidence::USUAL), wilson(2, 1, Confidence::USUAL)), (None, None));
    }

    #[test]
    fn a_coin_that_falls_one_way() {
        assert_eq!((sign_test(0, 0), sign_test(5, 5)), (1.0, 1.0));
        assert!((sign_test(0, 6) - 2.0 / 64.0).abs() < 1e-12);
        assert!((sign_test(1, 9) - 22.0 / 1024.0).abs() < 1e-12);
        let many = sign_test(5200, 4800);
        assert!((6.0e-5..6.6e-5).contains(&many), "{many}");
        assert_eq!(mcnemar(3, 9).p_value, sign_test(9, 3));
    }

    proptest! {
        #[test]
        fn an_interval_holds_its_share_and_narrows(hits in 0..200usize, misses in 0..200usize) {
            let trials = hits + misses;
            prop_assume!(trials > 0);
            let (one, ten) = (wilson(hits, trials, Confidence::USUAL).unwrap(), wilson(10 * hits, 10 * trials, Confidence::USUAL).unwrap());
            prop_assert!(0.0 <= one.low && one.low <= one.value && one.value <= one.high && one.high <= 1.0);
            prop_assert!(ten.high - ten.low < one.high - one.low);
        }

        #[test]
        fn a_test_is_a_probability_and_symmetric(heads in 0..3000usize, tails in 0..3000usize) {
            let p = sign_test(heads, tails);
            prop_assert!((0.0..=1.0).contains(&p));
            prop_assert_eq!(p, sign_test(tails, heads));
        }
    }
}
