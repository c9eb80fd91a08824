//! Decode steps inside graphs.
//!
//! A captured decode step holds addresses and its padding; batch size, lengths and ring are read from the device when it runs, so one
//! graph serves every batch up to its padding. What a graph cannot do is ask: before each launch the host makes sure that the ring has
//! enough ids, sends what changed, and brings the mirror forward.
//!
//! ```text
//!   ours      graph = batch.capture_decode(padding, 1)      batch.launch(&mut graph) for each step
//!   theirs    begin capture; batch.enqueue_decode(stream, padding); the model; end capture
//!             batch.announce_decode(padding); launch their graph           for each step
//! ```

use std::ffi::c_void;

use super::gpu::{Graph, Stream};
use super::kernels::Decode;
use super::{CudaBatch, CudaBatchError};
use crate::metadata::{StepSize, check_padding};
use crate::{BatchError, Padding, Work};

/// One or more decode steps, captured from one batch. See [`CudaBatch::capture_decode`].
#[derive(Debug)]
pub struct DecodeGraph {
    graph: Graph,
    padding: Padding,
    steps: u32,
    batch: u64,
}

impl DecodeGraph {
    /// What its outputs are padded to.
    pub fn padding(&self) -> Padding {
        self.padding
    }

    /// Decode steps of one launch.
    pub fn steps(&self) -> u32 {
        self.steps
    }
}

impl CudaBatch {
    /// A graph of `steps` decode steps, one behind the other. Nothing runs yet.
    ///
    /// # Errors
    /// Padding for which the arrays were not made; what the driver says.
    pub fn capture_decode(&self, padding: Padding, steps: u32) -> Result<DecodeGraph, CudaBatchError> {
        check_padding(self.tables.shape(), padding)?;
        // A stream of its own: the batch's may be the default stream, which cannot be captured.
        let stream = Stream::new(&self.gpu)?;
        let graph =
            stream.capture(|| (0..steps).try_for_each(|_| self.launch_decode_on(&stream, Decode::Step, padding)))?;
        Ok(DecodeGraph { graph, padding, steps, batch: self.identity })
    }

    /// Puts a graph's steps on the stream. All or nothing.
    ///
    /// # Errors
    /// As [`step`](Self::step). A graph of several steps is refused unless there are ids for the worst case, in which every row
    /// begins a block in its first step.
    pub fn launch(&mut self, graph: &mut DecodeGraph) -> Result<(), CudaBatchError> {
        self.launch_between(graph, |_| Ok(()), |_| Ok(()))
    }

    /// Puts something on the stream directly before and behind the graph. The context is current for both.
    pub(super) fn launch_between(
        &mut self,
        graph: &mut DecodeGraph,
        before: impl FnOnce(&Stream) -> Result<(), CudaBatchError>,
        behind: impl FnOnce(&Stream) -> Result<(), CudaBatchError>,
    ) -> Result<(), CudaBatchError> {
        if graph.batch != self.identity {
            return Err(CudaBatchError::ForeignGraph);
        }
        let _entered = self.gpu.enter()?;
        let size = self.prepare(graph.steps)?;
        before(&self.stream)?;
        // SAFETY: as a decode step on the stream, `steps` times.
        unsafe { graph.graph.launch(&self.stream) }?;
        let put_behind = behind(&self.stream);
        // Whatever became of that: the steps are on the stream.
        for _ in 0..graph.steps {
            self.advance(Work::Decode, size, graph.padding)?;
        }
        put_behind
    }

    /// Puts a decode step on a stream that somebody is capturing (or ordering with the batch's stream in another way), and does nothing
    /// else: each time the captured step is about to run, [`announce_decode`](Self::announce_decode) must be told.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of the device's primary context. What is captured is launched only while this batch lives, once for each
    /// announcement, and ordered behind the work on the batch's stream (most simply on that stream: [`use_stream`](Self::use_stream)).
    ///
    /// # Errors
    /// Padding for which the arrays were not made; what the driver says.
    pub unsafe fn enqueue_decode(&self, stream: *mut c_void, padding: Padding) -> Result<(), CudaBatchError> {
        check_padding(self.tables.shape(), padding)?;
        let _entered = self.gpu.enter()?;
        // SAFETY: the caller's promise; the value does not leave this call.
        let stream = unsafe { Stream::borrowed(&self.gpu, stream.cast()) };
        self.launch_decode_on(&stream, Decode::Step, padding)
    }

    /// Makes sure that a decode step can run, sends what changed, and counts the step as done: launch what
    /// [`enqueue_decode`](Self::enqueue_decode) captured next.
    ///
    /// # Errors
    /// As [`step`](Self::step); then do not launch.
    pub fn announce_decode(&mut self, padding: Padding) -> Result<(), CudaBatchError> {
        check_padding(self.tables.shape(), padding)?;
        let _entered = self.gpu.enter()?;
        let size = self.prepare(1)?;
        self.advance(Work::Decode, size, padding)
    }

    /// Checks that so many decode steps can be done, and sends what changed. The context is current.
    fn prepare(&mut self, steps: u32) -> Result<StepSize, CudaBatchError> {
        let (_, size) = self.tables.check(Work::Decode)?;
        if steps > 1 {
            self.check_steps(steps)?;
        }
        self.flush()?;
        Ok(size)
    }

    /// The worst case of several decode steps: every row begins a block in the first.
    fn check_steps(&self, steps: u32) -> Result<(), BatchError> {
        let config = *self.tables.shape().config();
        let (batch, free) = (u64::from(self.tables.batch()), self.tables.free_blocks());
        let needed = batch * u64::from(steps.div_ceil(config.block_tokens));
        if needed > u64::from(free) {
            return Err(BatchError::Shortage { needed: u32::try_from(needed).unwrap_or(u32::MAX), free });
        }
        let tokens = u64::from(self.tables.longest_row()) + u64::from(steps);
        if tokens > u64::from(config.max_row_tokens) {
            let longest = self.tables.longest_row();
            let row = self.tables.lens().iter().position(|&len| len.cast_unsigned() == longest);
            if let Some(&seq) = row.and_then(|row| self.tables.sequences().get(row)) {
                return Err(BatchError::SequenceTooLong { seq, tokens, max_row_tokens: config.max_row_tokens });
            }
        }
        self.tables.check_total(batch * u64::from(steps))
    }
}
