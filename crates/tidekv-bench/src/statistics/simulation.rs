//! Runs that were made up, from a fixed sequence: what tests of conclusions are fed with.

use crate::random::Random;
use crate::stats::to_f64;

/// Made-up runs: what a machine does to a figure whose true value is `truth`.
pub(crate) struct Machine(Random);

impl Machine {
    pub(crate) fn new(seed: u64) -> Self {
        let mut random = Random::seeded(seed);
        // Small seeds give small first words.
        (0..16).for_each(|_| {
            random.next_word();
        });
        Self(random)
    }

    /// Between 0 and 1, and neither.
    pub(crate) fn uniform(&mut self) -> f64 {
        (to_f64(self.0.next_word() >> 11) + 0.5) / to_f64(1 << 53)
    }

    /// Around 0, with a deviation of 1.
    pub(crate) fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Runs that scatter by `noise`, a share.
    pub(crate) fn quiet(&mut self, runs: usize, truth: f64, noise: f64) -> Vec<f64> {
        (0..runs).map(|_| truth * (1.0 + noise * self.normal())).collect()
    }

    /// The same with a hiccup in every tenth run, which takes 15 % longer.
    pub(crate) fn with_hiccups(&mut self, runs: usize, truth: f64, noise: f64) -> Vec<f64> {
        let hiccup = |machine: &mut Self| if machine.uniform() < 0.1 { 1.15 } else { 1.0 };
        self.quiet(runs, truth, noise).into_iter().map(|run| run * hiccup(self)).collect()
    }
}
