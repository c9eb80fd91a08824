//! Several pools on one budget: nobody takes what another holds, and the starved get memory back.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use support::{BLOCKS, Device, NO_WORK, PAGE, SOON, alloc, assert_balanced, pages, wait_until};
use tidekv_core::blocks::BlockLease;
use tidekv_core::share::MemoryUse;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_pool::{KvPool, PoolConfig, PoolError, ReclaimRequest, ReservePolicy, Share, Shortage};
use tidekv_shm::LedgerView;

#[test]
fn idle_pages_of_one_pool_reach_another_that_waits() {
    let device = Device::new(8);
    let (rich, poor) = (device.pool("rich"), device.pool("poor"));
    let leases = alloc(&rich, 8 * BLOCKS);
    rich.free(&leases, NO_WORK).unwrap();
    let mut got = Vec::new();
    let begun = Instant::now();
    poor.alloc_within(6 * BLOCKS, SOON, &mut got).unwrap();
    assert!(begun.elapsed() < SOON / 4, "idle pages took {:?}", begun.elapsed());
    assert_eq!(got.len(), 48);
    assert_eq!(poor.snapshot().counters.waits, 1);
    assert_eq!(poor.snapshot().demand_bytes, Bytes::ZERO, "what was given is no longer wanted");
    assert!(rich.snapshot().counters.reclaims > 0);
    let (rich, poor) = (assert_balanced(&rich), assert_balanced(&poor));
    assert!(rich.mapped_bytes.0 + poor.mapped_bytes.0 <= pages(8).0);
}

#[test]
fn an_engine_that_evicts_on_request_feeds_its_neighbour() {
    let device = Device::new(8);
    let (rich, poor) = (device.pool("rich"), device.pool("poor"));
    let held = Arc::new(Mutex::new(alloc(&rich, 8 * BLOCKS)));
    let (asked, requests) = mpsc::channel();
    // What an engine does: remember the request, evict from its own thread. Here: at once.
    let evicting = rich.clone();
    let (evict, orders) = mpsc::channel::<ReclaimRequest>();
    let cache = Arc::clone(&held);
    let engine = std::thread::spawn(move || {
        for order in orders {
            let mut cache = cache.lock().unwrap();
            let keep = cache.len().saturating_sub((order.pages * BLOCKS) as usize);
            let evicted: Vec<BlockLease> = cache.split_off(keep);
            evicting.free(&evicted, NO_WORK).unwrap();
        }
    });
    rich.on_reclaim(move |request| {
        asked.send(request).unwrap();
        evict.send(request).unwrap();
    });
    let mut got = Vec::new();
    poor.alloc_within(4 * BLOCKS, SOON, &mut got).unwrap();
    let request = requests.recv_timeout(SOON).unwrap();
    assert_eq!((request.pages, request.bytes), (4, pages(4)), "its fair share is half");
    assert_eq!(poor.snapshot().mapped_bytes, pages(4));
    // The callback goes with the pool, the channel with the callback, the engine with the channel.
    rich.on_reclaim(|_| {});
    engine.join().unwrap();
}

#[test]
fn a_floor_that_is_given_up_is_for_others_and_comes_back() {
    let device = Device::new(8);
    let sleeper = PoolConfig { share: Share { floor: pages(6), ..Share::default() }, ..device.config("sleeper") };
    let (sleeper, other) = (KvPool::open(sleeper).unwrap(), device.pool("other"));
    let short = |pool: &KvPool, count: u32| pool.alloc(count, &mut Vec::new()).unwrap_err().is_transient();
    assert!(short(&other, 3 * BLOCKS), "six pages are kept for the sleeper");
    assert_eq!(sleeper.set_floor(Bytes::ZERO).unwrap(), pages(6));
    let leases = alloc(&other, 8 * BLOCKS);
    assert_eq!(sleeper.set_floor(pages(6)).unwrap(), Bytes::ZERO);
    assert_eq!(device.entry(&sleeper).floor, pages(6));
    assert!(short(&sleeper, BLOCKS), "what is in use is not taken away");
    other.free(&leases, NO_WORK).unwrap();
    let mut own = Vec::new();
    sleeper.alloc_within(6 * BLOCKS, SOON, &mut own).unwrap();
    assert!(short(&other, 3 * BLOCKS));
}

