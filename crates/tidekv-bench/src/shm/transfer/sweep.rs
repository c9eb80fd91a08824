//! Every size, hot and cold, by every method in turn.

use std::hint::black_box;
use std::time::Instant;

use tidekv_shm::copy::{Copier, CopyError, Method};

use super::{Field, Plan, Temperature};
use crate::progress::Progress;
use crate::shm::chunks::nanos;
use crate::stats::{Samples, to_f64};

/// Turns of each contender. Many short ones: what disturbs the machine for a while disturbs all of them.
const ROUNDS: u32 = 25;
/// For fewer than 500 transfers.
const FEW_ROUNDS: u32 = 3;
/// Blocks from here on take milliseconds: they have one sample a turn.
const LARGE: usize = 16 << 20;

/// Samples of a turn.
const SAMPLES: usize = 8;

/// Bytes of one sample, if the block is not larger. A quarter of a millisecond of cold memory: long for a clock, short
/// beside the time that a busy machine lets a thread run.
const SAMPLE_BYTES: usize = 2 << 20;

/// A hot sample has this many times the bytes: caches are that much faster.
const HOT_TIMES: usize = 4;

/// Cold bytes that are copied at the beginning of a turn and not timed. Caches are full of what the one before wrote,
/// and he who is next would pay for writing that back.
const SETTLE_BYTES: usize = 16 << 20;

/// Bytes of a GiB, and nanoseconds of a second: bytes over nanoseconds times this is GiB/s.
const GIBPS: f64 = 1e9 / (1u64 << 30) as f64;

/// Times of one size at one temperature.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) len: usize,
    pub(super) temperature: Temperature,
    /// Bytes of one sample.
    pub(super) sample_bytes: usize,
    /// By contender, ours last.
    pub(super) samples: Vec<(Contender, Samples)>,
    /// Copies that differ from their source.
    pub(super) differing: u32,
}

/// Who copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    Method(Method),
    Ours,
}

impl Contender {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Method(method) => method.name(),
            Self::Ours => "ours",
        }
    }
}

impl Row {
    /// The median, in GiB/s.
    pub(super) fn gibps(&self, contender: Contender) -> Option<f64> {
        let (_, samples) = self.samples.iter().find(|(who, _)| *who == contender)?;
        Some(to_f64(self.sample_bytes as u64) / to_f64(samples.percentiles()?.p50) * GIBPS)
    }

    pub(super) fn ours(&self) -> f64 {
        self.gibps(Contender::Ours).unwrap_or(0.0)
    }

    pub(super) fn memcpy(&self) -> f64 {
        self.gibps(Contender::Method(Method::Plain)).unwrap_or(0.0)
    }

    /// The fastest.
    pub(super) fn best(&self) -> f64 {
        self.samples.iter().filter_map(|(who, _)| self.gibps(*who)).fold(0.0, f64::max)
    }
}

pub(super) fn measure(
    plan: &Plan,
    copier: &Copier,
    field: &mut Field,
    progress: &Progress,
) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for len in plan.sizes() {
        for temperature in plan.temperatures() {
            progress.now(format!("{} KB, {}", len >> 10, temperature.name()));
            rows.push(measure_row(plan, copier, field, len, temperature)?);
            progress.step();
        }
    }
    Ok(rows)
}

fn measure_row(
    plan: &Plan,
    copier: &Copier,
    field: &mut Field,
    len: usize,
    temperature: Temperature,
) -> anyhow::Result<Row> {
    let contenders = Method::available().map(Contender::Method).chain([Contender::Ours]);
    let samples: Vec<_> = contenders.map(|contender| (contender, Samples::new())).collect();
    let bytes = if temperature == Temperature::Hot { HOT_TIMES * SAMPLE_BYTES } else { SAMPLE_BYTES };
    let blocks = (bytes / len).max(1);
    let mut row = Row { len, temperature, sample_bytes: blocks * len, samples, differing: 0 };
    let rounds = if plan.num_transfers < 500 { FEW_ROUNDS } else { ROUNDS };
    let samples_of_turn = if len >= LARGE { 1 } else { SAMPLES };
    let settling = if temperature == Temperature::Hot { 1 } else { SETTLE_BYTES.div_ceil(len) };
    for round in 0..rounds as usize {
        let count = row.samples.len();
        for turn in 0..count {
            let (contender, samples) = &mut row.samples[(turn + round) % count];
            let copy = Copy { copier, contender: *contender, len, temperature };
            copy.blocks(field, settling)?;
            for _ in 0..samples_of_turn {
                samples.push(copy.blocks(field, blocks)?);
            }
            if plan.verify_data && round == 0 {
                row.differing += u32::from(!copy.arrives(field)?);
            }
        }
    }
    Ok(row)
}

/// Who copies what.
#[derive(Clone, Copy)]
struct Copy<'a> {
    copier: &'a Copier,
    contender: Contender,
    len: usize,
    temperature: Temperature,
}

impl Copy<'_> {
    /// Copies so many blocks, and answers how many nanoseconds that took.
    fn blocks(&self, field: &mut Field, count: usize) -> Result<u64, CopyError> {
        let started = Instant::now();
        for _ in 0..count {
            let at = self.place(field);
            self.block(field, at)?;
        }
        Ok(nanos(started))
    }

    fn place(&self, field: &mut Field) -> usize {
        match self.temperature {
            Temperature::Hot => 0,
            Temperature::Cold => field.next_block(self.len),
        }
    }

    fn block(&self, field: &mut Field, at: usize) -> Result<(), CopyError> {
        let (to, from) = field.block(at, self.len);
        match self.contender {
            Contender::Method(method) => method.copy(to, from)?,
            Contender::Ours => self.copier.copy(to, from, self.temperature.destination())?,
        }
        black_box(to);
        Ok(())
    }

    /// Whether a block arrives where there was none.
    fn arrives(&self, field: &mut Field) -> Result<bool, CopyError> {
        let at = self.place(field);
        field.block(at, self.len).0.fill(0);
        self.block(field, at)?;
        Ok(field.arrived(at, self.len))
    }
}
