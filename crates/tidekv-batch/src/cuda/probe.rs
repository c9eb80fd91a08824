//! Floors and clocks: what benchmarks compare a step with, on the same device in the same run.

use tidekv_core::units::Bytes;
use tidekv_mem::cuda::{DeviceMemory, PinnedMemory};

use super::gpu::{Event, Graph, Stream};
use super::{CudaBatch, CudaBatchError, DecodeGraph};

/// Kernels that give the host its lead: a microsecond or so each.
const LEAD_KERNELS: u32 = 200;

impl CudaBatch {
    /// Puts a kernel that does nothing on the stream: the least that any step costs.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch_nothing(&self) -> Result<(), CudaBatchError> {
        let _entered = self.gpu.enter()?;
        Ok(self.kernels.nothing(self.stream.raw())?)
    }

    /// A graph of `count` such kernels, one behind the other.
    ///
    /// # Errors
    /// What the driver says.
    pub fn capture_nothing(&self, count: u32) -> Result<NothingGraph, CudaBatchError> {
        let stream = Stream::new(&self.gpu)?;
        let graph = stream
            .capture::<CudaBatchError>(|| (0..count).try_for_each(|_| Ok(self.kernels.nothing(stream.raw())?)))?;
        Ok(NothingGraph(graph))
    }

    /// Puts such a graph on the stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn launch_nothing_graph(&self, graph: &mut NothingGraph) -> Result<(), CudaBatchError> {
        let _entered = self.gpu.enter()?;
        graph.launch(&self.stream)
    }

    /// A clock for graphs.
    ///
    /// # Errors
    /// What the driver says.
    pub fn device_clock(&self) -> Result<DeviceClock, CudaBatchError> {
        let (start, end) = (Event::with_time(&self.gpu)?, Event::with_time(&self.gpu)?);
        Ok(DeviceClock { start, end, lead: self.capture_nothing(LEAD_KERNELS)? })
    }

    /// [`launch`](Self::launch) and wait; returns the microseconds of the device from the graph's begin to its end.
    ///
    /// # Errors
    /// As there.
    pub fn launch_timed(&mut self, graph: &mut DecodeGraph, clock: &mut DeviceClock) -> Result<f64, CudaBatchError> {
        let DeviceClock { start, end, lead } = clock;
        self.launch_between(
            graph,
            |stream| {
                lead.launch(stream)?;
                Ok(start.record(stream)?)
            },
            |stream| Ok(end.record(stream)?),
        )?;
        end.wait()?;
        Ok(end.micros_since(start)?)
    }

    /// Room to send `bytes` to the device, as the CPU path must.
    ///
    /// # Errors
    /// What the driver says; [`CudaBatchError::is_out_of_memory`].
    pub fn upload(&self, bytes: usize) -> Result<Upload, CudaBatchError> {
        let to = DeviceMemory::zeroed(&self.gpu.device, Bytes(bytes as u64))?;
        Ok(Upload { from: PinnedMemory::zeroed(&self.gpu.device, bytes)?, to, used: 0 })
    }
}

/// A graph of kernels that do nothing.
#[derive(Debug)]
pub struct NothingGraph(Graph);

impl NothingGraph {
    fn launch(&mut self, stream: &Stream) -> Result<(), CudaBatchError> {
        // SAFETY: the kernels touch no memory.
        Ok(unsafe { self.0.launch(stream) }?)
    }
}

/// The device's own clock, read directly before and behind a graph. Something that takes the device longer than the host needs to
/// put all of it on the stream runs first, so that the device never waits for the host in between.
#[derive(Debug)]
pub struct DeviceClock {
    start: Event,
    end: Event,
    lead: NothingGraph,
}

/// The CPU path's way to the device: arrays side by side in pinned memory, then one asynchronous copy.
#[derive(Debug)]
pub struct Upload {
    from: PinnedMemory,
    to: DeviceMemory,
    used: usize,
}

impl Upload {
    /// Puts an array behind those that are there; `false` if there is no room.
    pub fn push<T: Plain>(&mut self, array: &[T]) -> bool {
        let bytes = size_of_val(array);
        if self.from.len() - self.used < bytes {
            return false;
        }
        // SAFETY: `used..used + bytes` is inside the allocation, as just seen.
        let to = unsafe { self.from.as_ptr().add(self.used) };
        // SAFETY: the array's own bytes, to memory that nobody else has: `send` waited for the copy before.
        unsafe { std::ptr::copy_nonoverlapping(array.as_ptr().cast::<u8>(), to.as_ptr(), bytes) };
        self.used += bytes;
        true
    }

    /// Copies all of it to the device and waits until it is there; then it is empty again.
    ///
    /// # Errors
    /// What the driver says.
    pub fn send(&mut self, batch: &CudaBatch) -> Result<(), CudaBatchError> {
        let _entered = batch.gpu.enter()?;
        let bytes = std::mem::take(&mut self.used);
        // SAFETY: both allocations are as long and live until the copy is over, which is waited for.
        let copied = unsafe { batch.stream.copy_in(self.to.address(), self.from.as_ptr().as_ptr(), bytes) };
        batch.wait()?;
        Ok(copied?)
    }
}

/// Numbers without padding bytes.
pub trait Plain: Copy + sealed::Sealed {}

impl Plain for i32 {}
impl Plain for i64 {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for i32 {}
    impl Sealed for i64 {}
}
