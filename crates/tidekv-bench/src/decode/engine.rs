//! The engine's own steps, without an engine around them.

use std::num::NonZero;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tidekv_batch::{BatchConfig, IdRun, SeqId};
use tidekv_core::geometry::{Capacity, ChunkChoice, Geometry, GeometryConfig, Layout};
use tidekv_core::units::Bytes;
use tidekv_mem::cuda::{CudaBackend, CudaOptions};
use tidekv_mem::host::{HostBackend, HostOptions};
use tidekv_mem::{Backend as MemBackend, Capabilities};
use tidekv_serve::compute::cuda::{Device, StepLimits};
use tidekv_serve::compute::{Compute, CpuCompute, CudaCompute, KvStore, StepInput, StepTables, Wanted};
use tidekv_serve::config::{ModelSource, Precision, SyntheticSize};
use tidekv_serve::model::{Model, ModelShape};

use super::Plan;
use super::host_floor::HostFloor;
use super::report::{CellTimes, Measured};
use crate::host::HostInfo;
use crate::lab::{BLOCK_TOKENS, Lab};
use crate::output::Output;
use crate::servers::kvserve::Backend;
use crate::stats::{Samples, to_f64};

/// Query tokens of a step, at most: what a prompt is cut into.
const STEP_TOKENS: u32 = 2048;
/// Steps before the first that counts: kernels are loaded, a graph is captured.
const WARM_STEPS: u32 = 8;
/// Steps between two floors.
const STEPS_PER_FLOOR: u32 = 8;
/// Bytes of what makes the vocabulary of every synthetic model.
const BYTES: u32 = 251;

/// A model that computes, and the least that a step of it can take.
enum Subject {
    Cpu { compute: Box<CpuCompute>, floor: HostFloor },
    Cuda(Box<CudaCompute>),
}

impl Subject {
    fn open(plan: &Plan, size: SyntheticSize, seed: u64) -> anyhow::Result<(Self, Bytes)> {
        match plan.backend {
            Backend::Cpu => {
                let threads = thread::available_parallelism().map_or(1, NonZero::get);
                let mut weights = 0;
                Model::sketch(size, seed).weights.map(|draw| weights += draw.rows * draw.columns);
                let bytes = Bytes((weights * size_of::<f32>()) as u64);
                let compute = CpuCompute::new(Model::load(&ModelSource::Synthetic { size, seed })?, threads)?;
                Ok((Self::Cpu { compute: Box::new(compute), floor: HostFloor::new(bytes, threads) }, bytes))
            }
            Backend::Cuda => {
                let device = Device::open(plan.device).context("nothing can be computed on a GPU here")?;
                let max_rows = plan.batch.iter().copied().max().unwrap_or(1);
                let limits = StepLimits { max_rows, max_step_tokens: STEP_TOKENS.max(max_rows) };
                let compute = CudaCompute::made(&device, Model::sketch(size, seed), Precision::Bf16, limits)?;
                let bytes = compute.weight_bytes();
                Ok((Self::Cuda(Box::new(compute)), bytes))
            }
        }
    }

    fn compute(&mut self) -> &mut dyn Compute {
        match self {
            Self::Cpu { compute, .. } => &mut **compute,
            Self::Cuda(compute) => &mut **compute,
        }
    }

    fn time_floor(&self) -> anyhow::Result<Duration> {
        match self {
            Self::Cpu { floor, .. } => Ok(floor.time()),
            Self::Cuda(compute) => Ok(compute.time_weight_read()?),
        }
    }
}

/// Measures every batch size in turn.
pub(super) fn measure(plan: &Plan, output: &Output) -> anyhow::Result<(HostInfo, Measured)> {
    let ModelSource::Synthetic { size, seed } = plan.model.parse()? else {
        bail!(
            "--model is {:?}: a step's time is that of its shape; give a synthetic one, such as synthetic:llama-8b",
            plan.model
        );
    };
    let (mut subject, weight_bytes) = Subject::open(plan, size, seed)?;
    let shape = Model::sketch(size, seed).shape;
    let progress = output.progress(plan.batch.len() as u64);
    let (mut cells, mut host) = (Vec::new(), HostInfo::current());
    for &batch in &plan.batch {
        progress.now(format!("{batch} rows"));
        let (mut rows, capabilities) = Rows::open(plan, &shape, batch)?;
        host = HostInfo::with_backend(&capabilities);
        cells.push(cell(plan, &mut subject, &mut rows, batch)?);
        progress.step();
    }
    Ok((host, Measured { weight_bytes, cells }))
}

