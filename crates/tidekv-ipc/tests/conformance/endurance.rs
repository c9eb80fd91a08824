//! What adds up: reconnects and long loops must leave nothing behind.

use std::time::Instant;

use tidekv_ipc::SocketDir;
use tidekv_ipc::broadcast::{Broadcaster, Ranks, StrategyEntry, strategy};

use crate::support::{Fleet, Worker, folder, heading, is_done, map, say, soon, unmap};

/// How many broadcasts the long loop makes; 100,000 where somebody asks for it.
const ROUNDS: &str = "TIDEKV_IPC_LOOP";
const RANKS: u32 = 4;

pub(crate) fn a_thousand_reconnects(strategy: &StrategyEntry) {
    let mut fleet = Fleet::start(strategy, 1);
    for round in 0..1000 {
        if round % 100 == 0 {
            fleet.send_to_all(&map(&[round]));
        }
        fleet.caster.disconnect(0);
        fleet.workers[0].expect("gone");
        fleet.connect();
    }
    assert_eq!(fleet.held(), [vec![]], "every scheduler's pages went with it");
    let open = std::fs::read_dir(format!("/proc/{}/fd", fleet.workers[0].pid())).expect("it lives").count();
    assert!(open < 20, "the worker has {open} descriptors");
}

/// In a process of its own, because the others of this one come and go.
pub(crate) fn a_long_loop_leaks_nothing(strategy: &StrategyEntry) {
    let (_root, dir) = folder();
    let mut workers: Vec<Worker> = (0..RANKS).map(|rank| Worker::start(&dir, 0, rank)).collect();
    let before: Vec<Usage> = workers.iter().map(|worker| usage(&worker.pid().to_string())).collect();
    let mut scheduler = Worker::in_role(&dir, &format!("loop {}", strategy.name));
    scheduler.expect("nothing leaked");
    assert!(scheduler.finish());
    for (worker, before) in workers.iter_mut().zip(before) {
        worker.expect("came");
        worker.expect("gone");
        // It says so before the last descriptor of the lane is closed.
        let deadline = soon();
        let after = loop {
            let after = usage(&worker.pid().to_string());
            if after.descriptors <= before.descriptors && after.threads <= before.threads {
                break after;
            }
            assert!(Instant::now() < deadline, "{before:?} {after:?}");
            std::thread::yield_now();
        };
        assert!(after.resident_kib <= before.resident_kib + 2048, "{before:?} {after:?}");
    }
}

/// What the scheduler of that loop does.
pub(crate) fn looping(dir: &SocketDir, words: &[String]) {
    let strategy = strategy(&words[1]).expect("registered");
    let rounds: u32 = std::env::var(ROUNDS).ok().map_or(2_500, |text| text.parse::<u32>().expect("a number") / 2);
    let mut caster = Broadcaster::new(dir.clone(), 0, RANKS, strategy, None);
    assert!(caster.connect(soon()).iter().all(Result::is_ok));
    let turn = |epoch: u32, caster: &mut Broadcaster| {
        for deed in [map(&[epoch % 100]), unmap(&[epoch % 100])] {
            let answers = caster.send(Ranks::All, heading(u64::from(epoch)), &deed, soon());
            assert!(answers.len() == RANKS as usize && answers.iter().all(is_done), "{answers:?}");
        }
    };
    (0..500).for_each(|epoch| turn(epoch, &mut caster));
    let before = usage("self");
    let started = Instant::now();
    (0..rounds).for_each(|epoch| turn(epoch, &mut caster));
    let (elapsed, after) = (started.elapsed(), usage("self"));
    eprintln!("{}: {} broadcasts in {elapsed:?}", strategy.name, rounds * 2);
    assert_eq!((after.descriptors, after.threads), (before.descriptors, before.threads), "{before:?} {after:?}");
    assert!(after.resident_kib <= before.resident_kib + 2048, "{before:?} {after:?}");
    say("nothing leaked");
}

#[derive(Debug)]
struct Usage {
    descriptors: usize,
    threads: usize,
    resident_kib: u64,
}

fn usage(process: &str) -> Usage {
    let entries = |folder: &str| std::fs::read_dir(format!("/proc/{process}/{folder}")).expect("it lives").count();
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it lives");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    let resident_kib = resident.trim().trim_end_matches(" kB").parse().expect("a number");
    Usage { descriptors: entries("fd"), threads: entries("task"), resident_kib }
}
