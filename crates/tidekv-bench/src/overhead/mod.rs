//! `kvbench overhead`: what does elastic memory cost, at every rate that somebody may serve at?
//!
//! ```text
//!   round 1   rate 1    A B B A A B B A ...      A static, B elastic: two servers, up at the same time, one of them silent
//!             rate 2    └┬┘ └┬┘                  an eighth of a second each; the same requests in both slices of a pair
//!             ...       pair pair                each request's time with B / with A, and their median
//!             saturated                          as many requests as fit, each followed by the next
//!   round 2   both servers started anew, again
//!   ...                                          the interval is of the rounds
//! ```
//!
//! Slices of a pair lie side by side in time, so what the machine does besides meets both alike; that A and B change places
//! takes away what a drift would do, and what it makes to be first is taken out (`order`); that servers are started anew makes
//! what two processes happen to differ in part of the interval. A ratio whose interval is wider than the tolerance is called
//! underpowered: it shows neither that there is an overhead nor that there is none.
//!
//! There is so much time for all of it (`--minutes`), and rates whose intervals are still wide get more: see `allocate`.
//!
//! | figure of `summary`                                      | meaning                                                     |
//! |----------------------------------------------------------|-------------------------------------------------------------|
//! | `rates[].throughput_ratio`                               | elastic / static, the middle of the rounds' ratios; `rate` is a number, or `"inf"` where requests follow each other |
//! | `rates[].{ttft_p50,itl_p50,e2e_p50}_ratio`               | the smoothed median of all requests, each compared with itself: its time with elastic / with static memory |
//! | (ITL)                                                    | the mean gap of each answer, of which the median: where several tokens come in one read, single gaps say how they were read |
//! | `rates[].ci.{throughput,ttft_p50,itl_p50}`               | its 95 % interval, by signed ranks of the rounds              |
//! | `rates[].rounds`, `rates[].pairs`                        | how many rounds a rate was part of, and with how many pairs of slices |
//! | `rates[].{static,elastic}.*`                             | throughput, latencies and KV memory (in use / held) themselves |
//! | `profiles[]`                                             | `name`, `rates[]` and memory utilisation of each `--profile`; `rates` is that of the first |
//! | `starts`, `elapsed_s`                                    | how often servers were started, and how long everything took |
//! | `verdict`                                                | `no overhead beyond 3 %`, `overhead beyond 3 %`, `overhead that may be beyond 3 %`, `underpowered: ...`, or why nothing is concluded |

mod allocate;
pub(crate) mod judge;
pub(crate) mod measure;
mod order;
mod plan;
pub(crate) mod report;

use clap::{Args, ValueEnum};
use serde::Serialize;
use tidekv_cli::exit::Outcome;

use crate::compare::judge::Tolerance;
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

    /// Minutes for everything, servers' starts included; rates whose intervals are wide get more of them [default: 9, with
    /// --quick 0.75]
    #[arg(long, value_name = "MIN", conflicts_with_all = ["rounds", "seconds"])]
    pub minutes: Option<f64>,

    /// Instead: so many rounds, each of which is one sample of each rate [default: up to 24 within
    /// --minutes, else 10; with --quick 6]
    #[arg(long, visible_alias = "pairs", value_name = "N")]
    pub rounds: Option<u32>,

    /// And so many seconds of measuring for each rate, both servers and all rounds together [default: 45, with --quick 8];
    /// the lowest rates get up to twice that
    #[arg(long, value_name = "SEC")]
    pub seconds: Option<f64>,

    /// Requests under way at the saturated point; 0 leaves it out
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub saturated: u32,

    /// How far a ratio may be from 1 to be called none
    #[arg(long, value_name = "PERCENT", default_value = "3%")]
    pub tolerance: Tolerance,

    /// Requests to each server whenever it was started, before anything is measured [default: 100, with --quick 20]
    #[arg(long, value_name = "N")]
    pub warmup_requests: Option<u32>,

    /// Seed of prompts and arrivals
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Keep every request's times in the result
    #[arg(long)]
    pub save_detailed: bool,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench overhead                                     # elastic against static kvserve, 1 to 128 requests a second
  kvbench overhead --quick --rates 8,64
  kvbench overhead --minutes 30 --tolerance 1.5%       # more time, smaller differences
  kvbench overhead --rates 8 --rounds 24 --seconds 120 # as much as you say, wherever intervals lie
  kvbench overhead --profile short,varying,long --rates 8,32
  kvbench overhead --config bench-config.yaml          # the file of kvcached's guide
  kvbench overhead --model Qwen/Qwen3-0.6B --a-cmd 'vllm serve Qwen/Qwen3-0.6B --port {port}' \\
      --b-cmd 'ENABLE_KVCACHED=true vllm serve Qwen/Qwen3-0.6B --port {port}'
  kvbench overhead --a-url http://gpu1:8000 --b-url http://gpu1:8001

A is without elastic memory, B with it, and ratios are B / A. Commands are started by sh with a free port for {port}, one
server at a time unless --both-up says that both fit.
Exit status: 0 no overhead beyond the tolerance (or less than none), 1 overhead, or underpowered: too noisy to tell, 2 error,
130 interrupted (what was measured is written).";

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
    /// All alike: 128 tokens in, 32 out. What the guide calls a fixed workload
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
            Self::Fixed => (128, 32, 0.0),
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
    let mut result = BenchResult::new("overhead", &plan, sides.host())?;
    let progress = output.progress(u64::from(plan.design.rounds()));
    let measured = measure::measure(&plan, &sides, &session, &progress)?;
    drop(progress);
    let judged = judge::judge(&plan, args.tolerance, &measured);
    report::fill(&mut result, &plan, &measured, &judged);
    if args.save_detailed {
        result.set_more("pairs", report::pairs(&plan, &measured));
    }
    result.set_partial(measured.is_partial);
    output.emit(&result, &report::tables(&plan, &measured, &judged))?;
    Ok(session.interrupt().outcome(judged.outcome()))
}
