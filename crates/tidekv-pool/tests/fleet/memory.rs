//! Memory of the workers' devices: too little on one of them, and neighbours that want theirs back.

use std::sync::Arc;
use std::time::Duration;

use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, GroupId, Step};
use tidekv_mem::fake::FakeBackend;
use tidekv_pool::{KvPool, PoolConfig, PoolError, RankId, ReservePolicy, Scope, Shortage};
use tidekv_shm::{DeviceName, Event, EventKind, EventReader, PoolName};

use crate::crew::{BLOCKS, Crew, G0, PAGES, device_of, geometry, pages, wait_for};
use crate::strategies;

const NO_WORK: Fence = Fence::Step(Step(0));
const ONE: RankId = RankId { stage: 0, rank: 1 };

#[test]
fn out_of_memory_on_one_rank_is_a_miss_for_all() {
    for strategy in strategies() {
        let crew = Crew::with(&[3], &[PAGES, 4, PAGES], 1);
        let fleet = crew.fleet(strategy);
        let pool = crew.pool(&fleet);
        let mut leases = Vec::new();
        pool.alloc(3 * BLOCKS, &mut leases).unwrap();
        let error = pool.alloc(2 * BLOCKS, &mut leases).unwrap_err();
        let PoolError::Exhausted { shortage: Shortage::Rank { at, wanted, grantable }, .. } = error else {
            panic!("{strategy}: {error:?}");
        };
        assert_eq!((at, wanted, grantable), (ONE, pages(2), pages(1)));
        assert!(error.is_transient() && error.is_exhausted());
        crew.at_rest(&fleet, &pool);
        assert_eq!(pool.snapshot().mapped_bytes, pages(3));
        // What fits, fits.
        pool.alloc(BLOCKS, &mut leases).unwrap();
        crew.at_rest(&fleet, &pool);
    }
}

/// A pool of one process on the device of rank 1.
fn neighbour(crew: &Crew) -> KvPool {
    let name = PoolName::new("neighbour").unwrap();
    let mut config = PoolConfig::new(name, Arc::new(FakeBackend::default()), geometry());
    config.runtime_dir = crew.runtime_dir();
    config.device = Some(device_of(ONE));
    config.budget = Some(pages(crew.budget_pages[1]));
    config.reserve = ReservePolicy::Fixed { min: 0, max: PAGES };
    KvPool::open(config).unwrap()
}

#[test]
fn a_neighbour_of_one_rank_gets_idle_pages_and_then_what_the_engine_frees() {
    let crew = Crew::with(&[2], &[PAGES, 12], 1);
    let fleet = crew.fleet("ring");
    let pool =
        KvPool::open(PoolConfig { decay: Duration::from_secs(3600), ..crew.pool_config(&fleet, G0, Scope::AllStages) })
            .unwrap();
    let mut leases = Vec::new();
    pool.alloc(12 * BLOCKS, &mut leases).unwrap();
    // Three of twelve pages are idle, and nobody but us knows.
    pool.free(&leases[9 * BLOCKS as usize..], NO_WORK).unwrap();
    let other = neighbour(&crew);
    let mut theirs = Vec::new();
    other.alloc_within(3 * BLOCKS, Duration::from_secs(60), &mut theirs).unwrap();
    assert_eq!(pool.snapshot().reclaim.pages, 0, "nothing had to be evicted");
    crew.at_rest(&fleet, &pool);
    // Two more: the engine is asked, here and not on the worker.
    let error = other.alloc(2 * BLOCKS, &mut theirs).unwrap_err();
    assert!(error.is_exhausted(), "{error:?}");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| other.alloc_within(2 * BLOCKS, Duration::from_secs(60), &mut theirs));
        wait_for("the engine is asked", || pool.reclaim_requested().pages == 2);
        pool.free(&leases[7 * BLOCKS as usize..9 * BLOCKS as usize], NO_WORK).unwrap();
        waiting.join().unwrap().unwrap();
    });
    crew.at_rest(&fleet, &pool);
    assert_eq!(pool.snapshot().mapped_bytes, pages(7));
    assert_eq!(other.snapshot().mapped_bytes, pages(5));
}

