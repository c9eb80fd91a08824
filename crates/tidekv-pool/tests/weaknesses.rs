//! What kvcached gets wrong, as tests of this pool. Each is named after the weakness it answers.
//!
//! | id       | weakness                                     | test                                                           |
//! |----------|----------------------------------------------|----------------------------------------------------------------|
//! | W1       | running out of memory ends the process       | faults: a_device_without_memory_is_a_miss_even_after_a_grant   |
//! | W2       | two processes both take the last page        | sharing: the_last_page_has_exactly_one_winner                  |
//! | W3       | half a batch stays mapped                    | faults: a_refused_map_undoes_everything_whichever_call_it_was  |
//! | W4       | a page id with two holders after a shrink    | here                                                           |
//! | W5       | groups share one segment                     | blocks: groups_have_entries_and_segments_of_their_own          |
//! | W7       | limits that are ignored                      | limits: all of it; here with prealloc off                      |
//! | W8       | two pools of one name destroy each other     | here                                                           |
//! | W9       | a deleted segment is gone for good           | here                                                           |
//! | W10, W12 | an idle model holds gigabytes                | here                                                           |
//! | W13      | system calls on the hot path                 | blocks: steady_serving_makes_no_call_to_driver_or_ledger       |
//! | W17      | a failed unmap loses its pages               | faults: a_refused_unmap_keeps_the_page_and_tries_again         |
//! | W18      | double frees go unnoticed                    | here                                                           |
//! | W19      | start-up polls, and may never end            | faults: a_pool_that_cannot_open_leaves_nothing                 |
//! | W22      | first come, first served                     | here, and sharing                                              |

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use support::{BLOCKS, Device, NO_WORK, SOON, alloc, assert_balanced, pages, wait_until};
use tidekv_core::blocks::FreeError;
use tidekv_core::geometry::{Capacity, ChunkChoice, KvShape};
use tidekv_core::units::{Bytes, GroupId};
use tidekv_pool::{KvPool, LimitStatus, PoolConfig, PoolError, ReservePolicy, Share};
use tidekv_shm::segment;

#[test]
fn w4_no_block_has_two_holders_across_shrink_and_grow() {
    let device = Device::new(64);
    let pool = device.pool("a");
    let mut leases = alloc(&pool, 40 * BLOCKS);
    let freed: Vec<_> = leases.drain(10 * BLOCKS as usize..).collect();
    pool.free(&freed, NO_WORK).unwrap();
    for limit in [32, 10, 48, 11, 64] {
        pool.resize(pages(limit)).unwrap();
        let revision = pool.limit_state().revision;
        device.until("the limit is applied", |view| view.entries[0].applied_revision == revision);
        let free = pool.available();
        leases.extend(alloc(&pool, free));
        let distinct: HashSet<_> = leases.iter().map(|lease| lease.block).collect();
        assert_eq!(distinct.len(), leases.len());
        assert_eq!(leases.len(), (limit * BLOCKS) as usize);
        let freed: Vec<_> = leases.drain(10 * BLOCKS as usize..).collect();
        pool.free(&freed, NO_WORK).unwrap();
    }
}

#[test]
fn w7_limits_work_without_preallocation() {
    let device = Device::new(16);
    let config = device.config("a").with_variables(|name| match name {
        "KVCACHED_PAGE_PREALLOC_ENABLED" => Some("false".to_owned()),
        _ => None,
    });
    let pool = KvPool::open(config.unwrap()).unwrap();
    segment::write_limit(&device.runtime_dir().segment_path(pool.name()), pages(3)).unwrap();
    device.until("the limit is applied", |view| view.entries[0].applied_revision == 1);
    assert_eq!((pool.available(), pool.limit_state().status), (3 * BLOCKS, LimitStatus::Applied));
}

#[test]
fn w8_a_name_that_is_taken_gets_a_number() {
    let device = Device::new(16);
    let (first, second) = (device.pool("VLLM"), device.pool("VLLM"));
    assert_eq!((first.name().as_str(), second.name().as_str()), ("VLLM", "VLLM-2"));
    alloc(&second, BLOCKS);
    drop(second);
    assert_eq!(segment::list(&device.runtime_dir()).len(), 1, "the first pool's segment is still there");
    assert_eq!(device.pool("VLLM").name().as_str(), "VLLM-2", "and the number is free again");
    drop(first);
    assert_eq!(device.pool("VLLM").name().as_str(), "VLLM");
}

#[test]
fn w9_a_deleted_segment_comes_back() {
    let device = Device::new(16);
    let pool = device.pool("a");
    alloc(&pool, 2 * BLOCKS);
    let path = device.runtime_dir().segment_path(pool.name());
    assert!(segment::delete(&path).unwrap());
    let watch = device.ledger().watch().unwrap();
    wait_until("the segment is back", &watch, || segment::read(&path).unwrap().is_some_and(|view| view.used > 0));
    // And it is listened to.
    segment::write_limit(&path, pages(5)).unwrap();
    device.until("the limit is applied", |view| view.entries[0].applied_revision == 1);
    assert_eq!(pool.limit_state().effective_limit_bytes, pages(5));
}

