//! `kvbench multi-model`: how many models fit into one budget and serve, with static memory and with elastic memory; and what
//! does sharing cost?
//!
//! ```text
//!   budget    ├──────────────── 256M ────────────────┤
//!   static    [ model 1: 160M          ][ 96M left: not enough for model 2 ]      sized for its own peak, held from the start
//!   elastic   [1 ][2 ][3 ][4 ]                                                    what requests need, while they need it
//! ```
//!
//! Servers are started one after the other on the same budget until one is refused; those that are up must then answer every
//! request of a load that all of them get at the same time. What sharing costs is measured against static servers that have
//! a budget each, so many times the memory: slices of all models together, A B B A, as `kvbench overhead` does it.
//!
//! | figure of `summary`                         | meaning                                                             |
//! |---------------------------------------------|---------------------------------------------------------------------|
//! | `models_static`, `models_elastic`           | how many were up and answered everything                            |
//! | `models_ratio`                              | elastic / static                                                    |
//! | `profiles[].{throughput,ttft_p50,itl_p50,e2e_p50}_ratio`, `.ci` | elastic on one budget / static with one each     |
//! | `profiles[].{static,elastic}.kv_*`          | KV memory of all models together: in use and held, mean and peak of what they had at the same moments |

mod fit;
mod measure;
mod report;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use tidekv_cli::exit::Outcome;
use tidekv_core::units::Bytes;

use crate::bench_config::BenchConfig;
use crate::compare::judge::Tolerance;
use crate::load::BaseUrl;
use crate::output::OutputArgs;
use crate::overhead::Profile;
use crate::result::BenchResult;
use crate::servers::drive::Lengths;
use crate::servers::kvserve::Backend;
use crate::servers::session::Session;
use crate::servers::sides::budget;

/// Default and with `--quick`.
const SECONDS: (f64, f64) = (60.0, 12.0);
const PAIRS: (u32, u32) = (12, 6);

/// Arguments of `kvbench multi-model`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct MultiModelArgs {
    /// What is served, every one with another seed [default: synthetic:tiny, or the models of --config in turn]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,

    /// What the models compute on
    #[arg(long, value_enum, value_name = "NAME", default_value = "cpu")]
    pub backend: Backend,

    /// What all models on one machine may hold together
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub kv_budget: Bytes,

    /// What a static model holds: sized for its own peak
    #[arg(long, value_name = "SIZE", default_value = "160M")]
    pub model_kv: Bytes,

    /// Stop counting here
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub max_models: u32,

    /// Requests a second to each model
    #[arg(long, value_name = "R", default_value_t = 4.0)]
    pub rate: f64,

    /// Kinds of requests
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "fixed")]
    pub profile: Vec<Profile>,

    /// Pairs of slices for each profile [default: 12, with --quick 6]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub pairs: Option<u32>,

    /// Seconds of measuring for each profile, both sides together [default: 60, with --quick 12]; 0 counts models alone
    #[arg(long, value_name = "SEC")]
    pub seconds: Option<f64>,

    /// How far a ratio may be from 1 to be called none
    #[arg(long, value_name = "PERCENT", default_value = "10%")]
    pub tolerance: Tolerance,

    /// Start each model of side A (without elastic memory) by this line, with a free port for {port} and 1, 2, ... for {n}
    #[arg(long, value_name = "LINE", requires = "b_cmd", conflicts_with_all = ["a_url", "b_url"])]
    pub a_cmd: Option<String>,

    /// The same for side B (with elastic memory)
    #[arg(long, value_name = "LINE", requires = "a_cmd")]
    pub b_cmd: Option<String>,

    /// The models of side A are there
    #[arg(long, value_name = "URL,...", value_delimiter = ',', requires = "b_url")]
    pub a_url: Vec<BaseUrl>,

    /// The models of side B are there
    #[arg(long, value_name = "URL,...", value_delimiter = ',', requires = "a_url")]
    pub b_url: Vec<BaseUrl>,

    /// Seconds that a server may take to answer for the first time
    #[arg(long, value_name = "SEC", default_value_t = 600)]
    pub start_timeout: u64,

    /// Models, load and KVCACHED_* variables from the file of kvcached's guide
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Seed of prompts and arrivals
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench multi-model                                        # how many kvserves fit into 256 MiB of KV memory
  kvbench multi-model --quick --profile short,long
  kvbench multi-model --kv-budget 4G --model-kv 3G --max-models 8
  kvbench multi-model --config bench-config.yaml
  kvbench multi-model --a-cmd 'vllm serve m --port {port} --gpu-memory-utilization 0.45' \\
      --b-cmd 'ENABLE_KVCACHED=true vllm serve m --port {port} --served-model-name m{n}'

