//! Workers that are too slow: stopped past the deadline, and waiting for their device.

use std::time::{Duration, Instant};

use tidekv_core::pages::Fence;
use tidekv_core::units::Step;
use tidekv_pool::fleet::RankState;
use tidekv_pool::{Fleet, FleetConfig, FleetError, PoolError, RankFault, RankId};

use crate::crew::{BLOCKS, Crew, G0, PATIENCE, pages, wait_for};
use crate::strategies;

const ONE: RankId = RankId { stage: 0, rank: 1 };

#[test]
fn stopped_past_the_deadline_and_continued() {
    for strategy in strategies() {
        let crew = Crew::new(&[2]);
        let timeout = Duration::from_millis(700);
        let fleet = Fleet::connect(FleetConfig { timeout: Some(timeout), ..crew.fleet_config(strategy) }).unwrap();
        let pool = crew.pool(&fleet);
        let mut leases = Vec::new();
        pool.alloc(BLOCKS, &mut leases).unwrap();
        crew.stop(1);
        let started = Instant::now();
        // The heartbeat may have found it out before us.
        let error = pool.alloc(3 * BLOCKS, &mut leases).unwrap_err();
        let slow = matches!(
            &error,
            PoolError::Fleet(FleetError::Rank { at: ONE, fault: RankFault::TimedOut { .. } | RankFault::Late { .. } })
        );
        assert!(slow && error.is_transient(), "{strategy}: {error:?}");
        assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
        wait_for("it counts as late", || matches!(fleet.status()[1].state, RankState::Late { .. }));
        // Who asks again hears so at once; what rank 1 may have is kept and counted.
        let started = Instant::now();
        let again = pool.alloc(BLOCKS, &mut leases).unwrap_err();
        assert!(
            matches!(&again, PoolError::Fleet(FleetError::Rank { at: ONE, fault: RankFault::Late { .. } })),
            "{again:?}"
        );
        assert!(started.elapsed() < timeout, "{:?}", started.elapsed());
        assert_eq!(pool.snapshot().refused_pages as usize, fleet.quarantined(G0));
        assert_eq!(crew.reserved(0), pages(1), "rank 0 has undone it");
        crew.go_on(1);
        crew.at_rest(&fleet, &pool);
        assert_eq!(fleet.status()[1].rejoins, 0, "slow once is no reason to go");
        pool.alloc(3 * BLOCKS, &mut leases).unwrap();
        crew.at_rest(&fleet, &pool);
    }
}

/// Stopped between a map and its unmap: the unmap is kept, counted, and over when the worker goes on.
#[test]
fn stopped_during_an_unmap() {
    for strategy in strategies() {
        let crew = Crew::new(&[3]);
        let timeout = Some(Duration::from_millis(500));
        let fleet = Fleet::connect(FleetConfig { timeout, ..crew.fleet_config(strategy) }).unwrap();
        let pool = crew.pool(&fleet);
        let mut leases = Vec::new();
        pool.alloc(6 * BLOCKS, &mut leases).unwrap();
        pool.free(&leases[2 * BLOCKS as usize..], Fence::Step(Step(0))).unwrap();
        crew.stop(1);
        assert!(pool.trim().is_err());
        assert_eq!((pool.snapshot().refused_pages as usize, crew.reserved(0)), (fleet.quarantined(G0), pages(2)));
        assert_eq!(crew.reserved(1), pages(6), "it sleeps");
        crew.go_on(1);
        crew.at_rest(&fleet, &pool);
        assert_eq!(pool.snapshot().mapped_bytes, pages(2));
    }
}