/// An idle engine whose cached prefixes fill its share: without the hint its neighbour never got more than its own share.
#[test]
fn what_an_engine_only_keeps_goes_to_a_neighbour_that_waits() {
    let device = Device::new(8);
    let (idle, busy) = (device.pool("idle"), device.pool("busy"));
    let cached = alloc(&idle, 4 * BLOCKS);
    alloc(&busy, 4 * BLOCKS);
    assert!(busy.alloc(BLOCKS, &mut Vec::new()).unwrap_err().is_exhausted(), "each has its share");
    idle.set_evictable(4 * BLOCKS);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| busy.alloc_within(3 * BLOCKS, SOON, &mut Vec::new()));
        device.until("the idle engine is asked", |view| {
            view.by_name("idle", GroupId(0)).is_some_and(|entry| entry.reclaim == pages(3))
        });
        let request = idle.reclaim_requested();
        assert_eq!(
            (request.pages, request.firm_pages),
            (3, 0),
            "it is within its share: no request of its own makes room"
        );
        idle.free(&cached[..3 * BLOCKS as usize], NO_WORK).unwrap();
        idle.set_evictable(BLOCKS);
        waiting.join().unwrap().unwrap();
    });
    assert_eq!(device.entry(&busy).reserved, pages(7));
}

/// What an operator sees: the parts of what is held, in the snapshot and in the ledger.
#[test]
fn what_is_held_is_needed_cached_or_idle() {
    let device = Device::new(8);
    let pool = device.pool("engine");
    let leases = alloc(&pool, 4 * BLOCKS);
    let is = |needed: u32, cached: u32, idle: u32| {
        let usage = MemoryUse { needed: pages(needed), cached: pages(cached), idle: pages(idle) };
        assert_eq!(pool.snapshot().usage, usage);
        device.until("the ledger says so", |view| view.entries[0].usage() == usage);
        let entry = device.entry(&pool);
        assert_eq!((entry.in_use, entry.reserved), (usage.used(), usage.held()), "older programs read these");
    };
    is(4, 0, 0);
    pool.set_evictable(4 * BLOCKS);
    is(0, 4, 0);
    // A part of the blocks that are leased is a part of the pages.
    pool.set_evictable(2 * BLOCKS);
    is(2, 2, 0);
    pool.free(&leases[..1], NO_WORK).unwrap();
    pool.set_evictable(4 * BLOCKS - 1);
    is(0, 4, 0);
    pool.free(&leases[1..], NO_WORK).unwrap();
    pool.set_evictable(99);
    pool.trim().unwrap();
    is(0, 0, 0);
}

/// `kvctl trim --cached`: the engine is asked for what it keeps, and for nothing that runs.
#[test]
fn a_trim_of_what_is_cached_asks_the_engine_and_is_done_when_it_is_gone() {
    let device = Device::new(8);
    let pool = device.pool("engine");
    let leases = alloc(&pool, 4 * BLOCKS);
    let (kept, needed) = leases.split_at(3 * BLOCKS as usize);
    pool.set_evictable(3 * BLOCKS);
    let trim = |cached: bool| {
        let ask = |view: &mut LedgerView| {
            let entry = &mut view.entries[0];
            entry.trim_request += 1;
            if cached {
                entry.trim_cached = entry.trim_request;
            }
            entry.trim_request
        };
        device.ledger().update(Instant::now() + SOON, ask).unwrap()
    };
    let plain = trim(false);
    device.until("a plain trim is done at once", |view| view.entries[0].trim_done == plain);
    assert_eq!(pool.reclaim_requested().pages, 0);
    let request = trim(true);
    device.until("the engine is asked", |_| pool.reclaim_requested().pages == 3);
    assert_eq!(pool.reclaim_requested().firm_pages, 0, "no request makes room for it");
    assert_eq!(device.entry(&pool).trim_done, plain, "nothing has gone yet");
    pool.free(kept, NO_WORK).unwrap();
    pool.set_evictable(0);
    device.until("it is done", |view| view.entries[0].trim_done == request && view.entries[0].reserved == pages(1));
    // What is cached from now on was not meant.
    pool.set_evictable(BLOCKS);
    device.until("it is cached", |view| view.entries[0].cached == pages(1));
    assert_eq!(pool.reclaim_requested().pages, 0);
    pool.free(needed, NO_WORK).unwrap();
}

