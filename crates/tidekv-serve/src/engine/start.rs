//! Starting an engine: what computes, the model, the pool, the tables, the thread. Whatever fails, nothing is left behind.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use tidekv_batch::{BatchConfig, ConfigError};
use tidekv_core::geometry::{Capacity, Geometry, GeometryConfig, GeometryError, Layout};
use tidekv_core::units::Bytes;
use tidekv_mem::cuda::{CudaBackend, CudaOptions};
use tidekv_mem::host::{HostBackend, HostOptions};
use tidekv_mem::{Backend, MemError};
use tidekv_pool::{PoolConfig, PoolError, ReservePolicy};

use super::blocks::Blocks;
use super::front::{Bounds, Command, Counters, Front};
use super::room::Room;
use super::worker::{Loader, Patience, Worker};
use crate::compute::cuda::{Device, StepLimits};
use crate::compute::{Compute, ComputeError, CpuCompute, CudaCompute, KvStore, KvStoreError, StepTables};
use crate::config::{ComputeChoice, EngineConfig, KvMode, ModelSource, Precision};
use crate::handle::{Engine, ModelInfo};
use crate::model::{Model, ModelError, ModelShape, SYNTHETIC_ANSWER};

/// How long mapping everything at start may wait: the pool's own thread maps as well, and on a busy machine it may be in the middle
/// of a page for a while.
const START_PATIENCE: Duration = Duration::from_secs(10);

