//! Many operations leave nothing behind: no descriptor, no thread, no memory, no page; neither at the scheduler, which is a
//! process of its own here, nor at its workers.
//!
//! `TIDEKV_FLEET_ROUNDS=50000` for the long run: a round is one broadcast to map and one to unmap.

use tidekv_core::pages::Fence;
use tidekv_core::units::{Bytes, Step};
use tidekv_shm::RuntimeDir;

use crate::crew::{BLOCKS, Crew, Process, listen, say, wait_for};
use crate::deaths::connect;
use crate::strategies;

const ROUNDS: &str = "TIDEKV_FLEET_ROUNDS";
/// Buffers have their size after so many.
const WARM_UP: u32 = 200;
/// What an allocator may keep between two looks.
const SLACK_KIB: u64 = 2048;

/// What a process has open: descriptors, threads, resident memory in KiB.
fn footprint(process: &Process) -> (usize, usize, u64) {
    let pid = process.pid();
    let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    (count("fd"), count("task"), line.split_whitespace().nth(1).unwrap().parse().unwrap())
}

/// Maps and unmaps: `busy <strategy> <ranks> <rounds>`.
pub(crate) fn be_busy(arguments: &[String], dir: &RuntimeDir) {
    let (_fleet, pool) = connect(&arguments[0], arguments[1].parse().unwrap(), dir);
    let turn = || {
        let mut leases = Vec::new();
        pool.alloc(BLOCKS, &mut leases).unwrap();
        pool.free(&leases, Fence::Step(Step(0))).unwrap();
        pool.trim().unwrap();
    };
    (0..WARM_UP).for_each(|_| turn());
    say("ready");
    listen();
    (0..arguments[2].parse::<u32>().unwrap()).for_each(|_| turn());
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.mapped_bytes, snapshot.ledger_bytes, snapshot.refused_pages), (Bytes::ZERO, Bytes::ZERO, 0));
    say("done");
    listen();
}

#[test]
fn a_hot_loop_leaves_nothing_behind() {
    let rounds = std::env::var(ROUNDS).unwrap_or_else(|_| "600".to_owned());
    for strategy in strategies() {
        let crew = Crew::new(&[4]);
        let mut scheduler = Process::start(crew.dir.path(), &format!("busy {strategy} 4 {rounds}"));
        let look = |scheduler: &Process| -> Vec<_> {
            (0..4).map(|worker| footprint(crew.process(worker))).chain([footprint(scheduler)]).collect()
        };
        let before = look(&scheduler);
        scheduler.tell("go");
        scheduler.expect("done");
        for (process, (before, after)) in before.into_iter().zip(look(&scheduler)).enumerate() {
            assert_eq!((after.0, after.1), (before.0, before.1), "{strategy}: descriptors and threads of {process}");
            assert!(after.2 <= before.2 + SLACK_KIB, "{strategy}: {process} grew from {} to {} KiB", before.2, after.2);
        }
        (0..4).for_each(|worker| assert_eq!(crew.reserved(worker), Bytes::ZERO));
        scheduler.kill();
        wait_for("nothing is held", || (0..4).all(|worker| crew.reserved(worker) == Bytes::ZERO));
    }
}
