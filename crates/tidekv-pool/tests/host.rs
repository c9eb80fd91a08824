//! Two pools on real memory: the kernel's own count of it, and how fast it changes hands.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use support::{Device, NO_WORK, SOON, assert_balanced};
use tidekv_core::geometry::{Capacity, ChunkChoice, KvShape};
use tidekv_core::units::Bytes;
use tidekv_mem::Backend;
use tidekv_mem::host::{HostBackend, HostOptions};
use tidekv_pool::{KvPool, MemorySource, PoolConfig, ReservePolicy};
use tidekv_shm::DeviceName;

const PAGES: u32 = 12;

fn config(device: &Device, backend: &Arc<dyn Backend>, name: &str) -> PoolConfig {
    let mut config = PoolConfig { memory: MemorySource::Backend(Arc::clone(backend)), ..device.config(name) };
    config.device = Some(DeviceName::new("fake").unwrap());
    config.geometry.shape = KvShape::heads(32, 8, 128, 2, 16);
    config.geometry.granularity = backend.capabilities().granularity;
    config.geometry.chunk = ChunkChoice::Auto;
    config.geometry.capacity = Capacity::Pages(PAGES);
    config.budget = Some(Bytes(Bytes::mib(20).0 * u64::from(PAGES)));
    config
}

/// The floor of the promise is 0.5 GiB/s and 10 ms for the first page; machines that test are busy, hence the slack.
#[test]
fn idle_memory_changes_hands_quickly() {
    let device = Device::new(0);
    let backend: Arc<dyn Backend> = Arc::new(HostBackend::open(HostOptions::default()).unwrap());
    let rich = KvPool::open(config(&device, &backend, "rich")).unwrap();
    let poor = KvPool::open(config(&device, &backend, "poor")).unwrap();
    let (page, blocks) = (rich.snapshot().page_bytes, rich.snapshot().blocks_per_page);
    assert_eq!(page, Bytes::mib(20));

    let mut leases = Vec::new();
    rich.alloc(PAGES * blocks, &mut leases).unwrap();
    rich.reservation().expect("memory of its own").write(tidekv_core::units::ByteOffset(0), &[7; 64]).unwrap();
    rich.free(&leases, NO_WORK).unwrap();

    let mut taken = Vec::new();
    let begun = Instant::now();
    poor.alloc_within(blocks, SOON, &mut taken).unwrap();
    let first = begun.elapsed();
    poor.alloc_within((PAGES - 1) * blocks, SOON, &mut taken).unwrap();
    let all = begun.elapsed();
    let gib_per_s = Bytes(page.0 * u64::from(PAGES)).as_gib() / all.as_secs_f64();
    // Straight to the descriptor: the harness swallows what passing tests print.
    let line = format!("MEASURED: first page given and mapped after {first:?}, all at {gib_per_s:.2} GiB/s\n");
    let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
    assert!(first < Duration::from_millis(200), "the first page took {first:?}");
    assert!(gib_per_s > 0.1, "{gib_per_s:.2} GiB/s");

    assert_eq!(assert_balanced(&rich).mapped_bytes, Bytes::ZERO);
    assert_eq!(assert_balanced(&poor).mapped_bytes, Bytes(page.0 * u64::from(PAGES)));
}

/// An allocation met pages that the pool's own thread was mapping ahead, which count as held, and was refused although
/// nothing was in use. Found by `kvbench frag`. Host pages take milliseconds to map, so they are met here every time.
#[test]
fn pages_in_flight_of_the_own_thread_are_no_shortage() {
    let device = Device::new(0);
    let backend: Arc<dyn Backend> = Arc::new(HostBackend::open(HostOptions::default()).unwrap());
    // An allocation that does not wait for neighbours waits for this pool's own thread, but not for long: on a machine that
    // is busy with other things a few of these may give up before the thread is done. Without the wait all of them do.
    let mut refusals = Vec::new();
    for _ in 0..10 {
        let reserve = ReservePolicy::Fixed { min: 4, max: PAGES };
        let pool = KvPool::open(PoolConfig { reserve, ..config(&device, &backend, "own") }).unwrap();
        let blocks = pool.snapshot().blocks_per_page;
        // Until the thread has begun to map its reserve.
        let deadline = Instant::now() + SOON;
        while pool.snapshot().ledger_bytes == Bytes::ZERO {
            assert!(Instant::now() < deadline, "the reserve is never filled");
            std::thread::yield_now();
        }
        let mut leases = Vec::new();
        match pool.alloc(PAGES * blocks, &mut leases) {
            Ok(()) => return assert_eq!(leases.len(), (PAGES * blocks) as usize),
            Err(refusal) => refusals.push(refusal.to_string()),
        }
    }
    panic!("refused every time: {refusals:?}");
}
