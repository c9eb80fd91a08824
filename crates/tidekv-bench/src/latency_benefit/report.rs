//! Ratios and the verdict.

use serde_json::{Map, Value, json};
use tidekv_cli::exit::Outcome;

use super::Plan;
use super::calibrate::Calibration;
use super::ledger::LedgerLooks;
use super::measure::{Measured, MeasuredScenario, Served};
use super::scenario::{Peaks, Scenario};
use super::timing::Fit;
use crate::overhead::report::side;
use crate::result::BenchResult;
use crate::servers::drive::Answers;
use crate::servers::memory::MemorySummary;
use crate::statistics::{Confidence, Estimate, enough_pairs, paired_ratio};
use crate::stats::{Samples, to_f64};
use crate::table::format_figure;

/// Elastic memory is no worse as long as its mean TTFT is at least so many times as good.
const NO_WORSE: f64 = 0.95;
pub(super) const NAMES: [&str; 2] = ["static", "elastic"];

/// All scenarios of a run.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) scenarios: Vec<ScenarioReport>,
    pub(super) names: Vec<String>,
    pub(super) calibration: Calibration,
    pub(super) ledger: LedgerLooks,
    /// As many as there was time for.
    pub(super) repeats: usize,
    wanted_repeats: u32,
}

/// One scenario: everything of both sides together, model by model, repeat by repeat.
#[derive(Debug)]
pub(super) struct ScenarioReport {
    pub(super) scenario: Scenario,
    /// As many as there was time for.
    pub(super) requests_per_peak: usize,
    pub(super) sides: [Answers; 2],
    /// Of each model, repeat by repeat.
    pub(super) models: Vec<Vec<[Answers; 2]>>,
    /// Of all models together.
    pub(super) repeats: Vec<[Answers; 2]>,
    /// Of all models together, with the requests of the last repeat.
    pub(super) unlimited: Option<Answers>,
}

/// The mean in nanoseconds.
pub(super) fn mean(times: &Samples) -> Option<f64> {
    times.percentiles().map(|percentiles| percentiles.avg)
}

pub(super) fn p99(times: &Samples) -> Option<f64> {
    times.percentile(99).map(to_f64)
}

/// A figure of a repeat's times.
pub(super) type Of = fn(&Samples) -> Option<f64>;

/// The figures that are compared.
pub(super) const FIGURES: [(&str, Of); 2] = [("ttft_mean", mean as Of), ("ttft_p99", p99)];

/// Static over elastic, how many times sooner: the middle of the repeats. Sides that were served one after the other belong
/// together, and a repeat in which the machine hiccuped moves their middle little.
pub(super) fn ratio(repeats: &[[Answers; 2]], of: Of) -> Option<Estimate> {
    let pair = |[fixed, elastic]: &[Answers; 2]| Some((of(&elastic.ttft)?, of(&fixed.ttft)?));
    let pairs: Vec<(f64, f64)> = repeats.iter().filter_map(pair).collect();
    paired_ratio(&pairs, Confidence::USUAL)
}

/// All models of one side in one repeat.
fn together(scenario: &Scenario, served: &Served) -> Answers {
    let mut all = Answers::default();
    served.models.iter().for_each(|answers| all.extend(answers));
    if scenario.peaks == Peaks::Simultaneous {
        // Side by side: their times do not add up.
        all.duration = served.models.iter().map(|answers| answers.duration).max().unwrap_or_default();
    }
    all.memory = served.memory;
    all
}

