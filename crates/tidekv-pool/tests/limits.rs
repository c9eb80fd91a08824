//! Limits from every hand that writes them: the engine, `kvctl` through the ledger, kvcached's tools through the segment.
//!
//! ```text
//!   TIDEKV_LIMIT_ROUNDS=1000000    rounds in which a limit must never be passed over (default 4,000)
//! ```

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use support::{BLOCKS, Device, NO_WORK, SOON, alloc, assert_balanced, pages, wait_until};
use tidekv_core::blocks::BlockLease;
use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, GroupId, Step};
use tidekv_mem::Backend;
use tidekv_pool::{KvPool, LimitStatus, PoolConfig, PoolError, ReservePolicy, Shortage};
use tidekv_shm::{DeviceName, EntrySpec, Ledger, LedgerView, PoolName, segment};

/// As `kvctl limit` does it: the word, then bytes and the next revision in the ledger. Says which revision that is.
fn kvctl_limit(device: &Device, pool: &KvPool, bytes: Bytes) -> u64 {
    segment::write_limit(&device.runtime_dir().segment_path(pool.name()), bytes).unwrap();
    let write = |view: &mut LedgerView| {
        let entry = &mut view.entries[0];
        (entry.limit, entry.limit_revision) = (bytes, entry.limit_revision + 1);
        entry.limit_revision
    };
    device.ledger().update(Instant::now() + SOON, write).unwrap()
}

fn until_applied(device: &Device, revision: u64) {
    device.until("the limit is applied", |view| view.entries[0].applied_revision >= revision);
}

fn segment_word(device: &Device, pool: &KvPool) -> Option<i64> {
    segment::read(&device.runtime_dir().segment_path(pool.name())).unwrap().map(|view| view.limit)
}

#[test]
fn revisions_are_judged_as_kvcached_does() {
    let device = Device::new(16);
    let pool = device.pool("a");
    let state = pool.set_limit(Bytes(pages(4).0 + 1), 7).unwrap();
    assert_eq!((state.status, state.revision), (LimitStatus::Applied, 7));
    assert_eq!((state.limit_bytes, state.effective_limit_bytes), (Bytes(pages(4).0 + 1), pages(4)));
    assert_eq!((state.current_capacity_bytes, state.remaining_bytes), (pages(64), pages(4)));

    let stale = pool.set_limit(pages(9), 6).unwrap();
    assert_eq!((stale.status, stale.revision, stale.effective_limit_bytes), (LimitStatus::Stale, 7, pages(4)));
    let again = pool.set_limit(Bytes(pages(4).0 + 1), 7).unwrap();
    assert_eq!((again.status, again.revision), (LimitStatus::Applied, 7));
    let conflict = pool.set_limit(pages(9), 7).unwrap();
    assert_eq!((conflict.status, conflict.effective_limit_bytes), (LimitStatus::Conflict, pages(4)));
    assert!(conflict.reason.is_some());

    let resized = pool.resize(pages(9)).unwrap();
    assert_eq!((resized.status, resized.revision), (LimitStatus::Applied, 8));
    until_applied(&device, 8);
    assert_eq!(segment_word(&device, &pool), Some(i64::try_from(pages(9).0).unwrap()));
}

#[test]
fn the_first_order_is_carried_out_with_revision_0_too() {
    let device = Device::new(64);
    let pool = device.pool("a");
    let state = pool.set_limit(pages(4), 0).unwrap();
    assert_eq!((state.status, state.revision, state.effective_limit_bytes), (LimitStatus::Applied, 0, pages(4)));
    assert_eq!(pool.set_limit(pages(4), 0).unwrap().status, LimitStatus::Applied);
    assert_eq!(pool.set_limit(pages(9), 0).unwrap().status, LimitStatus::Conflict);
    assert_eq!(pool.set_limit(pages(9), 1).unwrap().status, LimitStatus::Applied);
    // Where somebody was faster, revision 0 is an old one.
    let pool = device.pool("b");
    pool.resize(pages(9)).unwrap();
    assert_eq!(pool.set_limit(pages(4), 0).unwrap().status, LimitStatus::Stale);
}