/// A scheduling miss waits for the rank's neighbours as it would for its own.
#[test]
fn a_miss_on_one_rank_is_posted_there_and_served() {
    let crew = Crew::with(&[2], &[PAGES, 8], 1);
    let fleet = crew.fleet("ring");
    let other = neighbour(&crew);
    let mut theirs = Vec::new();
    other.alloc(8 * BLOCKS, &mut theirs).unwrap();
    let pool = crew.pool(&fleet);
    let mut leases = Vec::new();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| pool.alloc_within(2 * BLOCKS, Duration::from_secs(60), &mut leases));
        wait_for("the neighbour is asked", || other.reclaim_requested().pages >= 2);
        other.free(&theirs[4 * BLOCKS as usize..], NO_WORK).unwrap();
        waiting.join().unwrap().unwrap();
    });
    crew.at_rest(&fleet, &pool);
    wait_for("the demand is gone", || crew.entry(1, G0).is_some_and(|entry| entry.demand == Bytes::ZERO));
}

/// Tools see the scheduler's pool as any other, in a ledger of its own, and the workers on their devices.
#[test]
fn limits_and_counters_work_as_everywhere() {
    let crew = Crew::new(&[2]);
    let fleet = crew.fleet("seq");
    let pool = crew.pool(&fleet);
    let mut leases = Vec::new();
    pool.alloc(6 * BLOCKS, &mut leases).unwrap();
    pool.free(&leases[2 * BLOCKS as usize..], NO_WORK).unwrap();
    pool.resize(pages(3)).unwrap();
    wait_for("the limit is in force on every rank", || crew.reserved(0) <= pages(3) && crew.reserved(1) <= pages(3));
    crew.at_rest(&fleet, &pool);
    let device = tidekv_shm::DeviceName::new(&format!("fleet-{}", pool.name())).unwrap();
    let ledger = tidekv_shm::Ledger::open_existing(&crew.runtime_dir(), &device).unwrap().unwrap();
    wait_for("the ledger shows it", || {
        let view = ledger.read().unwrap();
        let entry = view.by_name(pool.name().as_str(), GroupId(0)).unwrap();
        entry.applied_revision == 1 && entry.reserved == pool.snapshot().mapped_bytes && entry.counters.maps == 6
    });
    assert_eq!(ledger.read().unwrap().header.budget, pages(PAGES));
}

/// Rank 1's neighbour has more than its share already, so nothing but idle pages is owed to it.
#[test]
fn idle_pages_below_the_share_go_to_a_neighbour_of_one_rank_at_once() {
    let crew = Crew::with(&[2], &[PAGES, 12], 1);
    let fleet = crew.fleet("ring");
    let pool =
        KvPool::open(PoolConfig { decay: Duration::from_secs(3600), ..crew.pool_config(&fleet, G0, Scope::AllStages) })
            .unwrap();
    let mut leases = Vec::new();
    pool.alloc(5 * BLOCKS, &mut leases).unwrap();
    let other = neighbour(&crew);
    let mut theirs = Vec::new();
    other.alloc(7 * BLOCKS, &mut theirs).unwrap();
    pool.free(&leases[BLOCKS as usize..], NO_WORK).unwrap();
    wait_for("the worker says which are idle", || crew.entry(1, G0).is_some_and(|entry| entry.idle == pages(4)));
    other.alloc_within(3 * BLOCKS, Duration::from_secs(60), &mut theirs).unwrap();
    // The device's ledger hears of unmapped pages before the scheduler does.
    crew.at_rest(&fleet, &pool);
    assert_eq!(pool.snapshot().mapped_bytes, pages(2));
    assert_eq!(pool.snapshot().reclaim.pages, 0, "nothing had to be evicted");
    wait_for("one idle page is left", || crew.entry(1, G0).is_some_and(|entry| entry.idle == pages(1)));
    // What is in use again is not idle there either.
    pool.alloc(BLOCKS, &mut leases).unwrap();
    wait_for("none is left", || crew.entry(1, G0).is_some_and(|entry| entry.idle == Bytes::ZERO));
}

