//! Computing a step: tokens in, the next tokens or their logits out, and K and V into the pool's memory on the way.
//!
//! ```text
//!   StepInput { query, tokens, wanted }
//!        │
//!     Compute::forward ── gives the tokens their places ──> StepTables      block tables, where the step is computed
//!        │             ── writes K and V of the new tokens, reads those of all earlier ones ──> KvStore
//!        │                                                                                       (the pool's memory)
//!     Outputs of the tokens that were asked for
//! ```
//!
//! [`Compute`] is all that the engine knows of a device: `cpu` and `cuda` are behind it. On the processor a row's result does not depend
//! on its company: neither on the other rows of the step nor on how a prompt was cut into chunks, to the last bit. On a GPU the library
//! that multiplies chooses by the size of the step, so there the promise is smaller (decision 0017): the same steps give the
//! same bits, wherever the blocks are. Elastic and static memory give the same text on both.
//!
//! This is the one place of the crate with `unsafe` code: [`KvStore`] turns block ids into memory, `cuda` launches kernels.

mod cpu;
pub mod cuda;
mod kv;
mod tables;

pub use cpu::CpuCompute;
pub use cuda::CudaCompute;
pub use kv::{KvGauge, KvStore, KvStoreError};
pub use tables::{HostTables, StepTables};

use tidekv_batch::cuda::CudaBatchError;
use tidekv_batch::{BatchError, BlockTables};
use tidekv_core::units::{Bytes, KernelId};
use tidekv_mem::MemError;

/// `CUBLAS_STATUS_ALLOC_FAILED`.
const CUBLAS_ALLOC_FAILED: i32 = 3;

/// One step.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Query tokens of each row, in the order of the rows.
    pub query: &'a [u32],
    /// The query tokens of all rows, one row after the other.
    pub tokens: &'a [u32],
    /// What is asked of it.
    pub wanted: &'a [Wanted],
}

/// A token whose successor is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Index of the query token in the step.
    pub token: u32,
    /// Whether all logits are needed, and not only the id of the largest.
    pub logits: bool,
}

/// What a step says about the next tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Outputs {
    /// The [likeliest] id for each wanted token, in their order.
    pub best: Vec<u32>,
    /// The logits of those that asked for them.
    pub logits: Logits,
}

/// Rows of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// Elements of a row.
    pub vocab: usize,
    /// One row after the other.
    pub data: Vec<f32>,
}

impl Logits {
    /// Row by row.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.data.chunks_exact(self.vocab)
    }
}

/// The id of the largest logit; of equals the first. What is not a number is never the largest.
pub fn likeliest(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in (0..).zip(logits) {
        if logit > best.1 {
            best = (id, logit);
        }
    }
    best.0
}

/// A step that could not be computed. Its tokens' K and V are not to be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ComputeError {
    /// The engine and its block table disagree: a bug, found before it could touch memory.
    #[error("block {id} is in a row of the step and is not held: its memory may be somebody else's")]
    NotHeld {
        /// The block.
        id: KernelId,
    },
    /// An id outside the vocabulary.
    #[error("token {id} is not in the vocabulary of {vocab}")]
    UnknownToken {
        /// As given.
        id: u32,
        /// Ids are below this.
        vocab: usize,
    },
    /// The numbers of the step do not fit together.
    #[error("the step has {tokens} tokens and {places} places for them, and wants the logits of token {last_wanted}")]
    Mismatch {
        /// Tokens given.
        tokens: usize,
        /// Places that the rows have for them.
        places: usize,
        /// The largest wanted index.
        last_wanted: u32,
    },
    /// The system did not give a thread.
    #[error("{threads} threads to compute with cannot be had")]
    Threads {
        /// How many.
        threads: usize,
        /// Why.
        #[source]
        source: rayon::ThreadPoolBuildError,
    },
    /// The tables refused the step: a bug of the engine.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// Tables or memory of another device than the one that computes.
    #[error("the step's {what} are not where it is computed")]
    Elsewhere {
        /// Which part of it.
        what: &'static str,
    },
    /// The GPU or its driver refused.
    #[error(transparent)]
    Device(#[from] MemError),
    /// The same, while a step was prepared.
    #[error(transparent)]
    DeviceBatch(#[from] CudaBatchError),
    /// The library that multiplies is missing.
    #[error("cuBLAS was not found (tried {tried}): install the CUDA toolkit, or choose the back-end cpu")]
    NoCublas {
        /// Names and folders that were tried.
        tried: String,
    },
    /// It is there and refused.
    #[error("cuBLAS refused: {function} answers {code}")]
    Cublas {
        /// Which call.
        function: &'static str,
        /// Its answer.
        code: i32,
    },
    /// More tokens in a step than kernels are launched for.
    #[error(
        "steps of up to {tokens} tokens are asked for, and a GPU computes at most {most} at once: give fewer to \
         --max-num-batched-tokens and --max-num-seqs"
    )]
    StepTooLarge {
        /// As given.
        tokens: u32,
        /// What is possible.
        most: u32,
    },
    /// A model that the kernels were not made for.
    #[error("{what} is {found}, and on a GPU {known} can be computed: choose the back-end cpu")]
    Unsupported {
        /// Which size of the model.
        what: &'static str,
        /// As it is.
        found: usize,
        /// What it could be.
        known: &'static str,
    },
    /// The weights were moved to host memory and not back.
    #[error("the weights are in host memory: wake the model first")]
    Parked,
    /// The host has no room for them.
    #[error("the host has no room for the weights, and they stay on the GPU (POST /sleep?level=2 drops them)")]
    NoRoomToPark(#[source] MemError),
}

