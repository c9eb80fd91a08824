//! Everything below the pool fails at every place it can, and the books still agree.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::collections::HashSet;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use support::{BLOCKS, Device, NO_WORK, SOON, alloc, assert_balanced, pages};
use tidekv_core::blocks::BlockLease;
use tidekv_core::units::Bytes;
use tidekv_mem::{Backend, Call, CallMeter};
use tidekv_pool::{KvPool, PoolConfig, PoolError, Shortage};
use tidekv_shm::{DeviceName, Ledger, LedgerError};

fn meter(device: &Device) -> &CallMeter {
    device.backend.meter()
}

#[test]
fn a_refused_map_undoes_everything_whichever_call_it_was() {
    for call in [Call::Create, Call::Map, Call::SetAccess] {
        for nth in 1..=3 {
            let device = Device::new(8);
            let pool = device.pool("a");
            let kept = alloc(&pool, 3);
            meter(&device).fail_nth(call, nth);
            let mut leases = Vec::new();
            let error = pool.alloc(3 * BLOCKS, &mut leases).unwrap_err();
            assert!(matches!(error, PoolError::Map(_)) && !error.is_transient(), "{call} {nth}: {error}");
            assert!(leases.is_empty());
            let snapshot = assert_balanced(&pool);
            assert_eq!((snapshot.mapped_bytes, snapshot.allocated_blocks), (pages(1), 3), "{call} {nth}");
            assert_eq!(device.entry(&pool).reserved, pages(1));
            pool.alloc(3 * BLOCKS, &mut leases).unwrap();
            pool.free(&kept, NO_WORK).unwrap();
            assert_eq!(pool.snapshot().counters.failures, 1);
        }
    }
}

#[test]
fn memory_that_a_failed_map_leaves_behind_stays_counted_and_comes_back() {
    let device = Device::new(8);
    let pool = device.pool("a");
    meter(&device).fail_nth(Call::Create, 3);
    meter(&device).fail_nth(Call::Release, 1);
    assert!(matches!(pool.alloc(3 * BLOCKS, &mut Vec::new()), Err(PoolError::Map(_))));
    let snapshot = assert_balanced(&pool);
    assert_eq!(snapshot.mapped_bytes, pages(snapshot.refused_pages), "what stuck, and nothing else");
    // Nobody is given the stuck page, and the heartbeat takes it back.
    alloc(&pool, 4 * BLOCKS);
    device.until("the stuck page is back", |_| pool.snapshot().refused_pages == 0);
    device.until("and out of the ledger", |view| view.entries[0].reserved == pages(4));
    assert_balanced(&pool);
}

#[test]
fn a_refused_unmap_keeps_the_page_and_tries_again() {
    for call in [Call::Unmap, Call::Release] {
        let device = Device::new(8);
        let pool = device.pool("a");
        let leases = alloc(&pool, 2 * BLOCKS);
        pool.free(&leases, NO_WORK).unwrap();
        meter(&device).fail_nth(call, 1);
        let error = pool.trim().unwrap_err();
        assert!(matches!(error, PoolError::Unmap(_)) && error.is_transient(), "{error}");
        device.until("it is tried again", |view| view.entries[0].reserved == Bytes::ZERO);
        assert_eq!(assert_balanced(&pool).refused_pages, 0);
    }
}

#[test]
fn a_device_without_memory_is_a_miss_even_after_a_grant() {
    let mut device = Device::new(8);
    device.backend = std::sync::Arc::new(tidekv_mem::fake::FakeBackend::with_total(pages(2)));
    let pool = device.pool("a");
    let error = pool.alloc(3 * BLOCKS, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, PoolError::Exhausted { shortage: Shortage::Device { .. }, .. }), "{error}");
    assert_eq!(assert_balanced(&pool).mapped_bytes, Bytes::ZERO);
    let begun = Instant::now();
    let wait = Duration::from_millis(40);
    assert!(pool.alloc_within(3 * BLOCKS, wait, &mut Vec::new()).unwrap_err().is_transient());
    assert!(begun.elapsed() >= wait && begun.elapsed() < SOON / 4);
    alloc(&pool, 2 * BLOCKS);
}

/// Holds the ledger's lock as a stopped process would, until the returned sender is dropped.
fn stop_a_neighbour(device: &Device) -> (mpsc::Sender<()>, std::thread::JoinHandle<()>) {
    let name = DeviceName::new(&device.backend.capabilities().id).unwrap();
    let ledger = Ledger::open_existing(&device.runtime_dir(), &name).unwrap().unwrap();
    let (go_on, stopped) = mpsc::channel::<()>();
    let (holding, held) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let hold = |_: &mut tidekv_shm::LedgerView| {
            holding.send(()).unwrap();
            let _ = stopped.recv();
        };
        ledger.update(Instant::now() + SOON, hold).unwrap();
    });
    held.recv_timeout(SOON).unwrap();
    (go_on, thread)
}

