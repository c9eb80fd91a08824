//! Allocating and freeing through the pool: what is promised to the engine, and what it costs.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::collections::HashSet;

use support::{BLOCKS, Device, NO_WORK, PAGE, alloc, assert_balanced, pages};
use tidekv_core::blocks::FreeError;
use tidekv_core::pages::Fence;
use tidekv_core::units::{BlockIndex, Bytes, GroupId, PageId, Step};
use tidekv_pool::{KvPool, PoolConfig, PoolError, ReservePolicy};

#[test]
fn blocks_come_and_go_and_pages_stay_for_the_next() {
    let device = Device::new(8);
    let pool = device.pool("a");
    assert_eq!(pool.available(), 8 * BLOCKS, "the budget, not the reservation");
    let leases = alloc(&pool, 20);
    let ids: HashSet<_> = leases.iter().map(|&lease| pool.kernel_id(lease).unwrap()).collect();
    assert_eq!(ids.len(), 20);
    assert_eq!(assert_balanced(&pool).mapped_bytes, pages(3));
    assert_eq!(pool.occupancy(&[PageId(0), PageId(2), PageId(999)]), [BLOCKS, 4, 0]);

    pool.free(&leases, NO_WORK).unwrap();
    let snapshot = assert_balanced(&pool);
    assert_eq!((snapshot.inuse_pages, snapshot.reserved_pages, snapshot.allocated_blocks), (0, 3, 0));
    assert_eq!(pool.trim().unwrap(), pages(3));
    assert_eq!(assert_balanced(&pool).mapped_bytes, Bytes::ZERO);
}

#[test]
fn steady_serving_makes_no_call_to_driver_or_ledger() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let held = alloc(&pool, 20);
    let leases = alloc(&pool, 30);
    pool.free(&leases, NO_WORK).unwrap();
    // The pages taken so far reach the ledger first.
    device.until("the pool is published", |view| view.entries[0].in_use == pages(3));
    let calls = tidekv_mem::Backend::meter(&*device.backend).total();
    let changes = device.ledger().read().unwrap().header.changes;
    for _ in 0..10_000 {
        let leases = alloc(&pool, 4);
        pool.free(&leases, NO_WORK).unwrap();
    }
    assert_eq!(tidekv_mem::Backend::meter(&*device.backend).total(), calls);
    assert_eq!(device.ledger().read().unwrap().header.changes, changes);
    pool.free(&held, NO_WORK).unwrap();
}

#[test]
fn two_pools_live_in_one_process() {
    let device = Device::new(8);
    let (a, b) = (device.pool("a"), device.pool("b"));
    alloc(&a, 3 * BLOCKS);
    alloc(&b, 5 * BLOCKS);
    let mut none = Vec::new();
    let refused = a.alloc(1, &mut none).unwrap_err();
    assert!(refused.is_exhausted() && refused.is_transient(), "{refused}");
    assert!(none.is_empty());
    drop(b);
    alloc(&a, 5 * BLOCKS);
    assert_balanced(&a);
}

#[test]
fn the_null_block_is_block_zero_and_nobodys() {
    let device = Device::new(8);
    let pool = KvPool::open(PoolConfig { null_block: true, ..device.config("a") }).unwrap();
    assert_eq!(assert_balanced(&pool).mapped_bytes, PAGE);
    assert!(alloc(&pool, 8 * BLOCKS - 1).iter().all(|lease| lease.block != BlockIndex(0)));
    let freed = pool.free_blocks(&[BlockIndex(0)], NO_WORK).unwrap_err();
    assert!(matches!(freed, PoolError::Free(FreeError::NullBlock)), "{freed}");
    assert_eq!(pool.clear().unwrap(), 8 * BLOCKS - 1);
    assert_eq!(pool.trim().unwrap(), pages(7));
    assert_eq!(assert_balanced(&pool).mapped_bytes, PAGE, "its page stays");
}

#[test]
fn set_aside_blocks_are_certain() {
    let device = Device::new(3);
    let pool = device.pool("a");
    pool.reserve(BLOCKS + 2).unwrap();
    assert_eq!(pool.available(), 2 * BLOCKS - 2);
    alloc(&pool, 2 * BLOCKS - 2);
    assert!(pool.alloc(1, &mut Vec::new()).unwrap_err().is_exhausted());
    let mut leases = Vec::new();
    pool.alloc_reserved(BLOCKS, &mut leases).unwrap();
    let short = pool.alloc_reserved(3, &mut leases).unwrap_err();
    assert!(matches!(short, PoolError::NotReserved(_)) && !short.is_transient(), "{short}");
    pool.free_reserved().unwrap();
    assert_eq!(pool.available(), 2);
    assert_eq!(pool.snapshot().allocated_blocks, 3 * BLOCKS - 2);
}

