//! The last page finds a taker, also where the device refuses what the ledger granted.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::Barrier;
use std::time::{Duration, Instant};

use support::{Device, NO_WORK, assert_balanced};
use tidekv_core::units::Bytes;
use tidekv_pool::KvPool;

const POOLS: usize = 6;

/// Has six pools wait so long for the one page there is, `rounds` times, on a device that has no memory for a while. Says how
/// many pools had the page in each round.
fn winners(rounds: u32, wait: Duration, without_memory: Duration) -> Vec<usize> {
    let device = Device::new(1);
    let pools: Vec<KvPool> = (0..POOLS).map(|number| device.pool(&format!("pool{number}"))).collect();
    let round = || {
        let begin = Barrier::new(POOLS + 1);
        let end = Barrier::new(POOLS);
        let race = |pool: &KvPool| {
            begin.wait();
            let mut leases = Vec::new();
            let had_it = pool.alloc_within(1, wait, &mut leases).is_ok();
            // Nobody gives it on.
            end.wait();
            pool.free(&leases, NO_WORK).unwrap();
            pool.trim().unwrap();
            had_it
        };
        std::thread::scope(|scope| {
            let racers: Vec<_> = pools.iter().map(|pool| scope.spawn(move || race(pool))).collect();
            // Before anybody's wait begins, so that it is over before any of them ends.
            device.backend.refuse_until(Instant::now() + without_memory);
            begin.wait();
            racers.into_iter().map(|racer| racer.join().unwrap()).filter(|&had_it| had_it).count()
        })
    };
    let winners = (0..rounds).map(|_| round()).collect();
    for pool in &pools {
        assert_eq!(assert_balanced(pool).mapped_bytes, Bytes::ZERO);
    }
    winners
}

/// Issue 22: six processes wanted the last page of a machine short of memory, and in 19 rounds none had it.
#[test]
fn a_page_that_comes_free_at_the_end_of_the_wait_finds_a_taker() {
    let rounds = std::env::var("TIDEKV_LAST_PAGES").map_or(100, |count| count.parse().unwrap());
    let wait = Duration::from_millis(20);
    let winners = winners(rounds, wait, wait);
    let without = winners.iter().filter(|&&count| count == 0).count();
    assert_eq!(without, 0, "of {rounds} rounds had no winner: {winners:?}");
    assert!(winners.iter().all(|&count| count == 1), "{winners:?}");
}
