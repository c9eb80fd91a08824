//! A card that is full. In a test binary of its own, because it leaves no memory to others meanwhile. Needs a GPU.

// Miri cannot load a driver.
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use support::open;
use tidekv_batch::BatchConfig;
use tidekv_batch::cuda::CudaBatch;
use tidekv_core::units::Bytes;
use tidekv_mem::Backend;
use tidekv_mem::cuda::{CudaBackend, CudaDevice, CudaOptions, DeviceMemory};

#[test]
fn a_full_card_is_a_value_and_nothing_stays_of_the_attempt() {
    let config = BatchConfig {
        block_tokens: 1,
        max_rows: 1024,
        max_row_tokens: 100_000,
        max_step_tokens: 1024,
        max_ids: 1 << 20,
    };
    let test = "a_full_card_is_a_value_and_nothing_stays_of_the_attempt";
    let Some(batch) = open(test, config) else { return };
    let needed = batch.device_bytes();
    assert!(needed > Bytes::mib(300), "{needed}");
    drop(batch);
    let (device, backend) = (CudaDevice::open(0).unwrap(), CudaBackend::open(CudaOptions::default()).unwrap());
    let free = backend.memory().unwrap().free;
    let hog = DeviceMemory::zeroed(&device, Bytes(free.0 - Bytes::mib(200).0)).unwrap();
    let left = backend.memory().unwrap().free;
    let refused = CudaBatch::open(0, config).unwrap_err();
    assert!(refused.is_out_of_memory() && refused.is_transient(), "{refused}");
    assert_eq!(backend.memory().unwrap().free, left);
    drop(hog);
    drop(CudaBatch::open(0, config).unwrap());
}
