//! `kvbench latency-benefit`: several models on one budget, busy at different times. How much sooner does the first token come
//! when memory goes where it is needed, instead of being split once for all?
//!
//! ```text
//!   budget      static partition                 elastic
//!   ███ 100 %   ─────────────────────────        ▄▄▄▄▄▄▄  model 1 has what it needs, then model 2, then 3
//!               a third each, always; a peak     ░░░░░░░
//!               needs more: requests wait
//! ```
//!
//! First the machine is measured: how many requests a second it computes when memory is no bound, and how much KV memory is in
//! use when it is offered the scenario's share of that. The budget follows, so that a peak needs the scenario's share of it.
//! Then both sides serve the same requests at the same times, A B B A. Latency counts from when a request was meant to be
//! sent, so waiting shows wherever it happens. In the end models that have the whole budget each serve them once: nothing
//! that shares it can be better, so elastic over that says how much of the possible there is.
//!
//! What the machine can do also says how long all this takes. Where that is more than `--time-limit`, there are fewer requests
//! in a peak or fewer repeats (`timing`), and the result says how many.
//!
//! | figure of `summary`                                   | meaning                                                      |
//! |-------------------------------------------------------|--------------------------------------------------------------|
//! | `ttft_mean_speedup`, `ttft_p99_speedup`               | static / elastic of the disjoint peaks: the middle of the repeats, whose requests are those of all models |
//! | `ci.ttft_mean_speedup`, `ci.ttft_p99_speedup`         | their 95 % intervals, by signed ranks of the repeats; from 6 repeats on |
//! | `models.NAME.ttft_mean_speedup`, `.ttft_p99_speedup`  | the same for each model                                      |
//! | `{static,elastic}.{ttft,e2e}_{mean,p50,p99}_ms`       | the latencies themselves; KV memory in use and held beside them |
//! | `unlimited.*`, `elastic_over_unlimited.{ttft_mean,ttft_p99}_ratio` | every model with the whole budget, and how near elastic comes to that: 1 is as good |
//! | `peak_need`, `offered_over_compute`                   | as measured: share of the budget in use at most, share of compute asked for |
//! | `requests_per_peak`, `failed`                         | how many there were                                          |
//! | `ledger.{looks,over_budget,peak_reserved_bytes}`      | of the elastic models: whether they ever reserved more than the budget |
//! | `repeats[]`                                           | `ttft_mean_speedup` and `ttft_p99_speedup` of each repeat     |
//! | `simultaneous.*`                                      | all of this for peaks that meet                               |
//! | `wall_s`                                              | how long the run took                                        |
//! | `verdict`                                             | one sentence                                                 |

mod calibrate;
mod ledger;
mod measure;
mod report;
mod scenario;
mod tables;
mod timing;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use tidekv_cli::exit::Outcome;
use tidekv_core::units::Bytes;

use crate::bench_config::BenchConfig;
use crate::output::OutputArgs;
use crate::result::BenchResult;
use crate::servers::kvserve::Backend;
use crate::servers::session::Session;
use measure::Measuring;
use scenario::Scenario;
use timing::{Fit, Wanted};

/// Default and with `--quick`.
const REPEATS: (u32, u32) = (6, 1);
const CALIBRATION_SECONDS: (f64, f64) = (8.0, 2.0);
const TIME_LIMIT_SECONDS: (f64, f64) = (520.0, 42.0);

/// Arguments of `kvbench latency-benefit`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct LatencyBenefitArgs {
    /// A scenario of your own instead of the two that ship; the keys are those of benchmarks/scenarios/*.yaml
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    pub scenario: Option<PathBuf>,

    /// Models and KVCACHED_* variables from the file of kvcached's guide, peaks from the scenarios that ship
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// What the models compute on; with cuda give a scenario of a model of that size
    #[arg(long, value_enum, value_name = "NAME", default_value = "cpu")]
    pub backend: Backend,

    /// What all models may hold together [default: measured, so that a peak needs the scenario's share of it]
    #[arg(long, value_name = "SIZE")]
    pub kv_budget: Option<Bytes>,

    /// Seconds that the whole run may take: fewer requests and repeats where that is too little, but for those that flags
    /// say [default: 520, with --quick 42]
    #[arg(long, value_name = "SEC")]
    pub time_limit: Option<f64>,

    /// Requests of each peak [default: the scenario's, as far as there is time]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub requests_per_peak: Option<u32>,

    /// Tokens of a prompt [default: the scenario's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub input_len: Option<u32>,

    /// Tokens of an answer [default: the scenario's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub output_len: Option<u32>,

    /// How often each side serves each scenario [default: 6 as far as there is time, with --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: Option<u32>,

    /// Seconds of measuring the machine first, twice [default: 8, with --quick 2]
    #[arg(long, value_name = "SEC")]
    pub calibration: Option<f64>,

    /// Seed of prompts and arrivals
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench latency-benefit                              # three models, peaks apart, then peaks that meet
  kvbench latency-benefit --quick                      # within a minute
  kvbench latency-benefit --time-limit 1800            # longer peaks and all repeats on a slow machine
  kvbench latency-benefit --config bench-config.yaml   # the models of kvcached's guide
  kvbench latency-benefit --scenario mine.yaml --output mine.json