impl ScenarioReport {
    fn of(scenario: &Scenario, fit: Fit, measured: &MeasuredScenario) -> Self {
        let count = measured.sides[0].len();
        let both = |of: &dyn Fn(&Served) -> Answers| -> Vec<[Answers; 2]> {
            (0..count).map(|repeat| measured.sides.each_ref().map(|side| of(&side[repeat]))).collect()
        };
        let repeats = both(&|served| together(scenario, served));
        let sides = [0, 1].map(|side| {
            let mut all = Answers::default();
            repeats.iter().for_each(|sides| all.extend(&sides[side]));
            all.memory = MemorySummary::over(repeats.iter().filter_map(|sides| sides[side].memory));
            all
        });
        Self {
            scenario: scenario.clone(),
            requests_per_peak: fit.requests(scenario),
            sides,
            models: (0..scenario.models).map(|model| both(&|served| served.models[model].clone())).collect(),
            repeats,
            unlimited: measured.unlimited.as_ref().map(|served| together(scenario, served)),
        }
    }

    /// The most of the budget that requests used: of one model where peaks are apart, of all together where they meet.
    pub(super) fn peak_need(&self, budget_bytes: u64) -> Option<f64> {
        let used = |sides: &[Answers; 2]| sides[1].memory.map(|memory| memory.peak.used);
        let most = match self.scenario.peaks {
            Peaks::Disjoint => self.models.iter().flatten().filter_map(used).reduce(f64::max),
            Peaks::Simultaneous => self.repeats.iter().filter_map(used).reduce(f64::max),
        };
        most.map(|bytes| bytes / to_f64(budget_bytes))
    }

    /// Elastic over models that lack nothing, with the same requests: 1 is as good.
    pub(super) fn over_unlimited(&self, of: Of) -> Option<f64> {
        Some(of(&self.repeats.last()?[1].ttft)? / of(&self.unlimited.as_ref()?.ttft)?)
    }

    fn figures(&self, names: &[String], budget_bytes: u64) -> Map<String, Value> {
        let mut figures = ratios(&self.repeats);
        let models = self.models.iter().zip(names).map(|(repeats, name)| (name.clone(), ratios(repeats).into()));
        figures.insert("models".to_owned(), Value::Object(models.collect()));
        let repeats = self.repeats.chunks(1).map(|repeat| Value::Object(ratios(repeat)));
        figures.insert("repeats".to_owned(), repeats.collect());
        let unlimited = self.unlimited.iter().map(|all| ("unlimited", all));
        for (name, all) in NAMES.into_iter().zip(&self.sides).chain(unlimited) {
            let mut own = side(all);
            for (figure, times) in [("ttft", &all.ttft), ("e2e", &all.e2e)] {
                if let Some(mean) = mean(times) {
                    own[format!("{figure}_mean_ms")] = json!(mean / 1e6);
                }
            }
            figures.insert(name.to_owned(), own);
        }
        let near =
            FIGURES.iter().filter_map(|(name, of)| Some((format!("{name}_ratio"), self.over_unlimited(*of)?.into())));
        let near: Map<String, Value> = near.collect();
        if !near.is_empty() {
            figures.insert("elastic_over_unlimited".to_owned(), near.into());
        }
        if let Some(need) = self.peak_need(budget_bytes) {
            figures.insert("peak_need".to_owned(), need.into());
        }
        figures.insert("offered_over_compute".to_owned(), self.scenario.offered.into());
        figures.insert("requests_per_peak".to_owned(), self.requests_per_peak.into());
        figures.insert("failed".to_owned(), json!(self.failed()));
        figures
    }

    fn failed(&self) -> usize {
        self.sides.iter().chain(&self.unlimited).map(|side| side.failed).sum()
    }

    fn is_worse(&self) -> bool {
        self.failed() > 0 || ratio(&self.repeats, mean).is_none_or(|ratio| ratio.value < NO_WORSE)
    }

    fn verdict(&self) -> String {
        let times = |of| ratio(&self.repeats, of).map_or_else(|| "-".to_owned(), |ratio| format_figure(ratio.value));
        let failed = if self.failed() > 0 { format!(", {} requests failed", self.failed()) } else { String::new() };
        format!("{}: TTFT {} times lower in the mean, {} at p99{failed}", self.scenario.name, times(mean), times(p99))
    }
}

