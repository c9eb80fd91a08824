//! Starting an engine: the model, the pool, the tables, the thread. Whatever fails, nothing is left behind.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use tidekv_batch::{BatchConfig, BlockTables, ConfigError, Metadata};
use tidekv_core::geometry::{Capacity, Geometry, GeometryConfig, Layout};
use tidekv_core::units::Bytes;
use tidekv_mem::host::{HostBackend, HostOptions};
use tidekv_mem::{Backend, MemError};
use tidekv_pool::{PoolConfig, PoolError, ReservePolicy};

use super::blocks::Blocks;
use super::front::{Bounds, Command, Counters, Front};
use super::worker::{Loader, Worker};
use crate::compute::{Compute, ComputeError, CpuCompute, KvStore, KvStoreError};
use crate::config::{ComputeChoice, EngineConfig, KvMode};
use crate::handle::{Engine, ModelInfo};
use crate::model::{Model, ModelError, ModelShape};

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
    /// There is no CUDA path yet.
    #[error("this version computes on the processor only: choose the back-end cpu or auto")]
    NoCuda,
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

/// Starts an engine. It ends when the last clone of what is returned is dropped, or by [`Engine::drain`].
///
/// # Errors
/// [`StartError`]; nothing is left behind.
pub fn start(config: EngineConfig) -> Result<Arc<dyn Engine>, StartError> {
    if config.compute == ComputeChoice::Cuda {
        return Err(StartError::NoCuda);
    }
    let model = Model::load(&config.model)?;
    let about = About { name: model.name.clone(), shape: model.shape.clone(), eos: model.eos.clone() };
    let threads = config.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from)).max(1);
    let source = config.model.clone();
    // Weights that were dropped by a deep sleep come back the way they came.
    let load: Loader = Box::new(move || Ok(Box::new(CpuCompute::new(Model::load(&source)?, threads)?)));
    let compute = Box::new(CpuCompute::new(model, threads)?);
    Ok(Arc::new(start_with(config, about, compute, load)?))
}

/// What the front says of a model.
#[derive(Clone, Debug)]
pub(super) struct About {
    pub(super) name: String,
    pub(super) shape: ModelShape,
    pub(super) eos: Vec<u32>,
}

/// [`start`] with anything that computes.
pub(super) fn start_with(
    config: EngineConfig,
    about: About,
    compute: Box<dyn Compute>,
    load: Loader,
) -> Result<Front, StartError> {
    let most = about.shape.context_tokens;
    let context_tokens = config.context_tokens.unwrap_or(most);
    if context_tokens > most || context_tokens == 0 {
        return Err(StartError::Context { asked: context_tokens, most });
    }
    let kv = open_kv(&config, &about.shape)?;
    let tables = BlockTables::new(BatchConfig {
        block_tokens: config.block_tokens,
        max_rows: config.max_batch_rows,
        max_row_tokens: context_tokens,
        max_step_tokens: config.max_step_tokens,
        max_ids: kv.block_count(),
    })?;
    let metadata = Metadata::new(tables.shape())?;
    let bounds = Bounds {
        model: ModelInfo {
            name: about.name,
            vocab: u32::try_from(about.shape.vocab).unwrap_or(u32::MAX),
            context_tokens,
            eos: about.eos,
            block_tokens: config.block_tokens,
        },
        kv_mode: config.kv,
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
    if let KvMode::Static(size) = config.kv {
        blocks.map_everything().map_err(|source| StartError::Static { size, source })?;
    }
    let counters = Arc::new(Counters::default());
    let worker = Worker::new(&config, blocks, metadata, compute, load, orders, Arc::clone(&counters));
    let thread = thread::Builder::new().name("engine".to_owned()).spawn(move || worker.run());
    Ok(Front::new(bounds, counters, gauge, commands, thread.map_err(StartError::Thread)?))
}

fn open_kv(config: &EngineConfig, shape: &ModelShape) -> Result<KvStore, StartError> {
    let backend = HostBackend::open(HostOptions::default())?;
    let size = match config.kv {
        KvMode::Elastic => config.kv_budget,
        KvMode::Static(size) if size > config.kv_budget => {
            return Err(StartError::OverBudget { size, budget: config.kv_budget });
        }
        KvMode::Static(size) => size,
    };
    let geometry = GeometryConfig {
        shape: shape.kv_shape(config.block_tokens),
        layout: Layout::Slab,
        granularity: backend.capabilities().granularity,
        chunk: config.chunk,
        capacity: Capacity::Budget(size),
    };
    let mut pool = PoolConfig::new(config.pool_name.clone(), Arc::new(backend), geometry);
    pool.runtime_dir = config.runtime_dir.clone();
    pool.budget = Some(config.kv_budget);
    pool.reserve = config.reserve;
    if config.kv != KvMode::Elastic {
        let geometry = Geometry::new(&geometry).map_err(|error| KvStoreError::Pool(error.into()))?;
        let pages = geometry.page_count();
        // Mapped at start and never given back, whatever neighbours want.
        pool.reserve = ReservePolicy::Fixed { min: pages, max: pages };
        pool.share.floor = Bytes(geometry.page_bytes().0 * u64::from(pages));
    }
    Ok(KvStore::open(pool)?)
}