Exit status: 0 elastic memory is no worse (mean TTFT at least 0.95 times as good in every scenario, nothing failed, the
ledger never over budget), 1 it is, 2 error, 130 interrupted (what was measured is written).";

/// The checked arguments, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    scenarios: Vec<Scenario>,
    names: Vec<String>,
    models: Vec<String>,
    backend: Backend,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_budget_bytes: Option<u64>,
    /// As wanted; the result says how many there was time for.
    repeats: u32,
    #[serde(skip)]
    repeats_fixed: bool,
    #[serde(skip)]
    requests_fixed: bool,
    time_limit_s: f64,
    calibration_s: f64,
    seed: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    variables: Vec<(String, String)>,
    utilization: f64,
}

impl Plan {
    fn of(args: &LatencyBenefitArgs) -> anyhow::Result<Self> {
        let quick = args.output.quick;
        let seconds = |(usual, quick_one): (f64, f64)| if quick { quick_one } else { usual };
        let config = args.config.as_deref().map(BenchConfig::read).transpose()?;
        let mut scenarios = match &args.scenario {
            Some(path) => vec![Scenario::read(path)?],
            None => Scenario::shipped()?.to_vec(),
        };
        for scenario in &mut scenarios {
            if let Some(config) = &config {
                scenario.adopt(config);
            }
            if let Some(requests) = args.requests_per_peak {
                scenario.requests_per_peak = requests as usize;
            }
            scenario.input_len = args.input_len.unwrap_or(scenario.input_len);
            scenario.output_len = args.output_len.unwrap_or(scenario.output_len);
            scenario.check()?;
        }
        let count = scenarios.iter().map(|scenario| scenario.models).max().unwrap_or(0);
        let of_file = config.as_ref().filter(|config| !config.models.is_empty());
        let models = (1..=count).map(|n| match of_file {
            Some(config) => config.models[n - 1].path.clone(),
            None => scenarios[0].model(n),
        });
        let names = (1..=count).map(|n| match of_file {
            Some(config) => config.models[n - 1].name.clone(),
            None => format!("model-{n}"),
        });
        let plan = Self {
            names: names.collect(),
            models: models.collect(),
            backend: args.backend,
            kv_budget_bytes: args.kv_budget.map(|budget| budget.0),
            repeats: args.repeats.unwrap_or(if quick { REPEATS.1 } else { REPEATS.0 }),
            repeats_fixed: args.repeats.is_some(),
            requests_fixed: args.requests_per_peak.is_some(),
            time_limit_s: args.time_limit.unwrap_or(seconds(TIME_LIMIT_SECONDS)),
            calibration_s: args.calibration.unwrap_or(seconds(CALIBRATION_SECONDS)),
            seed: args.seed,
            variables: config.as_ref().map(BenchConfig::variables).unwrap_or_default(),
            utilization: config.as_ref().map_or(1.0, BenchConfig::utilization),
            scenarios,
        };
        ensure!(plan.kv_budget_bytes != Some(0), "--kv-budget is 0");
        ensure!(
            plan.calibration_s > 0.0 && plan.calibration_s <= 3600.0,
            "--calibration is {}: give up to an hour",
            plan.calibration_s
        );
        ensure!(
            plan.time_limit_s > 0.0 && plan.time_limit_s <= 86_400.0,
            "--time-limit is {}: give up to a day",
            plan.time_limit_s
        );
        Ok(plan)
    }

    fn wanted(&self) -> Wanted {
        Wanted { repeats: self.repeats, repeats_fixed: self.repeats_fixed, requests_fixed: self.requests_fixed }
    }

    fn calibration(&self) -> Duration {
        Duration::from_secs_f64(self.calibration_s)
    }
}

/// Measures, prints and keeps the result.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "seconds of at most a day, not negative")]
pub fn run(args: &LatencyBenefitArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    let mut result = BenchResult::new("latency-benefit", &plan, plan.backend.host())?;
    let session = Session::begin()?;
    let started = Instant::now();
    // In seconds: what is left of it is known once the machine is measured.
    let progress = output.progress(plan.time_limit_s as u64);
    let calibrated = calibrate::calibrate(&plan, &session, &progress);
    let Some(calibration) = session.unless_interrupted(calibrated)? else {
        // Neither side has served anything: there is nothing to write.
        return Ok(session.interrupt().outcome(Outcome::Done));
    };
    let elapsed_s = started.elapsed().as_secs_f64();
    let fit = Fit::of(&plan.scenarios, calibration.pace(), plan.wanted(), plan.time_limit_s - elapsed_s);
    progress.expect((elapsed_s + fit.expected_s) as u64);
    progress.at(elapsed_s as u64);
    let measuring =
        Measuring { plan: &plan, calibration: &calibration, fit, started, session: &session, progress: &progress };
    let measured = measuring.measure()?;
    drop(progress);
    let report = report::Report::of(&plan, &calibration, fit, &measured);
    report.fill(&mut result);
    result.set_figure("wall_s", started.elapsed().as_secs_f64());
    result.set_partial(session.is_interrupted());
    output.emit(&result, &report.tables())?;
    Ok(session.interrupt().outcome(report.outcome()))
}
