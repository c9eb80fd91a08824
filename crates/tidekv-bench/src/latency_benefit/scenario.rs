//! A scenario: how many models, when they are busy, and how much of memory and compute that takes.
//!
//! ```text
//!   disjoint      1 ▄▄▄▄                    a peak at a time, with a pause behind each
//!                 2      ▄▄▄▄
//!                 3           ▄▄▄▄
//!
//!   simultaneous  1 ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂         all at once, each at its part of the rate
//!                 2 ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂
//!                 3 ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂
//! ```
//!
//! Need and load are shares, of the budget and of what the machine computes: a fast machine gets more requests a second and
//! a larger budget, and the scenario stays the same. The two that ship are in `benchmarks/scenarios/`.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use crate::bench_config::BenchConfig;
use crate::load::Arrivals;
use crate::servers::drive::Lengths;
use crate::yaml;

const DISJOINT: &str = include_str!("../../../../benchmarks/scenarios/disjoint-peaks.yaml");
const SIMULTANEOUS: &str = include_str!("../../../../benchmarks/scenarios/simultaneous-peaks.yaml");
const MAX_MODELS: usize = 16;

/// See the [module](self).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Scenario {
    pub(super) name: String,
    /// What every model is, with another seed each.
    pub(super) model: String,
    pub(super) models: usize,
    pub(super) peaks: Peaks,
    pub(super) requests_per_peak: usize,
    pub(super) input_len: u32,
    pub(super) output_len: u32,
    /// Share of the budget that requests use at the height of a peak.
    pub(super) peak_need: f64,
    /// Share of what the machine computes that is asked of it during a peak.
    pub(super) offered: f64,
    /// How regular arrivals are: 1 is Poisson, more is steadier. Where every gap may be anything, the worst request of a
    /// peak tells of a chance crowd that no memory would have served sooner.
    #[serde(default = "poisson")]
    pub(super) burstiness: f64,
}

fn poisson() -> f64 {
    1.0
}

/// When models are busy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Peaks {
    /// One after the other.
    Disjoint,
    /// All at once.
    Simultaneous,
}

impl Scenario {
    /// The two that ship: the one that shows the benefit, and the one that must not be worse.
    pub(super) fn shipped() -> anyhow::Result<[Self; 2]> {
        let parse = |text| Self::parse(text).context("a scenario that ships");
        Ok([parse(DISJOINT)?, parse(SIMULTANEOUS)?])
    }

    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
        Self::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let scenario: Self = yaml::parse(text)?;
        scenario.check()?;
        Ok(scenario)
    }

    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!((2..=MAX_MODELS).contains(&self.models), "models is {}: give 2 to {MAX_MODELS}", self.models);
        ensure!(
            (1..=100_000).contains(&self.requests_per_peak),
            "requests_per_peak is {}: give 1 to 100000",
            self.requests_per_peak
        );
        ensure!(self.input_len > 0 && self.output_len > 0, "input_len and output_len are at least 1");
        for (name, share) in [("peak_need", self.peak_need), ("offered", self.offered)] {
            ensure!(share > 0.0 && share <= 1.0, "{name} is {share}: give a share above 0 and up to 1");
        }
        ensure!(
            self.burstiness > 0.0 && self.burstiness <= 1e6,
            "burstiness is {}: give 1 for Poisson, more for steadier arrivals",
            self.burstiness
        );
        Ok(())
    }

    /// The models and the lengths of kvcached's file; as many requests as it says, shared among the peaks.
    pub(super) fn adopt(&mut self, config: &BenchConfig) {
        if !config.models.is_empty() {
            self.models = config.models.len();
        }
        self.input_len = config.benchmark.input_len;
        self.output_len = config.benchmark.output_len;
        self.requests_per_peak = (config.benchmark.num_requests as usize).div_ceil(self.models.max(1));
    }

    pub(super) fn arrivals(&self, per_s: f64) -> Arrivals {
        Arrivals::Rate { per_s, burstiness: self.burstiness }
    }

    pub(super) fn lengths(&self) -> Lengths {
        Lengths { input: self.input_len, output: self.output_len, spread: 0.0 }
    }

    /// The n-th model, counted from 1.
    pub(super) fn model(&self, n: usize) -> String {
        let is_plain = self.model.starts_with("synthetic:") && self.model.matches(':').count() == 1;
        if is_plain { format!("{}:{n}", self.model) } else { self.model.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ships_is_what_is_promised() {
        let [disjoint, simultaneous] = Scenario::shipped().unwrap();
        assert_eq!((disjoint.peaks, disjoint.models), (Peaks::Disjoint, 3));
        assert!((0.6..=0.9).contains(&disjoint.peak_need) && disjoint.offered <= 0.7);
        assert_eq!((simultaneous.peaks, simultaneous.models), (Peaks::Simultaneous, 3));
        assert!(simultaneous.offered <= 0.7);
        let poisson = Scenario::parse(&DISJOINT.replace("burstiness: 4", "")).unwrap();
        assert_eq!(poisson.arrivals(3.0), Arrivals::poisson(3.0));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let broken = |from: &str, to: &str| format!("{:#}", Scenario::parse(&DISJOINT.replace(from, to)).unwrap_err());
        assert!(broken("models: 3", "models: 1").contains("models is 1"));
        assert!(broken("peak_need: 0.75", "peak_need: 1.5").contains("peak_need"));
        assert!(broken("offered:", "ofered:").contains("ofered"));
        assert!(broken("burstiness: 4", "burstiness: 0").contains("burstiness is 0"));
        assert!(broken("peaks: disjoint", "peaks: never").contains("never"));
    }
}
