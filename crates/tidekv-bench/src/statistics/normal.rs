//! The normal distribution: how much lies below a value, and below which value a share lies.

use std::f64::consts::SQRT_2;

/// Share of a standard normal distribution below `z`.
pub(super) fn below(z: f64) -> f64 {
    if z > 0.0 { 1.0 - tail(z) } else { tail(-z) }
}

/// The value below which `share` of a standard normal distribution lies. `share` is above 0 and below 1.
pub(super) fn quantile(share: f64) -> f64 {
    debug_assert!(share > 0.0 && share < 1.0, "{share} is no share of a distribution");
    // Beyond 40 nothing is left that a floating-point number could tell from 0.
    let (mut low, mut high) = (-40.0, 40.0);
    for _ in 0..80 {
        let middle = f64::midpoint(low, high);
        if below(middle) < share { low = middle } else { high = middle }
    }
    f64::midpoint(low, high)
}

/// Share above `z`, which is not negative: half of erfc(z / sqrt 2).
fn tail(z: f64) -> f64 {
    let x = z / SQRT_2;
    if x < 2.5 { 0.5 - 0.5 * erf_series(x) } else { 0.5 * erfc_fraction(x) }
}

/// erf by its Taylor series around 0: sum of (-1)^n x^(2n+1) / (n! (2n+1)), times 2 / sqrt pi. Below 2.5 the terms
/// stay small enough that their cancelling costs a few of the 53 bits.
fn erf_series(x: f64) -> f64 {
    let (mut power, mut sum) = (x, x);
    for n in 1..60 {
        let n = f64::from(n);
        power *= -x * x / n;
        sum += power / (2.0 * n + 1.0);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

/// erfc by its continued fraction, evaluated from the inside: exp(-x^2) / sqrt pi / (x + (1/2)/(x + (2/2)/(x + ...))).
fn erfc_fraction(x: f64) -> f64 {
    let inner = (1..=80).rev().fold(x, |inner, k| x + f64::from(k) / 2.0 / inner);
    (-x * x).exp() * std::f64::consts::FRAC_2_SQRT_PI / 2.0 / inner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_the_tables() {
        for (z, share) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746_068_542_9),
            (1.959_963_984_540_054, 0.975),
            (3.0, 0.998_650_101_968_369_9),
            (-3.6, 0.000_159_108_590_157_533_6),
            (-6.0, 9.865_876_450_376_98e-10),
        ] {
            assert!((below(z) - share).abs() <= 1e-12 + 1e-9 * share, "{z}: {}", below(z));
        }
        for (share, z) in [(0.975, 1.959_963_984_540_054), (0.8, 0.841_621_233_572_914_3), (0.5, 0.0)] {
            assert!((quantile(share) - z).abs() < 1e-9, "{share}: {}", quantile(share));
        }
    }

    #[test]
    fn the_two_formulas_meet() {
        // 2.5 sqrt 2 is where they change over.
        let (left, right) = (below(-3.535_534), below(-3.535_533));
        assert!(left < right && right - left < 1e-8, "{left} {right}");
    }
}
