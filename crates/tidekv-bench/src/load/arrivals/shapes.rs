//! What rates and gaps are made of: a wave between two rates, and gaps that are gamma distributed.

use crate::random::Random;

/// Two rates in turn, the high one first.
pub(super) struct Wave {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) period: f64,
    pub(super) duty: f64,
}

impl Wave {
    /// When so many requests' worth of time is over: the rate is constant between two edges.
    pub(super) fn after(&self, at: f64, gap: f64) -> f64 {
        let mut period = (at / self.period).floor();
        let mut is_high = at - period * self.period < self.duty * self.period;
        let (mut at, mut left) = (at, gap);
        // Every period has a high part, so this ends.
        loop {
            let rate = if is_high { self.high } else { self.low };
            let edge = self.period * (period + if is_high { self.duty } else { 1.0 });
            let room = rate * (edge - at).max(0.0);
            if left < room {
                return at + left / rate;
            }
            left -= room;
            at = edge;
            period += if is_high { 0.0 } else { 1.0 };
            is_high = !is_high;
        }
    }
}

/// Gaps with mean 1.
pub(super) struct Gaps {
    pub(super) random: Random,
    pub(super) shape: f64,
}

impl Gaps {
    pub(super) fn next(&mut self) -> f64 {
        if self.shape.is_infinite() {
            1.0
        } else if self.shape < 1.0 {
            // A gamma below 1 is one above it, made smaller by a power of a uniform number.
            self.gamma(self.shape + 1.0) * self.random.unit().powf(1.0 / self.shape) / self.shape
        } else {
            self.gamma(self.shape) / self.shape
        }
    }

    /// Marsaglia and Tsang's method, for a shape of 1 and more.
    fn gamma(&mut self, shape: f64) -> f64 {
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let normal = self.normal();
            let cube = (1.0 + c * normal).powi(3);
            if cube > 0.0 && self.random.unit().ln() < 0.5 * normal * normal + d - d * cube + d * cube.ln() {
                return d * cube;
            }
        }
    }

    /// Box and Muller's.
    fn normal(&mut self) -> f64 {
        let (radius, angle) = ((-2.0 * self.random.unit().ln()).sqrt(), std::f64::consts::TAU * self.random.unit());
        radius * angle.cos()
    }
}
