//! `kvbench decode`: how long does a decode step take, beside the least that it can: reading the model's weights once?
//!
//! ```text
//!   prompt     every row gets --context tokens, as an engine would compute them, in chunks
//!   step       one more token for every row, the likeliest: from the call to its answer, as an engine waits for it
//!   floor      one reading of all weights with nothing else to do, after every eighth step: what slows one slows both
//! ```
//!
//! No server and no client: the engine's own steps, over a pool of its own. At batch 1 a step is little more than its weights; with
//! many rows and long contexts it reads keys and values as well, which `kvbench attention` measures.
//!
//! | figure of `summary`                          | meaning                                                            |
//! |----------------------------------------------|--------------------------------------------------------------------|
//! | `cells[] {batch, context}`                   | a row of the table                                                 |
//! | `cells[] .step_ms.{p50,p99}`                 | a decode step                                                      |
//! | `cells[] .tokens_per_s`                      | batch over the median step                                         |
//! | `cells[] .weights_read_ms`                   | the floor, median                                                  |
//! | `cells[] .ratio_to_floor`                    | median step over median floor                                      |
//! | `cells[] .prompt_tokens_per_s`               | of the prompts before them                                         |
//! | `weight_bytes`, `weights_read_gb_per_s`      | what a floor reads, and how fast                                   |
//! | `ratio_to_floor`                             | of the first cell                                                  |

#[cfg(feature = "serve")]
mod engine;
#[cfg(feature = "serve")]
mod host_floor;
#[cfg(feature = "serve")]
mod report;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use tidekv_cli::exit::Outcome;

use crate::list::List;
use crate::output::{Output, OutputArgs};
use crate::servers::kvserve::Backend;

/// Default and with `--quick`.
const STEPS: (u32, u32) = (128, 32);
const MAX_STEPS: u32 = 1_000_000;
const MAX_BATCH: u32 = 1024;
const MAX_CONTEXT: u32 = 100_000;

/// Arguments of `kvbench decode`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct DecodeArgs {
    /// The model: synthetic:tiny, small, qwen-0.5b, llama-1b, llama-8b [default: synthetic:small; on a GPU synthetic:llama-8b]
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,

    /// Rows of a step, one measurement each
    #[arg(long, value_name = "N,...", default_value = "1")]
    pub batch: List<u32>,

    /// Tokens that each row has before the first step
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub context: u32,

    /// Steps that are measured [default: 128, with --quick 32]
    #[arg(long, value_name = "N")]
    pub steps: Option<u32>,

    /// What computes
    #[arg(long, value_enum, value_name = "NAME", default_value = "cpu")]
    pub backend: Backend,

    /// CUDA device number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench decode                                       # a small model on the processor
  kvbench decode --backend cuda                        # the shape of Llama 3.1 8B at batch 1
  kvbench decode --backend cuda --batch 1,16,64 --context 4096 --output decode.json
  kvbench decode --backend cuda --model synthetic:qwen-0.5b --quick";

/// Measures, prints and keeps the result.
pub fn run(args: &DecodeArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    measure(&plan, &output)?;
    Ok(Outcome::Done)
}

#[cfg(feature = "serve")]
fn measure(plan: &Plan, output: &Output) -> anyhow::Result<()> {
    let (host, measured) = engine::measure(plan, output)?;
    let mut result = crate::result::BenchResult::new("decode", plan, host)?;
    report::fill(&mut result, &measured);
    output.emit(&result, &report::table(plan, &measured))
}

/// Says what is missing.
#[cfg(not(feature = "serve"))]
fn measure(_: &Plan, _: &Output) -> anyhow::Result<()> {
    anyhow::bail!("this kvbench was built without its engine: take the one that comes with kvserve")
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    model: String,
    backend: Backend,
    batch: Vec<u32>,
    context: u32,
    steps: u32,
    device: u32,
}

impl Plan {
    fn of(args: &DecodeArgs) -> anyhow::Result<Self> {
        let model = match args.backend {
            Backend::Cpu => "synthetic:small",
            Backend::Cuda => "synthetic:llama-8b",
        };
        let plan = Self {
            model: args.model.clone().unwrap_or_else(|| model.to_owned()),
            backend: args.backend,
            batch: args.batch.to_vec(),
            context: args.context,
            steps: args.steps.unwrap_or(if args.output.quick { STEPS.1 } else { STEPS.0 }),
            device: args.device,
        };
        for &batch in &plan.batch {
            ensure!((1..=MAX_BATCH).contains(&batch), "--batch has {batch}: give 1 to {MAX_BATCH}");
        }
        let (context, steps) = (plan.context, plan.steps);
        ensure!((1..=MAX_CONTEXT).contains(&context), "--context is {context}: give 1 to {MAX_CONTEXT}");
        ensure!((1..=MAX_STEPS).contains(&steps), "--steps is {steps}: give 1 to {MAX_STEPS}");
        Ok(plan)
    }
}
