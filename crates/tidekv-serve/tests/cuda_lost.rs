//! A device that is lost under an engine: a kernel of this process writes where nothing is, and from then on the driver refuses everything.
//! One test, because the process cannot use the device behind it. Needs a GPU.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

#[allow(dead_code, reason = "the engine's tests use the rest")]
#[path = "engine/support.rs"]
mod engine;

use std::io::Write;
use std::ptr;
use std::sync::Arc;

use tidekv_batch::cuda::gpu::{Gpu, Grid, Kernel, Module, Stream};
use tidekv_core::units::Bytes;
use tidekv_mem::MemError;
use tidekv_serve::config::{ComputeChoice, EngineConfig, KvBudget, KvMode, Precision};
use tidekv_serve::handle::{GenerateError, Health, SleepError, SubmitError};

/// Writes a word at an address.
const WILD: &std::ffi::CStr = c"
.version 7.0
.target sm_80
.address_size 64
.visible .entry wild(.param .u64 at)
{
    .reg .u64 %rd<2>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [at];
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
";

/// Breaks this process's context, as a faulty kernel would.
fn lose(gpu: &Arc<Gpu>, kernel: &Kernel) -> MemError {
    let stream = Stream::new(gpu).unwrap();
    let _entered = gpu.enter().unwrap();
    let address = 16u64;
    // SAFETY: the kernel takes one address. That nothing is there is the point: the device catches it, and nothing else uses it.
    unsafe { kernel.launch(Grid::line(1, 1), stream.raw(), [ptr::from_ref(&address).cast()]) }.unwrap();
    stream.synchronise().unwrap_err()
}

#[test]
fn an_engine_whose_device_is_lost_says_so() {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error @ (MemError::Unavailable { .. } | MemError::NoSuchDevice { count: 0, .. }))
            if std::env::var_os("TIDEKV_REQUIRE_GPU").is_none() =>
        {
            let _ = writeln!(std::io::stderr(), "SKIPPED: an_engine_whose_device_is_lost_says_so: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let compute = ComputeChoice::Cuda(Precision::Bf16);
    let kv_budget = KvBudget::Given(Bytes::mib(512));
    let lab = engine::Lab::new(|dir| EngineConfig { kv_budget, compute, ..engine::config(dir, KvMode::Elastic, 32) });
    engine::tokens(lab.submit(&engine::text(1, 40), 10));
    assert_eq!(lab.engine.health(), Health::Well);
    let kernel = Module::load(&gpu, WILD).unwrap().kernel(c"wild").unwrap();
    // A second or more of work.
    let running: Vec<_> = (0..4).map(|number| lab.submit(&engine::text(number, 40), 6_000)).collect();
    let lost = lose(&gpu, &kernel);
    assert!(lost.is_device_lost(), "{lost}");
    for generation in running {
        let error = engine::finish(generation).unwrap_err();
        assert!(matches!(&error, GenerateError::DeviceLost { what } if what.contains("CUDA_ERROR")), "{error}");
    }
    let refused = lab.engine.submit(engine::request(&[1], 1)).map(drop).unwrap_err();
    assert!(matches!(&refused, SubmitError::DeviceLost { .. }), "{refused}");
    assert!(matches!(lab.engine.sleep(1), Err(SleepError::DeviceLost { .. })));
    assert!(matches!(lab.engine.health(), Health::DeviceLost { .. }));
    assert_eq!((lab.engine.stats().running, lab.engine.stats().waiting), (0, 0));
}
