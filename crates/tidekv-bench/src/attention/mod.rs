//! `kvbench attention`: how fast does decode attention read the KV cache, does the layout of the cache show in that, and how far
//! is it from what the card can do at all?
//!
//! ```text
//!   a cell        batch x context: that many rows, each of which attends from one new token to all of its tokens, layer by layer
//!   slab 128K     the cell's keys and values in pages whose chunks have 128 KiB; so 256K, 512K, 1M, 2M
//!   per-layer     kvcached's tensors, one handle for each layer's K and V;      interleaved   its contiguous one
//!   read          a kernel that reads as many bytes of plain memory, and does nothing else      ─┐ beside every layout, in turns:
//!   copy          the driver's copy of as many bytes: each is read and written                  ─┘ what slows one slows all three
//! ```
//!
//! Bytes are counted once, however often a kernel comes by: those of the keys and values of all tokens of all layers, of what
//! is read, of what is copied. Times are the device's own, from the first launch to the end of the last. Reading and copying take at
//! most `PLAIN_BYTES` at a time, beyond which their speed does not change.
//!
//! | figure of `summary`                                    | meaning                                                               |
//! |--------------------------------------------------------|-----------------------------------------------------------------------|
//! | `cells[] {batch, context, kv_bytes}`                   | a cell, and the bytes that a step reads of it                         |
//! | `cells[] .read_gb_per_s`, `.copy_gb_per_s`             | plain memory, median; 1 GB is 10^9 bytes                              |
//! | `cells[] .layouts[] {name, layout, chunk_bytes, page_bytes}` | a layout as it comes out                                        |
//! | `cells[] .layouts[] .gb_per_s`                         | what attention reads in a second, median                              |
//! | `cells[] .layouts[] .share_of_read`                    | of the reads in between its own turns                                 |
//! | `cells[] .layouts[] .time_over_copy`                   | attention's time for a byte over that of the copies in between        |
//! | `cells[] .chunk_spread`                                | fastest of the slab's chunks of at most 512 KiB over the slowest, less 1 |
//! | `read_gb_per_s`, `share_of_read`, `chunk_spread`       | of the largest cell; the share is that of its slowest layout          |
//! | `slab_2m_share_of_read`                                | of the largest cell, where chunks of 2 MiB are measured               |
//! | `left_out`                                             | cells that the card's free memory does not hold                       |

#[cfg(feature = "serve")]
mod cuda;
mod measure;
mod report;

use std::fmt;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use serde::Serialize;
use tidekv_cli::exit::Outcome;
use tidekv_core::geometry::Layout;
use tidekv_core::units::Bytes;

use crate::lab::LayoutName;
use crate::list::List;
use crate::output::{OutputArgs, warn};
use crate::result::BenchResult;

/// Plain memory that is read and copied at a time, at most.
const PLAIN_BYTES: Bytes = Bytes::gib(4);
/// kvcached's, for its two layouts.
const PER_LAYER_CHUNK: Bytes = Bytes::mib(2);
const DEFAULT_SAMPLES: u32 = 20;
const QUICK_SAMPLES: u32 = 5;
const MAX_SAMPLES: u32 = 100_000;
const MAX_BATCH: u32 = 1 << 14;
const MAX_CONTEXT: u32 = 1 << 20;

/// Arguments of `kvbench attention`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct AttentionArgs {
    /// Shape of the model: synthetic:llama-8b, synthetic:llama-1b, synthetic:qwen-0.5b
    #[arg(long, value_name = "MODEL", default_value = "synthetic:llama-8b")]
    pub model: String,

    /// Rows of a step [default: 1,16,64; with --quick 64]
    #[arg(long, value_name = "N,...")]
    pub batch: Option<List<u32>>,

    /// Tokens of each row [default: 1024,4096; with --quick 1024]
    #[arg(long, value_name = "N,...")]
    pub context: Option<List<u32>>,

    /// Layouts of the cache: slab, per-layer, interleaved
    #[arg(long, value_name = "NAME,...", default_value = "slab,per-layer,interleaved")]
    pub layout: List<LayoutName>,

    /// Chunks of the slab layout: what a page has of each layer's K, and of its V
    #[arg(long, value_name = "SIZE,...", default_value = "128K,256K,512K,1M,2M")]
    pub chunk: List<Bytes>,

    /// Tokens of one block: a power of two
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub block_size: u32,

    /// Times that each layout is measured in each cell [default: 20, with --quick 5]
    #[arg(long, value_name = "N")]
    pub samples: Option<u32>,

    /// What computes
    #[arg(long, value_enum, value_name = "NAME", default_value = "cuda")]
    pub backend: Gpu,

    /// CUDA device number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench attention                                    # the shape of Llama 3.1 8B, every layout
  kvbench attention --batch 64 --context 4096          # one cell: 34 GB of keys and values
  kvbench attention --quick --layout slab --chunk 128K,512K,2M
  kvbench attention --model synthetic:qwen-0.5b --batch 1,256 --context 512,32768 --output attention.json

