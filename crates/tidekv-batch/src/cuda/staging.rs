//! Pinned memory through which changes and query lengths reach the device, in slots that take turns.
//!
//! ```text
//!   slot 0 [ runs | rows | row work ]   event: over?     A slot is written by the host, read by one launch, and recorded
//!   slot 1 [ runs | rows | row work ]   event: over?     behind it. It is written again only when that event is over:
//!   ...                                                  the host waits, however far it is ahead.
//! ```
//!
//! Depth makes waiting rare, and the events make it right: a ring that is merely long enough corrupts steps as soon as it is not.

use std::sync::Arc;

use tidekv_mem::MemError;
use tidekv_mem::cuda::PinnedMemory;

use super::gpu::{Event, Gpu, Stream};
use super::replica::{RowState, RowWork, Run};

const SLOTS: usize = 8;
/// Runs of one slot; more go through several.
pub(super) const SLOT_RUNS: usize = 4096;

/// Where kernels find what was staged.
#[derive(Clone, Copy, Debug)]
pub(super) struct Staged {
    pub(super) runs: u64,
    pub(super) run_count: u32,
    pub(super) rows: u64,
    pub(super) row_count: u32,
}

#[derive(Debug)]
pub(super) struct Staging {
    memory: PinnedMemory,
    slot_bytes: usize,
    max_rows: usize,
    over: Vec<Event>,
    next: usize,
}

/// A slot that the device is done with.
#[derive(Debug)]
pub(super) struct Slot<'a> {
    pub(super) runs: &'a mut [Run],
    pub(super) rows: &'a mut [RowState],
    pub(super) work: &'a mut [RowWork],
    address: u64,
    over: &'a Event,
}

impl Staging {
    pub(super) fn new(gpu: &Arc<Gpu>, max_rows: u32) -> Result<Self, MemError> {
        let max_rows = max_rows as usize;
        let slot_bytes = SLOT_RUNS * size_of::<Run>() + max_rows * (size_of::<RowState>() + size_of::<RowWork>());
        let slot_bytes = slot_bytes.next_multiple_of(256);
        let over = (0..SLOTS).map(|_| Event::new(gpu)).collect::<Result<_, _>>()?;
        Ok(Self { memory: PinnedMemory::zeroed(&gpu.device, SLOTS * slot_bytes)?, slot_bytes, max_rows, over, next: 0 })
    }

    /// The next slot, once the device is done with it.
    pub(super) fn slot(&mut self) -> Result<Slot<'_>, MemError> {
        let index = self.next;
        self.over[index].wait()?;
        self.next = (index + 1) % SLOTS;
        let offset = index * self.slot_bytes;
        // SAFETY: inside the allocation: there are SLOTS slots.
        let runs = unsafe { self.memory.as_ptr().add(offset) }.cast::<Run>();
        // SAFETY: inside the slot, which has room for all three arrays, largest alignment first.
        let rows = unsafe { runs.add(SLOT_RUNS) }.cast::<RowState>();
        // SAFETY: as above.
        let work = unsafe { rows.add(self.max_rows) }.cast::<RowWork>();
        // The memory was zeroed, and zeros are valid in all three structs. Nobody else has these slices: they borrow `self`, and
        // the device's last launch that read the slot is over.
        Ok(Slot {
            // SAFETY: as just said.
            runs: unsafe { std::slice::from_raw_parts_mut(runs.as_ptr(), SLOT_RUNS) },
            // SAFETY: as just said.
            rows: unsafe { std::slice::from_raw_parts_mut(rows.as_ptr(), self.max_rows) },
            // SAFETY: as just said.
            work: unsafe { std::slice::from_raw_parts_mut(work.as_ptr(), self.max_rows) },
            address: self.memory.address() + offset as u64,
            over: &self.over[index],
        })
    }
}

impl Slot<'_> {
    /// The first runs and rows of the slot, for the device.
    pub(super) fn staged(&self, run_count: u32, row_count: u32) -> Staged {
        Staged { runs: self.address, run_count, rows: self.address + size_of_val(self.runs) as u64, row_count }
    }

    /// The row work, for the device.
    pub(super) fn work_address(&self) -> u64 {
        self.address + size_of_val(self.runs) as u64 + size_of_val(self.rows) as u64
    }

    /// Everything on the stream until now may read the slot; what comes after does not. The context is current.
    pub(super) fn hand_over(self, stream: &Stream) -> Result<(), MemError> {
        // Without an event to wait for later, the only way to know is to wait now.
        self.over.record(stream).or_else(|_| stream.synchronise())
    }
}
