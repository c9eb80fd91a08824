//! W6 and W3: maps and unmaps of every group go to its own stages and ranks, and wrong pages go nowhere.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

use tidekv_core::geometry::Geometry;
use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, GroupId, PageId, Step};
use tidekv_mem::fake::FakeBackend;
use tidekv_mem::{Backend, RegionOptions, Reservation};
use tidekv_pool::worker::{DeviceFence, FenceError};
use tidekv_pool::{KvPool, RankId, Scope, Worker, WorkerConfig, WorkerGroupConfig};
use tidekv_shm::PoolName;

use crate::crew::{BLOCKS, Crew, G0, POOL, geometry, pages, wait_for};
use crate::strategies;

const NO_WORK: Fence = Fence::Step(Step(0));

#[test]
fn w6_groups_and_stages_are_routed_for_maps_and_unmaps() {
    for strategy in strategies() {
        let crew = Crew::with(&[2, 2], &[64; 4], 2);
        let fleet = crew.fleet(strategy);
        let all = KvPool::open(crew.pool_config(&fleet, G0, Scope::AllStages)).unwrap();
        let second = KvPool::open(crew.pool_config(&fleet, GroupId(1), Scope::Stage(1))).unwrap();
        let (mut of_all, mut of_second) = (Vec::new(), Vec::new());
        all.alloc(2 * BLOCKS, &mut of_all).unwrap();
        second.alloc(3 * BLOCKS, &mut of_second).unwrap();
        let reserved = |worker, group| crew.entry(worker, group).map(|entry| entry.reserved);
        for worker in 0..4 {
            assert_eq!(reserved(worker, G0), Some(pages(2)), "{strategy}: worker {worker}");
            let other = if worker < 2 { Bytes::ZERO } else { pages(3) };
            assert_eq!(reserved(worker, GroupId(1)), Some(other), "{strategy}: worker {worker}");
        }
        second.free(&of_second[BLOCKS as usize..], NO_WORK).unwrap();
        assert_eq!(second.trim().unwrap(), pages(2));
        assert_eq!(crew.held_by(&fleet, GroupId(1), 3), Some(vec![PageId(0)]));
        all.free(&of_all, NO_WORK).unwrap();
        assert_eq!(all.trim().unwrap(), pages(2));
        assert_eq!(crew.held_by(&fleet, G0, 3), Some(Vec::new()));
        drop(second);
        for worker in 0..4 {
            assert_eq!((reserved(worker, G0), reserved(worker, GroupId(1))), (Some(Bytes::ZERO), Some(Bytes::ZERO)));
        }
    }
}

/// An engine makes its caches after its workers, and may map in them without a pool.
#[test]
fn groups_join_a_running_worker_and_their_pages_can_be_had_by_hand() {
    let crew = Crew::with(&[], &[], 1);
    let mut config = WorkerConfig::new(PoolName::new(POOL).unwrap(), RankId { stage: 0, rank: 0 });
    config.socket_root = Some(crew.dir.path().to_owned());
    config.runtime_dir = crew.runtime_dir();
    let mut worker = Worker::new(config).unwrap();
    let (groups, stopper) = (worker.groups(), worker.stopper());
    let thread = std::thread::spawn(move || worker.run());
    let mut config = crew.fleet_config("ring");
    config.stages = vec![1];
    let fleet = tidekv_pool::Fleet::connect(config).unwrap();
    assert!(!fleet.has_group(G0, Scope::AllStages).unwrap());
    assert!(fleet.group(G0, Scope::AllStages).take(4).is_err());

    let backend: Arc<dyn Backend> = Arc::new(FakeBackend::default());
    let placement = *Geometry::new(&geometry()).unwrap().placement();
    let reservation = Arc::new(Reservation::new(backend, placement, RegionOptions::default()).unwrap());
    groups.add(WorkerGroupConfig::new(G0, Arc::clone(&reservation))).unwrap();
    assert_eq!(groups.ids(), [G0]);
    assert!(fleet.has_group(G0, Scope::AllStages).unwrap());

    let by_hand = fleet.group(G0, Scope::AllStages).take(4).unwrap();
    by_hand.map(&[PageId(1), PageId(3)]).unwrap();
    assert_eq!(reservation.mapped_pages(), 2);
    assert!(by_hand.map(&[PageId(3)]).is_err() && by_hand.map(&[PageId(4)]).is_err());
    by_hand.unmap(&[PageId(1)], NO_WORK).unwrap();
    assert_eq!(fleet.held(G0).unwrap()[0].pages, Ok(vec![PageId(3)]));
    drop(by_hand);
    assert_eq!(reservation.mapped_pages(), 0, "what was mapped by hand goes with the hand");
    drop(fleet);
    stopper.stop();
    thread.join().unwrap().unwrap();
}