/// An allocation that would not wait finds what was asked for before it: nobody runs short while a neighbour only keeps.
#[test]
fn what_is_asked_for_ahead_is_there_when_it_is_allocated() {
    let device = Device::new(8);
    let (idle, busy) = (device.pool("idle"), device.pool("busy"));
    let cached = alloc(&idle, 7 * BLOCKS);
    alloc(&busy, BLOCKS);
    idle.set_evictable(7 * BLOCKS);
    // The word holds for a while; on a slow machine it is said again.
    let asked = |view: &LedgerView| {
        busy.ask(3 * BLOCKS).unwrap();
        view.by_name("idle", GroupId(0)).is_some_and(|entry| entry.reclaim == pages(3))
    };
    device.until("the idle engine is asked", asked);
    idle.free(&cached[..3 * BLOCKS as usize], NO_WORK).unwrap();
    idle.set_evictable(4 * BLOCKS);
    device.until("memory that was asked for", |_| {
        busy.ask(3 * BLOCKS).unwrap();
        busy.available() >= 3 * BLOCKS
    });
    assert_eq!(busy.snapshot().mapped_bytes, pages(1), "nothing was allocated");
    busy.alloc_within(3 * BLOCKS, Duration::ZERO, &mut Vec::new()).unwrap();
    assert_eq!(device.entry(&busy).wish, Bytes::ZERO, "what was given is no longer wished for");
    assert_eq!(busy.snapshot().counters.failures, 0);
}

#[test]
fn nobody_is_asked_for_what_is_free_or_forbidden() {
    let device = Device::new(8);
    let (idle, busy) = (device.pool("idle"), device.pool("busy"));
    alloc(&idle, 4 * BLOCKS);
    idle.set_evictable(4 * BLOCKS);
    busy.ask(4 * BLOCKS).unwrap();
    assert_eq!(device.entry(&busy).wish, Bytes::ZERO, "four pages are free");
    busy.resize(pages(5)).unwrap();
    let mut most = Bytes::ZERO;
    device.until("a wish", |_| {
        busy.ask(9 * BLOCKS).unwrap();
        most = most.max(device.entry(&busy).wish);
        most > Bytes::ZERO
    });
    assert_eq!(most, pages(5), "more than its limit is of no use to it");
    device.until("the word expires", |_| device.entry(&busy).wish == Bytes::ZERO);
}

/// Each has its share and waits for more: whoever gives way no longer waits, and so the other need not.
#[test]
fn of_two_that_would_give_way_to_each_other_one_stays() {
    let device = Device::new(8);
    let (first, second) = (device.pool("first"), device.pool("second"));
    let given = alloc(&first, 4 * BLOCKS);
    alloc(&second, 4 * BLOCKS);
    let is_refused = |pool: &KvPool| pool.alloc(BLOCKS, &mut Vec::new()).unwrap_err().is_exhausted();
    assert!(is_refused(&first));
    assert!(!first.give_way().unwrap(), "nobody else waits");
    // A refusal counts for a while; on a slow machine it is repeated.
    device.until("a neighbour that waits", |_| is_refused(&first) && is_refused(&second) && first.give_way().unwrap());
    assert_eq!(device.entry(&first).demand, Bytes::ZERO);
    assert!(is_refused(&second) && !second.give_way().unwrap(), "it is the only one now");
    assert_eq!(device.entry(&second).demand, pages(1), "and waits on");
    first.free(&given, NO_WORK).unwrap();
    second.alloc_within(3 * BLOCKS, SOON, &mut Vec::new()).unwrap();
}