#[test]
fn a_stopped_neighbour_costs_a_typed_timeout_and_nothing_else() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let leases = alloc(&pool, 2 * BLOCKS);
    let (neighbour, thread) = stop_a_neighbour(&device);

    let begun = Instant::now();
    let error = pool.alloc(3 * BLOCKS, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, PoolError::Ledger(LedgerError::LockTimeout { .. })) && error.is_transient(), "{error}");
    let error = pool.set_limit(pages(1), 9).unwrap_err();
    assert!(matches!(error, PoolError::Ledger(LedgerError::LockTimeout { .. })), "{error}");
    assert_eq!((pool.limit_state().revision, pool.limit_state().effective_limit_bytes), (0, pages(64)));
    assert!(begun.elapsed() < SOON / 2, "{:?}", begun.elapsed());
    assert_eq!(assert_balanced(&pool).mapped_bytes, pages(2));

    // What is mapped serves on, and memory still goes back to the device; the ledger hears of it later.
    pool.free(&leases, NO_WORK).unwrap();
    alloc(&pool, 2 * BLOCKS);
    pool.clear().unwrap();
    assert_eq!(pool.trim().unwrap(), pages(2));
    assert_eq!(pool.snapshot().witness_bytes, Some(Bytes::ZERO));
    assert_eq!(device.entry(&pool).reserved, pages(2), "too much is the safe side");

    drop(neighbour);
    thread.join().unwrap();
    device.until("the ledger has heard", |view| view.entries[0].reserved == Bytes::ZERO);
    alloc(&pool, 3 * BLOCKS);
}

#[test]
fn a_wait_outlives_a_short_stop_of_a_neighbour() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let (neighbour, thread) = stop_a_neighbour(&device);
    std::thread::scope(|scope| {
        let (begun, begins) = mpsc::channel();
        let pool = &pool;
        let waiting = scope.spawn(move || {
            begun.send(()).unwrap();
            pool.alloc_within(BLOCKS, SOON, &mut Vec::new())
        });
        begins.recv_timeout(SOON).unwrap();
        drop(neighbour);
        waiting.join().unwrap().unwrap();
    });
    thread.join().unwrap();
}

#[test]
fn a_pool_that_cannot_open_leaves_nothing() {
    let device = Device::new(0);
    let config = PoolConfig { null_block: true, ..device.config("a") };
    let error = KvPool::open(config).unwrap_err();
    assert!(error.is_exhausted(), "{error}");
    let left: Vec<_> = std::fs::read_dir(device.dir.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(device.backend.held(), Bytes::ZERO);
}

#[derive(Clone, Debug)]
enum Op {
    Alloc(u32),
    Free(usize, usize),
    Trim,
    Limit(u32),
    Fault(Call, u64),
    Reserve(u32),
    FreeReserved,
}

fn op() -> impl Strategy<Value = Op> {
    let call =
        prop_oneof![Just(Call::Create), Just(Call::Map), Just(Call::SetAccess), Just(Call::Unmap), Just(Call::Release)];
    prop_oneof![
        6 => (0u32..40).prop_map(Op::Alloc),
        6 => (any::<usize>(), 1usize..30).prop_map(|(at, count)| Op::Free(at, count)),
        1 => Just(Op::Trim),
        2 => (0u32..12).prop_map(Op::Limit),
        3 => (call, 1u64..5).prop_map(|(call, nth)| Op::Fault(call, nth)),
        1 => (0u32..12).prop_map(Op::Reserve),
        1 => Just(Op::FreeReserved),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// No block has two holders, nothing is lost, and in the end ledger, driver and witness all say zero.
    #[test]
    fn any_sequence_of_calls_and_faults_ends_with_empty_books(ops in prop::collection::vec(op(), 1..60)) {
        let device = Device::new(10);
        let pool = device.pool("a");
        let mut leases: Vec<BlockLease> = Vec::new();
        for op in ops {
            match op {
                Op::Alloc(count) => {
                    let before = leases.len();
                    let taken = pool.alloc(count, &mut leases).is_ok();
                    prop_assert_eq!(leases.len() - before, if taken { count as usize } else { 0 });
                }
                Op::Free(at, count) if !leases.is_empty() => {
                    let at = at % leases.len();
                    let freed: Vec<_> = leases.drain(at..(at + count).min(leases.len())).collect();
                    pool.free(&freed, NO_WORK).unwrap();
                    prop_assert!(pool.free(&freed, NO_WORK).is_err(), "a second free is found");
                }
                Op::Free(..) => {}
                Op::Trim => drop(pool.trim()),
                Op::Limit(limit) => drop(pool.resize(pages(limit)).unwrap()),
                Op::Fault(call, nth) => meter(&device).fail_nth(call, nth),
                Op::Reserve(count) => drop(pool.reserve(count)),
                Op::FreeReserved => pool.free_reserved().unwrap(),
            }
            let distinct: HashSet<_> = leases.iter().map(|lease| lease.block).collect();
            prop_assert_eq!(distinct.len(), leases.len(), "a block has two holders");
            let snapshot = pool.snapshot();
            prop_assert_eq!(snapshot.allocated_blocks as usize, leases.len());
            prop_assert!(snapshot.ledger_bytes <= pages(10), "past the budget");
        }
        meter(&device).heal();
        pool.clear().unwrap();
        let _ = pool.trim();
        device.until("the ledger is empty", |view| view.entries[0].reserved == Bytes::ZERO);
        prop_assert_eq!(assert_balanced(&pool).mapped_bytes, Bytes::ZERO);
        prop_assert_eq!(device.backend.held(), Bytes::ZERO);
    }
}
