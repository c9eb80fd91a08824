//! The one block of `--transfer_size_kb`, copied to the same place again and again.

use std::hint::black_box;

use tidekv_shm::copy::Method;

use super::{Field, Plan};
use crate::shm::chunks::{Chunks, Figure, clock_ns};

/// Chunks of at least this much, so that a block of a few KB is not timed by its clock.
const CHUNK_BYTES: usize = 1 << 20;

/// What was found out about it.
#[derive(Debug)]
pub(super) struct Single {
    pub(super) len: usize,
    /// Copies that were timed.
    pub(super) copies: usize,
    pub(super) figure: Figure,
    pub(super) chunks: Chunks,
    pub(super) differs: bool,
}

pub(super) fn measure(plan: &Plan, field: &mut Field) -> anyhow::Result<Single> {
    let len = plan.transfer_size_kb as usize * 1024;
    let wanted = plan.num_transfers as usize;
    let per_chunk = (CHUNK_BYTES / len).clamp(1, wanted);
    let mut chunks = Chunks::new(per_chunk, clock_ns());
    copy(plan, field, len)?;
    let differs = plan.verify_data && !field.arrived(0, len);
    let count = wanted.div_ceil(per_chunk);
    for _ in 0..count {
        chunks.time(|| (0..per_chunk).try_for_each(|_| copy(plan, field, len)))?;
    }
    let figure = chunks.figure().ok_or_else(|| anyhow::anyhow!("no block was copied"))?;
    Ok(Single { len, copies: count * per_chunk, figure, chunks, differs })
}

fn copy(plan: &Plan, field: &mut Field, len: usize) -> anyhow::Result<()> {
    let (to, from) = field.block(0, len);
    if plan.use_memcpy {
        Method::Plain.copy(to, from)?;
    } else {
        // Each byte passes through here, so that the compiler cannot make blocks of them.
        to.iter_mut().zip(from).for_each(|(to, from)| *to = black_box(*from));
    }
    black_box(to);
    Ok(())
}