With commands, models are counted, and those of one side are stopped before the other side starts.
Exit status: 0 measured, 2 error: not even one model could be started, 130 interrupted (what was measured is written).";

/// The checked arguments, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    models: Vec<String>,
    backend: Backend,
    kv_budget_bytes: u64,
    model_kv_bytes: u64,
    max_models: usize,
    rate: f64,
    profiles: Vec<(&'static str, Lengths)>,
    pairs: u32,
    seconds: f64,
    tolerance: f64,
    seed: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    variables: Vec<(String, String)>,
    #[serde(skip)]
    kind: Kind,
    #[serde(skip)]
    start_timeout: Duration,
}

/// What a side consists of.
#[derive(Clone, Debug)]
enum Kind {
    KvServe,
    Commands([String; 2]),
    Urls([Vec<BaseUrl>; 2]),
}

impl Plan {
    fn of(args: &MultiModelArgs) -> anyhow::Result<Self> {
        let config = args.config.as_deref().map(BenchConfig::read).transpose()?;
        let of_file: Vec<String> =
            config.iter().flat_map(|config| &config.models).map(|model| model.path.clone()).collect();
        let models = match &args.model {
            Some(model) => vec![model.clone()],
            None if of_file.is_empty() => vec!["synthetic:tiny".to_owned()],
            None => of_file,
        };
        let quick = args.output.quick;
        let lengths = |&profile: &Profile| {
            let mut lengths = profile.lengths();
            if let Some(config) = config.as_ref().filter(|_| profile == Profile::Fixed) {
                (lengths.input, lengths.output) = (config.benchmark.input_len, config.benchmark.output_len);
            }
            (profile.name(), lengths)
        };
        let kind = match (&args.a_cmd, &args.b_cmd) {
            (Some(a), Some(b)) => Kind::Commands([a.clone(), b.clone()]),
            _ if !args.a_url.is_empty() => Kind::Urls([args.a_url.clone(), args.b_url.clone()]),
            _ => Kind::KvServe,
        };
        let plan = Self {
            models,
            backend: args.backend,
            kv_budget_bytes: budget(args.kv_budget, config.as_ref())?,
            model_kv_bytes: args.model_kv.0,
            max_models: args.max_models as usize,
            rate: args.rate,
            profiles: args.profile.iter().map(lengths).collect(),
            pairs: args.pairs.unwrap_or(if quick { PAIRS.1 } else { PAIRS.0 }),
            seconds: args.seconds.unwrap_or(if quick { SECONDS.1 } else { SECONDS.0 }),
            tolerance: args.tolerance.share(),
            seed: args.seed,
            variables: config.as_ref().map(BenchConfig::variables).unwrap_or_default(),
            kind,
            start_timeout: Duration::from_secs(args.start_timeout),
        };
        ensure!(plan.rate > 0.0 && plan.rate <= 10_000.0, "--rate is {}: give requests a second above 0", plan.rate);
        ensure!(plan.seconds >= 0.0 && plan.seconds <= 86_400.0, "--seconds is {}: give up to a day", plan.seconds);
        ensure!(plan.model_kv_bytes > 0, "--model-kv is 0");
        Ok(plan)
    }

    /// The n-th model, counted from 1: synthetic ones with another seed each.
    fn model(&self, n: usize) -> String {
        let model = &self.models[(n - 1) % self.models.len()];
        let is_plain = model.starts_with("synthetic:") && model.matches(':').count() == 1;
        if is_plain { format!("{model}:{n}") } else { model.clone() }
    }
}

/// Measures, prints and keeps the result.
pub fn run(args: &MultiModelArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    let mut result = BenchResult::new("multi-model", &plan, plan.backend.host())?;
    let session = Session::begin()?;
    let profiles = if plan.seconds > 0.0 { plan.profiles.len() as u64 } else { 0 };
    let progress = output.progress(2 + profiles * u64::from(plan.pairs));
    let Some(counted) = session.unless_interrupted(fit::count(&plan, &session, &progress))? else {
        // Not both sides were counted: there is nothing to write.
        return Ok(session.interrupt().outcome(Outcome::Done));
    };
    let measured = measure::measure(&plan, &session, &counted, args.tolerance, &progress)?;
    drop(progress);
    report::fill(&mut result, &counted, &measured);
    result.set_partial(session.is_interrupted());
    output.emit(&result, &report::tables(&plan, &counted, &measured))?;
    Ok(session.interrupt().outcome(Outcome::Done))
}