/// A neighbour above its share gives what it only keeps for what will be needed soon, and stops nothing that runs.
#[test]
fn a_wish_stops_nothing_that_runs() {
    let device = Device::new(8);
    let (running, wishing) = (device.pool("running"), device.pool("wishing"));
    let leases = alloc(&running, 8 * BLOCKS);
    running.set_evictable(BLOCKS);
    device.until("a request", |view| {
        wishing.ask(4 * BLOCKS).unwrap();
        view.by_name("running", GroupId(0)).is_some_and(|entry| entry.reclaim > Bytes::ZERO)
    });
    let request = running.reclaim_requested();
    // The word may have expired on a slow machine: then nothing is asked for.
    assert!(request.pages <= 4 && request.firm_pages == 0, "{request:?}");
    running.free(&leases, NO_WORK).unwrap();
}

/// It was not while a neighbour wished for more than the limit forbids, so an engine that stops nothing for a wish never
/// came under it.
#[test]
fn a_lowered_limit_is_firm_beside_a_wish() {
    let device = Device::new(8);
    let (running, wishing) = (device.pool("running"), device.pool("wishing"));
    let leases = alloc(&running, 8 * BLOCKS);
    // Without a page that it only keeps, nobody may wish for what it uses.
    running.set_evictable(4 * BLOCKS);
    running.set_limit(pages(6), 1).unwrap();
    let mut request = running.reclaim_requested();
    device.until("more is wished for than the limit forbids", |_| {
        wishing.ask(4 * BLOCKS).unwrap();
        request = running.reclaim_requested();
        request.pages > 2
    });
    assert_eq!((request.pages, request.firm_pages), (4, 2));
    running.free(&leases, NO_WORK).unwrap();
}

#[test]
fn what_an_engine_only_keeps_within_its_floor_stays() {
    let device = Device::new(8);
    let floor = Share { floor: pages(3), ..Share::default() };
    let idle = KvPool::open(PoolConfig { share: floor, ..device.config("idle") }).unwrap();
    let busy = device.pool("busy");
    let cached = alloc(&idle, 4 * BLOCKS);
    alloc(&busy, 4 * BLOCKS);
    idle.set_evictable(4 * BLOCKS);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| busy.alloc_within(BLOCKS, SOON, &mut Vec::new()));
        device.until("one page is asked for", |view| {
            view.by_name("idle", GroupId(0)).is_some_and(|entry| entry.reclaim == pages(1))
        });
        idle.free(&cached[..BLOCKS as usize], NO_WORK).unwrap();
        waiting.join().unwrap().unwrap();
    });
    assert!(busy.alloc_within(BLOCKS, Duration::from_millis(300), &mut Vec::new()).unwrap_err().is_exhausted());
    assert_eq!(idle.reclaim_requested().pages, 0);
}

#[test]
fn an_engine_that_polls_sees_the_same_request() {
    let device = Device::new(8);
    let (rich, poor) = (device.pool("rich"), device.pool("poor"));
    let leases = alloc(&rich, 8 * BLOCKS);
    assert_eq!(rich.reclaim_requested(), ReclaimRequest::default());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| poor.alloc_within(2 * BLOCKS, SOON, &mut Vec::new()));
        device.until("the request is published", |view| {
            view.by_name("rich", GroupId(0)).is_some_and(|entry| entry.reclaim == pages(2))
        });
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(rich.reclaim_fd(), rustix::event::PollFlags::IN)];
        let soon = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&soon)).unwrap(), 1);
        let request = rich.reclaim_requested();
        assert_eq!((request.pages, request.firm_pages, request.bytes), (2, 2, pages(2)));
        // The pages that the engine empties are given back without another word.
        rich.free(&leases[..16], NO_WORK).unwrap();
        waiting.join().unwrap().unwrap();
    });
    device.until("the debt is settled", |view| {
        view.by_name("rich", GroupId(0)).is_some_and(|entry| entry.reclaim == Bytes::ZERO)
    });
    assert_eq!(rich.reclaim_requested().pages, 0);
}

