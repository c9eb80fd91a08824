//! A cell of the table: one batch size and one length, what was measured of it, and what can go wrong in it alone.

use std::fmt;
use std::time::Instant;

use tidekv_batch::{BatchError, ConfigError, LeaseError};
use tidekv_core::units::Bytes;

use super::Op;
use super::reference::Mismatch;
use crate::stats::{Samples, to_f64};

/// So many sequences of so many tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) batch: u32,
    pub(super) seq: u32,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch {}, sequences of {} tokens", self.batch, self.seq)
    }
}

/// Why a cell has no figures. The others are measured nevertheless.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(super) enum CellError {
    /// Its tables do not fit.
    #[error("{cell}: {reason}: reduce --batch-sizes or --seq-lens")]
    OutOfMemory { cell: Cell, reason: String },
    /// What was prepared is not what the reference says.
    #[error("{cell}: {mismatch}")]
    Wrong { cell: Cell, mismatch: Mismatch },
    /// A step was refused that the benchmark had made room for.
    #[error("{cell}: {reason}")]
    Failed { cell: Cell, reason: String },
}

impl CellError {
    pub(super) fn too_large(cell: Cell, needed: Bytes, free: Bytes) -> Self {
        Self::OutOfMemory { cell, reason: format!("its tables take {needed}, and {free} are free") }
    }

    pub(super) fn of_config(cell: Cell, error: &ConfigError) -> Self {
        let reason = error.to_string();
        match error {
            ConfigError::OutOfMemory { .. } | ConfigError::TableTooLarge { .. } | ConfigError::OutOfRange { .. } => {
                Self::OutOfMemory { cell, reason }
            }
            _ => Self::Failed { cell, reason },
        }
    }

    pub(super) fn of_batch(cell: Cell, error: BatchError) -> Self {
        Self::Failed { cell, reason: error.to_string() }
    }

    pub(super) fn of_lease(cell: Cell, error: LeaseError) -> Self {
        Self::Failed { cell, reason: error.to_string() }
    }
}

/// Times of one operation, several in a sample.
#[derive(Clone, Debug, Default)]
pub(super) struct Timed {
    per_sample: u32,
    samples: Samples,
}

/// Microseconds of one operation, over the samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Micros {
    pub(super) mean: f64,
    pub(super) p50: f64,
    pub(super) p10: f64,
    pub(super) p90: f64,
}

impl Timed {
    /// Nothing measured yet; each sample will be of `per_sample` operations.
    pub(super) fn new(per_sample: u32) -> Self {
        Self { per_sample, samples: Samples::new() }
    }

    /// Times one sample.
    pub(super) fn time<T>(&mut self, sample: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let answer = std::hint::black_box(sample());
        self.samples.push_duration(started.elapsed());
        answer
    }

    pub(super) fn samples(&self) -> &Samples {
        &self.samples
    }

    pub(super) fn micros(&self) -> Option<Micros> {
        let p = self.samples.percentiles()?;
        let each = |ns: f64| ns / 1e3 / f64::from(self.per_sample);
        let p10 = self.samples.percentile(10)?;
        Some(Micros { mean: each(p.avg), p50: each(to_f64(p.p50)), p10: each(to_f64(p10)), p90: each(to_f64(p.p90)) })
    }
}

/// What a GPU showed of a cell; what it did not measure is empty.
#[derive(Clone, Debug, Default)]
pub(super) struct DeviceTimes {
    /// Each operation on the device until it is over.
    pub(super) ops: Vec<(Op, Timed)>,
    /// Packing on the host, and table and arrays brought to the device.
    pub(super) cpu_pack_to_device: Timed,
    /// The whole step on the host, and brought to the device.
    pub(super) cpu_step_to_device: Timed,
    /// A step as a launch of a captured graph.
    pub(super) graph_launch: Timed,
    /// Device time of one step inside a longer graph.
    pub(super) in_graph_us: Option<f64>,
    /// The host's part of a step.
    pub(super) issue: Timed,
}

/// Everything measured of one cell.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) cell: Cell,
    pub(super) cpu: Vec<(Op, Timed)>,
    pub(super) gpu: Option<DeviceTimes>,
    /// Steps whose outputs were compared.
    pub(super) verified_steps: u64,
    pub(super) error: Option<CellError>,
}

impl Measured {
    pub(super) fn new(cell: Cell) -> Self {
        Self { cell, cpu: Vec::new(), gpu: None, verified_steps: 0, error: None }
    }

    pub(super) fn cpu_us(&self, op: Op) -> Option<Micros> {
        find(&self.cpu, op)
    }

    pub(super) fn gpu_us(&self, op: Op) -> Option<Micros> {
        find(&self.gpu.as_ref()?.ops, op)
    }
}

fn find(ops: &[(Op, Timed)], op: Op) -> Option<Micros> {
    ops.iter().find(|(other, _)| *other == op)?.1.micros()
}