/// Why an engine could not start. One sentence and its source; nothing was left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The model cannot be had.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The memory for K and V cannot be had.
    #[error(transparent)]
    Kv(#[from] KvStoreError),
    /// The same, when it was to be mapped at once.
    #[error("the KV cache of {size} could not be mapped at start: lower --kv static:SIZE or raise the budget")]
    Static {
        /// What was asked for.
        size: Bytes,
        /// Why not.
        #[source]
        source: PoolError,
    },
    /// Host memory cannot be used.
    #[error(transparent)]
    Mem(#[from] MemError),
    /// Sizes of the batch make no sense.
    #[error(transparent)]
    Batch(#[from] ConfigError),
    /// The model could not be made ready to compute.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// A GPU was asked for, and something that it takes is missing.
    #[error("nothing can be computed on a GPU here (--backend cpu needs none)")]
    NoCuda(#[source] ComputeError),
    /// Longer than the model was made for.
    #[error("a context of {asked} tokens was asked for and the model was made for {most}: lower --max-model-len")]
    Context {
        /// As asked for.
        asked: u32,
        /// What the model allows.
        most: u32,
    },
    /// A static cache cannot be larger than what all pools may hold.
    #[error("a static KV cache of {size} is more than the KV budget of {budget}: lower the one or raise the other")]
    OverBudget {
        /// What was asked for.
        size: Bytes,
        /// What is allowed.
        budget: Bytes,
    },
    /// The operating system refused a thread.
    #[error("the engine's thread could not be started")]
    Thread(#[source] std::io::Error),
}

impl StartError {
    /// Whether the device had no memory left, so that others giving some back can help.
    pub(super) fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Compute(error) => error.is_out_of_memory(),
            Self::Mem(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}

/// Starts an engine. It ends when the last clone of what is returned is dropped, or by [`Engine::drain`].
///
/// # Errors
/// [`StartError`]; nothing is left behind.
pub fn start(config: EngineConfig) -> Result<Arc<dyn Engine>, StartError> {
    let front = match choose(config.compute)? {
        Some((device, precision)) => start_on_gpu(config, device, precision)?,
        None => start_on_processor(config)?,
    };
    Ok(Arc::new(front))
}

/// The GPU to compute on, or none for the processor.
fn choose(choice: ComputeChoice) -> Result<Option<(Device, Precision)>, StartError> {
    match choice {
        ComputeChoice::Cpu => Ok(None),
        ComputeChoice::Cuda(precision) => match Device::open(0) {
            Ok(device) => Ok(Some((device, precision))),
            Err(error) => Err(StartError::NoCuda(error)),
        },
        ComputeChoice::Auto => match Device::open(0) {
            Ok(device) => Ok(Some((device, Precision::default()))),
            Err(error) => {
                tracing::info!(%error, "computing on the processor");
                Ok(None)
            }
        },
    }
}

fn start_on_processor(config: EngineConfig) -> Result<Front, StartError> {
    let model = Model::load(&config.model)?;
    let about = About::new(&model);
    let threads = config.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from)).max(1);
    let source = config.model.clone();
    // Weights that were dropped by a deep sleep come back the way they came.
    let load = Box::new(move || Ok(Box::new(CpuCompute::new(Model::load(&source)?, threads)?) as _));
    let load = Loader { load, device_bytes: Bytes::ZERO };
    let compute = Box::new(CpuCompute::new(model, threads)?);
    start_with(config, about, compute, load, Place::Host, Patience::default())
}

fn start_on_gpu(config: EngineConfig, device: Device, precision: Precision) -> Result<Front, StartError> {
    let limits = StepLimits { max_rows: config.max_batch_rows, max_step_tokens: config.max_step_tokens };
    let place = Place::Gpu { device: device.number(), precision };
    let (compute, about) = load_on_gpu(&device, &config.model, precision, limits)?;
    let (weights, buffers) = (compute.weight_bytes(), compute.buffer_bytes());
    tracing::info!(%weights, %buffers, "the model is on the GPU");
    let source = config.model.clone();
    let load =
        Box::new(move || load_on_gpu(&device, &source, precision, limits).map(|(compute, _)| Box::new(compute) as _));
    // Another of the same model takes as much.
    let load = Loader { load, device_bytes: Bytes(weights.0 + buffers.0) };
    start_with(config, about, Box::new(compute), load, place, Patience::default())
}

/// Synthetic weights are made where they are used; others come through the host.
fn load_on_gpu(
    device: &Device,
    source: &ModelSource,
    precision: Precision,
    limits: StepLimits,
) -> Result<(CudaCompute, About), StartError> {
    if let ModelSource::Synthetic { size, seed } = *source {
        let model = Model::sketch(size, seed);
        let about = About::new(&model);
        return Ok((CudaCompute::made(device, model, precision, limits)?, about));
    }
    let model = Model::load(source)?;
    let about = About::new(&model);
    Ok((CudaCompute::new(device, model, precision, limits)?, about))
}

/// Where steps are computed, and so where tables, keys and values are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    Host,
    Gpu { device: u32, precision: Precision },
}

/// What the front says of a model.
#[derive(Clone, Debug)]
pub(super) struct About {
    pub(super) name: String,
    pub(super) shape: ModelShape,
    pub(super) eos: Vec<u32>,
}

impl About {
    pub(super) fn new<M>(model: &Model<M>) -> Self {
        Self { name: model.name.clone(), shape: model.shape.clone(), eos: model.eos.clone() }
    }
}

/// [`start`] with anything that computes.
pub(super) fn start_with(
    config: EngineConfig,
    about: About,
    compute: Box<dyn Compute>,
    load: Loader,
    place: Place,
    patience: Patience,
) -> Result<Front, StartError> {
    let most = about.shape.context_tokens;
    let context_tokens = config.context_tokens.unwrap_or(most);
    if context_tokens > most || context_tokens == 0 {
        return Err(StartError::Context { asked: context_tokens, most });
    }
    let (kv, kv_mode) = open_kv(&config, &about.shape, place)?;
    let batch = BatchConfig {
        block_tokens: config.block_tokens,
        max_rows: config.max_batch_rows,
        max_row_tokens: context_tokens,
        max_step_tokens: config.max_step_tokens,
        max_ids: kv.block_count(),
    };
    let tables = match place {
        Place::Host => StepTables::host(batch)?,
        Place::Gpu { device, .. } => StepTables::cuda(device, batch).map_err(ComputeError::from)?,
    };
    let bounds = Bounds {
        model: ModelInfo {
            name: about.name,
            vocab: u32::try_from(about.shape.vocab).unwrap_or(u32::MAX),
            context_tokens,
            eos: about.eos,
            block_tokens: config.block_tokens,
            answer_tokens: matches!(config.model, ModelSource::Synthetic { .. }).then_some(SYNTHETIC_ANSWER),
        },
        kv_mode,
        max_waiting: config.max_waiting,
        capacity_tokens: u64::from(kv.block_count()) * u64::from(config.block_tokens),
    };
    let gauge = kv.gauge();
    let (commands, orders) = channel();
    let wake = commands.clone();
    kv.on_reclaim(move || {
        // A worker that is gone owes nothing.
        let _ = wake.send(Command::Reclaim);
    });
    let mut blocks = Blocks::new(kv, tables, config.max_cached_tokens);
    if let KvMode::Static(size) = kv_mode {
        blocks.map_everything(START_PATIENCE).map_err(|source| StartError::Static { size, source })?;
    }
    let counters = Arc::new(Counters::default());
    let worker = Worker::new(&config, kv_mode, blocks, compute, load, orders, Arc::clone(&counters));
    let worker = worker.with_patience(patience);
    let thread = thread::Builder::new().name("engine".to_owned()).spawn(move || worker.run());
    Ok(Front::new(bounds, counters, gauge, commands, thread.map_err(StartError::Thread)?))
}

/// The pool, and whether its memory is held: the weights are on the device already.
fn open_kv(config: &EngineConfig, shape: &ModelShape, place: Place) -> Result<(KvStore, KvMode), StartError> {
    let (backend, card): (Arc<dyn Backend>, _) = match place {
        Place::Host => (Arc::new(HostBackend::open(HostOptions::default())?), None),
        Place::Gpu { device, .. } => {
            let backend = CudaBackend::open(CudaOptions { device, ..CudaOptions::default() })?;
            let card = backend.memory()?;
            (Arc::new(backend), Some(card))
        }
    };
    let room = Room::new(config.kv, config.kv_budget, card)?;
    let wrong = |error: GeometryError| KvStoreError::Pool(error.into());
    let geometry = room.geometry(GeometryConfig {
        shape: match place {
            Place::Host => shape.kv_shape(config.block_tokens),
            Place::Gpu { precision, .. } => shape.kv_shape_of(precision.bytes(), config.block_tokens),
        },
        layout: Layout::Slab,
        granularity: backend.capabilities().granularity,
        chunk: config.chunk,
        capacity: Capacity::Budget(room.reservation),
    });
    let geometry = geometry.map_err(wrong)?;
    let mut pool = PoolConfig::new(config.pool_name.clone(), backend, geometry);
    pool.runtime_dir = config.runtime_dir.clone();
    pool.budget = room.budget;
    pool.utilization = room.utilization;
    pool.reserve = config.reserve;
    if room.mode != KvMode::Elastic {
        let geometry = Geometry::new(&geometry).map_err(wrong)?;
        let pages = geometry.page_count();
        // Mapped at start and not given back while the model is awake, whatever neighbours want.
        pool.reserve = ReservePolicy::Fixed { min: pages, max: pages };
        pool.share.floor = Bytes(geometry.page_bytes().0 * u64::from(pages));
    }
    let kv = match place {
        Place::Host => KvStore::open(pool)?,
        Place::Gpu { .. } => KvStore::open_on_device(pool)?,
    };
    Ok((kv, room.mode))
}