/// Each holds its share of rank 1's device, and the engine's part is only kept: workers learn that from the scheduler alone.
#[test]
fn what_the_engine_only_keeps_goes_to_a_neighbour_of_one_rank_and_is_not_firm() {
    let crew = Crew::with(&[2], &[PAGES, 12], 1);
    let fleet = crew.fleet("ring");
    let pool = crew.pool(&fleet);
    let mut leases = Vec::new();
    pool.alloc(6 * BLOCKS, &mut leases).unwrap();
    let other = neighbour(&crew);
    let mut theirs = Vec::new();
    other.alloc(6 * BLOCKS, &mut theirs).unwrap();
    pool.set_evictable(4 * BLOCKS);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| other.alloc_within(5 * BLOCKS, Duration::from_secs(60), &mut theirs));
        wait_for("the engine is asked for what it keeps, and for no more", || pool.reclaim_requested().pages == 4);
        assert_eq!(pool.reclaim_requested().firm_pages, 0, "the pool is within its share");
        pool.free(&leases[3 * BLOCKS as usize..], NO_WORK).unwrap();
        pool.set_evictable(BLOCKS);
        // One more was evictable; then the neighbour waits in vain, and the engine is left alone.
        wait_for("one page is still asked for", || pool.reclaim_requested().pages == 1);
        pool.set_evictable(0);
        wait_for("nothing is asked for any more", || pool.reclaim_requested().pages == 0);
        // The two that are missing come from a request that ends.
        pool.free(&leases[BLOCKS as usize..3 * BLOCKS as usize], NO_WORK).unwrap();
        waiting.join().unwrap().unwrap();
    });
    crew.at_rest(&fleet, &pool);
    assert_eq!((pool.snapshot().mapped_bytes, other.snapshot().mapped_bytes), (pages(1), pages(11)));
}

/// Events of a device, from the first on.
fn events(crew: &Crew, device: &DeviceName) -> Vec<Event> {
    let reader = EventReader::open(&crew.runtime_dir(), device).unwrap();
    reader.expect("a pool has joined").read().unwrap().events
}

#[test]
fn a_refill_that_a_rank_refuses_asks_nobody_to_make_room() {
    let crew = Crew::with(&[2], &[PAGES, 4], 1);
    let fleet = crew.fleet("ring");
    let reserve = ReservePolicy::Fixed { min: 2, max: PAGES };
    let pool = KvPool::open(PoolConfig { reserve, ..crew.pool_config(&fleet, G0, Scope::AllStages) }).unwrap();
    let mut leases = Vec::new();
    // Each time the reserve is full first, so that the allocation itself asks no rank for anything.
    for _ in 0..2 {
        wait_for("the reserve is full", || pool.snapshot().free_mapped_blocks == 2 * BLOCKS);
        pool.alloc(2 * BLOCKS, &mut leases).unwrap();
    }
    let fleet_ledger = DeviceName::new(&format!("fleet-{}", pool.name())).unwrap();
    wait_for("rank 1 refuses a refill", || {
        events(&crew, &fleet_ledger).iter().any(|event| event.kind == EventKind::Undone)
    });
    let asked = events(&crew, &device_of(ONE)).into_iter().find(|event| event.kind == EventKind::Asked);
    assert_eq!(asked, None);
    let entry = crew.entry(1, G0).unwrap();
    assert_eq!((entry.demand, entry.counters.failures), (Bytes::ZERO, 0));
    // Between two tries the pool has what rank 1 has, no more.
    wait_for("a refused refill is undone", || pool.snapshot().mapped_bytes == pages(4));
}

#[test]
fn no_more_is_promised_than_the_poorest_device_has() {
    for strategy in strategies() {
        let crew = Crew::with(&[3], &[PAGES, 6, PAGES], 1);
        let fleet = crew.fleet(strategy);
        let pool = crew.pool(&fleet);
        assert_eq!(pool.available(), 6 * BLOCKS, "{strategy}: from the start");
        let mut leases = Vec::new();
        pool.alloc(2 * BLOCKS, &mut leases).unwrap();
        wait_for("what was mapped is not promised again", || pool.available() == 4 * BLOCKS);
        let other = neighbour(&crew);
        let mut theirs = Vec::new();
        other.alloc(3 * BLOCKS, &mut theirs).unwrap();
        wait_for("the neighbour's pages are not promised", || pool.available() == BLOCKS);
        pool.alloc(pool.available(), &mut leases).unwrap();
        wait_for("nothing is left", || pool.available() == 0);
        drop(other);
        wait_for("they are again", || pool.available() == 3 * BLOCKS);
    }
}
