//! Ledgers between real processes: killed, stopped, forked, racing. What a pool may do to its neighbours, done for real.

mod support;

use std::time::{Duration, Instant};

use support::{PATIENCE, Worker, folder, listen, open, role, say, soon, spec};
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::{DeviceName, EntryState, Ledger, LedgerError, LedgerView, OwnedEntry, RuntimeDir};

const UPDATES: u64 = 400;

/// The processes that the tests below start.
#[test]
fn worker() {
    let Some((role, dir)) = role() else { return };
    match role.as_str() {
        "register" => register(&dir),
        "inside" => inside(&dir),
        "churn" => churn(&dir),
        "count" => count(&dir),
        "fork" => fork(&dir),
        other => panic!("no role {other}"),
    }
}

/// Takes a slot when told to, and leaves when told to.
fn register(dir: &RuntimeDir) {
    say("ready");
    listen();
    let entry = open(dir).register(soon(), spec("worker")).expect("a slot");
    say(&format!("{}", entry.slot()));
    listen();
    drop(entry);
    say("left");
}

/// Stays inside an update, with the lock held, until told to go on.
fn inside(dir: &RuntimeDir) {
    let entry = open(dir).register(soon(), spec("worker")).expect("a slot");
    entry.update(soon(), |view, me| view.entries[me].reserved = Bytes(5)).expect("an update");
    let change = |view: &mut LedgerView, me: usize| {
        view.entries[me].reserved = Bytes(999);
        say("inside");
        listen();
    };
    entry.update(soon(), change).expect("an update");
    say("done");
    listen();
}

/// Changes its entry as fast as it can, every time all the same words, until it is killed.
fn churn(dir: &RuntimeDir) {
    let ledger = open(dir);
    for round in 1_u64.. {
        let entry = ledger.register(soon(), spec("worker")).expect("a slot");
        for step in 1..200 {
            let value = round * 1000 + step;
            entry.update(soon(), |view, me| put_same(view, me, value)).expect("an update");
            if (round, step) == (1, 1) {
                say("ready");
            }
        }
        entry.update(soon(), |view, me| put_same(view, me, 0)).expect("an update");
    }
}

fn put_same(view: &mut LedgerView, me: usize, value: u64) {
    let entry = &mut view.entries[me];
    (entry.reserved, entry.in_use, entry.idle) = (Bytes(value), Bytes(value), Bytes(value));
    (entry.counters.maps, entry.trim_done) = (value, value);
    view.header.refreshed_ms = value;
}

/// Adds to a word that all share.
fn count(dir: &RuntimeDir) {
    let ledger = open(dir);
    say("ready");
    listen();
    for _ in 0..UPDATES {
        ledger.update(soon(), |view| view.header.non_pool.0 += 1).expect("an update");
    }
    say("done");
}

/// Forks a child that outlives it.
fn fork(dir: &RuntimeDir) {
    let entry = open(dir).register(soon(), spec("worker")).expect("a slot");
    entry.update(soon(), |view, me| view.entries[me].reserved = Bytes(5)).expect("an update");
    let watch = entry.ledger().watch().expect("a watch");
    // SAFETY: the child uses nothing that another thread of this process may have locked: it looks at two error
    // values, writes to a pipe, reads from another, and ends without running any destructor.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let forked = matches!(entry.read(), Err(LedgerError::Forked))
            && matches!(entry.update(soon(), |_, _| ()), Err(LedgerError::Forked))
            && matches!(watch.wait(PATIENCE), Err(LedgerError::Forked));
        let word: &[u8] = if forked { b"@child knows\n" } else { b"@child does not know\n" };
        rustix::io::write(rustix::stdio::stdout(), word).expect("the test listens");
        // Lives until the test lets go of its input.
        while rustix::io::read(rustix::stdio::stdin(), &mut [0; 16]).is_ok_and(|count| count > 0) {}
        // SAFETY: ends this process at once; nothing of it is needed any more.
        unsafe { libc::_exit(0) };
    }
    std::thread::park();
}

