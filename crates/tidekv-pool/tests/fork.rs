//! What a forked child may do with its parent's pool: nothing, at once and without harm.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use support::{BLOCKS, Device, NO_WORK, alloc, assert_balanced, pages};
use tidekv_core::units::{PageId, Step};
use tidekv_pool::{PoolError, PoolSnapshot, ReclaimRequest};

fn in_forked_child(child: impl FnOnce() -> bool) -> i32 {
    // SAFETY: the child uses only memory that existed before the fork, allocates little, and leaves through `_exit`.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork failed");
    if pid == 0 {
        let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
        // SAFETY: ends the child at once, without the harness's exit handlers.
        unsafe { libc::_exit(i32::from(!passed)) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child and writes to a local.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid);
    status
}

#[test]
fn a_child_is_refused_by_every_call_and_its_parent_goes_on() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let leases = alloc(&pool, BLOCKS);
    let status = in_forked_child(|| {
        let forked = |outcome: Result<(), PoolError>| matches!(outcome, Err(PoolError::Forked));
        pool.step_completed(Step(1));
        pool.on_reclaim(|_| {});
        forked(pool.alloc(1, &mut Vec::new()))
            && forked(pool.free(&leases, NO_WORK))
            && forked(pool.reserve(1))
            && forked(pool.clear().map(drop))
            && forked(pool.trim().map(drop))
            && forked(pool.set_limit(pages(1), 1).map(drop))
            && pool.occupancy(&[PageId(0)]) == [0]
            && pool.reclaim_requested() == ReclaimRequest::default()
            && pool.snapshot() == PoolSnapshot { pool_name: "a".to_owned(), ..PoolSnapshot::default() }
    });
    assert_eq!(status, 0, "the child saw something it should not");
    assert_eq!(assert_balanced(&pool).allocated_blocks, BLOCKS);
    alloc(&pool, 3 * BLOCKS);
}

#[test]
fn a_child_that_drops_the_pool_takes_nothing_with_it() {
    let device = Device::new(8);
    let pool = device.pool("a");
    let leases = alloc(&pool, 2 * BLOCKS);
    let mut moved = Some(pool);
    let status = in_forked_child(|| {
        drop(moved.take());
        true
    });
    assert_eq!(status, 0);
    let pool = moved.take().unwrap();
    assert_eq!(device.entry(&pool).reserved, pages(2));
    assert_eq!(tidekv_shm::segment::list(&device.runtime_dir()).len(), 1);
    pool.free(&leases, NO_WORK).unwrap();
    assert_eq!(pool.trim().unwrap(), pages(2));
    drop(pool);
    let left: Vec<_> = std::fs::read_dir(device.dir.path()).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}
