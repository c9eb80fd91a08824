//! Workers that are killed, stopped, restarted, missing.

use std::time::{Duration, Instant};

use tidekv_ipc::LaneError;
use tidekv_ipc::broadcast::{Broadcaster, RankAnswer, Ranks, StrategyEntry};
use tidekv_ipc::message::Deed;

use crate::support::{Fleet, PATIENCE, Worker, folder, heading, is_done, map, page, soon};

/// A dead worker is to be reported in this time.
const NOTICE: Duration = Duration::from_millis(100);
/// A busy machine may be late, but not every time.
const TRIES: u32 = 5;

fn outcomes(answers: &[RankAnswer]) -> Vec<Result<(), LaneError>> {
    answers.iter().map(|answer| answer.outcome.as_ref().map(drop).map_err(Clone::clone)).collect()
}

pub(crate) fn a_worker_killed_before_the_order(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 3);
    fleet.send_to_all(&map(&[1]));
    fleet.workers[1].kill();
    let started = Instant::now();
    assert_eq!(outcomes(fleet.send(&map(&[2]))), [Ok(()), Err(LaneError::Closed), Ok(())]);
    assert!(started.elapsed() < PATIENCE / 2, "not at the deadline");
    assert!(!fleet.caster.is_connected(1) && fleet.caster.instance(1).is_none());
    assert_eq!(outcomes(fleet.send(&map(&[3]))), [Ok(()), Err(LaneError::NotConnected), Ok(())]);
}

/// In the middle of an order, and the answer is never sent: reported within 100 ms.
pub(crate) fn a_worker_killed_while_it_works(strategy: &StrategyEntry) {
    let mut best = Duration::MAX;
    for _ in 0..TRIES {
        let mut fleet = Fleet::start(strategy, 2);
        let mut workers = std::mem::take(&mut fleet.workers);
        let (outcome, reported, killed) = std::thread::scope(|scope| {
            let victim = &mut workers[1];
            let killer = scope.spawn(move || {
                victim.expect("inside");
                victim.kill();
                Instant::now()
            });
            // Rank 0 is told nothing, so it is not stuck inside.
            let answers = fleet.caster.send(Ranks::Some(&[1]), heading(1), &map(&[page::WAITS]), soon());
            let outcome = answers[0].outcome.clone();
            (outcome, Instant::now(), killer.join().expect("the killer"))
        });
        assert_eq!(outcome.map(drop), Err(LaneError::Closed));
        let notice = reported.saturating_duration_since(killed);
        assert!(notice < PATIENCE / 2, "not at the deadline");
        best = best.min(notice);
        // The other lane is as it was.
        assert!(is_done(&fleet.caster.send(Ranks::Some(&[0]), heading(2), &Deed::Ping, soon())[0]));
        if best <= NOTICE {
            return;
        }
    }
    panic!("a killed worker was reported after {best:?} at best");
}

pub(crate) fn a_worker_killed_after_it(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 2);
    fleet.send_to_all(&map(&[1]));
    fleet.workers[0].kill();
    fleet.workers[0] = Worker::start(&fleet.dir, 0, 0);
    // The lane is the old worker's, and says so, although a new one sits in its place.
    assert_eq!(outcomes(fleet.send(&Deed::Ping)), [Err(LaneError::Closed), Ok(())]);
    fleet.connect();
    assert_eq!(fleet.held(), [vec![], vec![1]]);
}

pub(crate) fn a_stopped_worker_times_out_alone(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 3);
    for stopped in 0..3_u32 {
        fleet.workers[stopped as usize].stop();
        let wait = Duration::from_millis(300);
        let started = Instant::now();
        let answers = fleet.send_until(&map(&[stopped]), started + wait).to_vec();
        let elapsed = started.elapsed();
        assert!(elapsed >= wait && elapsed < PATIENCE / 2, "at the deadline, not at {elapsed:?}");
        for answer in &answers {
            match &answer.outcome {
                Err(LaneError::TimedOut { waited }) if answer.rank == stopped => {
                    // Since the order was ready to be sent, which it was not at once.
                    assert!(!waited.is_zero() && *waited <= elapsed, "{waited:?} of {elapsed:?}");
                }
                _ => assert!(answer.rank != stopped && is_done(answer), "{answer:?}"),
            }
        }
        assert!(fleet.caster.is_connected(stopped), "it may still answer");
        fleet.workers[stopped as usize].resume();
        // What it answers now to the first order is late; what it answers to the next ones is not.
        fleet.send_to_all(&Deed::Ping);
        let all: Vec<u32> = (0..=stopped).collect();
        assert_eq!(fleet.held(), vec![all; 3], "the order was carried out, late");
    }
}