#[test]
fn a_callback_that_comes_late_hears_of_the_request_that_stands() {
    let device = Device::new(8);
    let (rich, poor) = (device.pool("rich"), device.pool("poor"));
    let leases = alloc(&rich, 8 * BLOCKS);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| poor.alloc_within(2 * BLOCKS, SOON, &mut Vec::new()));
        device.until("the request stands", |view| {
            view.by_name("rich", GroupId(0)).is_some_and(|entry| entry.reclaim == pages(2))
        });
        let (asked, requests) = mpsc::channel();
        rich.on_reclaim(move |request| asked.send(request).unwrap());
        assert_eq!(requests.recv_timeout(SOON).unwrap().pages, 2);
        // Part of it: the rest is still asked for, and what was freed is not asked for again.
        rich.free(&leases[..8], NO_WORK).unwrap();
        assert_eq!(rich.reclaim_requested().pages, 1);
        rich.free(&leases[8..16], NO_WORK).unwrap();
        assert_eq!(rich.reclaim_requested().pages, 0);
        waiting.join().unwrap().unwrap();
        rich.on_reclaim(|_| {});
    });
}

#[test]
fn a_wait_ends_at_its_deadline_and_leaves_no_demand() {
    let device = Device::new(4);
    let (rich, poor) = (device.pool("rich"), device.pool("poor"));
    alloc(&rich, 4 * BLOCKS);
    let begun = Instant::now();
    let wait = Duration::from_millis(60);
    let error = poor.alloc_within(1, wait, &mut Vec::new()).unwrap_err();
    let waited = begun.elapsed();
    assert!(matches!(error, PoolError::Exhausted { shortage: Shortage::Budget { .. }, .. }), "{error}");
    assert!(waited >= wait && waited < wait + SOON / 4, "{waited:?}");
    assert_eq!(poor.snapshot().demand_bytes, Bytes::ZERO);
    assert_eq!(device.entry(&poor).demand, Bytes::ZERO);
}

#[test]
fn a_refusal_lingers_as_demand_and_expires() {
    let device = Device::new(4);
    let (rich, poor) = (device.pool("rich"), device.pool("poor"));
    alloc(&rich, 4 * BLOCKS);
    assert!(poor.alloc(BLOCKS, &mut Vec::new()).unwrap_err().is_exhausted());
    assert_eq!(device.entry(&poor).demand, PAGE);
    device.until("nobody evicts for an engine that changed its mind", |view| {
        view.by_name("poor", GroupId(0)).is_some_and(|entry| entry.demand == Bytes::ZERO)
    });
}

#[test]
fn freed_blocks_of_the_own_pool_end_a_wait_too() {
    let device = Device::new(2);
    let pool = device.pool("a");
    let leases = alloc(&pool, 2 * BLOCKS);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.alloc_within(3, SOON, &mut Vec::new()));
        device.until("it waits", |view| view.entries[0].demand > Bytes::ZERO);
        pool.free(&leases[..3], NO_WORK).unwrap();
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn a_floor_is_kept_free_for_its_pool() {
    let device = Device::new(8);
    let share = Share { floor: pages(3), ..Share::default() };
    let quiet = KvPool::open(PoolConfig { share, ..device.config("quiet") }).unwrap();
    let greedy = device.pool("greedy");
    assert_eq!(greedy.available(), 5 * BLOCKS);
    alloc(&greedy, 5 * BLOCKS);
    assert!(greedy.alloc(1, &mut Vec::new()).unwrap_err().is_exhausted());
    let begun = Instant::now();
    alloc(&quiet, 3 * BLOCKS);
    assert!(begun.elapsed() < Duration::from_millis(50) * 4, "a floor took {:?}", begun.elapsed());
}

#[test]
fn a_ceiling_is_a_limit_that_the_operator_can_move() {
    let device = Device::new(8);
    let share = Share { ceiling: Some(pages(2)), ..Share::default() };
    let pool = KvPool::open(PoolConfig { share, ..device.config("a") }).unwrap();
    alloc(&pool, 2 * BLOCKS);
    let error = pool.alloc(1, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, PoolError::Exhausted { shortage: Shortage::Limit { limit_pages: 2, .. }, .. }), "{error}");
    let ledger = device.ledger();
    let raise = |view: &mut tidekv_shm::LedgerView| view.entries[0].ceiling = pages(3);
    ledger.update(Instant::now() + SOON, raise).unwrap();
    let watch = ledger.watch().unwrap();
    wait_until("the new ceiling", &watch, || pool.snapshot().limit_pages == 3);
    alloc(&pool, BLOCKS);
}

