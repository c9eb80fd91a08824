//! Which blocks each row has, kept where steps are computed.
//!
//! ```text
//!   engine ── lend, admit, share, remove ──> StepTables ─┬─ Host   BlockTables and the arrays of a step
//!                                                        └─ Cuda   CudaBatch: its mirror here, tables and arrays on the device
//!   Compute::forward ── step ──> either
//! ```
//!
//! Both are `tidekv-batch`'s, and agree on every id: what the engine decides does not depend on what computes.

use tidekv_batch::cuda::{CudaBatch, CudaBatchError};
use tidekv_batch::{BatchConfig, BatchError, BlockTables, ConfigError, IdRun, LeaseError, Left, Metadata, SeqId};
use tidekv_core::units::KernelId;

/// Which blocks each row has, where steps are computed.
#[derive(Debug)]
pub enum StepTables {
    /// For the processor.
    Host(Box<HostTables>),
    /// For a GPU.
    Cuda(Box<CudaBatch>),
}

/// Tables in host memory.
#[derive(Debug)]
pub struct HostTables {
    pub(super) tables: BlockTables,
    /// The arrays of the latest step.
    pub(super) metadata: Metadata,
}

impl StepTables {
    /// Tables for the processor.
    ///
    /// # Errors
    /// A batch that makes no sense.
    pub fn host(config: BatchConfig) -> Result<Self, ConfigError> {
        let tables = BlockTables::new(config)?;
        let metadata = Metadata::new(tables.shape())?;
        Ok(Self::Host(Box::new(HostTables { tables, metadata })))
    }

    /// Tables on the device of this number.
    ///
    /// # Errors
    /// A batch that makes no sense; what the driver says.
    pub fn cuda(device: u32, config: BatchConfig) -> Result<Self, CudaBatchError> {
        Ok(Self::Cuda(Box::new(CudaBatch::open(device, config)?)))
    }

    /// To look at.
    pub fn view(&self) -> &BlockTables {
        match self {
            Self::Host(host) => &host.tables,
            Self::Cuda(batch) => batch.tables(),
        }
    }

    /// Gives the tokens of a step their places without computing it.
    #[cfg(test)]
    pub(crate) fn step(&mut self, query: &[u32]) -> Result<(), BatchError> {
        let Self::Host(host) = self else { panic!("only the processor's tables") };
        host.tables.update_block_table(tidekv_batch::Work::Rows(query)).map(|_| ())
    }

    /// See [`BlockTables::lend`].
    ///
    /// # Errors
    /// As there.
    pub fn lend(&mut self, runs: &[IdRun]) -> Result<(), LeaseError> {
        match self {
            Self::Host(host) => host.tables.lend(runs),
            Self::Cuda(batch) => batch.lend(runs),
        }
    }

    /// See [`BlockTables::take_back`].
    pub fn take_back(&mut self, count: u32, out: &mut Vec<KernelId>) -> u32 {
        match self {
            Self::Host(host) => host.tables.take_back(count, out),
            Self::Cuda(batch) => batch.take_back(count, out),
        }
    }

    /// See [`BlockTables::admit`].
    ///
    /// # Errors
    /// As there.
    pub fn admit(&mut self, seq: SeqId, tokens: u32, shared: &[KernelId]) -> Result<u32, BatchError> {
        match self {
            Self::Host(host) => host.tables.admit(seq, tokens, shared),
            Self::Cuda(batch) => batch.admit(seq, tokens, shared),
        }
    }

    /// See [`BlockTables::share`].
    ///
    /// # Errors
    /// As there.
    pub fn share(&mut self, seq: SeqId, blocks: u32, out: &mut Vec<KernelId>) -> Result<(), BatchError> {
        match self {
            Self::Host(host) => host.tables.share(seq, blocks, out),
            Self::Cuda(batch) => batch.share(seq, blocks, out),
        }
    }

    /// See [`BlockTables::remove`].
    ///
    /// # Errors
    /// As there.
    pub fn remove(&mut self, seq: SeqId, out: &mut Vec<KernelId>) -> Result<Left, BatchError> {
        match self {
            Self::Host(host) => host.tables.remove(seq, out),
            Self::Cuda(batch) => batch.remove(seq, out),
        }
    }

    /// See [`BlockTables::release`].
    ///
    /// # Errors
    /// As there.
    pub fn release(&mut self, seq: SeqId, out: &mut Vec<KernelId>) -> Result<Left, BatchError> {
        match self {
            Self::Host(host) => host.tables.release(seq, out),
            Self::Cuda(batch) => batch.release(seq, out),
        }
    }
}
