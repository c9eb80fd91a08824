//! The GPU: products by cuBLAS, everything else our own kernels, K and V in the pool's pages.
//!
//! ```text
//!                      host                                             device, one stream
//!   tokens ─> pinned memory                          metadata (tidekv-batch) ─> embed ─┬─> norm ─> qkv ─> rope ─> attend ─> output ─┬─> ...
//!                                                                                      │             K, V into pages                │
//!                                                    ... ─> norm ─> gate_up ─> gate ─> down ─> next layer ... ─> norm ─> head ─> best
//!   event of the step <── waited for                 ids of the likeliest tokens ─> pinned memory
//! ```
//!
//! | file        | it                                                                                |
//! |-------------|-----------------------------------------------------------------------------------|
//! | `cublas`    | the library, found at run time                                                    |
//! | `kernels`   | our kernels and how each is launched                                              |
//! | `attention` | the same for attention: tiles and splits                                          |
//! | `weights`   | the model's numbers on the device; made there, or sent; parked in host memory     |
//! | `carry`     | the way there and back, in several lanes                                          |
//! | `buffers`   | everything between the layers, made once                                          |
//! | `step`      | a step: eagerly, or as a graph for decode steps                                   |
//! | `probe`     | floors for benchmarks to compare with                                             |
//!
//! A decode step is one graph, captured for each of a few batch sizes, with the metadata step of `tidekv-batch` as its first node: the
//! host sends tokens and nothing else. [`forward`](CudaCompute::forward) returns when the step's event is over, whatever happened, so a
//! block that is freed behind it is read by nobody any more.
//!
//! Weights, K and V are bf16, or floats to compare with the processor; every sum is a float, and so is the state between layers.

mod attention;
mod buffers;
mod carry;
mod cublas;
mod kernels;
mod probe;
mod step;
mod weights;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tidekv_batch::cuda::gpu::{Event, Gpu, Graph};
use tidekv_core::units::Bytes;
use tidekv_mem::cuda::DeviceMemory;

use super::{Compute, ComputeError, KvStore, Outputs, StepInput, StepTables};
use crate::config::Precision;
use crate::model::{Draw, Model, ModelShape};
use attention::{Attend, MAX_HEAD_SIZE};
use buffers::Buffers;
use cublas::Cublas;
use kernels::Kernels;
use weights::{DeviceWeights, Source};

pub use buffers::StepLimits;
pub use carry::CopyTimes;
pub use probe::{AttentionProbe, PlainMemory};

/// A GPU on which models can be computed, with the library for it.
#[derive(Clone, Debug)]
pub struct Device {
    gpu: Arc<Gpu>,
}

impl Device {
    /// Opens device `number` and makes sure that it can compute.
    ///
    /// # Errors
    /// Without a driver, a GPU or cuBLAS: what is missing, in a sentence.
    pub fn open(number: u32) -> Result<Self, ComputeError> {
        let gpu = Gpu::open(number)?;
        // Found now, not when the weights are there.
        drop(Cublas::open(&gpu)?);
        Ok(Self { gpu })
    }

    /// As CUDA counts them.
    pub fn number(&self) -> u32 {
        self.gpu.device.number()
    }
}

/// A model on a GPU.
pub struct CudaCompute {
    shape: ModelShape,
    precision: Precision,
    /// Decode steps by their padded number of rows.
    graphs: BTreeMap<u32, Graph>,
    /// The batch and the memory that the graphs were captured for.
    captured_for: Option<(u64, u64)>,
    weights: DeviceWeights,
    kernels: Kernels,
    attend: Attend,
    blas: Cublas,
    buffers: Buffers,
    done: Event,
    gpu: Arc<Gpu>,
}

impl fmt::Debug for CudaCompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaCompute")
            .field("shape", &self.shape)
            .field("precision", &self.precision)
            .field("weights", &self.weights.bytes())
            .finish_non_exhaustive()
    }
}

impl CudaCompute {
    /// Sends a model to the device, to compute steps within `limits`.
    ///
    /// # Errors
    /// [`ComputeError::Unsupported`], and what driver and library say.
    pub fn new(device: &Device, model: Model, precision: Precision, limits: StepLimits) -> Result<Self, ComputeError> {
        Self::build(device, model, precision, limits)
    }

    /// Has the device make a model's numbers, to compute steps within `limits`.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn made(
        device: &Device,
        model: Model<Draw>,
        precision: Precision,
        limits: StepLimits,
    ) -> Result<Self, ComputeError> {
        Self::build(device, model, precision, limits)
    }

    fn build<M: Source>(
        device: &Device,
        model: Model<M>,
        precision: Precision,
        limits: StepLimits,
    ) -> Result<Self, ComputeError> {
        limits.check()?;
        let Model { shape, weights, .. } = model;
        if shape.head_size > MAX_HEAD_SIZE {
            let (what, found) = ("the size of a head", shape.head_size);
            return Err(ComputeError::Unsupported { what, found, known: "up to 256 elements" });
        }
        let gpu = Arc::clone(&device.gpu);
        let kernels = Kernels::load(&gpu, precision)?;
        let attend = Attend::load(&gpu, precision, &shape)?;
        let blas = Cublas::open(&gpu)?;
        let weights = DeviceWeights::new(&gpu, &kernels, precision, &shape, weights)?;
        let buffers = Buffers::new(&gpu, &shape, precision, limits, attend.partial_bytes())?;
        let done = Event::new(&gpu)?;
        Ok(Self {
            shape,
            precision,
            graphs: BTreeMap::new(),
            captured_for: None,
            weights,
            kernels,
            attend,
            blas,
            buffers,
            done,
            gpu,
        })
    }

    /// What the weights take of the card, or of the host while they are parked.
    pub fn weight_bytes(&self) -> Bytes {
        self.weights.bytes()
    }

    /// What steps take of the card besides weights and pages.
    pub fn buffer_bytes(&self) -> Bytes {
        self.buffers.bytes()
    }
}

impl Compute for CudaCompute {
    fn forward(
        &mut self,
        kv: &mut KvStore,
        tables: &mut StepTables,
        step: &StepInput<'_>,
    ) -> Result<Outputs, ComputeError> {
        self.step(kv, tables, step)
    }

    fn check_device(&mut self) -> Result<(), ComputeError> {
        // Takes memory, writes it and waits: what a context that is broken refuses.
        DeviceMemory::zeroed(&self.gpu.device, Bytes(1))?;
        Ok(())
    }

    fn park(&mut self) -> Result<(), ComputeError> {
        // They hold the addresses of the weights.
        self.graphs.clear();
        self.weights.park(&self.gpu)
    }

    fn parked_bytes(&self) -> Bytes {
        self.weights.parked_bytes()
    }

    fn unpark(&mut self) -> Result<(), ComputeError> {
        self.weights.unpark(&self.gpu)
    }
}