impl ComputeError {
    /// Whether the device is lost to this process: nothing can be computed on it any more, by nobody of the process.
    pub fn is_device_lost(&self) -> bool {
        match self {
            Self::Device(error) | Self::DeviceBatch(CudaBatchError::Device(error)) => error.is_device_lost(),
            _ => false,
        }
    }

    /// Whether the device had no memory left, so that others giving some back can help.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::Device(error) | Self::DeviceBatch(CudaBatchError::Device(error)) => error.is_out_of_memory(),
            // Its handle takes memory of the device too.
            Self::Cublas { code, .. } => *code == CUBLAS_ALLOC_FAILED,
            _ => false,
        }
    }
}

/// What computes a model. One value per model; it owns the weights.
pub trait Compute: Send {
    /// Computes a step: its tokens have their places in `tables`, and their K and V are in `kv`, when it returns.
    ///
    /// # Errors
    /// [`ComputeError`]; nothing that earlier steps wrote has changed.
    fn forward(
        &mut self,
        kv: &mut KvStore,
        tables: &mut StepTables,
        step: &StepInput<'_>,
    ) -> Result<Outputs, ComputeError>;

    /// Whether anything can be computed still: asked behind a step that failed.
    ///
    /// # Errors
    /// What the device says; [`ComputeError::is_device_lost`] tells a loss from a trouble that passes.
    fn check_device(&mut self) -> Result<(), ComputeError> {
        Ok(())
    }

    /// Moves the weights to host memory, where that frees a device's. Nothing is computed until [`unpark`](Self::unpark).
    ///
    /// # Errors
    /// [`ComputeError`]; then the weights are where they were.
    fn park(&mut self) -> Result<(), ComputeError> {
        Ok(())
    }

    /// What [`unpark`](Self::unpark) would take of the device.
    fn parked_bytes(&self) -> Bytes {
        Bytes::ZERO
    }

    /// Moves them back.
    ///
    /// # Errors
    /// As [`park`](Self::park).
    fn unpark(&mut self) -> Result<(), ComputeError> {
        Ok(())
    }
}

/// Refuses a step whose tokens, rows and wishes do not fit together.
fn check_step(step: &StepInput<'_>, vocab: usize) -> Result<(), ComputeError> {
    let places: usize = step.query.iter().map(|&tokens| tokens as usize).sum();
    let last_wanted = step.wanted.iter().map(|wanted| wanted.token).max().unwrap_or(0);
    let tokens = step.tokens.len();
    if tokens != places || (!step.wanted.is_empty() && last_wanted as usize >= tokens) {
        return Err(ComputeError::Mismatch { tokens, places, last_wanted });
    }
    match step.tokens.iter().find(|&&id| id as usize >= vocab) {
        Some(&id) => Err(ComputeError::UnknownToken { id, vocab }),
        None => Ok(()),
    }
}

/// Refuses a step with a block that is not held: its memory may be somebody else's, or gone. The step takes the next `new_blocks` of the
/// ring.
fn check_held(kv: &KvStore, tables: &BlockTables, new_blocks: u32) -> Result<(), ComputeError> {
    let view = tables.block_tables();
    let of_row = |(row, &len): (u32, &i32)| {
        let blocks = tables.shape().blocks_for(len.cast_unsigned()) as usize;
        view.row(row)[..blocks].iter().map(|id| KernelId(id.cast_unsigned()))
    };
    let in_rows = (0..view.rows).zip(tables.lens()).flat_map(of_row);
    let mut all = in_rows.chain(tables.free_ids().take(new_blocks as usize));
    all.find(|&id| !kv.holds(id)).map_or(Ok(()), |id| Err(ComputeError::NotHeld { id }))
}
