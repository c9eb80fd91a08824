//! `kvbench overhead`: what does elastic memory cost, at every rate that somebody may serve at?
//!
//! ```text
//!   rate 8     A B B A A B B A ...      A static, B elastic: two servers, up at the same time, one of them silent
//!              └┬┘ └┬┘                  a slice of a few seconds each; the same prompts in both slices of a pair
//!              pair pair                B / A for each pair; the interval is of the pairs
//!   ...
//!   saturated  A B B A A B B A ...      as many requests as fit, each followed by the next
//! ```
//!
//! Slices of a pair lie side by side in time, so what the machine does besides meets both alike; that A and B change places
//! takes away what a drift would do. A ratio whose interval is wider than the tolerance is called underpowered: it shows
//! neither that there is an overhead nor that there is none.
//!
//! | figure of `summary`                                      | meaning                                                     |
//! |----------------------------------------------------------|-------------------------------------------------------------|
//! | `rates[].{throughput,ttft_p50,itl_p50}_ratio`            | elastic / static, the median of the pairs' ratios; `rate` is a number, or `"inf"` where requests follow each other |
//! | `rates[].ci.{throughput,ttft_p50,itl_p50}`               | its 95 % interval, by the bootstrap over pairs               |
//! | `rates[].{static,elastic}.*`                             | throughput, latencies and KV memory (in use / held) themselves |
//! | `profiles[]`                                             | `name`, `rates[]` and memory utilisation of each `--profile`; `rates` is that of the first |
//! | `verdict`                                                | `no overhead beyond 3 %`, `overhead`, `faster` or `underpowered` |

pub(crate) mod judge;
mod measure;
mod plan;
pub(crate) mod report;

use clap::{Args, ValueEnum};
use serde::Serialize;
use tidekv_cli::exit::Outcome;

use crate::compare::judge::Tolerance;
use crate::host::HostInfo;
use crate::list::List;
use crate::output::OutputArgs;
use crate::result::BenchResult;
use crate::servers::drive::Lengths;
use crate::servers::session::Session;
use crate::servers::sides::SideArgs;
use plan::Plan;

/// Arguments of `kvbench overhead`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct OverheadArgs {
    /// What is compared.
    #[command(flatten)]
    pub sides: SideArgs,

    /// Requests a second, one measurement each [default: 1,2,4,8,16,32,64,128; with --quick 8,64]
    #[arg(long, value_name = "R,...")]
    pub rates: Option<List<Rate>>,

    /// Kinds of requests
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = "fixed")]
    pub profile: Vec<Profile>,

    /// Tokens of a prompt [default: those of the profile]
    #[arg(long, value_name = "N")]
    pub input_len: Option<u32>,

    /// Tokens of an answer [default: those of the profile]
    #[arg(long, value_name = "N")]
    pub output_len: Option<u32>,

    /// Pairs of slices for each rate [default: 12, with --quick 6]
    #[arg(long, value_name = "N")]
    pub pairs: Option<u32>,

    /// Seconds of measuring for each rate, both servers together [default: 45, with --quick 8]; the lowest rates get up to
    /// twice that
    #[arg(long, value_name = "SEC")]
    pub seconds: Option<f64>,

    /// Requests under way at the saturated point; 0 leaves it out
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub saturated: u32,

    /// How far a ratio may be from 1 to be called none
    #[arg(long, value_name = "PERCENT", default_value = "3%")]
    pub tolerance: Tolerance,

    /// Requests to each server before anything is measured [default: 100, with --quick 20]
    #[arg(long, value_name = "N")]
    pub warmup_requests: Option<u32>,

    /// Seed of prompts and arrivals
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench overhead                                     # elastic against static kvserve, 1 to 128 requests a second
  kvbench overhead --quick --rates 8,64
  kvbench overhead --profile short,varying,long --rates 8,32
  kvbench overhead --config bench-config.yaml          # the file of kvcached's guide
  kvbench overhead --model Qwen/Qwen3-0.6B --a-cmd 'vllm serve Qwen/Qwen3-0.6B --port {port}' \\
      --b-cmd 'ENABLE_KVCACHED=true vllm serve Qwen/Qwen3-0.6B --port {port}'
  kvbench overhead --a-url http://gpu1:8000 --b-url http://gpu1:8001

A is without elastic memory, B with it, and ratios are B / A. Commands are started by sh with a free port for {port}, one
server at a time unless --both-up says that both fit.
Exit status: 0 no overhead beyond the tolerance (or less than none), 1 overhead, or underpowered: too noisy to tell, 2 error.";

/// A rate, compared by what was written.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize)]
pub struct Rate(pub f64);

impl std::str::FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(rate) if rate > 0.0 && rate <= 10_000.0 => Ok(Self(rate)),
            _ => Err("not a rate: give requests a second above 0 and up to 10000".to_owned()),
        }
    }
}

/// What requests are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Profile {
    /// All alike: 128 tokens in, 16 out. What the guide calls a fixed workload
    Fixed,
    /// 16 in, 8 out: little memory, and little time for it to cost anything in
    Short,
    /// 32 to 480 in, 4 to 60 out
    Varying,
    /// 2048 in, 64 out
    Long,
}

impl Profile {
    /// As people write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fixed => "fixed",
            Self::Short => "short",
            Self::Varying => "varying",
            Self::Long => "long",
        }
    }

    /// How long its prompts and answers are.
    pub(crate) fn lengths(self) -> Lengths {
        let (input, output, spread) = match self {
            Self::Fixed => (128, 16, 0.0),
            Self::Short => (16, 8, 0.0),
            Self::Varying => (256, 32, 0.875),
            Self::Long => (2048, 64, 0.0),
        };
        Lengths { input, output, spread }
    }
}

/// Measures, prints and keeps the result.
pub fn run(args: &OverheadArgs) -> anyhow::Result<Outcome> {
    let session = Session::begin()?;
    let (plan, sides) = Plan::of(args)?;
    let output = args.output.open()?;
    let mut result = BenchResult::new("overhead", &plan, HostInfo::current())?;
    let progress = output.progress(plan.slices());
    let measured = measure::measure(&plan, &sides, &session, &progress)?;
    drop(progress);
    let judged = judge::judge(&plan, args.tolerance, &measured);
    report::fill(&mut result, &plan, &measured, &judged);
    output.emit(&result, &report::tables(&plan, &measured, &judged))?;
    Ok(judged.outcome())
}
