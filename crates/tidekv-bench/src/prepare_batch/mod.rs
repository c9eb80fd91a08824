//! `kvbench prepare-batch`: what does it cost to prepare a step, that is to give its tokens blocks (update) and to
//! write the arrays with which attention finds them (pack), on the CPU and on a GPU?
//!
//! ```text
//!   update    update_block_table of a decode step          prefill   admit the whole batch and place all its prompts
//!   pack      pack_flash_attn_metadata of that step        mixed     one prompt beside a decode of all other rows
//!   step      both in one pass                             free      release the whole batch
//! ```
//!
//! Rows begin at random places of their last blocks, and a sample is a whole number of block lengths of decode steps: every row
//! goes over block boundaries, each step as many as the next. Then all rows are cut back, which is not timed. A
//! step takes less than a microsecond and a clock reading 16 to 21 ns, so no sample has fewer than 64 steps. Ids
//! are sparse, as those of the slab layout are. Both sides use the same block size.
//!
//! Where there is a GPU, attention reads there, and the CPU's columns include bringing table and arrays to it; the
//! host's own time stands beside them. What a GPU does is measured behind the trait of `device.rs`.
//!
//! | figure of `summary`                              | meaning                                                   |
//! |--------------------------------------------------|-----------------------------------------------------------|
//! | `cells[] {batch, seq}`                           | a row of the table; figures that were not measured are left out |
//! | `cells[] .cpu_step_us`                           | a decode step on the host, median                         |
//! | `cells[] .cpu_step_to_device_us`                 | the same with table and arrays brought to the device      |
//! | `cells[] .gpu_step_us`, `.gpu_graph_launch_us`   | a step on the device until it is over; as a graph         |
//! | `cells[] .gpu_in_graph_us`, `.gpu_issue_us`      | its part of a longer graph; the host's part of it         |
//! | `ops.<batch>x<seq>.<op>_us.{mean,p50,p10,p90}`   | each operation on the CPU; `gpu_<op>_us` on the device    |
//! | `launch_floor_us`, `graph_floor_us`              | an empty kernel until it is over; as a graph              |
//! | `anchors[] {batch, seq, best_peer_us, ...}`      | a default run on a GPU: cells in which others were measured |
//! | `anchors[] .peer_over_step`, `.peer_over_graph_launch` | how many times faster than the best of them          |
//! | `seq_growth`                                     | CPU step with 32,768 tokens per row over 128, batch 256   |
//! | `gpu_absent`                                     | why there are no figures of a GPU                         |
//! | `verified_steps`                                 | steps whose every output was compared with the reference  |

mod anchors;
mod cell;
mod cpu;
mod cuda;
mod device;
mod reference;
mod report;

use std::fmt;
use std::str::FromStr;

use anyhow::ensure;
use clap::Args;
use serde::Serialize;
use tidekv_cli::exit::Outcome;

use crate::host::HostInfo;
use crate::list::{List, MAX_ENTRIES};
use crate::output::{OutputArgs, warn};
use crate::progress::Progress;
use crate::result::BenchResult;
use cell::{Cell, CellError, Measured};
use device::DeviceSide;

/// Decode steps in a sample, at least; more where a block is longer.
const STEPS: u32 = 64;
/// Sequences whose two lengths `seq_growth` compares.
const GROWTH_BATCH: u32 = 256;
const GROWTH_SEQS: [u32; 2] = [128, 32_768];

const MAX_BATCH: u32 = 1 << 20;
const MAX_SEQ: u32 = 1 << 29;
const MAX_ITERATIONS: u32 = 1_000_000;

/// Arguments of `kvbench prepare-batch`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct PrepareBatchArgs {
    /// Sequences in the batch [default: 16 32 64 128 256, with --quick 4 16]
    #[arg(long, value_name = "N", num_args = 1..)]
    pub batch_sizes: Vec<List<u32>>,

    /// Tokens that each sequence holds [default: 128 256 512 1024, with --quick 64 128]
    #[arg(long, value_name = "N", num_args = 1..)]
    pub seq_lens: Vec<List<u32>>,

    /// Samples of each measurement [default: 100, with --quick 20]
    #[arg(long, value_name = "N")]
    pub iterations: Option<u32>,

    /// What to measure: update, pack, step, prefill, mixed, free [default: all]
    #[arg(long, value_name = "OP", num_args = 1..)]
    pub ops: Vec<List<Op>>,

    /// Tokens of one block, on both sides: a power of two
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub block_size: u32,

    /// Who prepares: cpu, cuda [default: cpu, and cuda where there is a GPU]
    #[arg(long, value_name = "NAME", num_args = 1..)]
    pub backend: Vec<List<Side>>,

    /// CUDA device number
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: u32,

    /// Launch a captured graph where the table has a GPU's step; the JSON object has both ways anyway
    #[arg(long)]
    pub graph: bool,

    /// Compare every output with a plain reference before measuring; --quick does so too, and says PASS
    #[arg(long)]
    pub verify: bool,

    /// Where the result goes.
    #[command(flatten)]
    pub output: OutputArgs,
}

