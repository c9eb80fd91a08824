//! `kvbench interference`: does a model that is answering feel it when a neighbour on the same device maps and unmaps pages?
//!
//! ```text
//!   kvserve      --streams answers at once, all of the same length: steady decoding, one step after the other
//!   neighbour    another process with a pool of its own on the same device and the same ledger: it maps pages at --map-rate, and
//!                unmaps the oldest as soon as it holds more than --pages
//!
//!   rate 100     A B B A A B B A ...      A the neighbour is there and rests, B it maps; a slice is one answer for every stream
//!                └┬┘ └┬┘                  B / A for each pair; the interval is of the pairs
//!   rate max     A B B A ...              as fast as the device lets it: where the limit is
//! ```
//!
//! What a model's *own* pool costs while it grows and shrinks is `kvbench overhead`'s question. Here the two share nothing but the
//! device, its driver and the ledger: whatever shows, one of these three lets a neighbour's memory calls reach into steps under way.
//!
//! A page is as large as those of a model (20 MiB), whatever is served, so that 100 pages a second are 2 GiB/s of new keys and values.
//! The verdict is about rates that somebody may have; `max` is measured beside them and decides only where it is all that was asked for.
//!
//! | figure of `summary`                                  | meaning                                                            |
//! |------------------------------------------------------|--------------------------------------------------------------------|
//! | `rates[] {map_rate}`                                 | pages a second that were asked for, or `"max"`                      |
//! | `rates[].{itl_p50,itl_p99,tokens_per_s}_ratio`       | mapping / quiet, over the pairs                                     |
//! | `rates[].ci.*`, `.verdicts.*`                        | the 95 % interval of each, and what it comes to                     |
//! | `rates[].{quiet,mapping}.{itl_p50_ms,itl_p99_ms,tokens_per_s}` | the sides themselves, all slices together                 |
//! | `rates[].mapped_pages_per_s`, `.mapped_gib_per_s`    | what the neighbour managed                                          |
//! | `rates[].{map,unmap}_us.{p50,p99}`                   | its calls, ledger included, for --map-batch pages                   |
//! | `failed`, `verdict`                                  | requests that failed; one sentence                                  |

mod judge;
mod measure;
mod neighbour;
mod plan;
mod report;

use std::fmt;
use std::str::FromStr;

use clap::Args;
use serde::Serialize;
use tidekv_cli::exit::Outcome;
use tidekv_core::units::Bytes;

use crate::compare::judge::Tolerance;
use crate::list::List;
use crate::output::OutputArgs;
use crate::result::BenchResult;
use crate::servers::kvserve::Backend;
use crate::servers::session::Session;
use plan::Plan;

pub use neighbour::{NeighbourArgs, run as run_neighbour};

/// Arguments of `kvbench interference`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct InterferenceArgs {
    /// What is served [default: synthetic:tiny; on a GPU synthetic:llama-8b]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,

    /// What the server computes on, and where the neighbour maps
    #[arg(long, value_enum, value_name = "NAME", default_value = "cpu")]
    pub backend: Backend,

    /// KV memory of the server
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub kv_budget: Bytes,

    /// Answers under way at once
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub streams: u32,

    /// Tokens of a prompt
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub input_len: u32,

    /// Tokens of an answer: the steps of a slice [default: 256, with --quick 128]
    #[arg(long, value_name = "N")]
    pub output_len: Option<u32>,

    /// Pages that the neighbour maps in a second, and max: one measurement each [default: 100,1000,max; with --quick 100]
    #[arg(long, value_name = "R,...")]
    pub map_rate: Option<List<MapRate>>,

    /// Pages that it maps, and unmaps, at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub map_batch: u32,

    /// Bytes of a page
    #[arg(long, value_name = "SIZE", default_value = "20M")]
    pub page_size: Bytes,

    /// Pages that the neighbour holds
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub pages: u32,

    /// Have the neighbour write every page that it maps
    #[arg(long)]
    pub touch: bool,

    /// Pairs of slices for each rate [default: 24, with --quick 6]
    #[arg(long, value_name = "N")]
    pub pairs: Option<u32>,

    /// How far the median of the gaps between tokens may move
    #[arg(long, value_name = "PERCENT", default_value = "2%")]
    pub tolerance: Tolerance,

    /// How far their 99th percentile may
    #[arg(long, value_name = "PERCENT", default_value = "10%")]
    pub tail_tolerance: Tolerance,

    /// Seed of prompts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench interference --backend cuda                      # Llama 3.1 8B's shape, beside 100 and 1000 pages a second
  kvbench interference --backend cuda --map-rate 10,100,1000,max --touch --output interference.json
  kvbench interference --backend cuda --model synthetic:qwen-0.5b --streams 1
  kvbench interference --quick --page-size 2M              # on the processor: pages of host memory

The neighbour's limit, max, is shown and decides nothing, unless it is the only rate.
Exit status: 0 within the tolerances (or better), 1 interference, or underpowered: too noisy to tell, 2 error, 130
interrupted (what was measured is written).";

/// How fast the neighbour maps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MapRate {
    /// Pages a second.
    Pages(f64),
    /// As many as the device lets it.
    Max,
}

impl MapRate {
    /// Pages a second; `None` for as many as possible.
    fn per_s(self) -> Option<f64> {
        match self {
            Self::Pages(rate) => Some(rate),
            Self::Max => None,
        }
    }
}

impl FromStr for MapRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "max" => Ok(Self::Max),
            Ok(rate) if rate > 0.0 && rate <= 1e6 => Ok(Self::Pages(rate)),
            _ => Err("not a rate: give pages a second above 0 and up to 1000000, or max".to_owned()),
        }
    }
}

impl fmt::Display for MapRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pages(rate) => write!(f, "{rate}/s"),
            Self::Max => f.write_str("max"),
        }
    }
}

impl Serialize for MapRate {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Pages(rate) => serializer.serialize_f64(*rate),
            Self::Max => serializer.serialize_str("max"),
        }
    }
}

/// Measures, prints and keeps the result.
pub fn run(args: &InterferenceArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let session = Session::begin()?;
    let output = args.output.open()?;
    let progress = output.progress(plan.slices());
    let (host, measured) = measure::measure(&plan, &session, &progress)?;
    drop(progress);
    let mut result = BenchResult::new("interference", &plan, host)?;
    let judged = judge::judge(&plan, &measured);
    report::fill(&mut result, &plan, &judged);
    output.emit(&result, &report::tables(&plan, &judged))?;
    Ok(session.interrupt().outcome(judged.outcome()))
}