#[test]
fn a_limit_below_use_is_deferred_until_blocks_are_freed() {
    let device = Device::new(16);
    let pool = device.pool("a");
    let leases = alloc(&pool, 6 * BLOCKS);
    let state = pool.set_limit(pages(2), 1).unwrap();
    assert_eq!((state.status, state.overage_bytes), (LimitStatus::Deferred, pages(4)));
    assert_eq!(pool.available(), 0);
    let refused = pool.alloc(1, &mut Vec::new()).unwrap_err();
    assert!(matches!(refused, PoolError::Exhausted { shortage: Shortage::Limit { .. }, .. }), "{refused}");
    device.until("the engine is asked to evict", |view| view.entries[0].reclaim == pages(4));
    assert!(device.entry(&pool).applied_revision < 1);

    pool.free(&leases[..32], NO_WORK).unwrap();
    until_applied(&device, 1);
    assert_eq!(pool.limit_state().status, LimitStatus::Applied);
    assert_eq!(assert_balanced(&pool).mapped_bytes, pages(2));
    device.until("nothing is asked for any more", |view| view.entries[0].reclaim == Bytes::ZERO);
}

#[test]
fn idle_pages_above_a_new_limit_are_leased_to_nobody() {
    let device = Device::new(16);
    let pool = device.pool("a");
    for revision in (1..40).step_by(2) {
        let leases = alloc(&pool, 6 * BLOCKS);
        pool.free(&leases, NO_WORK).unwrap();
        pool.set_limit(pages(2), revision).unwrap();
        let refused = pool.alloc(3 * BLOCKS, &mut Vec::new()).unwrap_err();
        assert!(matches!(refused, PoolError::Exhausted { shortage: Shortage::Limit { .. }, .. }), "{refused}");
        pool.set_limit(pages(16), revision + 1).unwrap();
    }
    assert_balanced(&pool);
}

#[test]
fn an_idle_engine_shrinks_without_being_called() {
    let device = Device::new(16);
    let pool = device.pool("a");
    let leases = alloc(&pool, 8 * BLOCKS);
    pool.free(&leases, NO_WORK).unwrap();
    let revision = kvctl_limit(&device, &pool, pages(3));
    until_applied(&device, revision);
    assert_eq!(assert_balanced(&pool).mapped_bytes, pages(3));
}

#[test]
fn zero_is_a_limit_and_the_start_up_value_can_be_restored() {
    let device = Device::new(16);
    let pool = KvPool::open(PoolConfig { limit: Some(pages(10)), ..device.config("a") }).unwrap();
    let leases = alloc(&pool, 4 * BLOCKS);
    pool.free(&leases, NO_WORK).unwrap();
    let revision = kvctl_limit(&device, &pool, Bytes::ZERO);
    until_applied(&device, revision);
    assert_eq!((pool.available(), assert_balanced(&pool).mapped_bytes), (0, Bytes::ZERO));

    let revision = kvctl_limit(&device, &pool, pages(10));
    until_applied(&device, revision);
    assert_eq!(pool.available(), 10 * BLOCKS);
    alloc(&pool, 10 * BLOCKS);
}

/// It was counted with the limit before it, until the next look at the ledger.
#[test]
fn what_is_available_is_right_as_soon_as_a_limit_is_applied() {
    let device = Device::new(16);
    let pool = device.pool("a");
    let path = device.runtime_dir().segment_path(pool.name());
    for round in 0..50 {
        pool.set_limit(Bytes::ZERO, 4 * round + 1).unwrap();
        assert_eq!(pool.available(), 0);
        pool.set_limit(pages(10), 4 * round + 2).unwrap();
        assert_eq!(pool.available(), 10 * BLOCKS, "by the engine, round {round}");
        until_applied(&device, 4 * round + 2);
        segment::write_limit(&path, Bytes::ZERO).unwrap();
        until_applied(&device, 4 * round + 3);
        assert_eq!(pool.available(), 0);
        segment::write_limit(&path, pages(10)).unwrap();
        until_applied(&device, 4 * round + 4);
        assert_eq!(pool.available(), 10 * BLOCKS, "by the segment, round {round}");
    }
}

#[test]
fn a_word_of_kvcacheds_own_tools_becomes_a_revision() {
    let device = Device::new(16);
    let pool = device.pool("a");
    let path = device.runtime_dir().segment_path(pool.name());
    segment::write_limit(&path, pages(5)).unwrap();
    until_applied(&device, 1);
    assert_eq!(pool.limit_state().effective_limit_bytes, pages(5));
    // Back to what it was at the start: kvcached ignores exactly this one.
    segment::write_limit(&path, pages(64)).unwrap();
    until_applied(&device, 2);
    assert_eq!(pool.limit_state().effective_limit_bytes, pages(64));
    assert_eq!(device.entry(&pool).limit, pages(64), "the ledger says so too");
}