const EXAMPLES: &str = "\
Examples:
  kvbench prepare-batch --quick                # a quick test: every output is compared, PASS or FAIL
  kvbench prepare-batch
  kvbench prepare-batch --batch-sizes 16 32 64 --seq-lens 128 256 512 --iterations 50 --output results.json
  kvbench prepare-batch --batch-sizes 64,1024 --seq-lens 2048,32768 --ops step --verify";

/// An operation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// `update_block_table` of a decode step.
    Update,
    /// `pack_flash_attn_metadata`.
    Pack,
    /// Both in one pass.
    Step,
    /// The whole batch comes, and all its prompts are placed.
    Prefill,
    /// One prompt beside decoding rows.
    Mixed,
    /// The whole batch leaves.
    Free,
}

impl Op {
    const ALL: [Self; 6] = [Self::Update, Self::Pack, Self::Step, Self::Prefill, Self::Mixed, Self::Free];

    const fn name(self) -> &'static str {
        match self {
            Self::Update => "update",
            Self::Pack => "pack",
            Self::Step => "step",
            Self::Prefill => "prefill",
            Self::Mixed => "mixed",
            Self::Free => "free",
        }
    }
}

impl FromStr for Op {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|op| op.name() == text);
        known.ok_or_else(|| "not an operation: use update, pack, step, prefill, mixed or free".to_owned())
    }
}

/// Who prepares steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The host.
    Cpu,
    /// A GPU.
    Cuda,
}

impl FromStr for Side {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda),
            _ => Err("not a back-end: use cpu, cuda or both".to_owned()),
        }
    }
}

/// Measures, prints and keeps the result.
pub fn run(args: &PrepareBatchArgs) -> anyhow::Result<Outcome> {
    let plan = Plan::of(args)?;
    let output = args.output.open()?;
    let mut device = open_device(&plan)?;
    let host = device.as_ref().map_or_else(|_| HostInfo::current(), |device| device.host());
    let mut result = BenchResult::new("prepare-batch", &plan, host)?;
    let progress = output.progress(plan.cells().count() as u64 + 1);
    let mut measured = Vec::new();
    for cell in plan.cells() {
        progress.now(cell.to_string());
        measured.push(measure_cell(&plan, cell, device.as_deref_mut().ok()));
        progress.step();
    }
    let anchors = measure_anchors(&plan, device.as_deref_mut().ok(), &progress);
    let floors = device.as_deref_mut().map(DeviceSide::floors).unwrap_or_default();
    let growth = growth(&plan, &progress)?;
    drop(progress);
    let findings = report::Findings {
        measured: &measured,
        gpu_absent: device.as_ref().err().map(String::as_str),
        anchors: &anchors,
        floors,
        graph: plan.graph,
        seq_growth: growth,
        verified: plan.verify,
    };
    report::fill(&mut result, &findings);
    output.emit(&result, &report::text(&findings))?;
    let failures: Vec<&CellError> =
        measured.iter().chain(&anchors).filter_map(|measured| measured.error.as_ref()).collect();
    if !args.output.quiet {
        failures.iter().for_each(|error| warn(&error.to_string()));
    }
    Ok(if failures.is_empty() { Outcome::Done } else { Outcome::Negative })
}

/// The device, or why there is none. That it is missing is an error only where it was asked for by name.
fn open_device(plan: &Plan) -> anyhow::Result<Result<Box<dyn DeviceSide>, String>> {
    match plan.cuda {
        Wanted::No => Ok(Err("--backend has no cuda".to_owned())),
        Wanted::IfThere => Ok(device::open(plan.device)),
        Wanted::Yes => {
            let device = device::open(plan.device);
            if let Err(reason) = &device {
                anyhow::bail!("--backend cuda: {reason}");
            }
            Ok(device)
        }
    }
}

