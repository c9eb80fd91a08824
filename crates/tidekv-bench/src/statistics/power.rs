//! What so many runs, with so much noise, can show: asked before a comparison, and after one that was inconclusive.

use super::bootstrap::Confidence;
use super::normal;
use super::spread::whole;

/// How often a change of the size that is asked about shall be found: the usual four times in five.
const POWER: f64 = 0.8;

/// A median scatters more than a mean, by sqrt(pi / 2) where values are normal. It is the price of ignoring outliers.
const MEDIAN_OVER_MEAN: f64 = 1.253_314_137_315_500_3;

/// The smallest change, as a share, that runs with these coefficients of variation show four times in five.
pub fn detectable_change(a: (usize, f64), b: (usize, f64), confidence: Confidence) -> Option<f64> {
    let ((a_runs, a_variation), (b_runs, b_variation)) = (a, b);
    if a_runs == 0 || b_runs == 0 {
        return None;
    }
    let variance = a_variation.powi(2) / whole(a_runs) + b_variation.powi(2) / whole(b_runs);
    let change = reach(confidence) * variance.sqrt();
    change.is_finite().then_some(change)
}

/// How many runs a side it takes to show a change of `share` four times in five, with this coefficient of variation.
/// `None` where no number of runs does.
pub fn runs_for(share: f64, variation: f64, confidence: Confidence) -> Option<usize> {
    let runs = 2.0 * (reach(confidence) * variation / share).powi(2);
    // Whoever needs a million runs needs a quieter machine.
    let fits = runs.is_finite() && runs < 1e6;
    fits.then(|| (1..).find(|&n| whole(n) >= runs)).flatten()
}

fn reach(confidence: Confidence) -> f64 {
    MEDIAN_OVER_MEAN * (normal::quantile(1.0 - confidence.risk() / 2.0) + normal::quantile(POWER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_runs_and_less_noise_show_less() {
        let at = |runs, variation| detectable_change((runs, variation), (runs, variation), Confidence::USUAL).unwrap();
        // 1.2533 * (1.96 + 0.8416) * sqrt(2 * 0.02^2 / 10)
        assert!((at(10, 0.02) - 0.031_406).abs() < 1e-5, "{}", at(10, 0.02));
        assert!(at(40, 0.02) < at(10, 0.02) && at(10, 0.01) < at(10, 0.02));
        assert_eq!(detectable_change((0, 0.1), (3, 0.1), Confidence::USUAL), None);
        assert_eq!(at(4, 0.0), 0.0);
    }

    #[test]
    fn the_two_questions_are_one() {
        let runs = runs_for(0.03, 0.02, Confidence::USUAL).unwrap();
        let shown = |runs| detectable_change((runs, 0.02), (runs, 0.02), Confidence::USUAL).unwrap();
        assert!(shown(runs) <= 0.03 && shown(runs - 1) > 0.03, "{runs}");
        assert_eq!(runs_for(0.0, 0.02, Confidence::USUAL), None);
        assert_eq!(runs_for(0.001, 1e9, Confidence::USUAL), None);
    }
}