/// 36 layers, GQA with 8 heads of 128 in bf16: kvcached keeps 0.7 to 1.7 GiB of such a model when it is idle.
#[test]
fn w12_an_idle_model_holds_megabytes() {
    let device = Device::new(0);
    let mut config = PoolConfig {
        budget: Some(Bytes::gib(4)),
        reserve: ReservePolicy::Auto,
        decay: Duration::from_millis(80),
        null_block: true,
        ..device.config("a")
    };
    config.geometry.shape = KvShape::heads(36, 8, 128, 2, 16);
    config.geometry.granularity = Bytes::mib(2);
    config.geometry.chunk = ChunkChoice::Auto;
    config.geometry.capacity = Capacity::Budget(Bytes::gib(8));
    let pool = KvPool::open(config).unwrap();
    let leases = alloc(&pool, 200);
    assert!(pool.snapshot().mapped_bytes > Bytes::mib(400));
    pool.free(&leases, NO_WORK).unwrap();
    device.until("the idle pages decayed", |view| view.entries[0].reserved <= Bytes::mib(64));
    let mut last = Bytes::ZERO;
    device.until("two pages are left: null block and reserve", |view| {
        last = view.entries[0].reserved;
        last == Bytes(2 * pool.snapshot().page_bytes.0)
    });
    assert_balanced(&pool);
    assert!(last <= Bytes::mib(64), "{last}");
}

#[test]
fn w18_a_double_free_is_named_and_frees_nothing() {
    let device = Device::new(16);
    let pool = device.pool("a");
    let leases = alloc(&pool, 4);
    pool.free(&leases[..1], NO_WORK).unwrap();
    let error = pool.free(&leases, NO_WORK).unwrap_err();
    let block = leases[0].block;
    assert!(matches!(error, PoolError::Free(FreeError::NotLeased { block: named }) if named == block), "{error}");
    assert_eq!(pool.snapshot().allocated_blocks, 3);
    // A lease that was kept too long does not free its successor.
    let next = alloc(&pool, 1);
    assert_eq!(next[0].block, block);
    assert!(matches!(pool.free(&leases[..1], NO_WORK), Err(PoolError::Free(FreeError::Stale { .. }))));
    assert_eq!(pool.snapshot().allocated_blocks, 4);
}

/// Four engines that take all they can get and give back when asked end at their weights.
#[test]
fn w22_weights_decide_who_holds_what() {
    let device = Device::new(400);
    let weights = [1, 1, 2, 4];
    let pools: Vec<KvPool> = weights
        .iter()
        .map(|&weight| {
            let mut config = device.config("tenant");
            config.geometry.capacity = Capacity::Pages(400);
            config.share = Share { weight, ..Share::default() };
            KvPool::open(config).unwrap()
        })
        .collect();
    let begun = Instant::now();
    let mut ended = Vec::new();
    std::thread::scope(|scope| {
        for pool in &pools {
            scope.spawn(move || {
                let mut held = Vec::new();
                while begun.elapsed() < Duration::from_millis(1500) {
                    let owed = (pool.reclaim_requested().pages * BLOCKS) as usize;
                    if owed > 0 {
                        let evicted = held.split_off(held.len() - owed.min(held.len()));
                        pool.free(&evicted, NO_WORK).unwrap();
                    }
                    // Everything it could ever use: that is what full demand means.
                    let _ = pool.alloc_within(4 * BLOCKS, Duration::from_millis(5), &mut held);
                }
            });
        }
        device.until("the shares are near the weights", |view| {
            ended = view.entries.iter().map(|entry| entry.reserved.0 / pages(1).0).collect();
            let fair = [50u64, 50, 100, 200];
            ended.iter().zip(fair).all(|(&held, fair)| held.abs_diff(fair) * 20 <= fair.max(80))
        });
    });
    assert!(begun.elapsed() < SOON);
    let total: u64 = pools.iter().map(|pool| pool.snapshot().ledger_bytes.0).sum();
    assert!(total <= pages(400).0);
}

/// An owner that is gone without a word: its entry has no lock.
#[test]
fn a_dead_neighbours_memory_comes_back_within_a_second() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let begun = Instant::now();
    let die = |view: &mut tidekv_shm::LedgerView| {
        let mut dead = view.entries[0].clone();
        (dead.slot, dead.name) = (77, "dead".to_owned());
        (dead.reserved, dead.in_use) = (pages(8), pages(8));
        view.entries.push(dead);
    };
    device.ledger().update(Instant::now() + SOON, die).unwrap();
    let mut leases = Vec::new();
    pool.alloc_within(8 * BLOCKS, SOON, &mut leases).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    device.until("its entry is gone", |view| view.by_name("dead", GroupId(0)).is_none());
}
