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
//! sent, so waiting shows wherever it happens.
//!
//! | figure of `summary`                                   | meaning                                                      |
//! |-------------------------------------------------------|--------------------------------------------------------------|
//! | `ttft_mean_ratio`, `ttft_p99_ratio`                   | static / elastic of the disjoint peaks: the median of the repeats, whose requests are those of all models |
//! | `ci.ttft_mean`, `ci.ttft_p99`                         | their 95 % intervals, by the bootstrap over repeats; from 6 repeats on |
//! | `models.NAME.ttft_mean_ratio`, `.ttft_p99_ratio`      | the same for each model                                      |
//! | `{static,elastic}.{ttft,e2e}_{mean,p50,p99}_ms`       | the latencies themselves; KV memory in use and held beside them |
//! | `peak_need`, `offered_over_compute`                   | as measured: share of the budget in use at most, share of compute asked for |
//! | `repeats[]`                                           | `ttft_mean_ratio` and `ttft_p99_ratio` of each repeat         |
//! | `simultaneous.*`                                      | all of this for peaks that meet                               |
//! | `verdict`                                             | one sentence                                                 |

mod calibrate;
mod measure;
mod report;
mod scenario;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use tidekv_cli::exit::Outcome;
use tidekv_core::units::Bytes;

use crate::bench_config::BenchConfig;
use crate::host::HostInfo;
use crate::output::OutputArgs;
use crate::result::BenchResult;
use crate::servers::kvserve::Backend;
use crate::servers::session::Session;
use scenario::Scenario;

/// Default and with `--quick`.
const REPEATS: (u32, u32) = (6, 1);
const CALIBRATION_SECONDS: (f64, f64) = (8.0, 2.0);
/// Part of a peak's requests that `--quick` sends.
const QUICK_PART: usize = 2;

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

    /// Requests of each peak [default: the scenario's, with --quick half of it]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub requests_per_peak: Option<u32>,

    /// Tokens of a prompt [default: the scenario's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub input_len: Option<u32>,

    /// Tokens of an answer [default: the scenario's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub output_len: Option<u32>,

    /// How often each side serves each scenario [default: 6, with --quick 1]
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
  kvbench latency-benefit --quick
  kvbench latency-benefit --config bench-config.yaml   # the models of kvcached's guide
  kvbench latency-benefit --scenario mine.yaml --output mine.json

Exit status: 0 elastic memory is no worse (mean TTFT at least 0.95 times as good in every scenario), 1 it is, 2 error.";

/// The checked arguments, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    scenarios: Vec<Scenario>,
    names: Vec<String>,
    models: Vec<String>,
    backend: Backend,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_budget_bytes: Option<u64>,
    repeats: u32,
    calibration_s: f64,
    seed: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    variables: Vec<(String, String)>,
    utilization: f64,
}

impl Plan {
    fn of(args: &LatencyBenefitArgs) -> anyhow::Result<Self> {
        let quick = args.output.quick;
        let config = args.config.as_deref().map(BenchConfig::read).transpose()?;
        let mut scenarios = match &args.scenario {
            Some(path) => vec![Scenario::read(path)?],
            None => Scenario::shipped()?.to_vec(),
        };
        for scenario in &mut scenarios {
            if let Some(config) = &config {
                scenario.adopt(config);
            }
            if quick {
                scenario.requests_per_peak = (scenario.requests_per_peak / QUICK_PART).max(1);
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
            calibration_s: args.calibration.unwrap_or(if quick {
                CALIBRATION_SECONDS.1
            } else {
                CALIBRATION_SECONDS.0
            }),
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
        Ok(plan)
    }

    fn calibration(&self) -> Duration {
        Duration::from_secs_f64(self.calibration_s)
    }
}

/// Measures, prints and keeps the result.
pub fn run(args: &LatencyBenefitArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    let mut result = BenchResult::new("latency-benefit", &plan, HostInfo::current())?;
    let session = Session::begin()?;
    let steps = plan.scenarios.len() as u64 * u64::from(plan.repeats) * 2;
    let progress = output.progress(1 + steps);
    let calibration = calibrate::calibrate(&plan, &session, &progress)?;
    let measured = measure::measure(&plan, &calibration, &session, &progress)?;
    drop(progress);
    let report = report::Report::of(&plan, &calibration, measured);
    report.fill(&mut result);
    output.emit(&result, &report.tables())?;
    Ok(report.outcome())
}