#[test]
fn more_than_the_pool_can_ever_give_is_no_miss() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let refused = pool.alloc(64 * BLOCKS + 1, &mut Vec::new()).unwrap_err();
    assert!(matches!(refused, PoolError::NeverFits { pool_blocks: 512, .. }) && !refused.is_transient(), "{refused}");
}

#[test]
fn a_wait_longer_than_clocks_count_is_a_wait() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let held = alloc(&pool, 8 * BLOCKS);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.alloc_within(1, std::time::Duration::MAX, &mut Vec::new()));
        device.until("it waits", |view| view.entries[0].demand > Bytes::ZERO);
        pool.free(&held, NO_WORK).unwrap();
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn pages_wait_for_their_step() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let leases = alloc(&pool, 2 * BLOCKS);
    pool.free(&leases[..8], Fence::Step(Step(7))).unwrap();
    pool.free(&leases[8..], Fence::Step(Step(9))).unwrap();
    pool.step_completed(Step(6));
    assert_eq!(pool.trim().unwrap(), Bytes::ZERO);
    assert_eq!(assert_balanced(&pool).leaving_pages, 2);
    // The background thread looks when a step comes that somebody waits for.
    device.until("it has seen them", |_| true);
    pool.step_completed(Step(7));
    device.until("one page is back", |view| view.entries[0].reserved == PAGE);
    pool.step_completed(Step(9));
    device.until("both are", |view| view.entries[0].reserved == Bytes::ZERO);
}

#[test]
fn an_unknown_fence_is_settled_by_a_synchronise() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let leases = alloc(&pool, BLOCKS);
    pool.free(&leases, Fence::Unknown).unwrap();
    assert_eq!(pool.trim().unwrap(), PAGE);
}

#[test]
fn groups_have_entries_and_segments_of_their_own() {
    let device = Device::new(8);
    let zero = device.pool("a");
    let one = KvPool::open(PoolConfig { group: GroupId(1), ..device.config("a") }).unwrap();
    assert_eq!((zero.name().as_str(), one.name().as_str()), ("a", "a"));
    alloc(&one, 1);
    device.until("the second group is published", |view| {
        view.by_name("a", GroupId(1)).is_some_and(|entry| entry.in_use == PAGE)
    });
    assert_eq!(device.entry(&zero).reserved, Bytes::ZERO);
    let files: HashSet<_> =
        tidekv_shm::segment::list(&device.runtime_dir()).into_iter().map(|(name, _)| name).collect();
    assert_eq!(files, HashSet::from(["a".to_owned(), "a_g1".to_owned()]));
    drop(one);
    let files = tidekv_shm::segment::list(&device.runtime_dir());
    assert_eq!(files.len(), 1, "the first group's segment survives the second's end: {files:?}");
}

#[test]
fn the_reserve_is_filled_ahead_of_demand() {
    let device = Device::new(16);
    let pool = KvPool::open(PoolConfig { reserve: ReservePolicy::Fixed { min: 2, max: 4 }, ..device.config("a") });
    let pool = pool.unwrap();
    device.until("two pages are ready", |view| view.entries[0].idle == pages(2));
    let leases = alloc(&pool, BLOCKS + 1);
    device.until("two again", |view| view.entries[0].idle == pages(2) && view.entries[0].in_use == pages(2));
    let more = alloc(&pool, 4 * BLOCKS);
    pool.free(&leases, NO_WORK).unwrap();
    pool.free(&more, NO_WORK).unwrap();
    device.until("four stay", |view| view.entries[0].reserved == pages(4) && view.entries[0].in_use == Bytes::ZERO);
    assert_balanced(&pool);
}

#[test]
fn many_threads_share_one_pool() {
    let device = Device::new(64);
    let pool = KvPool::open(PoolConfig { async_sched: true, ..device.config("a") }).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..8u32 {
            let pool = &pool;
            scope.spawn(move || {
                for round in 0..500 {
                    let leases = alloc(pool, 1 + (thread * 7 + round) % 40);
                    assert!(leases.iter().all(|lease| lease.block.0 < 64 * BLOCKS));
                    pool.free(&leases, NO_WORK).unwrap();
                }
            });
        }
    });
    assert_eq!(pool.snapshot().allocated_blocks, 0);
    assert_balanced(&pool);
    assert!(pool.trim().unwrap() > Bytes::ZERO);
}