/// The race that kvcached loses: whoever reserves first wins, the other hears a miss. Never both, never neither.
#[test]
fn the_last_page_has_exactly_one_winner() {
    let device = Device::new(1);
    let (a, b) = (device.pool("a"), device.pool("b"));
    let barrier = std::sync::Barrier::new(2);
    let wins: Vec<u32> = std::thread::scope(|scope| {
        let racers: Vec<_> = [&a, &b]
            .map(|pool| {
                let barrier = &barrier;
                scope.spawn(move || {
                    (0..300)
                        .map(|_| {
                            barrier.wait();
                            let mut leases = Vec::new();
                            let won = pool.alloc(1, &mut leases).is_ok();
                            barrier.wait();
                            pool.free(&leases, NO_WORK).unwrap();
                            pool.trim().unwrap();
                            u32::from(won)
                        })
                        .collect::<Vec<u32>>()
                })
            })
            .into_iter()
            .collect();
        let results: Vec<Vec<u32>> = racers.into_iter().map(|racer| racer.join().unwrap()).collect();
        results[0].iter().zip(&results[1]).map(|(a, b)| a + b).collect()
    });
    assert!(wins.iter().all(|&winners| winners == 1), "{wins:?}");
}

#[test]
fn the_first_idle_page_comes_within_milliseconds() {
    let device = Device::new(64);
    let (rich, poor) = (device.pool("rich"), device.pool("poor"));
    let leases = alloc(&rich, 64 * BLOCKS);
    rich.free(&leases, NO_WORK).unwrap();
    let mut times = Vec::new();
    for _ in 0..20 {
        let begun = Instant::now();
        poor.alloc_within(BLOCKS, SOON, &mut Vec::new()).unwrap();
        times.push(begun.elapsed());
    }
    times.sort();
    assert!(times[10] < Duration::from_millis(10), "median {:?} of {times:?}", times[10]);
}

#[test]
fn the_reserve_never_takes_what_a_neighbour_waits_for() {
    let device = Device::new(4);
    let poor = device.pool("poor");
    let comfort = ReservePolicy::Fixed { min: 2, max: 4 };
    let rich = KvPool::open(PoolConfig { reserve: comfort, ..device.config("rich") }).unwrap();
    device.until("the reserve is there", |view| {
        view.by_name("rich", GroupId(0)).is_some_and(|entry| entry.idle == pages(2))
    });
    let mut got = Vec::new();
    poor.alloc_within(4 * BLOCKS, SOON, &mut got).unwrap();
    assert_eq!(rich.snapshot().mapped_bytes, Bytes::ZERO);
    drop(poor);
}

#[test]
fn a_pool_that_ends_leaves_its_memory_to_the_others() {
    let device = Device::new(4);
    let (a, b) = (device.pool("a"), device.pool("b"));
    alloc(&a, 4 * BLOCKS);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| b.alloc_within(4 * BLOCKS, SOON, &mut Vec::new()));
        device.until("it waits", |view| view.by_name("b", GroupId(0)).is_some_and(|entry| entry.demand > Bytes::ZERO));
        drop(a);
        waiting.join().unwrap().unwrap();
    });
    assert_balanced(&b);
    drop(b);
    let left: Vec<_> = std::fs::read_dir(device.dir.path()).unwrap().collect();
    assert!(left.is_empty(), "the last one puts the light out: {left:?}");
}

/// A budget that nobody gave: the device's total, less a part, less what others use.
#[test]
fn without_a_budget_the_device_decides() {
    let device = Device::new(1);
    let config = PoolConfig { budget: None, utilization: Some(0.5), ..device.config("a") };
    let pool = KvPool::open(config).unwrap();
    let header = device.ledger().read().unwrap().header;
    let total = tidekv_mem::Backend::memory(&*device.backend).unwrap().total;
    assert_eq!((header.total, header.budget, header.explicit_budget), (total, Bytes(total.0 / 2), false));
    assert_eq!(pool.available(), 64 * BLOCKS);
}
