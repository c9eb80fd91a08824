//! Workers killed before, during and after a map, and brought back; the scheduler killed.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, Step};
use tidekv_pool::fleet::RankState;
use tidekv_pool::{
    Fleet, FleetConfig, FleetError, KvPool, PoolConfig, PoolError, RankFault, RankId, ReservePolicy, Scope,
};
use tidekv_shm::{PoolName, RuntimeDir};

use crate::crew::{BLOCKS, Crew, G0, PAGES, POOL, Process, geometry, pages, say, wait_for};
use crate::strategies;

const NO_WORK: Fence = Fence::Step(Step(0));
/// A death is noticed at once: far below the minute that a silent worker would cost.
const AT_ONCE: Duration = Duration::from_secs(20);

fn lost_rank(error: &PoolError) -> Option<RankId> {
    match error {
        PoolError::Fleet(FleetError::Rank { at, fault: RankFault::Lost { .. } }) => Some(*at),
        _ => None,
    }
}

#[test]
fn killed_before_a_map_and_restarted() {
    for strategy in strategies() {
        let mut crew = Crew::new(&[3]);
        let fleet = crew.fleet(strategy);
        let pool = crew.pool(&fleet);
        let mut leases = Vec::new();
        pool.alloc(2 * BLOCKS, &mut leases).unwrap();
        crew.kill(1);
        let started = Instant::now();
        let error = pool.alloc(BLOCKS, &mut leases).unwrap_err();
        assert_eq!(lost_rank(&error), Some(RankId { stage: 0, rank: 1 }), "{strategy}: {error:?}");
        assert!(error.is_transient() && started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
        // The pool stays usable: what is mapped is allocated and freed as ever.
        pool.free(&leases, NO_WORK).unwrap();
        leases.clear();
        pool.alloc(2 * BLOCKS, &mut leases).unwrap();
        crew.start(1);
        crew.at_rest(&fleet, &pool);
        assert_eq!(fleet.status()[1].rejoins, 1);
        pool.alloc(BLOCKS, &mut leases).unwrap();
        crew.at_rest(&fleet, &pool);
        assert_eq!(pool.snapshot().mapped_bytes, pages(3));
    }
}

#[test]
fn killed_during_a_map() {
    for strategy in strategies() {
        let mut crew = Crew::new(&[2]);
        let fleet = crew.fleet(strategy);
        let pool = crew.pool(&fleet);
        let mut leases = Vec::new();
        pool.alloc(BLOCKS, &mut leases).unwrap();
        // Rank 1 has the order and does not get to it; rank 0 is done when rank 1 dies.
        crew.stop(1);
        let error = std::thread::scope(|scope| {
            let alloc = scope.spawn(|| pool.alloc(4 * BLOCKS, &mut Vec::new()).unwrap_err());
            wait_for("rank 0 has mapped", || crew.reserved(0) == pages(5) || alloc.is_finished());
            crew.kill(1);
            alloc.join().unwrap()
        });
        // `seq` comes to rank 1 last, all others have sent to everybody: either way rank 1 is named and rank 0 undone.
        assert!(matches!(&error, PoolError::Fleet(FleetError::Rank { at: RankId { rank: 1, .. }, .. })), "{error:?}");
        wait_for("rank 0 has undone it", || crew.reserved(0) == pages(1));
        let snapshot = pool.snapshot();
        assert_eq!(snapshot.refused_pages as usize, fleet.quarantined(G0), "{strategy}");
        crew.start(1);
        crew.at_rest(&fleet, &pool);
        pool.alloc(4 * BLOCKS, &mut leases).unwrap();
        crew.at_rest(&fleet, &pool);
    }
}

#[test]
fn killed_after_a_map_and_rejoined_with_its_pages() {
    for strategy in strategies() {
        let mut crew = Crew::new(&[2]);
        let fleet = crew.fleet(strategy);
        let pool = crew.pool(&fleet);
        let mut leases = Vec::new();
        pool.alloc(5 * BLOCKS, &mut leases).unwrap();
        let instance = fleet.status()[0].instance;
        crew.kill(0);
        wait_for("the background thread noticed", || matches!(fleet.status()[0].state, RankState::Lost { .. }));
        // What is freed while a rank is away is given back on the others, and kept until the lost one is heard of.
        pool.free(&leases[..BLOCKS as usize], NO_WORK).unwrap();
        let error = pool.trim().unwrap_err();
        assert_eq!(lost_rank(&error), Some(RankId { stage: 0, rank: 0 }), "{error:?}");
        assert_eq!((pool.snapshot().refused_pages, fleet.quarantined(G0)), (1, 1));
        assert_eq!(crew.reserved(1), pages(4));
        crew.start(0);
        crew.at_rest(&fleet, &pool);
        let status = &fleet.status()[0];
        assert!(status.instance != instance && status.rejoins == 1, "{status:?}");
        assert_eq!(crew.reserved(0), pages(4));
    }
}

#[test]
fn killed_at_any_moment_of_a_busy_loop() {
    let mut crew = Crew::new(&[3]);
    let fleet = crew.fleet("ring");
    let pool = crew.pool(&fleet);
    let (ended, mapped, failed) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| {
            while !ended.load(Relaxed) {
                let mut leases = Vec::new();
                match pool.alloc(3 * BLOCKS, &mut leases) {
                    Ok(()) => drop(mapped.fetch_add(1, Relaxed)),
                    Err(error) => {
                        assert!(error.is_transient(), "{error:?}");
                        failed.fetch_add(1, Relaxed);
                        std::thread::yield_now();
                    }
                }
                pool.free(&leases, NO_WORK).unwrap();
                let _ = pool.trim();
            }
        });
        for round in 0..6_u32 {
            // Somewhere in the middle of a turn that nobody chose.
            let turn = mapped.load(Relaxed) + 5 + 3 * round;
            wait_for("some turns are over", || mapped.load(Relaxed) >= turn || busy.is_finished());
            let victim = usize::try_from(round % 3).unwrap();
            crew.kill(victim);
            crew.start(victim);
            wait_for("it is back", || fleet.status()[victim].state == RankState::Member);
        }
        ended.store(true, Relaxed);
        busy.join().unwrap();
    });
    assert!(failed.load(Relaxed) > 0, "{mapped:?} mapped, none failed");
    crew.at_rest(&fleet, &pool);
    pool.trim().unwrap();
    crew.at_rest(&fleet, &pool);
    assert_eq!(pool.snapshot().mapped_bytes, Bytes::ZERO);
}