fn cell(plan: &Plan, subject: &mut Subject, rows: &mut Rows, batch: u32) -> anyhow::Result<CellTimes> {
    let prompt = rows.fill(subject.compute(), batch, plan.context).context("computing the prompts")?;
    let tokens = to_f64(u64::from(batch) * u64::from(plan.context));
    let mut times = CellTimes {
        batch,
        context: plan.context,
        steps: Samples::with_capacity(plan.steps as usize),
        floor: Samples::new(),
        prompt_tokens_per_s: tokens / prompt.as_secs_f64().max(1e-9),
    };
    let mut tokens = vec![0; batch as usize];
    for _ in 0..WARM_STEPS {
        rows.decode(subject.compute(), &mut tokens)?;
    }
    subject.time_floor()?;
    for step in 0..plan.steps {
        times.steps.push_duration(rows.decode(subject.compute(), &mut tokens)?);
        if step % STEPS_PER_FLOOR == 0 {
            times.floor.push_duration(subject.time_floor()?);
        }
    }
    Ok(times)
}

/// Sequences, and the memory of their keys and values.
struct Rows {
    kv: KvStore,
    tables: StepTables,
    /// Behind the pool: its folder goes last.
    _lab: Lab,
}

impl Rows {
    fn open(plan: &Plan, shape: &ModelShape, batch: u32) -> anyhow::Result<(Self, Capabilities)> {
        let lab = Lab::new()?;
        let (backend, kv_shape): (Arc<dyn MemBackend>, _) = match plan.backend {
            Backend::Cpu => (Arc::new(HostBackend::open(HostOptions::default())?), shape.kv_shape(BLOCK_TOKENS)),
            Backend::Cuda => {
                let options = CudaOptions { device: plan.device, ..CudaOptions::default() };
                (Arc::new(CudaBackend::open(options)?), shape.kv_shape_of(Precision::Bf16.bytes(), BLOCK_TOKENS))
            }
        };
        let capabilities = backend.capabilities().clone();
        let row_tokens = plan.context + WARM_STEPS + plan.steps;
        let blocks = batch * row_tokens.div_ceil(BLOCK_TOKENS);
        let geometry = |capacity| GeometryConfig {
            shape: kv_shape,
            layout: Layout::Slab,
            granularity: capabilities.granularity,
            chunk: ChunkChoice::Auto,
            capacity,
        };
        let page = Geometry::new(&geometry(Capacity::Pages(1)))?;
        let pages = blocks.div_ceil(page.blocks_per_page());
        let budget = Bytes(page.page_bytes().0 * u64::from(pages));
        let config = lab.config(backend, geometry(Capacity::Pages(pages)), budget);
        let batch_config = BatchConfig {
            block_tokens: BLOCK_TOKENS,
            max_rows: batch,
            max_row_tokens: row_tokens,
            max_step_tokens: STEP_TOKENS.max(batch),
            max_ids: blocks,
        };
        let (mut kv, mut tables) = match plan.backend {
            Backend::Cpu => (KvStore::open(config)?, StepTables::host(batch_config)?),
            Backend::Cuda => (KvStore::open_on_device(config)?, StepTables::cuda(plan.device, batch_config)?),
        };
        let mut ids = Vec::new();
        kv.alloc(blocks, Duration::ZERO, &mut ids)?;
        let runs: Vec<IdRun> = ids.into_iter().map(|first| IdRun { first, count: 1 }).collect();
        tables.lend(&runs)?;
        Ok((Self { kv, tables, _lab: lab }, capabilities))
    }

    /// Computes `context` tokens for each of so many new sequences; says how long that took.
    fn fill(&mut self, compute: &mut dyn Compute, batch: u32, context: u32) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for row in 0..batch {
            self.tables.admit(SeqId(row.into()), 0, &[])?;
            let mut query = vec![0; row as usize + 1];
            for first in (0..context).step_by(STEP_TOKENS as usize) {
                let count = (context - first).min(STEP_TOKENS);
                query[row as usize] = count;
                let tokens: Vec<u32> = (first..first + count).map(|at| (row * 31 + at * 7) % BYTES).collect();
                let step = StepInput { query: &query, tokens: &tokens, wanted: &[] };
                compute.forward(&mut self.kv, &mut self.tables, &step)?;
            }
        }
        Ok(start.elapsed())
    }

    /// Every row's next token, the likeliest behind `tokens`, which it takes the place of.
    fn decode(&mut self, compute: &mut dyn Compute, tokens: &mut Vec<u32>) -> anyhow::Result<Duration> {
        let query = vec![1; tokens.len()];
        let wanted: Vec<Wanted> = (0..).take(tokens.len()).map(|token| Wanted { token, logits: false }).collect();
        let start = Instant::now();
        let step = StepInput { query: &query, tokens, wanted: &wanted };
        let outputs = compute.forward(&mut self.kv, &mut self.tables, &step)?;
        let took = start.elapsed();
        *tokens = outputs.best;
        Ok(took)
    }
}
