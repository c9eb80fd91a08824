//! Ratios, tables and the verdict.

use serde_json::{Map, Value, json};
use tidekv_cli::exit::Outcome;

use super::Plan;
use super::calibrate::Calibration;
use super::measure::Measured;
use super::scenario::{Peaks, Scenario};
use crate::overhead::report::{VALUE_HEADER, side, value_row};
use crate::result::BenchResult;
use crate::servers::drive::Answers;
use crate::servers::memory::MemorySummary;
use crate::statistics::{Bootstrap, Confidence, Estimate, enough_pairs, median};
use crate::stats::{Samples, to_f64};
use crate::table::{Table, format_figure, format_ns};

/// Elastic memory is no worse as long as its mean TTFT is at least so many times as good.
const NO_WORSE: f64 = 0.95;
const NAMES: [&str; 2] = ["static", "elastic"];

/// All scenarios of a run.
#[derive(Debug)]
pub(super) struct Report {
    scenarios: Vec<ScenarioReport>,
    names: Vec<String>,
    calibration: Calibration,
    repeats: u32,
}

/// One scenario: everything of both sides together, model by model, repeat by repeat.
#[derive(Debug)]
struct ScenarioReport {
    scenario: Scenario,
    sides: [Answers; 2],
    /// Of each model, repeat by repeat.
    models: Vec<Vec<[Answers; 2]>>,
    /// Of all models together.
    repeats: Vec<[Answers; 2]>,
}

/// The mean in nanoseconds.
fn mean(times: &Samples) -> Option<f64> {
    times.percentiles().map(|percentiles| percentiles.avg)
}

fn p99(times: &Samples) -> Option<f64> {
    times.percentile(99).map(to_f64)
}

/// A figure of a repeat's times.
type Of = fn(&Samples) -> Option<f64>;

/// Static over elastic, how many times sooner: the median of the repeats. Sides that were served one after the other belong
/// together, and a repeat in which the machine hiccuped moves a median little.
fn ratio(repeats: &[[Answers; 2]], of: Of) -> Option<Estimate> {
    let pair = |[fixed, elastic]: &[Answers; 2]| Some((of(&elastic.ttft)?, of(&fixed.ttft)?));
    let pairs: Vec<(f64, f64)> = repeats.iter().filter_map(pair).collect();
    Bootstrap::default().paired_ratio(&pairs)
}

impl ScenarioReport {
    fn of(scenario: &Scenario, measured: &Measured) -> Self {
        let all = |pick: &dyn Fn(usize, usize) -> bool| {
            measured.sides.each_ref().map(|repeats| {
                let mut all = Answers::default();
                let mut memory = Vec::new();
                for (repeat, models) in repeats.iter().enumerate() {
                    let picked: Vec<&Answers> = models
                        .iter()
                        .enumerate()
                        .filter(|(model, _)| pick(repeat, *model))
                        .map(|(_, answers)| answers)
                        .collect();
                    let before = all.duration;
                    picked.iter().for_each(|answers| all.extend(answers));
                    if scenario.peaks == Peaks::Simultaneous {
                        // Side by side: their times do not add up.
                        all.duration = before + picked.iter().map(|answers| answers.duration).max().unwrap_or_default();
                    }
                    let pools: Vec<MemorySummary> = picked.iter().filter_map(|answers| answers.memory).collect();
                    if !pools.is_empty() {
                        memory.push(MemorySummary::sum(&pools));
                    }
                }
                all.memory = MemorySummary::over(memory.into_iter());
                all
            })
        };
        let repeats = measured.sides[0].len();
        Self {
            scenario: scenario.clone(),
            sides: all(&|_, _| true),
            models: (0..scenario.models)
                .map(|one| (0..repeats).map(|wanted| all(&|repeat, model| (repeat, model) == (wanted, one))).collect())
                .collect(),
            repeats: (0..repeats).map(|wanted| all(&|repeat, _| repeat == wanted)).collect(),
        }
    }

    /// The most of the budget that requests used: of one model where peaks are apart, of all together where they meet.
    fn peak_need(&self, budget_bytes: u64) -> Option<f64> {
        let used = |sides: &[Answers; 2]| sides[1].memory.map(|memory| memory.peak.used);
        let most = match self.scenario.peaks {
            Peaks::Disjoint => self.models.iter().flatten().filter_map(used).reduce(f64::max),
            Peaks::Simultaneous => self.repeats.iter().filter_map(used).reduce(f64::max),
        };
        most.map(|bytes| bytes / to_f64(budget_bytes))
    }

    fn figures(&self, names: &[String], budget_bytes: u64) -> Map<String, Value> {
        let mut figures = ratios(&self.repeats);
        let models = self.models.iter().zip(names).map(|(repeats, name)| (name.clone(), ratios(repeats).into()));
        figures.insert("models".to_owned(), Value::Object(models.collect()));
        let repeats = self.repeats.chunks(1).map(|repeat| Value::Object(ratios(repeat)));
        figures.insert("repeats".to_owned(), repeats.collect());
        for (name, all) in NAMES.iter().zip(&self.sides) {
            let mut own = side(all);
            for (figure, times) in [("ttft", &all.ttft), ("e2e", &all.e2e)] {
                if let Some(mean) = mean(times) {
                    own[format!("{figure}_mean_ms")] = json!(mean / 1e6);
                }
            }
            figures.insert((*name).to_owned(), own);
        }
        if let Some(need) = self.peak_need(budget_bytes) {
            figures.insert("peak_need".to_owned(), need.into());
        }
        figures.insert("offered_over_compute".to_owned(), self.scenario.offered.into());
        figures.insert("failed".to_owned(), json!(self.failed()));
        figures
    }

