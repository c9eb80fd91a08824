//! Where values lie and how far they scatter.

/// The mean, or `None` without values.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / count(values))
}

/// The median: the middle value, or the mean of the two in the middle. `None` without values.
pub fn median(values: &[f64]) -> Option<f64> {
    quantile(values, 0.5)
}

/// The value below which the share `q` of 0 to 1 lies, interpolated linearly between neighbours as numpy and the load
/// generators of vLLM and SGLang do. `None` without values.
pub fn quantile(values: &[f64], q: f64) -> Option<f64> {
    if values.is_empty() {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    Some(quantile_of_sorted(&sorted, q))
}

/// Sample standard deviation over the mean, or `None` where that is no number: fewer than two values, a mean of zero.
pub fn coefficient_of_variation(values: &[f64]) -> Option<f64> {
    let mean = mean(values)?;
    if values.len() < 2 || mean == 0.0 {
        return None;
    }
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let variation = (squares / (count(values) - 1.0)).sqrt() / mean.abs();
    variation.is_finite().then_some(variation)
}

/// As [`quantile`]; `sorted` is sorted and not empty.
pub(super) fn quantile_of_sorted(sorted: &[f64], q: f64) -> f64 {
    let last = sorted.len() - 1;
    let place = q.clamp(0.0, 1.0) * count(&sorted[..last]);
    let (below, share) = (index(place.floor()).min(last), place.fract());
    let above = (below + 1).min(last);
    // Written so that equal neighbours give exactly their value.
    sorted[below] + (sorted[above] - sorted[below]) * share
}

pub(super) const fn count<T>(values: &[T]) -> f64 {
    whole(values.len())
}

#[expect(clippy::cast_precision_loss, reason = "a number of runs or answers, far below 2^53")]
pub(super) const fn whole(number: usize) -> f64 {
    number as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a place in a list, floored and clamped")]
const fn index(place: f64) -> usize {
    place as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn values_that_numpy_gives() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!((mean(&values), median(&values)), (Some(2.5), Some(2.5)));
        assert_eq!(quantile(&values, 0.99), Some(3.0 + 0.97));
        assert_eq!((quantile(&values, 0.0), quantile(&values, 1.0)), (Some(1.0), Some(4.0)));
        assert_eq!(median(&[7.0]), Some(7.0));
        let variation = coefficient_of_variation(&[1.0, 2.0, 3.0]).unwrap();
        assert!((variation - 0.5).abs() < 1e-12, "{variation}");
    }

    #[test]
    fn no_values_have_no_middle() {
        assert_eq!((mean(&[]), median(&[]), quantile(&[], 0.9)), (None, None, None));
        assert_eq!(coefficient_of_variation(&[1.0]), None);
        assert_eq!(coefficient_of_variation(&[-1.0, 1.0]), None, "nothing is a share of zero");
        assert_eq!(coefficient_of_variation(&[5.0, 5.0]), Some(0.0));
    }

    proptest! {
        #[test]
        fn quantiles_rise_and_stay_within_the_values(values in prop::collection::vec(-1e9..1e9f64, 1..40),
                                                     mut shares in prop::collection::vec(0.0..=1.0f64, 2..9)) {
            shares.sort_unstable_by(f64::total_cmp);
            let found: Vec<f64> = shares.iter().map(|&q| quantile(&values, q).unwrap()).collect();
            prop_assert!(found.windows(2).all(|pair| pair[0] <= pair[1] + 1e-6));
            let (low, high) = values.iter().fold((f64::MAX, f64::MIN), |(l, h), &v| (l.min(v), h.max(v)));
            prop_assert!(found.iter().all(|&value| value >= low - 1e-6 && value <= high + 1e-6));
        }
    }
}