fn ratios(repeats: &[[Answers; 2]]) -> Map<String, Value> {
    let (mut figures, mut intervals) = (Map::new(), Map::new());
    for (name, of) in FIGURES {
        if let Some(ratio) = ratio(repeats, of) {
            // By its name, so that a comparison knows that more is better.
            let name = format!("{name}_speedup");
            intervals.insert(name.clone(), json!([ratio.low, ratio.high]));
            figures.insert(name, ratio.value.into());
        }
    }
    // With fewer the interval would be too narrow to be one.
    if enough_pairs(repeats.len(), Confidence::USUAL.risk()) {
        figures.insert("ci".to_owned(), intervals.into());
    }
    figures
}

impl Report {
    pub(super) fn of(plan: &Plan, calibration: &Calibration, fit: Fit, measured: &Measured) -> Self {
        let scenarios = plan.scenarios.iter().zip(&measured.scenarios);
        let scenarios = scenarios.map(|(scenario, measured)| ScenarioReport::of(scenario, fit, measured));
        Self {
            scenarios: scenarios.collect(),
            names: plan.names.clone(),
            calibration: calibration.clone(),
            ledger: measured.ledger,
            repeats: measured.scenarios.first().map_or(0, |scenario| scenario.sides[0].len()),
            wanted_repeats: plan.repeats,
        }
    }

    /// What there was no time for, if anything.
    pub(super) fn cut(&self) -> Option<String> {
        let shorter = self.scenarios.iter().find(|report| report.requests_per_peak < report.scenario.requests_per_peak);
        let requests = shorter.map(|report| {
            format!("{} of {} requests in a peak", report.requests_per_peak, report.scenario.requests_per_peak)
        });
        let fewer = self.repeats < self.wanted_repeats as usize;
        let repeats = fewer.then(|| format!("{} of {} repeats", self.repeats, self.wanted_repeats));
        let cut: Vec<String> = requests.into_iter().chain(repeats).collect();
        (!cut.is_empty()).then(|| cut.join(", "))
    }

    pub(super) fn verdict(&self) -> String {
        let over = match self.ledger.over_budget {
            0 => None,
            looks => Some(format!("the ledger was over budget in {looks} of {} looks", self.ledger.looks)),
        };
        self.scenarios.iter().map(ScenarioReport::verdict).chain(over).collect::<Vec<_>>().join("; ")
    }

    pub(super) fn outcome(&self) -> Outcome {
        let is_worse = self.ledger.over_budget > 0 || self.scenarios.iter().any(ScenarioReport::is_worse);
        if is_worse { Outcome::Negative } else { Outcome::Done }
    }

    pub(super) fn fill(&self, result: &mut BenchResult) {
        let budget = self.calibration.budget_bytes;
        for (place, report) in self.scenarios.iter().enumerate() {
            let figures = report.figures(&self.names, budget);
            // The first scenario is the answer; what comes behind it has its own name.
            match report.scenario.peaks {
                _ if place == 0 => result.summary.extend(figures),
                Peaks::Simultaneous => drop(result.summary.insert("simultaneous".to_owned(), figures.into())),
                Peaks::Disjoint => drop(result.summary.insert(report.scenario.name.clone(), figures.into())),
            }
            let unlimited = report.unlimited.iter().map(|all| ("unlimited", all));
            for (name, all) in NAMES.into_iter().zip(&report.sides).chain(unlimited) {
                for (figure, times) in [("ttft", &all.ttft), ("itl", &all.mean_itl), ("e2e", &all.e2e)] {
                    result.add_times(format!("{}.{name}.{figure}", report.scenario.name), times);
                }
            }
        }
        result.set_figure("capacity_per_s", self.calibration.capacity_per_s);
        result.set_figure("calibrated_in_use_bytes", self.calibration.in_use_bytes);
        result.set_figure("kv_budget_bytes", to_f64(budget));
        result.summary.insert("ledger".to_owned(), json!(self.ledger));
        if let Some(cut) = self.cut() {
            result.set_text("cut_to_fit", &cut);
        }
        result.set_text("verdict", &self.verdict());
    }
}