#[test]
fn excluded_by_hand_or_after_its_patience() {
    let mut crew = Crew::new(&[2]);
    let fleet =
        Fleet::connect(FleetConfig { rejoin_patience: Duration::from_millis(300), ..crew.fleet_config("async") });
    let fleet = fleet.unwrap();
    let pool = crew.pool(&fleet);
    let mut leases = Vec::new();
    pool.alloc(2 * BLOCKS, &mut leases).unwrap();
    let (zero, one) = (RankId { stage: 0, rank: 0 }, RankId { stage: 0, rank: 1 });
    let excluded = |error: &PoolError, rank: RankId| matches!(error, PoolError::Fleet(FleetError::Rank { at, fault: RankFault::Excluded { .. } }) if *at == rank);
    crew.kill(1);
    wait_for("its patience is over", || matches!(fleet.status()[1].state, RankState::Excluded { .. }));
    let error = pool.alloc(BLOCKS, &mut Vec::new()).unwrap_err();
    assert!(excluded(&error, one) && !error.is_transient(), "{error:?}");
    // Nothing waits for it any more.
    pool.free(&leases[..BLOCKS as usize], NO_WORK).unwrap();
    assert_eq!(pool.trim().unwrap(), pages(1));
    assert_eq!((crew.reserved(0), fleet.quarantined(G0)), (pages(1), 0));
    // It comes back when somebody says so.
    crew.start(1);
    fleet.readmit(one).unwrap();
    crew.at_rest(&fleet, &pool);
    fleet.exclude(zero, "an operator said so").unwrap();
    let error = pool.alloc(BLOCKS, &mut Vec::new()).unwrap_err();
    assert!(excluded(&error, zero), "{error:?}");
    wait_for("it gave everything back", || crew.reserved(0) == Bytes::ZERO);
    fleet.readmit(zero).unwrap();
    crew.at_rest(&fleet, &pool);
}

/// A scheduler's fleet and pool, in a process of its own.
pub(crate) fn connect(strategy: &str, ranks: u32, dir: &RuntimeDir) -> (Fleet, KvPool) {
    let name = PoolName::new(POOL).unwrap();
    let mut config = FleetConfig::new(name.clone(), vec![ranks]);
    config.socket_root = Some(dir.path().to_owned());
    strategy.clone_into(&mut config.strategy);
    let fleet = Fleet::connect(config).unwrap();
    let mut config = PoolConfig::on_fleet(name, fleet.group(G0, Scope::AllStages), geometry());
    config.runtime_dir = dir.clone();
    config.reserve = ReservePolicy::Fixed { min: 0, max: PAGES };
    (fleet, KvPool::open(config).unwrap())
}

/// Maps some pages and waits to be killed: `scheduler <strategy>`.
pub(crate) fn be_scheduler(arguments: &[String], dir: &RuntimeDir) {
    let (_fleet, pool) = connect(&arguments[0], 2, dir);
    let mut leases = Vec::new();
    pool.alloc(7 * BLOCKS, &mut leases).unwrap();
    say("ready");
    loop {
        // Busy until the end, so that it dies in the middle of something.
        let mut more = Vec::new();
        if pool.alloc(2 * BLOCKS, &mut more).is_ok() {
            pool.free(&more, NO_WORK).unwrap();
        }
        let _ = pool.trim();
    }
}

/// Each scheduler counts its operations from 1: a worker must have forgotten those of the last one, whatever it left.
#[test]
fn schedulers_follow_each_other() {
    let crew = Crew::with(&[2], &[64; 2], 2);
    for round in 0..4 {
        let fleet = crew.fleet("seq");
        let pool = crew.pool(&fleet);
        let mut leases = Vec::new();
        for _ in 0..5 {
            pool.alloc(2 * BLOCKS, &mut leases).unwrap();
        }
        if round % 2 == 0 {
            pool.free(&leases, NO_WORK).unwrap();
            assert_eq!(pool.trim().unwrap(), pages(10));
        }
        crew.at_rest(&fleet, &pool);
    }
}

#[test]
fn a_dead_schedulers_pages_come_back() {
    for strategy in strategies() {
        let crew = Crew::new(&[2]);
        let mut scheduler = Process::start(crew.dir.path(), &format!("scheduler {strategy}"));
        assert!(crew.reserved(0) >= pages(7) && crew.reserved(1) >= pages(7));
        scheduler.kill();
        wait_for("both gave everything back", || crew.reserved(0) == Bytes::ZERO && crew.reserved(1) == Bytes::ZERO);
        // And they serve the next one.
        let fleet = crew.fleet(strategy);
        let pool = crew.pool(&fleet);
        pool.alloc(3 * BLOCKS, &mut Vec::new()).unwrap();
        crew.at_rest(&fleet, &pool);
    }
}