/// A device that is done with a step when the test says so.
#[derive(Debug)]
struct Events {
    asked: mpsc::Sender<Option<Step>>,
    over: mpsc::Receiver<()>,
}

impl DeviceFence for Events {
    fn wait(&mut self, step: Option<Step>, deadline: Instant) -> Result<(), FenceError> {
        self.asked.send(step).unwrap();
        self.over.recv_timeout(deadline.saturating_duration_since(Instant::now())).map_err(|_| FenceError::TimedOut)
    }
}

/// The order carries the step; the worker unmaps when its own device is done with it, and acks after that.
#[test]
fn a_worker_waits_for_its_own_device() {
    let crew = Crew::with(&[], &[], 1);
    let name = PoolName::new(POOL).unwrap();
    let (asked, questions) = mpsc::channel();
    let (answers, over) = mpsc::channel();
    let mut config = WorkerConfig::new(name.clone(), RankId { stage: 0, rank: 0 });
    config.socket_root = Some(crew.dir.path().to_owned());
    config.runtime_dir = crew.runtime_dir();
    config.fence = Some(Box::new(Events { asked, over }));
    let mut worker = Worker::new(config).unwrap();
    let backend: Arc<dyn Backend> = Arc::new(FakeBackend::default());
    let placement = *Geometry::new(&geometry()).unwrap().placement();
    let reservation = Arc::new(Reservation::new(backend, placement, RegionOptions::default()).unwrap());
    worker.add_group(WorkerGroupConfig::new(G0, Arc::clone(&reservation))).unwrap();
    let stopper = worker.stopper();
    let thread = std::thread::spawn(move || worker.run());

    let mut config = crew.fleet_config("ring");
    config.stages = vec![1];
    let fleet = tidekv_pool::Fleet::connect(config).unwrap();
    let pool = crew.pool(&fleet);
    let mut leases = Vec::new();
    pool.alloc(2 * BLOCKS, &mut leases).unwrap();
    pool.free(&leases[..BLOCKS as usize], Fence::Step(Step(7))).unwrap();
    pool.free(&leases[BLOCKS as usize..], Fence::Unknown).unwrap();
    std::thread::scope(|scope| {
        pool.step_completed(Step(7));
        let trim = scope.spawn(|| pool.trim());
        let mut steps = vec![questions.recv().unwrap()];
        assert_eq!(reservation.mapped_pages(), 2, "nothing is unmapped before the device is done");
        answers.send(()).unwrap();
        steps.push(questions.recv().unwrap());
        assert_eq!(reservation.mapped_pages(), 1);
        answers.send(()).unwrap();
        assert_eq!(trim.join().unwrap().unwrap(), pages(2));
        steps.sort();
        assert_eq!(steps, [None, Some(Step(7))]);
    });
    wait_for("all is back", || reservation.mapped_pages() == 0);
    drop((pool, fleet));
    stopper.stop();
    thread.join().unwrap().unwrap();
}

#[test]
fn a_fleet_that_is_not_there_is_named() {
    let mut crew = Crew::new(&[2]);
    crew.kill(1);
    let mut config = crew.fleet_config("seq");
    config.start_patience = std::time::Duration::from_millis(50);
    let error = tidekv_pool::Fleet::connect(config.clone()).unwrap_err();
    assert!(error.to_string().contains("rank 1 of stage 0"), "{error}");
    config.strategy = "pigeon".to_owned();
    let error = tidekv_pool::Fleet::connect(config).unwrap_err().to_string();
    assert!(error.contains("pigeon") && error.contains("adding-a-strategy"), "{error}");
}
