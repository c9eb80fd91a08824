//! Computing a step: tokens in, logits out, and K and V into the pool's memory on the way.
//!
//! ```text
//!   StepInput { tokens, metadata, tables }      what tidekv-batch prepared
//!        │
//!     Compute::forward ── writes K and V of the new tokens, reads those of all earlier ones ──> KvStore
//!        │                                                                                       (the pool's memory)
//!     Logits of the tokens that were asked for
//! ```
//!
//! [`Compute`] is all that the engine knows of a device. What a row gives must not depend on its company: neither on
//! the other rows of the step nor on how a prompt was cut into chunks, to the last bit. Elastic and static memory, a
//! preempted request and one that was left alone then give the same tokens, and that can be tested.
//!
//! This is the one place of the crate with `unsafe` code: [`KvStore`] turns block ids into memory.

mod cpu;
mod kv;

pub use cpu::CpuCompute;
pub use kv::{KvGauge, KvStore, KvStoreError};

use tidekv_batch::{Metadata, TableView};
use tidekv_core::units::KernelId;

/// One step, as `tidekv-batch` prepared it.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// The query tokens of all rows, one row after the other.
    pub tokens: &'a [u32],
    /// Where they are in their sequences, and where their K and V go.
    pub metadata: &'a Metadata,
    /// Where K and V of each row are.
    pub tables: TableView<'a>,
    /// Query tokens (indices into `tokens`) whose logits are wanted.
    pub wanted: &'a [u32],
}

/// What a step says about the next tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct Logits {
    /// Elements of a row.
    pub vocab: usize,
    /// One row for each wanted token, in their order.
    pub data: Vec<f32>,
}

impl Logits {
    /// One row for each wanted token.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[f32]> {
        self.data.chunks_exact(self.vocab)
    }
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
    #[error("the step has {tokens} tokens and {slots} places for them, and wants the logits of token {last_wanted}")]
    Mismatch {
        /// Tokens given.
        tokens: usize,
        /// Slots given.
        slots: usize,
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
}

/// What computes a model. One value per model; it owns the weights.
pub trait Compute: Send {
    /// Computes a step: K and V of its tokens are in `kv` when it returns.
    ///
    /// # Errors
    /// [`ComputeError`]; nothing that earlier steps wrote has changed.
    fn forward(&mut self, kv: &mut KvStore, step: &StepInput<'_>) -> Result<Logits, ComputeError>;
}