    fn failed(&self) -> usize {
        self.sides.iter().map(|side| side.failed).sum()
    }

    fn is_worse(&self) -> bool {
        self.failed() > 0 || ratio(&self.repeats, mean).is_none_or(|ratio| ratio.value < NO_WORSE)
    }
}

fn ratios(repeats: &[[Answers; 2]]) -> Map<String, Value> {
    let (mut figures, mut intervals) = (Map::new(), Map::new());
    for (name, of) in [("ttft_mean", mean as Of), ("ttft_p99", p99)] {
        if let Some(ratio) = ratio(repeats, of) {
            figures.insert(format!("{name}_ratio"), ratio.value.into());
            intervals.insert(name.to_owned(), json!([ratio.low, ratio.high]));
        }
    }
    // With fewer the interval would be too narrow to be one.
    if enough_pairs(repeats.len(), Confidence::USUAL.risk()) {
        figures.insert("ci".to_owned(), intervals.into());
    }
    figures
}

impl Report {
    pub(super) fn of(plan: &Plan, calibration: &Calibration, measured: Vec<Measured>) -> Self {
        let scenarios =
            plan.scenarios.iter().zip(&measured).map(|(scenario, measured)| ScenarioReport::of(scenario, measured));
        Self {
            scenarios: scenarios.collect(),
            names: plan.names.clone(),
            calibration: calibration.clone(),
            repeats: plan.repeats,
        }
    }

    fn verdict(&self) -> String {
        let of = |report: &ScenarioReport| {
            let times =
                |of| ratio(&report.repeats, of).map_or_else(|| "-".to_owned(), |ratio| format_figure(ratio.value));
            let failed =
                if report.failed() > 0 { format!(", {} requests failed", report.failed()) } else { String::new() };
            format!(
                "{}: TTFT {} times lower in the mean, {} at p99{failed}",
                report.scenario.name,
                times(mean),
                times(p99)
            )
        };
        self.scenarios.iter().map(of).collect::<Vec<_>>().join("; ")
    }

    pub(super) fn outcome(&self) -> Outcome {
        if self.scenarios.iter().any(ScenarioReport::is_worse) { Outcome::Negative } else { Outcome::Done }
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
            for (name, all) in NAMES.iter().zip(&report.sides) {
                for (figure, times) in [("ttft", &all.ttft), ("itl", &all.itl), ("e2e", &all.e2e)] {
                    result.add_times(format!("{}.{name}.{figure}", report.scenario.name), times);
                }
            }
        }
        result.set_figure("capacity_per_s", self.calibration.capacity_per_s);
        result.set_figure("calibrated_in_use_bytes", self.calibration.in_use_bytes);
        result.set_figure("kv_budget_bytes", to_f64(budget));
        result.set_text("verdict", &self.verdict());
    }

    pub(super) fn tables(&self) -> String {
        let mib = |bytes: f64| format_figure(bytes / f64::from(1 << 20));
        let budget = to_f64(self.calibration.budget_bytes);
        let mut text = format!(
            "This machine computes {} requests/s; {} models share {} MiB of KV memory\n",
            format_figure(self.calibration.capacity_per_s),
            self.names.len(),
            mib(budget)
        );
        for report in &self.scenarios {
            text += &report.table(&self.names, self.calibration.budget_bytes);
        }
        text + &format!(
            "\nStatic over elastic, the median of {} repeats, from the intended time on.\n{}\n",
            self.repeats,
            self.verdict()
        )
    }
}

impl ScenarioReport {
    fn table(&self, names: &[String], budget_bytes: u64) -> String {
        let need = self.peak_need(budget_bytes).map_or_else(|| "-".to_owned(), |need| format!("{:.0} %", need * 100.0));
        let mut text = format!(
            "\n{}: {:.0} % of compute offered, requests used {need} of the budget at most\n\n",
            self.scenario.name,
            self.scenario.offered * 100.0
        );
        let header = ["model", "TTFT mean", "(elastic)", "times lower", "TTFT p99", "(elastic)", "times lower"];
        let mut table = Table::new(&header);
        let all = "all".to_owned();
        for (name, repeats) in names.iter().zip(&self.models).chain([(&all, &self.repeats)]) {
            let mut row = vec![name.clone()];
            for of in [mean as Of, p99] {
                for side in [0, 1] {
                    let values: Vec<f64> = repeats.iter().filter_map(|sides| of(&sides[side].ttft)).collect();
                    row.push(median(&values).map_or_else(|| "-".to_owned(), format_ns));
                }
                row.push(ratio(repeats, of).map_or_else(|| "-".to_owned(), |ratio| format_figure(ratio.value)));
            }
            table.row(&row);
        }
        let mut values = Table::new(&VALUE_HEADER);
        for (name, all) in NAMES.iter().zip(&self.sides) {
            values.row(&value_row("all models".to_owned(), name, all));
        }
        text += &table.render();
        text + "\n" + &values.render()
    }
}