#[test]
fn of_two_writers_the_later_one_counts_and_the_earlier_one_hears_of_it() {
    let device = Device::new(16);
    let pool = device.pool("a");
    assert_eq!(pool.set_limit(pages(8), 1).unwrap().status, LimitStatus::Applied);
    let operator = kvctl_limit(&device, &pool, pages(6));
    // Revision 3 where the pool saw the word before the entry and gave it a revision of its own.
    assert!((2..=3).contains(&operator), "revision {operator}");
    // The engine's next order collides: it learns which one is in force, even before the background thread looked.
    let state = pool.set_limit(pages(7), operator).unwrap();
    assert_eq!((state.status, state.limit_bytes, state.revision), (LimitStatus::Conflict, pages(6), operator));
    assert_eq!(pool.set_limit(pages(7), operator + 1).unwrap().status, LimitStatus::Applied);
    until_applied(&device, operator + 1);
    assert_eq!(device.entry(&pool).limit, pages(7));
    assert_eq!(segment_word(&device, &pool), Some(i64::try_from(pages(7).0).unwrap()));
}

/// The slot of a pool was read in the new file before the pool had a seat there: whoever was first in it gave its
/// neighbour its own limit, and the number of its trims, for good.
#[test]
fn a_replaced_ledger_gives_nobody_its_neighbours_limit() {
    let device = Device::new(16);
    let pool = device.pool("a");
    assert_eq!(pool.resize(pages(9)).unwrap().revision, 1);
    until_applied(&device, 1);
    // The new file is made elsewhere and takes the old one's name in one step, so no pool can be there before `b`.
    let elsewhere = Device::new(16);
    let name = device.ledger().path().file_name().unwrap().to_owned();
    let host = DeviceName::new(&device.backend.capabilities().id).unwrap();
    let b = EntrySpec::new(PoolName::new("b").unwrap(), GroupId(0), pages(1));
    let b = Ledger::open(&elsewhere.runtime_dir(), &host).unwrap().register(Instant::now() + SOON, b).unwrap();
    let order = |view: &mut LedgerView, me: usize| {
        assert_eq!(me, 0, "the slot that `a` had");
        (view.entries[me].limit, view.entries[me].limit_revision) = (pages(3), 7);
        view.entries[me].trim_request = 5;
    };
    b.update(Instant::now() + SOON, order).unwrap();
    std::fs::rename(elsewhere.dir.path().join(&name), device.dir.path().join(&name)).unwrap();
    let mut seen = None;
    device.until("a has a seat in the new file", |view| {
        seen = view.by_name("a", GroupId(0)).cloned();
        seen.is_some()
    });
    let entry = seen.unwrap();
    assert_eq!((entry.slot, entry.limit, entry.limit_revision, entry.trim_done), (1, pages(9), 1, 0));
    assert_eq!(pool.limit_state().limit_bytes, pages(9));
    assert_eq!(device.ledger().read().unwrap().by_slot(0).unwrap().limit, pages(3), "nor the other way round");
}

#[test]
fn a_limit_past_the_reservation_means_all_of_it() {
    let device = Device::new(200);
    let pool = device.pool("a");
    let state = pool.resize(pages(1000)).unwrap();
    assert_eq!((state.limit_bytes, state.effective_limit_bytes), (pages(1000), pages(64)));
    alloc(&pool, 64 * BLOCKS);
    let refused = pool.alloc(1, &mut Vec::new()).unwrap_err();
    assert!(matches!(refused, PoolError::Exhausted { shortage: Shortage::Limit { limit_pages: 64, .. }, .. }));
}

#[test]
fn a_trim_by_an_operator_is_done_and_answered() {
    let device = Device::new(16);
    let pool = device.pool("a");
    let leases = alloc(&pool, 4 * BLOCKS);
    pool.free(&leases[8..], NO_WORK).unwrap();
    let ask = |view: &mut LedgerView| view.entries[0].trim_request += 1;
    device.ledger().update(Instant::now() + SOON, ask).unwrap();
    device.until("the trim is done", |view| view.entries[0].trim_done == 1);
    assert_eq!(assert_balanced(&pool).mapped_bytes, pages(1));
}

#[test]
fn the_segment_shows_what_kvcacheds_tools_show() {
    let device = Device::new(16);
    let pool = device.pool("a");
    let leases = alloc(&pool, 5 * BLOCKS);
    pool.free(&leases[16..], NO_WORK).unwrap();
    let path = device.runtime_dir().segment_path(pool.name());
    let watch = device.ledger().watch().unwrap();
    watch.add(&path).unwrap();
    let number = |bytes: Bytes| i64::try_from(bytes.0).unwrap();
    wait_until("used and prealloc", &watch, || {
        let view = segment::read(&path).unwrap().unwrap();
        (view.limit, view.used, view.prealloc) == (number(pages(64)), number(pages(2)), number(pages(3)))
    });
}