/// Its socket fills up, or its ring. Nobody waits longer than the deadline, and nothing is sent by halves.
pub(crate) fn a_stopped_worker_cannot_fill_us_up(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 2);
    fleet.workers[0].stop();
    let pages: Vec<u32> = (0..16_000).collect();
    let started = Instant::now();
    for _ in 0..12 {
        let answers = fleet.send_until(&map(&pages), Instant::now() + Duration::from_millis(20));
        assert!(matches!(answers[0].outcome, Err(LaneError::TimedOut { .. })), "{:?}", answers[0].outcome);
        // The other one may be slow on a busy machine, but it is in order.
        assert!(is_done(&answers[1]) || matches!(answers[1].outcome, Err(LaneError::TimedOut { .. })));
    }
    assert!(started.elapsed() < PATIENCE / 2);
    fleet.workers[0].resume();
    fleet.send_to_all(&Deed::Ping);
    assert!(fleet.held().iter().all(|held| *held == pages));
}

pub(crate) fn a_worker_comes_back(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 2);
    for _ in 0..3 {
        fleet.send_to_all(&map(&[1]));
        fleet.workers[1].kill();
        assert_eq!(outcomes(fleet.send(&Deed::Ping)), [Ok(()), Err(LaneError::Closed)]);
        let nobody = fleet.caster.connect(soon());
        assert!(matches!(&nobody[1], Err(LaneError::NoWorker { path }) if path.ends_with("w1.sock")), "{nobody:?}");
        let old = fleet.workers[1].instance;
        fleet.workers[1] = Worker::start(&fleet.dir, 0, 1);
        assert_ne!(fleet.workers[1].instance, old);
        fleet.connect();
        assert_eq!(fleet.held(), [vec![1], vec![]], "another instance: its pages are gone");
    }
}

pub(crate) fn missing_workers_are_named(strategy: &StrategyEntry) {
    let (_root, dir) = folder();
    let mut caster = Broadcaster::new(dir.clone(), 0, 2, strategy, None);
    let no_worker = |result: &Result<u64, LaneError>| matches!(result, Err(LaneError::NoWorker { .. }));
    assert!(caster.connect(soon()).iter().all(no_worker), "not even a folder");
    let worker = Worker::start(&dir, 0, 1);
    let results = caster.connect(soon());
    assert!(no_worker(&results[0]) && results[1] == Ok(worker.instance), "{results:?}");
    let answers = caster.send(Ranks::All, heading(1), &Deed::Ping, soon());
    assert_eq!(outcomes(answers), [Err(LaneError::NotConnected), Ok(())]);
    // A stopped worker costs the greeting its deadline, and the others nothing.
    let stopped = Worker::start(&dir, 0, 0);
    stopped.stop();
    let started = Instant::now();
    let results = caster.connect(started + Duration::from_millis(100));
    assert!(matches!(results[0], Err(LaneError::TimedOut { .. })), "{results:?}");
    assert!(results[1].is_ok() && started.elapsed() < PATIENCE / 2);
    stopped.resume();
    assert_eq!(caster.connect(soon()), [Ok(stopped.instance), Ok(worker.instance)]);
}

pub(crate) fn nobody_waits_longer_than_the_timeout(strategy: &StrategyEntry) {
    let (_root, dir) = folder();
    let worker = Worker::start(&dir, 0, 0);
    let mut caster = Broadcaster::new(dir, 0, 1, strategy, Some(Duration::from_millis(50)));
    // The greeting of a busy machine's worker may itself need more than that.
    let deadline = soon();
    while caster.connect(soon())[0].is_err() {
        assert!(Instant::now() < deadline);
    }
    worker.stop();
    let started = Instant::now();
    let answers = caster.send(Ranks::All, heading(1), &Deed::Ping, soon());
    assert!(matches!(answers[0].outcome, Err(LaneError::TimedOut { .. })), "{answers:?}");
    assert!(started.elapsed() < PATIENCE / 2, "the timeout comes before the deadline");
}
