//! A decode step as part of somebody else's graph, on somebody else's stream. Needs a GPU.

// Miri cannot load a driver.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::ptr;

use cudarc::driver::sys::{self, CUresult::CUDA_SUCCESS};
use support::{Twin, rounds, run};
use tidekv_batch::cuda::CudaBatchError;
use tidekv_batch::{BatchConfig, Padding, Work};

const CONFIG: BatchConfig =
    BatchConfig { block_tokens: 16, max_rows: 64, max_row_tokens: 4096, max_step_tokens: 512, max_ids: 8000 };

/// A stream as an engine would have it.
struct Engine {
    stream: sys::CUstream,
}

impl Engine {
    /// The device is open, so its primary context is there.
    fn new() -> Self {
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a place to write to, and device 0, which the test has open.
        assert_eq!(unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, 0) }, CUDA_SUCCESS);
        // SAFETY: the context that was just retained.
        assert_eq!(unsafe { sys::cuCtxSetCurrent(context) }, CUDA_SUCCESS);
        // SAFETY: a place to write to.
        assert_eq!(unsafe { sys::cuStreamCreate(&raw mut stream, 0) }, CUDA_SUCCESS);
        Self { stream }
    }

    fn begin_capture(&self) {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
        // SAFETY: a living stream.
        assert_eq!(unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) }, CUDA_SUCCESS);
    }

    fn end_capture(&self) -> sys::CUgraphExec {
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: pairs with the begin; a place to write to.
        assert_eq!(unsafe { sys::cuStreamEndCapture(self.stream, &raw mut graph) }, CUDA_SUCCESS);
        // SAFETY: a place to write to and the graph that was just made.
        assert_eq!(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) }, CUDA_SUCCESS);
        exec
    }
}

#[test]
fn a_step_is_a_node_of_somebody_elses_graph() {
    let Some(mut twin) = Twin::open("a_step_is_a_node_of_somebody_elses_graph", CONFIG) else { return };
    let engine = Engine::new();
    twin.lend(&[run(0, 8000)]);
    for seq in 0..40 {
        twin.admit(seq, 17 * u32::try_from(seq).unwrap(), &[]).unwrap();
    }
    // Something on the batch's own stream first: what follows must wait for it.
    assert!(twin.step(Work::Decode, Padding::NONE));
    // SAFETY: a stream of the primary context that outlives the batch.
    unsafe { twin.gpu.use_stream(engine.stream.cast()) }.unwrap();
    let padding = Padding::decode(64);
    engine.begin_capture();
    // SAFETY: the batch's stream; what is captured is launched on it once for each announcement below.
    unsafe { twin.gpu.enqueue_decode(engine.stream.cast(), padding) }.unwrap();
    // Anything else would have to run now.
    twin.admit(100, 30, &[]).unwrap();
    assert!(matches!(twin.gpu.step(Work::Decode, padding), Err(CudaBatchError::Capturing)));
    let exec = engine.end_capture();
    for round in 0..rounds(100) {
        twin.gpu.announce_decode(padding).unwrap();
        // SAFETY: a living graph and a living stream.
        assert_eq!(unsafe { sys::cuGraphLaunch(exec, engine.stream) }, CUDA_SUCCESS);
        twin.mirror_decode(padding);
        if round % 10 == 3 {
            twin.release(u64::try_from(round).unwrap() / 10);
            twin.compare_metadata();
        }
    }
    twin.gpu.announce_decode(padding).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { sys::cuGraphLaunch(exec, engine.stream) }, CUDA_SUCCESS);
    twin.mirror_decode(padding);
    twin.compare();
}

/// The default stream cannot be captured; graphs of the batch's own are captured elsewhere.
#[test]
fn the_default_stream_will_do() {
    let Some(mut twin) = Twin::open("the_default_stream_will_do", CONFIG) else { return };
    twin.lend(&[run(0, 8000)]);
    twin.admit(1, 100, &[]).unwrap();
    // SAFETY: the default stream is there as long as the context.
    unsafe { twin.gpu.use_stream(ptr::null_mut()) }.unwrap();
    assert!(twin.step(Work::Rows(&[60]), Padding::NONE));
    twin.compare();
    let mut graph = twin.gpu.capture_decode(Padding::decode(8), 1).unwrap();
    twin.gpu.launch(&mut graph).unwrap();
    twin.mirror_decode(Padding::decode(8));
    twin.compare();
}