fn deadline(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

fn neighbour(dir: &RuntimeDir) -> OwnedEntry {
    open(dir).register(soon(), spec("neighbour")).expect("a slot")
}

/// What the neighbour sees of the worker after an update of its own, which reaps.
fn seen(neighbour: &OwnedEntry) -> Option<(EntryState, Bytes)> {
    let entry =
        |view: &mut LedgerView, _| view.by_name("worker", GroupId(0)).map(|entry| (entry.state, entry.reserved));
    neighbour.update(deadline(10_000), entry).expect("the lock is free")
}

#[test]
fn a_pool_killed_inside_an_update_leaves_the_lock_free_and_its_bytes_counted() {
    let (_folder, dir) = folder();
    let us = neighbour(&dir);
    let mut worker = Worker::start(&dir, "inside");
    worker.expect("inside");
    let error = us.update(deadline(20), |_, _| ()).unwrap_err();
    assert!(matches!(error, LedgerError::LockTimeout { .. }), "{error}");
    worker.kill();
    assert_eq!(seen(&us), Some((EntryState::Returning, Bytes(5))), "what it had begun never happened");
    us.update(soon(), |view, _| view.by_name_mut("worker", GroupId(0)).unwrap().reserved = Bytes::ZERO).unwrap();
    assert_eq!(seen(&us), None, "its slot is free");
}

#[test]
fn a_pool_stopped_inside_an_update_costs_a_timeout_and_tools_still_read() {
    let (_folder, dir) = folder();
    let us = neighbour(&dir);
    let mut worker = Worker::start(&dir, "inside");
    worker.expect("inside");
    worker.stop();
    let started = Instant::now();
    let wait = Duration::from_millis(50);
    let error = us.update(started + wait, |_, _| ()).unwrap_err();
    let took = started.elapsed();
    assert!(matches!(error, LedgerError::LockTimeout { .. }) && error.is_transient(), "{error}");
    assert!(took >= wait && took < wait + Duration::from_secs(10), "{took:?}");
    let view = us.ledger().read().unwrap();
    assert_eq!(view.by_name("worker", GroupId(0)).unwrap().reserved, Bytes(5));
    worker.resume();
    worker.tell("go on");
    worker.expect("done");
    assert_eq!(seen(&us), Some((EntryState::Live, Bytes(999))));
}

#[test]
fn a_stopped_neighbour_cannot_keep_us_from_leaving() {
    let (_folder, dir) = folder();
    let us = neighbour(&dir);
    let mut worker = Worker::start(&dir, "inside");
    worker.expect("inside");
    let started = Instant::now();
    drop(us);
    assert!(started.elapsed() < Duration::from_secs(5));
    worker.tell("go on");
    worker.expect("done");
    // Its slot is left, its lock is not: whoever comes next takes it back.
    assert!(open(&dir).read().unwrap().by_name("neighbour", GroupId(0)).is_some());
    let next = open(&dir).register(soon(), spec("next")).unwrap();
    assert!(next.ledger().read().unwrap().by_name("neighbour", GroupId(0)).is_none());
}

/// Where in its work the worker dies is different each time; that it is nowhere wrong is not.
#[test]
fn a_pool_killed_at_any_moment_leaves_whole_entries() {
    let (_folder, dir) = folder();
    let us = neighbour(&dir);
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let (mut returning, mut gone) = (0, 0);
    for _ in 0..120 {
        let mut worker = Worker::start(&dir, "churn");
        worker.expect("ready");
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // Our own updates are the clock: each takes its turn among the worker's.
        for _ in 0..random % 64 {
            us.update(deadline(10_000), |view, me| view.entries[me].demand.0 += 1).unwrap();
        }
        worker.kill();
        us.update(deadline(10_000), |view, me| {
            assert!(view.torn.is_empty());
            assert_eq!(view.entries[me].name, "neighbour");
            match view.by_name_mut("worker", GroupId(0)) {
                Some(entry) => {
                    assert_eq!(entry.state, EntryState::Returning);
                    let value = entry.reserved.0;
                    assert_eq!((entry.counters.maps, entry.trim_done), (value, value), "one write, whole");
                    entry.reserved = Bytes::ZERO;
                    returning += 1;
                }
                None => gone += 1,
            }
        })
        .unwrap();
        us.update(deadline(10_000), |view, _| assert_eq!(view.entries.len(), 1)).unwrap();
    }
    assert!(returning > 60, "{returning} were killed with an entry, {gone} between two");
    drop(us);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
}

#[test]
fn a_pool_whose_forked_child_lives_is_dead_when_it_is() {
    let (_folder, dir) = folder();
    let us = neighbour(&dir);
    let mut worker = Worker::start(&dir, "fork");
    worker.expect("child knows");
    assert_eq!(seen(&us), Some((EntryState::Live, Bytes(5))));
    worker.kill();
    assert!(!worker.output_is_closed(), "the child still has the worker's output");
    assert_eq!(seen(&us), Some((EntryState::Returning, Bytes(5))));
}

#[test]
fn a_death_wakes_those_who_watch() {
    let (_folder, dir) = folder();
    let us = neighbour(&dir);
    let watch = us.ledger().watch().unwrap();
    let mut worker = Worker::start(&dir, "inside");
    worker.expect("inside");
    while watch.wait(Duration::ZERO).unwrap() {}
    worker.kill_unseen();
    let started = Instant::now();
    // Each time it wakes we look once, as a pool does; the watch alone must lead us to the death.
    loop {
        assert!(watch.wait(PATIENCE).unwrap(), "nothing woke us");
        if seen(&us) == Some((EntryState::Returning, Bytes(5))) {
            break;
        }
    }
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[test]
fn an_update_of_another_process_wakes_those_who_watch() {
    let (_folder, dir) = folder();
    let us = neighbour(&dir);
    let mut worker = Worker::start(&dir, "register");
    worker.expect("ready");
    let watch = us.ledger().watch().unwrap();
    assert!(!watch.wait(Duration::ZERO).unwrap(), "nothing has changed");
    worker.tell("register");
    worker.hear();
    assert!(watch.wait(Duration::ZERO).unwrap(), "the event is there when the writer has returned");
    // A tool that only reads disturbs nobody.
    while watch.wait(Duration::from_millis(20)).unwrap() {}
    us.ledger().read().unwrap();
    assert!(!watch.wait(Duration::ZERO).unwrap());
}

#[test]
fn processes_that_begin_together_agree_on_one_file_and_different_slots() {
    const WORKERS: usize = 4;
    for _ in 0..12 {
        let (_folder, dir) = folder();
        let mut workers: Vec<_> = (0..WORKERS).map(|_| Worker::start(&dir, "register")).collect();
        workers.iter_mut().for_each(|worker| worker.expect("ready"));
        workers.iter_mut().for_each(|worker| worker.tell("register"));
        let mut slots: Vec<u32> = workers.iter_mut().map(|worker| worker.hear().parse().unwrap()).collect();
        slots.sort_unstable();
        assert_eq!(slots, [0, 1, 2, 3]);
        let ledger = Ledger::open_existing(&dir, &DeviceName::host()).unwrap().unwrap();
        assert_eq!(ledger.read().unwrap().entries.len(), WORKERS);
        // And those that leave together leave nothing.
        workers.iter_mut().for_each(|worker| worker.tell("leave"));
        workers.iter_mut().for_each(|worker| worker.expect("left"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

#[test]
fn updates_of_many_processes_are_one_after_the_other() {
    const WORKERS: u64 = 4;
    let (_folder, dir) = folder();
    let us = neighbour(&dir);
    let mut workers: Vec<_> = (0..WORKERS).map(|_| Worker::start(&dir, "count")).collect();
    workers.iter_mut().for_each(|worker| worker.expect("ready"));
    workers.iter_mut().for_each(|worker| worker.tell("go"));
    // Readers without the lock see whole records all the while, and a count that only grows.
    let mut last = Bytes::ZERO;
    while last < Bytes(WORKERS * UPDATES) {
        let view = us.ledger().read().unwrap();
        assert!(view.torn.is_empty() && view.header.non_pool >= last);
        last = view.header.non_pool;
    }
    workers.iter_mut().for_each(|worker| worker.expect("done"));
    assert_eq!(us.ledger().read().unwrap().header.non_pool, Bytes(WORKERS * UPDATES), "not one was lost");
}
