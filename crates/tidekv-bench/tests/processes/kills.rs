//! Processes killed in the middle of whatever they do: nothing of them stays, and nobody waits for them.

use std::fs;
use std::io;
use std::time::{Duration, Instant};

use tidekv_bench::crew::memory_files::MemoryFiles;
use tidekv_bench::crew::{MemberId, Order};
use tidekv_bench::lab::Lab;
use tidekv_bench::random::Random;
use tidekv_cli::cli::Cli;
use tidekv_cli::console::Console;
use tidekv_cli::exit::Outcome;
use tidekv_core::units::Bytes;
use tidekv_shm::{DeviceName, Ledger};

use super::{PAGE, PATIENCE, Stage, number_of};

const BUDGET_PAGES: u32 = 96;

/// The deadline of every lease of a survivor.
const WAIT_MS: u64 = 20;

/// Victims live at most so long.
const LIFE_MAX_US: u32 = 20_000;

/// 1 s is the promise.
const RETURN_MAX: Duration = Duration::from_secs(3);

/// A call may be late by what the scheduler of a busy machine does to it, not by a dead neighbour.
const OVERRUN_MAX: Duration = Duration::from_secs(1);

#[test]
fn what_killed_processes_held_comes_back_and_nobody_waits_for_them() {
    let kills = number_of("TIDEKV_KILLS", 60);
    let mut stage = Stage::new(BUDGET_PAGES);
    let mut random = Random::new();
    let survivors = ["survivor_0", "survivor_1"].map(|name| {
        let spec = stage.spec(name);
        stage.start(spec)
    });
    for (seed, &survivor) in (1..).zip(&survivors) {
        stage.crew.send(survivor, &Order::Churn { seed, wait_ms: WAIT_MS }).unwrap();
    }
    let ledger = Ledger::open_existing(&stage.lab.runtime_dir(), &DeviceName::host()).unwrap().unwrap();
    let mut slowest = Duration::ZERO;
    for kill in 0..kills {
        let victim = start_victim(&mut stage, kill, &mut random);
        let pid = stage.crew.pid(victim).unwrap();
        stage.crew.kill(victim).unwrap();
        slowest = slowest.max(wait_until_forgotten(&ledger, pid));
    }

    // Survivors never met an error (hearing one fails the test) and never waited past their deadline.
    stage.crew.listen_until(Instant::now() + Duration::from_millis(200)).unwrap();
    let overruns = survivors.map(|id| stage.crew.latest(id).map_or(0, |report| report.worst_overrun_us));
    let overrun = Duration::from_micros(overruns.into_iter().max().unwrap());
    println!("{kills} kills: entries gone within {slowest:?}, survivors late by at most {overrun:?}");
    assert!(overrun < OVERRUN_MAX, "{overrun:?}");
    let files = MemoryFiles::of(survivors.map(|id| stage.crew.pid(id).unwrap())).unwrap();
    let budget = Bytes(PAGE.0 * u64::from(BUDGET_PAGES));
    assert!(files.total().is_none_or(|total| total <= budget));

    // The whole budget is there for whoever comes: nothing of the dead counts any more.
    survivors.iter().for_each(|&survivor| stage.want(survivor, 0));
    stage.want(survivors[0], BUDGET_PAGES);
    let deadline = Instant::now() + PATIENCE;
    while stage.held_pages(survivors[0]) < f64::from(BUDGET_PAGES) {
        assert!(Instant::now() < deadline, "{} of {BUDGET_PAGES} pages came back", stage.held_pages(survivors[0]));
        stage.crew.listen_until(Instant::now() + Duration::from_millis(20)).unwrap();
    }

    stage.crew.dismiss_all().unwrap();
    drop(ledger);
    collect_garbage(&stage.lab);
    let left: Vec<_> = fs::read_dir(stage.lab.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.is_empty(), "after gc there is still {left:?}");
}

/// A process somewhere in its life: most are leasing and freeing, some have not even opened their pool.
fn start_victim(stage: &mut Stage, kill: u32, random: &mut Random) -> MemberId {
    let life = Duration::from_micros(random.between(0, LIFE_MAX_US).into());
    // A name of its own for some, and for others one that the dead before them had.
    let mut spec = stage.spec(&format!("victim_{}", kill % 5));
    spec.weight = random.between(1, 4);
    if kill.is_multiple_of(4) {
        let victim = stage.crew.launch(spec).unwrap();
        stage.crew.listen_until(Instant::now() + life).unwrap();
        return victim;
    }
    let victim = stage.start(spec);
    stage.crew.send(victim, &Order::Churn { seed: random.next_word(), wait_ms: WAIT_MS }).unwrap();
    stage.crew.listen_until(Instant::now() + life).unwrap();
    victim
}

/// Waits until no entry of the process is left, and says how long that took.
fn wait_until_forgotten(ledger: &Ledger, pid: u32) -> Duration {
    let started = Instant::now();
    let watch = ledger.watch().unwrap();
    loop {
        let view = ledger.read().unwrap();
        let Some(entry) = view.entries.iter().find(|entry| entry.pid == pid) else {
            return started.elapsed();
        };
        assert!(started.elapsed() < RETURN_MAX, "still there: {entry:?}");
        watch.wait(Duration::from_millis(50)).unwrap();
    }
}

/// `kvctl gc`.
fn collect_garbage(lab: &Lab) {
    let args = ["kvctl".as_ref(), "--dir".as_ref(), lab.path().as_os_str(), "gc".as_ref()];
    let cli = Cli::parse_args(args.map(std::ffi::OsStr::to_owned)).unwrap();
    let outcome = tidekv_cli::run(&cli, &mut Console::to(io::sink(), io::sink(), false, None)).unwrap();
    assert_eq!(outcome, Outcome::Done);
}