fn measure_cell(plan: &Plan, cell: Cell, device: Option<&mut (dyn DeviceSide + '_)>) -> Measured {
    let mut measured = Measured::new(cell);
    let done = (|| {
        if plan.cpu {
            cpu::measure(plan, cell, &mut measured)?;
        }
        match device {
            Some(device) => device.measure(plan, cell, &mut measured),
            None => Ok(()),
        }
    })();
    measured.error = done.err();
    measured
}

/// Steps in the cells that others were measured in, in a default run where there is a GPU.
fn measure_anchors(plan: &Plan, device: Option<&mut (dyn DeviceSide + '_)>, progress: &Progress) -> Vec<Measured> {
    let Some(device) = device.filter(|_| plan.anchors) else { return Vec::new() };
    let plan = Plan { ops: vec![Op::Step], ..plan.clone() };
    let measure = |anchor: anchors::Anchor| {
        progress.now(anchor.cell.to_string());
        measure_cell(&plan, anchor.cell, Some(&mut *device))
    };
    anchors::ANCHORS.map(measure).into()
}

/// CPU step of long rows over short ones, in turns. `None` where steps are not asked for.
fn growth(plan: &Plan, progress: &Progress) -> anyhow::Result<Option<f64>> {
    if !plan.cpu || !plan.ops.contains(&Op::Step) {
        return Ok(None);
    }
    progress.now("growth with the length of sequences");
    let [short, long] = GROWTH_SEQS.map(|seq| Cell { batch: GROWTH_BATCH, seq });
    let ratio = cpu::step_ratio(plan, long, short)?;
    progress.step();
    Ok(Some(ratio))
}

/// The validated arguments: what is measured, and what `args` of the result says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Plan {
    batch_sizes: Vec<u32>,
    seq_lens: Vec<u32>,
    iterations: u32,
    steps_per_sample: u32,
    ops: Vec<Op>,
    block_size: u32,
    cpu: bool,
    cuda: Wanted,
    device: u32,
    graph: bool,
    verify: bool,
    /// Whether the cells that others were measured in are measured too, where there is a GPU.
    anchors: bool,
}

/// Whether a side is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Wanted {
    No,
    IfThere,
    Yes,
}

impl Plan {
    fn of(args: &PrepareBatchArgs) -> anyhow::Result<Self> {
        let quick = args.output.quick;
        let backends = flatten("--backend", &args.backend)?;
        let or = |values: Vec<u32>, usual: &[u32], quickly: &[u32]| match values.is_empty() {
            true if quick => quickly.to_vec(),
            true => usual.to_vec(),
            false => values,
        };
        let ops = flatten("--ops", &args.ops)?;
        let ops_given = ops.is_empty() || ops.contains(&Op::Step);
        let plan = Self {
            batch_sizes: or(flatten("--batch-sizes", &args.batch_sizes)?, &[16, 32, 64, 128, 256], &[4, 16]),
            seq_lens: or(flatten("--seq-lens", &args.seq_lens)?, &[128, 256, 512, 1024], &[64, 128]),
            iterations: args.iterations.unwrap_or(if quick { 20 } else { 100 }),
            steps_per_sample: args.block_size.max(STEPS),
            ops: if ops.is_empty() { Op::ALL.to_vec() } else { ops },
            block_size: args.block_size,
            cpu: backends.is_empty() || backends.contains(&Side::Cpu),
            cuda: match backends.contains(&Side::Cuda) {
                true => Wanted::Yes,
                false if backends.is_empty() => Wanted::IfThere,
                false => Wanted::No,
            },
            device: args.device,
            graph: args.graph,
            verify: args.verify || quick,
            anchors: args.batch_sizes.is_empty() && args.seq_lens.is_empty() && ops_given && !quick,
        };
        for &batch in &plan.batch_sizes {
            ensure!((1..=MAX_BATCH).contains(&batch), "--batch-sizes has {batch}: give 1 to {MAX_BATCH}");
        }
        for &seq in &plan.seq_lens {
            ensure!((1..=MAX_SEQ).contains(&seq), "--seq-lens has {seq}: give 1 to {MAX_SEQ}");
        }
        let iterations = plan.iterations;
        ensure!((1..=MAX_ITERATIONS).contains(&iterations), "--iterations is {iterations}: give 1 to {MAX_ITERATIONS}");
        let size = plan.block_size;
        ensure!(
            size.is_power_of_two() && size <= 4096,
            "--block-size is {size}: give a power of two from 1 to 4096, such as 16"
        );
        Ok(plan)
    }

    fn cells(&self) -> impl Iterator<Item = Cell> {
        let cells = |&batch| self.seq_lens.iter().map(move |&seq| Cell { batch, seq });
        self.batch_sizes.iter().flat_map(cells)
    }

    fn wants(&self, op: Op) -> bool {
        self.ops.contains(&op)
    }
}

/// The values of a flag that takes several lists: `16 32`, `16,32` and `16, 32` are the same.
fn flatten<T: Copy + PartialEq + fmt::Debug>(flag: &str, lists: &[List<T>]) -> anyhow::Result<Vec<T>> {
    let mut values = Vec::new();
    for &value in lists.iter().flat_map(|list| list.iter()) {
        ensure!(!values.contains(&value), "{flag} has {value:?} twice");
        ensure!(values.len() < MAX_ENTRIES, "{flag} has more than {MAX_ENTRIES} entries");
        values.push(value);
    }
    Ok(values)
}

#[cfg(test)]
mod tests;
