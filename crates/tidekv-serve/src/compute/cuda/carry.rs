//! Carrying much memory between the card and the host: several lanes side by side, each with a thread and two page-locked pieces.
//!
//! ```text
//!   card   [ piece | piece | piece | piece | ... ]        lanes take the next piece that nobody has
//!              │ the card copies: 50 GB/s
//!   lane     (a) and (b), page-locked: while the card copies one, the lane's thread copies the other
//!              │ the thread copies, and on the way out is the first to touch the page: the slow part, so there are several
//!   host   [ piece | piece | piece | piece | ... ]        ordinary pages
//! ```
//!
//! The driver's own copy to ordinary memory does all of it on one thread, page fault by page fault: 1.1 GB/s on an H200 whose bus carries fifty, and
//! sixteen lanes 22 of them. Page-locking the host's side instead would make one thread of the kernel do the same.

use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tidekv_batch::cuda::gpu::{Gpu, Stream};
use tidekv_core::units::Bytes;
use tidekv_mem::MemError;
use tidekv_mem::cuda::{DeviceMemory, PinnedMemory};
use tidekv_mem::host::BulkMemory;

use super::Device;
use crate::compute::ComputeError;

/// What goes through a lane at once: long beside what a copy costs to start, and a whole number of huge pages.
const PIECE: usize = 4 << 20;
/// More do not help: the bus is full, or the kernel is.
const MAX_LANES: usize = 16;
/// Page-locked memory that the driver's copies go through when they are timed.
const LOCKED: usize = 1 << 30;

/// Copies the card's memory from `from` on into `into`.
///
/// # Safety
/// The memory is the card's for so many bytes, and no work on the device writes it meanwhile.
///
/// # Errors
/// What the driver says; then `into` holds anything.
pub(super) unsafe fn carry_out(gpu: &Arc<Gpu>, from: u64, into: &mut [u8]) -> Result<(), MemError> {
    in_lanes(
        gpu,
        into.chunks_mut(PIECE).enumerate(),
        |slot, (index, piece)| {
            let (to, address) = (slot.memory.as_ptr().as_ptr(), from + (index * PIECE) as u64);
            // SAFETY: the caller's promise, and a page-locked piece of the slot's own that is waited for before it is used again.
            unsafe { slot.stream.copy_out(to, address, piece.len()) }.map(|()| piece)
        },
        |slot, piece| piece.copy_from_slice(slot.bytes(piece.len())),
    )
}

/// Copies `from` into the card's memory from `to` on.
///
/// # Safety
/// The memory is the card's for so many bytes, and nothing on the device uses it meanwhile.
///
/// # Errors
/// What the driver says; then the card's memory holds anything.
pub(super) unsafe fn carry_in(gpu: &Arc<Gpu>, from: &[u8], to: u64) -> Result<(), MemError> {
    in_lanes(
        gpu,
        from.chunks(PIECE).enumerate(),
        |slot, (index, piece)| {
            slot.bytes_mut(piece.len()).copy_from_slice(piece);
            let (address, from) = (to + (index * PIECE) as u64, slot.memory.as_ptr().as_ptr());
            // SAFETY: the caller's promise, and a page-locked piece of the slot's own that is waited for before it is used again.
            unsafe { slot.stream.copy_in(address, from, piece.len()) }
        },
        |_, ()| (),
    )
}

/// A page-locked piece, and the stream of the copies from and to it.
struct Slot {
    memory: PinnedMemory,
    stream: Stream,
}

impl Slot {
    fn of(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self, MemError> {
        Ok(Self { memory: PinnedMemory::zeroed(&gpu.device, bytes)?, stream: Stream::new(gpu)? })
    }

    /// What the card copied; its stream was waited for.
    fn bytes(&self, len: usize) -> &[u8] {
        assert!(len <= self.memory.len(), "a piece fits");
        // SAFETY: inside the allocation, initialised when it was made, and no copy is under way: the stream was waited for.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().as_ptr(), len) }
    }

    /// What the card shall copy; its stream was waited for.
    fn bytes_mut(&mut self, len: usize) -> &mut [u8] {
        assert!(len <= self.memory.len(), "a piece fits");
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().as_ptr(), len) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        // Whatever became of the others, no copy is under way when the piece is given back. A failure means that nothing runs.
        let _ = self.stream.synchronise();
    }
}