/// The same seed gives the same run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % limit
    }

    fn count(&mut self, limit: u32) -> u32 {
        u32::try_from(self.below(limit as usize)).unwrap()
    }
}

/// An engine that leases and frees behind steps of the device, which end later: pages drain all the time.
struct Engine<'a> {
    pool: &'a KvPool,
    leases: Vec<BlockLease>,
    steps: u64,
    random: Random,
}

impl<'a> Engine<'a> {
    fn new(pool: &'a KvPool, seed: u64) -> Self {
        Self { pool, leases: Vec::new(), steps: 0, random: Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1) }
    }

    fn lease(&mut self) {
        let count = 1 + self.random.count(4 * BLOCKS);
        if let Err(error) = self.pool.alloc(count, &mut self.leases) {
            assert!(error.is_transient(), "{error}");
        }
    }

    fn free(&mut self) {
        let kept = self.random.below(self.leases.len() + 1);
        let freed = self.leases.split_off(kept);
        self.steps += 1;
        let fence = [NO_WORK, Fence::Step(Step(self.steps)), Fence::Unknown][self.random.below(3)];
        self.pool.free(&freed, fence).unwrap();
    }

    fn step(&mut self) {
        match self.random.below(8) {
            0..3 => self.lease(),
            3..6 => self.free(),
            _ => self.pool.step_completed(Step(self.steps)),
        }
    }
}

impl Drop for Engine<'_> {
    fn drop(&mut self) {
        self.pool.step_completed(Step(self.steps));
    }
}

fn limit_rounds() -> u64 {
    std::env::var("TIDEKV_LIMIT_ROUNDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4_000)
}

/// A pool that refills its reserve in the background, so that pages are being mapped at any moment.
fn pool_with_reserve(device: &Device) -> KvPool {
    KvPool::open(PoolConfig { reserve: ReservePolicy::Fixed { min: 3, max: 6 }, ..device.config("a") }).unwrap()
}

/// A limit counted as applied while pages were on their way: what became idle after it was leased again.
#[test]
fn nothing_is_leased_or_promised_beyond_a_limit() {
    let device = Device::new(64);
    let pool = pool_with_reserve(&device);
    let mut engine = Engine::new(&pool, 1);
    let mut above = 0;
    for round in 1..=limit_rounds() {
        (0..4).for_each(|_| engine.step());
        let limit = engine.random.count(12);
        assert_eq!(pool.set_limit(pages(limit), round).unwrap().revision, round);
        for _ in 0..4 {
            let room = (limit * BLOCKS).saturating_sub(u32::try_from(engine.leases.len()).unwrap());
            let promised = pool.available();
            let leased = pool.alloc(room + 1, &mut engine.leases).is_ok();
            above += u64::from(promised > room || leased);
            engine.step();
        }
    }
    assert_eq!(above, 0, "of {} rounds", limit_rounds());
}

/// The limit of the earlier one was applied last, now and then, and stayed.
#[test]
fn of_two_orders_at_the_same_moment_the_later_one_is_in_force() {
    let device = Device::new(64);
    let pool = device.pool("a");
    let start = std::sync::Barrier::new(2);
    for round in 0..500 {
        std::thread::scope(|scope| {
            for (limit, revision) in [(9, 2 * round + 1), (5, 2 * round + 2)] {
                let (pool, start) = (&pool, &start);
                scope.spawn(move || {
                    start.wait();
                    pool.set_limit(pages(limit), revision).unwrap();
                });
            }
        });
        assert_eq!(pool.available(), 5 * BLOCKS, "round {round}");
    }
}

/// The same while other threads lease and free. Above the limit the number of leased blocks can only fall.
#[test]
fn threads_lease_nothing_beyond_a_limit() {
    let device = Device::new(64);
    let pool = pool_with_reserve(&device);
    let ended = AtomicBool::new(false);
    let (mut above, mut random) = (0, Random(7));
    std::thread::scope(|scope| {
        for seed in 2..5 {
            let (pool, ended) = (&pool, &ended);
            scope.spawn(move || {
                let mut engine = Engine::new(pool, seed);
                while !ended.load(Ordering::Relaxed) {
                    engine.step();
                }
            });
        }
        for round in 1..=limit_rounds() {
            let limit = random.count(12);
            assert_eq!(pool.set_limit(pages(limit), round).unwrap().revision, round);
            let mut leased = u32::MAX;
            for _ in 0..4 {
                let promised = pool.available();
                let now = pool.snapshot().allocated_blocks;
                above += u64::from(promised > limit * BLOCKS || now > leased.max(limit * BLOCKS));
                leased = now;
            }
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(above, 0, "of {} rounds", limit_rounds());
}
