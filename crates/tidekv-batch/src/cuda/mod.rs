//! The same steps on an NVIDIA GPU: one kernel each, capturable in a graph, with the CPU's [`BlockTables`] as exact mirror.
//!
//! ```text
//!        host                                            device
//!   BlockTables  admit, release, lend, ...   changes    table, len, next_slot, ring, control words
//!      |         marks what it changed      --------->  apply     only when there were any
//!      |  plan: enough ids? (no launch if not)          decode    one launch, or one node of a graph
//!      |         launch                     --------->  mixed     one launch
//!      `- advance, while the device works               slot_mapping, seq_lens, ... at fixed addresses
//! ```
//!
//! Both sides pop ids from a FIFO ring in the order of the rows, so they agree on every id and the device is never asked. A decode
//! step sends nothing: lengths, ring and batch size are on the device. Everything is allocated by [`CudaBatch::open`] and
//! stays where it is while sequences come and go and the pool grows and shrinks, so graphs and tensors stay valid.
//!
//! | module    | it                                                                       |
//! |-----------|--------------------------------------------------------------------------|
//! | [`gpu`]   | driver functions; owners of modules, streams, events and graphs           |
//! | `replica` | the arrays on the device, and the structs that kernels read               |
//! | `kernels` | the PTX and how each kernel is launched                                   |
//! | `staging` | pinned slots for changes and query lengths, fenced by events              |
//! | `steps`   | planning, launching and mirroring a step                                  |
//! | `graph`   | decode steps as a graph, and as a node of somebody else's                 |
//! | `tensor`  | the outputs in the terms of DLPack                                        |
//! | `probe`   | floors and clocks, for benchmarks to compare with                         |
//!
//! This is the only part of the crate that uses `unsafe`: launches, pinned memory, reading back.

mod error;
pub mod gpu;
mod graph;
mod kernels;
mod probe;
mod replica;
mod staging;
mod steps;
mod tensor;

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use tidekv_core::units::{Bytes, KernelId, Step};

use crate::metadata::StepSize;
use crate::{
    BatchConfig, BatchError, BatchShape, BlockTables, Changes, IdRun, LeaseError, Left, Metadata, Padding, SeqId,
};
use gpu::{Event, Gpu, Stream};
use kernels::{Kernels, MAX_ROWS, Words};
use replica::ReplicaMemory;
use staging::Staging;

pub use error::CudaBatchError;
pub use graph::DecodeGraph;
pub use probe::{DeviceClock, NothingGraph, Plain, Upload};
pub use tensor::{DLPACK_CUDA, DataType, DeviceTensor, StepTensors};

/// Block tables and metadata of one batch, on a device. See the [module](self).
#[derive(Debug)]
pub struct CudaBatch {
    tables: BlockTables,
    /// Reused for each round of changes.
    changes: Changes,
    /// What the device's control words are once everything on the stream is done.
    known: Words,
    steps: u64,
    last: LastStep,
    /// Which batch a graph belongs to.
    identity: u64,
    staging: Staging,
    stream: Stream,
    replica: ReplicaMemory,
    kernels: Kernels,
    gpu: Arc<Gpu>,
}

/// The shape of the outputs, as the latest step left them.
#[derive(Clone, Copy, Debug, Default)]
struct LastStep {
    size: StepSize,
    padding: Padding,
    max_seq_len: u32,
    /// A decode step, and nothing changed since: its metadata can be packed again.
    packable: bool,
}

impl CudaBatch {
    /// An empty batch without ids on device `device`, with a stream of its own.
    ///
    /// # Errors
    /// Without a driver, a GPU or enough memory of it [`CudaBatchError::Device`]; a configuration that cannot work.
    pub fn open(device: u32, config: BatchConfig) -> Result<Self, CudaBatchError> {
        static IDENTITIES: AtomicU64 = AtomicU64::new(0);
        if config.max_rows > MAX_ROWS {
            return Err(CudaBatchError::TooManyRows { max_rows: config.max_rows, most: MAX_ROWS });
        }
        let shape = BatchShape::new(config)?;
        // The device first: without one, the mirror's memory need not be touched.
        let gpu = Gpu::open(device)?;
        let replica = ReplicaMemory::new(&gpu, &shape)?;
        let tables = BlockTables::new(config)?;
        let kernels = Kernels::load(&gpu, config.max_rows)?;
        let staging = Staging::new(&gpu, config.max_rows)?;
        let stream = Stream::new(&gpu)?;
        Ok(Self {
            tables,
            changes: Changes::default(),
            known: Words::default(),
            steps: 0,
            last: LastStep::default(),
            identity: IDENTITIES.fetch_add(1, Relaxed),
            staging,
            stream,
            replica,
            kernels,
            gpu,
        })
    }

