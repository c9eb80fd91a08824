//! What can go wrong with a batch on a device: the batch's own refusals, and the device's.

use tidekv_mem::MemError;

use crate::{BatchError, ConfigError};

/// An operation that was not done. Unless the text says otherwise, the batch is as it was.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaBatchError {
    /// The batch refused: a shortage, an unknown sequence, a step that is too large. Nothing was launched.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A batch cannot be like this.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device or its driver refused, is not there, or has no memory left.
    #[error("the device refused")]
    Device(#[from] MemError),
    /// One block of threads plans a whole step.
    #[error("{max_rows} rows are more than a device prepares in one step: lower max_rows to {most}")]
    TooManyRows {
        /// As asked for.
        max_rows: u32,
        /// What works.
        most: u32,
    },
    /// What captured launches do must be known when they are launched.
    #[error(
        "the stream is being captured: only a decode step can be part of a graph; do the rest before the capture begins"
    )]
    Capturing,
    /// A graph belongs to the batch that it was captured from.
    #[error("this graph was captured from another batch: capture one from this batch")]
    ForeignGraph,
    /// The device and its mirror on the host are not in the same state: a captured step was launched without being announced,
    /// or something else wrote to the device's arrays. The batch must not be used any more.
    #[error(
        "the device is at step {device_step} and reports {status}, the host expects step {host_step}: announce each launch of a captured step, and open a new batch"
    )]
    Apart {
        /// Steps that the device has done.
        device_step: u64,
        /// Steps that were put on the stream.
        host_step: u64,
        /// What the device found, in words.
        status: &'static str,
    },
}

impl CudaBatchError {
    /// Whether the same call can succeed later, once somebody gave something back.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Batch(error) => error.is_transient(),
            Self::Device(error) => error.is_transient(),
            _ => false,
        }
    }

    /// Whether the device's memory ran out.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Device(error) if error.is_out_of_memory())
    }
}
