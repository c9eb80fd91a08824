//! The device's copy of the tables, and the outputs: one allocation, fixed addresses, and the structs that kernels read.
//!
//! ```text
//!   DeviceMemory  [ control | len | next_slot | ring | outputs ... | row work | table ........ ]
//!                   ^ each part begins on a boundary of 256 bytes
//! ```
//!
//! The structs are those of `kernels/batch.cu`, field by field; a test reads their sizes from the PTX.

use std::ops::Range;
use std::sync::Arc;

use tidekv_core::units::Bytes;
use tidekv_mem::MemError;
use tidekv_mem::cuda::DeviceMemory;

use super::gpu::Gpu;
use crate::{BatchShape, Padding};

/// What every launch gets: addresses and shapes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Replica {
    pub(super) table: u64,
    pub(super) len: u64,
    pub(super) next_slot: u64,
    pub(super) ring: u64,
    pub(super) control: u64,
    pub(super) slot_mapping: u64,
    pub(super) seq_lens: u64,
    pub(super) context_lens: u64,
    pub(super) query_start_loc: u64,
    pub(super) seq_start_loc: u64,
    table_stride: u64,
    row_blocks: u32,
    ring_cells: u32,
    max_rows: u32,
    block_shift: u32,
}

/// The words that change with every step.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Control {
    pub(super) batch: u32,
    pub(super) head: u32,
    pub(super) free: u32,
    pub(super) status: u32,
    pub(super) step: u64,
    pub(super) unused: u64,
}

impl Control {
    pub(super) fn status_text(self) -> &'static str {
        match self.status {
            0 => "nothing wrong",
            status if status & 1 != 0 => "too few ids in its ring",
            status if status & 2 != 0 => "a row without room",
            _ => "another batch or ring than it was told of",
        }
    }
}

/// Padding as kernels read it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PaddingWords {
    rows: u32,
    tokens: u32,
}

impl From<Padding> for PaddingWords {
    fn from(padding: Padding) -> Self {
        Self { rows: padding.rows, tokens: padding.tokens }
    }
}

/// Consecutive ids for consecutive cells.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) array: u32,
    pub(super) cell: u32,
    pub(super) first: i32,
    pub(super) count: u32,
}

impl Run {
    pub(super) const TABLE: u32 = 0;
    pub(super) const RING: u32 = 1;
}

/// A row as it is now.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug)]
pub(super) struct RowState {
    pub(super) next_slot: i64,
    pub(super) row: u32,
    pub(super) len: i32,
}

/// What a row brings into a step.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub(super) struct RowWork {
    pub(super) context: i32,
    pub(super) query: u32,
}

const _: () = {
    assert!(size_of::<Replica>() == 104 && size_of::<Control>() == 32 && size_of::<PaddingWords>() == 8);
    assert!(size_of::<Run>() == 16 && size_of::<RowState>() == 16 && size_of::<RowWork>() == 8);
};

/// Parts begin here, as `cudaMalloc` would align them.
const ALIGNMENT: u64 = 256;

/// The memory behind a [`Replica`].
#[derive(Debug)]
pub(super) struct ReplicaMemory {
    pub(super) addresses: Replica,
    /// [`RowWork`] of the step, where the host's copy would be read too often.
    pub(super) row_work: u64,
    memory: DeviceMemory,
}

impl ReplicaMemory {
    pub(super) fn new(gpu: &Arc<Gpu>, shape: &BatchShape) -> Result<Self, MemError> {
        let config = shape.config();
        let (rows, tokens) = (u64::from(config.max_rows), u64::from(config.max_step_tokens));
        let mut end = 0;
        let mut part = |count: u64, bytes_each: usize| {
            let at = end;
            end = (at + count * bytes_each as u64).next_multiple_of(ALIGNMENT);
            at
        };
        let mut addresses = Replica {
            control: part(1, size_of::<Control>()),
            len: part(rows, size_of::<i32>()),
            next_slot: part(rows, size_of::<i64>()),
            seq_lens: part(rows, size_of::<i32>()),
            context_lens: part(rows, size_of::<i32>()),
            query_start_loc: part(rows + 1, size_of::<i32>()),
            seq_start_loc: part(rows + 1, size_of::<i32>()),
            slot_mapping: part(tokens, size_of::<i64>()),
            ring: part(shape.ring_cells().into(), size_of::<i32>()),
            table: part(shape.table_cells().into(), size_of::<i32>()),
            table_stride: shape.stride().into(),
            row_blocks: shape.stride(),
            ring_cells: shape.ring_cells(),
            max_rows: config.max_rows,
            block_shift: shape.block_shift(),
        };
        let row_work = part(rows, size_of::<RowWork>());
        let memory = DeviceMemory::zeroed(&gpu.device, Bytes(end))?;
        let base = memory.address();
        for at in [
            &mut addresses.control,
            &mut addresses.len,
            &mut addresses.next_slot,
            &mut addresses.seq_lens,
            &mut addresses.context_lens,
            &mut addresses.query_start_loc,
            &mut addresses.seq_start_loc,
            &mut addresses.slot_mapping,
            &mut addresses.ring,
            &mut addresses.table,
        ] {
            *at += base;
        }
        Ok(Self { addresses, row_work: base + row_work, memory })
    }

    /// How much of the card it takes.
    pub(super) fn bytes(&self) -> Bytes {
        self.memory.bytes()
    }

    /// The control words.
    ///
    /// # Safety
    /// No work on the device is writing: the caller has waited for it.
    pub(super) unsafe fn control(&self) -> Result<Control, MemError> {
        let mut words = [0u32; 8];
        // SAFETY: the caller's promise.
        unsafe { self.read(self.addresses.control, &mut words) }?;
        let [batch, head, free, status, step_low, step_high, ..] = words;
        let step = u64::from(step_high) << 32 | u64::from(step_low);
        Ok(Control { batch, head, free, status, step, unused: 0 })
    }

    /// Fills `into` from an address of this memory.
    ///
    /// # Safety
    /// As [`control`](Self::control), and every bit pattern is a `T`.
    pub(super) unsafe fn read<T: Copy>(&self, address: u64, into: &mut [T]) -> Result<(), MemError> {
        let Range { start, end } = into.as_mut_ptr_range();
        let bytes = end as usize - start as usize;
        // SAFETY: the slice's own bytes, which are plain data by the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>(), bytes) };
        // SAFETY: the caller's promise.
        unsafe { self.memory.read_at(address - self.memory.address(), bytes) }
    }
}