/// Runs `begin` for every piece and, when what it put on the slot's stream is over, `finish` with what it left: in as many lanes as there
/// are processors, two pieces under way in each. The first failure ends all lanes.
fn in_lanes<P: Send, L>(
    gpu: &Arc<Gpu>,
    pieces: impl ExactSizeIterator<Item = P> + Send,
    begin: impl Fn(&mut Slot, P) -> Result<L, MemError> + Sync,
    finish: impl Fn(&Slot, L) + Sync,
) -> Result<(), MemError> {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let lanes = processors.min(MAX_LANES).min(pieces.len());
    let pieces = Mutex::new(Some(pieces));
    let lock = || pieces.lock().unwrap_or_else(PoisonError::into_inner);
    let carry = || -> Result<(), MemError> {
        let _entered = gpu.enter()?;
        let mut slots = [Slot::of(gpu, PIECE)?, Slot::of(gpu, PIECE)?];
        let mut begun = [None, None];
        for turn in [0, 1].into_iter().cycle() {
            // This slot's piece was put on its way before the other's, which goes on while this one is finished.
            if let Some(left) = begun[turn].take() {
                slots[turn].stream.synchronise()?;
                finish(&slots[turn], left);
            }
            let next = lock().as_mut().and_then(Iterator::next);
            match next {
                Some(piece) => begun[turn] = Some(begin(&mut slots[turn], piece)?),
                None if begun[1 - turn].is_none() => break,
                None => {}
            }
        }
        Ok(())
    };
    // Nobody begins another piece behind a failure.
    let lane = || carry().inspect_err(|_| drop(lock().take()));
    thread::scope(|scope| {
        let name = || thread::Builder::new().name("carry".to_owned());
        // This thread has a lane too: should the system give no other, it carries everything.
        let others: Vec<_> = (1..lanes).map_while(|_| name().spawn_scoped(scope, lane).ok()).collect();
        others.into_iter().fold(lane(), |all, other| all.and(other.join().unwrap_or_else(|panic| resume_unwind(panic))))
    })
}

/// What a bus and a driver need for as many bytes as a model's weights: what [`park`](crate::compute::Compute::park) is compared with.
#[derive(Clone, Copy, Debug)]
pub struct CopyTimes {
    /// By the driver, to page-locked memory that was touched before: as fast as the bus goes.
    pub to_locked: Duration,
    /// And back.
    pub from_locked: Duration,
    /// By the driver, to ordinary memory that nobody has touched.
    pub to_untouched: Duration,
    /// And back.
    pub from_ordinary: Duration,
}

impl Device {
    /// Times the driver's own copies of so many bytes.
    ///
    /// # Errors
    /// What the driver says; no room on the card or on the host.
    pub fn time_copies(&self, bytes: Bytes) -> Result<CopyTimes, ComputeError> {
        let memory = DeviceMemory::zeroed(&self.gpu.device, bytes)?;
        let mut ordinary = BulkMemory::take(bytes).map_err(ComputeError::NoRoomToPark)?;
        // SAFETY: nothing else uses the card's memory, here and below.
        let to_untouched = timed(|| unsafe { memory.read_at(0, ordinary.as_mut_slice()) })?;
        // SAFETY: as above.
        let from_ordinary = timed(|| unsafe { memory.write_at(0, ordinary.as_slice()) })?;
        drop(ordinary);
        let mut locked = Slot::of(&self.gpu, LOCKED)?;
        let pieces =
            (0..bytes.0).step_by(LOCKED).map(|at| (at, LOCKED.min(usize::try_from(bytes.0 - at).unwrap_or(LOCKED))));
        let to_locked = timed(|| {
            // SAFETY: as above.
            pieces.clone().try_for_each(|(at, len)| unsafe { memory.read_at(at, locked.bytes_mut(len)) })
        })?;
        let from_locked = timed(|| {
            // SAFETY: as above.
            pieces.clone().try_for_each(|(at, len)| unsafe { memory.write_at(at, locked.bytes(len)) })
        })?;
        Ok(CopyTimes { to_locked, from_locked, to_untouched, from_ordinary })
    }
}

fn timed(run: impl FnOnce() -> Result<(), MemError>) -> Result<Duration, MemError> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed())
}