Needs a GPU and libcublas. A cell that does not fit into the card's free memory is left out and named.";

/// Where this can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Gpu {
    /// A GPU of NVIDIA's
    Cuda,
}

/// Measures, prints and keeps the result.
pub fn run(args: &AttentionArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    let card = match args.backend {
        Gpu::Cuda => open_card(&plan)?,
    };
    let mut result = BenchResult::new("attention", &plan, card.host())?;
    let progress = output.progress(plan.steps());
    let measured = measure::measure(&plan, &*card, &progress)?;
    drop(progress);
    for cell in measured.left_out.iter().filter(|_| !args.output.quiet) {
        warn(&format!("{cell} does not fit into the card's free memory and was left out"));
    }
    report::fill(&mut result, &measured);
    output.emit(&result, &report::tables(&measured))?;
    Ok(Outcome::Done)
}

#[cfg(feature = "serve")]
fn open_card(plan: &Plan) -> anyhow::Result<Box<dyn measure::Card>> {
    Ok(Box::new(cuda::CudaCard::open(plan)?))
}

/// Says what is missing.
#[cfg(not(feature = "serve"))]
fn open_card(_: &Plan) -> anyhow::Result<Box<dyn measure::Card>> {
    anyhow::bail!("this kvbench was built without its engine: take the one that comes with kvserve")
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, Serialize)]
struct Plan {
    model: String,
    batch: Vec<u32>,
    context: Vec<u32>,
    variants: Vec<Variant>,
    block_size: u32,
    samples: u32,
    device: u32,
}

/// A layout with its chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Variant {
    layout: Layout,
    chunk: Bytes,
}

impl Serialize for Variant {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.layout {
            Layout::Slab => write!(f, "slab {}", self.chunk),
            other => f.write_str(other.name()),
        }
    }
}

/// What a step is asked to attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    batch: u32,
    context: u32,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.batch, self.context)
    }
}

impl Plan {
    fn of(args: &AttentionArgs) -> anyhow::Result<Self> {
        let quick = args.output.quick;
        let or = |list: &Option<List<u32>>, usual: &[u32], quickly: &[u32]| match list {
            Some(list) => list.to_vec(),
            None if quick => quickly.to_vec(),
            None => usual.to_vec(),
        };
        let of_layout = |name: &LayoutName| match name.0 {
            Layout::Slab => args.chunk.iter().map(|&chunk| Variant { layout: Layout::Slab, chunk }).collect(),
            layout => vec![Variant { layout, chunk: PER_LAYER_CHUNK }],
        };
        let plan = Self {
            model: args.model.clone(),
            batch: or(&args.batch, &[1, 16, 64], &[64]),
            context: or(&args.context, &[1024, 4096], &[1024]),
            variants: args.layout.iter().flat_map(of_layout).collect(),
            block_size: args.block_size,
            samples: args.samples.unwrap_or(if quick { QUICK_SAMPLES } else { DEFAULT_SAMPLES }),
            device: args.device,
        };
        let within = |flag: &str, value: u32, most: u32| {
            ensure!((1..=most).contains(&value), "{flag} has {value}: give 1 to {most}");
            Ok(())
        };
        plan.batch.iter().try_for_each(|&batch| within("--batch", batch, MAX_BATCH))?;
        plan.context.iter().try_for_each(|&context| within("--context", context, MAX_CONTEXT))?;
        within("--samples", plan.samples, MAX_SAMPLES)?;
        let size = plan.block_size;
        ensure!(
            size.is_power_of_two() && size <= 4096,
            "--block-size is {size}: give a power of two from 1 to 4096, such as 16"
        );
        Ok(plan)
    }

    fn cells(&self) -> impl Iterator<Item = Cell> {
        self.batch.iter().flat_map(|&batch| self.context.iter().map(move |&context| Cell { batch, context }))
    }

    fn steps(&self) -> u64 {
        (self.batch.len() * self.context.len() * self.variants.len()) as u64
    }
}

#[cfg(test)]
mod tests;