    /// Puts all further work on the caller's stream, behind what was put on the one before.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the device's primary context (null for its default stream), and outlives this batch or the next
    /// call of this.
    ///
    /// # Errors
    /// What the driver says; then the stream is the one before.
    pub unsafe fn use_stream(&mut self, stream: *mut c_void) -> Result<(), CudaBatchError> {
        let _entered = self.gpu.enter()?;
        let behind = Event::new(&self.gpu)?;
        behind.record(&self.stream)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::borrowed(&self.gpu, stream.cast()) };
        stream.wait(&behind)?;
        self.stream = stream;
        Ok(())
    }

    /// The stream that steps run on, as a `CUstream`.
    pub fn stream(&self) -> *mut c_void {
        self.stream.raw().cast()
    }

    /// The device that it is on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// A number that no other batch of this process has: captured launches belong to one batch.
    pub fn identity(&self) -> u64 {
        self.identity
    }

    /// The mirror: who is in which row and holds which ids.
    pub fn tables(&self) -> &BlockTables {
        &self.tables
    }

    /// What the batch takes of the card's memory.
    pub fn device_bytes(&self) -> Bytes {
        self.replica.bytes()
    }

    /// The number of the latest step that was put on the stream; 0 before the first.
    pub fn step_number(&self) -> Step {
        Step(self.steps)
    }

    /// See [`BlockTables::lend`]. Addresses and graphs stay valid: ids never move.
    ///
    /// # Errors
    /// As there.
    pub fn lend(&mut self, runs: &[IdRun]) -> Result<(), LeaseError> {
        self.tables.lend(runs)
    }

    /// See [`BlockTables::withdraw`]. The ids may be unmapped when the steps before this are over: see [`fence`](Self::fence).
    ///
    /// # Errors
    /// As there.
    pub fn withdraw(&mut self, runs: &[IdRun]) -> Result<(), LeaseError> {
        self.tables.withdraw(runs)
    }

    /// See [`BlockTables::take_back`].
    pub fn take_back(&mut self, count: u32, out: &mut Vec<KernelId>) -> u32 {
        self.tables.take_back(count, out)
    }

    /// See [`BlockTables::admit`].
    ///
    /// # Errors
    /// As there.
    pub fn admit(&mut self, seq: SeqId, tokens: u32, shared: &[KernelId]) -> Result<u32, BatchError> {
        self.tables.admit(seq, tokens, shared)
    }

    /// See [`BlockTables::release`]. The ids may serve another sequence in the next step: the stream orders the two.
    ///
    /// # Errors
    /// As there.
    pub fn release(&mut self, seq: SeqId, out: &mut Vec<KernelId>) -> Result<Left, BatchError> {
        self.tables.release(seq, out)
    }

    /// See [`BlockTables::remove`]. Work that is not on this stream may use the ids behind a [`fence`](Self::fence).
    ///
    /// # Errors
    /// As there.
    pub fn remove(&mut self, seq: SeqId, out: &mut Vec<KernelId>) -> Result<Left, BatchError> {
        self.tables.remove(seq, out)
    }

    /// See [`BlockTables::preempt`].
    ///
    /// # Errors
    /// As there.
    pub fn preempt(&mut self, seq: SeqId, out: &mut Vec<KernelId>) -> Result<u32, BatchError> {
        self.tables.preempt(seq, out)
    }

    /// See [`BlockTables::swap`].
    ///
    /// # Errors
    /// As there.
    pub fn swap(&mut self, a: SeqId, b: SeqId) -> Result<(), BatchError> {
        self.tables.swap(a, b)
    }

    /// See [`BlockTables::truncate`].
    ///
    /// # Errors
    /// As there.
    pub fn truncate(&mut self, seq: SeqId, tokens: u32) -> Result<(), BatchError> {
        self.tables.truncate(seq, tokens)
    }

    /// See [`BlockTables::share`].
    ///
    /// # Errors
    /// As there.
    pub fn share(&mut self, seq: SeqId, blocks: u32, out: &mut Vec<KernelId>) -> Result<(), BatchError> {
        self.tables.share(seq, blocks, out)
    }

    /// The outputs of the latest step, where the device has them.
    pub fn outputs(&self) -> StepTensors {
        let (device, at) = (self.gpu.device.number(), &self.replica.addresses);
        let rows = self.last.size.batch.max(self.last.padding.rows);
        let tokens = self.last.size.tokens.max(self.last.padding.tokens);
        let shape = self.tables.shape();
        let ints = |address, len| DeviceTensor::vector(device, address, DataType::I32, len);
        StepTensors {
            slot_mapping: DeviceTensor::vector(device, at.slot_mapping, DataType::I64, tokens),
            block_tables: DeviceTensor::matrix(
                device,
                at.table,
                [rows, shape.blocks_for(self.last.max_seq_len)],
                shape.stride(),
            ),
            seq_lens: ints(at.seq_lens, rows),
            context_lens: ints(at.context_lens, rows),
            query_start_loc: ints(at.query_start_loc, rows + 1),
            seq_start_loc: ints(at.seq_start_loc, rows + 1),
        }
    }

    /// A point behind everything that is on the stream now. Record it behind the work that reads the tables of a step: once it
    /// is over, nothing reads ids that left the batch before.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fence(&self) -> Result<StepFence, CudaBatchError> {
        let _entered = self.gpu.enter()?;
        let event = Event::new(&self.gpu)?;
        event.record(&self.stream)?;
        Ok(StepFence { step: self.step_number(), event })
    }

    /// Waits until everything on the stream is done.
    ///
    /// # Errors
    /// What the driver says, also of kernels that failed.
    pub fn wait(&self) -> Result<(), CudaBatchError> {
        Ok(self.stream.synchronise()?)
    }

    /// Waits, and compares the device's state with the mirror: step, batch, ring, and what the kernels checked themselves.
    ///
    /// # Errors
    /// [`CudaBatchError::Apart`] if they differ; what the driver says.
    pub fn check(&self) -> Result<(), CudaBatchError> {
        self.wait()?;
        // SAFETY: the stream that writes it is idle, as of just now, and `&self` puts nothing on it.
        let control = unsafe { self.replica.control() }?;
        let words = Words { batch: control.batch, head: control.head, free: control.free };
        if control.status != 0 || control.step != self.steps || words != self.known {
            return Err(CudaBatchError::Apart {
                device_step: control.step,
                host_step: self.steps,
                status: if control.status == 0 { "another batch or ring" } else { control.status_text() },
            });
        }
        Ok(())
    }

    /// Waits, and copies the outputs of the latest step to the host. For tests and for looking: steps need none of it there.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn read_back(&self, out: &mut Metadata) -> Result<(), CudaBatchError> {
        self.check()?;
        let LastStep { size, padding, max_seq_len, .. } = self.last;
        // Lengths and numbers; the rows come from the device.
        let _ = out.begin(&size, max_seq_len, padding);
        let at = &self.replica.addresses;
        // SAFETY: the stream is idle, and integers have no invalid bits.
        unsafe { self.replica.read(at.slot_mapping, &mut out.slot_mapping) }?;
        for (address, array) in [
            (at.seq_lens, &mut out.seq_lens),
            (at.context_lens, &mut out.context_lens),
            (at.query_start_loc, &mut out.query_start_loc),
            (at.seq_start_loc, &mut out.seq_start_loc),
        ] {
            // SAFETY: as above.
            unsafe { self.replica.read(address, array) }?;
        }
        Ok(())
    }

    /// Waits, and copies the whole block table to the host: `max_rows * stride` cells.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn read_back_table(&self) -> Result<Vec<i32>, CudaBatchError> {
        self.check()?;
        let mut cells = vec![0; self.tables.shape().table_cells() as usize];
        // SAFETY: the stream is idle, and integers have no invalid bits.
        unsafe { self.replica.read(self.replica.addresses.table, &mut cells) }?;
        Ok(cells)
    }
}

impl Drop for CudaBatch {
    fn drop(&mut self) {
        // Launches on their way use the memory that goes with this. A failure means that there are none left.
        let _ = self.stream.synchronise();
    }
}

/// A point in the stream of steps. See [`CudaBatch::fence`].
#[derive(Debug)]
pub struct StepFence {
    step: Step,
    event: Event,
}

impl StepFence {
    /// The latest step before it.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Whether the device has come so far.
    ///
    /// # Errors
    /// What the driver says.
    pub fn is_over(&self) -> Result<bool, CudaBatchError> {
        Ok(self.event.is_over()?)
    }

    /// Waits until it has.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait(&self) -> Result<(), CudaBatchError> {
        Ok(self.event.wait()?)
    }
}
