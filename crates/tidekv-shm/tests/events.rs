//! Events as pools write and tools read them: through the ledger, between real processes, under damage.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::{PATIENCE, Worker, folder, listen, open, role, say, soon, spec};
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::events::{self, Batch, EventsWatch};
use tidekv_shm::{
    BudgetAuthor, BudgetRight, DeviceName, Event, EventKind, EventReader, EventsError, Foreign, Ledger, LedgerView,
    Note, Reason, RuntimeDir,
};

const CAPACITY: u64 = 4096;
const RECORD: u64 = 256;
const FILE_BYTES: usize = 4096 + 4096 * 256;

/// What is done to a file, in words and in deed.
type Deed = (&'static str, fn(&PathBuf));

/// The processes that the tests below start.
#[test]
fn worker() {
    let Some((role, dir)) = role() else { return };
    match role.as_str() {
        "tell" => tell_for_ever(&dir),
        "count" => count(&dir),
        other => panic!("no role {other}"),
    }
}

/// Notes one thing after the other until it is killed.
fn tell_for_ever(dir: &RuntimeDir) {
    let entry = open(dir).register(soon(), spec("worker")).unwrap();
    for value in 1.. {
        tell(entry.ledger(), value);
        if value == 1 {
            say("ready");
        }
    }
}

/// Notes as many things as it is told, as fast as it can.
fn count(dir: &RuntimeDir) {
    let entry = open(dir).register(soon(), spec("worker")).unwrap();
    say("ready");
    let count: u64 = listen().parse().unwrap();
    for value in 1..=count {
        tell(entry.ledger(), value);
    }
    say("done");
    listen();
}

/// One event of the pool in slot 0, not merged with any other: told by somebody who is not its owner.
fn tell(ledger: &Ledger, bytes: u64) {
    let note = |view: &mut LedgerView| {
        view.note(view.entries[0].slot, Note::new(EventKind::Granted, Reason::Need, Bytes(bytes)));
    };
    ledger.update(soon(), note).unwrap();
}

fn path(dir: &RuntimeDir) -> PathBuf {
    dir.events_path(&DeviceName::host())
}

fn reader(dir: &RuntimeDir) -> EventReader {
    EventReader::open(dir, &DeviceName::host()).unwrap().expect("events")
}

fn all(dir: &RuntimeDir) -> Vec<Event> {
    reader(dir).read().unwrap().events
}

fn kvctl() -> BudgetAuthor {
    BudgetAuthor::here(BudgetRight::Operator, "kvctl")
}

fn kinds(events: &[Event]) -> Vec<(EventKind, &str)> {
    events.iter().map(|event| (event.kind, event.pool.as_ref().map_or("-", |pool| pool.name.as_str()))).collect()
}

fn sequences(batch: &Batch) -> Vec<u64> {
    batch.events.iter().map(|event| event.sequence).collect()
}

#[test]
fn a_pool_that_comes_and_goes_is_told_and_the_last_one_leaves_nothing() {
    let (_folder, dir) = folder();
    let first = open(&dir).register(soon(), spec("first")).unwrap();
    let second = open(&dir).register(soon(), spec("second")).unwrap();
    second.update(soon(), |view, me| view.entries[me].reserved = Bytes::mib(8)).unwrap();
    drop(second);
    let told = all(&dir);
    use EventKind::{Joined, Left};
    assert_eq!(kinds(&told), [(Joined, "first"), (Joined, "second"), (Left, "second")]);
    assert_eq!((told[2].bytes, told[2].pid, told[2].slot), (Bytes::mib(8), std::process::id(), 1));
    assert!(told.is_sorted_by_key(|event| event.at_ms) && told[0].wall_ms > 1_700_000_000_000);

    let metadata = fs::metadata(path(&dir)).unwrap();
    assert_eq!((metadata.mode() & 0o7777, metadata.len()), (0o600, 4096 + CAPACITY * RECORD));
    assert!(metadata.blocks() * 512 <= 16 * 1024, "what was never written takes no memory");
    assert_eq!(events::list(&dir), [DeviceName::host()]);
    assert_eq!(Ledger::list(&dir).unwrap(), [DeviceName::host()], "one ledger, and the events are none");
    assert_eq!(tidekv_shm::segment::list(&dir), []);

    let mut open_before = reader(&dir);
    drop(first);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "the last one takes both files away");
    let last = open_before.read().unwrap().events;
    assert_eq!(kinds(&last).last(), Some(&(Left, "first")), "whoever had it open can read on");
    assert!(!open_before.is_linked());
}

#[test]
fn orders_of_strangers_are_told_by_the_ledger_itself() {
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    let operator = open(&dir);
    let set = |view: &mut LedgerView| view.header.decide_budget(Some(Bytes::mib(100)), kvctl());
    operator.update(soon(), set).unwrap();
    let order = |view: &mut LedgerView| {
        let entry = &mut view.entries[0];
        (entry.limit, entry.limit_revision) = (Bytes::mib(10), 1);
        (entry.weight, entry.priority, entry.floor) = (4, -2, Bytes::mib(2));
        entry.trim_request += 1;
    };
    operator.update(soon(), order).unwrap();
    operator.update(soon(), |_| ()).unwrap();
    // Its own changes are its own to tell.
    entry.update(soon(), |view, me| (view.entries[me].limit, view.entries[me].weight) = (Bytes::mib(7), 9)).unwrap();
    let told = all(&dir);
    use EventKind::{Budget, Joined, LimitSet, ShareSet, TrimAsked};
    let expected = [(Joined, "pool"), (Budget, "-"), (LimitSet, "pool"), (ShareSet, "pool"), (TrimAsked, "pool")];
    assert_eq!(kinds(&told), expected);
    assert!(told[1..].iter().all(|event| event.reason == Reason::Operator));
    assert_eq!((told[1].budget, told[1].free, told[1].pid), (Bytes::mib(100), Bytes::ZERO, std::process::id()));
    assert_eq!((told[2].bytes, told[2].limit, told[2].budget), (Bytes::mib(10), Bytes::mib(10), Bytes::mib(100)));
    assert_eq!((told[3].weight, told[3].priority, told[3].bytes), (4, -2, Bytes::mib(2)));
}

/// Whoever changes the budget, the ledger tells it, with what it was and who did it.
#[test]
fn every_change_of_the_budget_is_told_with_its_author() {
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    let decide = |size, author| {
        entry.update(soon(), |view, _| view.header.decide_budget(size, author)).unwrap();
    };
    let pool = || BudgetAuthor::here(BudgetRight::Pool, "pool");
    decide(Some(Bytes::mib(256)), pool());
    decide(Some(Bytes::mib(256)), pool());
    let operator = BudgetAuthor { pid: 7, ..kvctl() };
    open(&dir).update(soon(), |view| view.header.decide_budget(Some(Bytes::gib(1)), operator)).unwrap();
    decide(Some(Bytes::mib(300)), pool());
    let budget = |event: &&Event| event.kind == EventKind::Budget;
    let last = all(&dir).iter().rfind(budget).map(|event| (event.budget, event.pid));
    assert_eq!(last, Some((Bytes::gib(1), 7)));
    open(&dir)
        .update(soon(), |view| {
            view.header.total = Bytes::gib(4);
            view.header.decide_budget(None, kvctl());
        })
        .unwrap();
    entry
        .update(soon(), |view, _| {
            view.header.non_pool = Bytes::gib(2);
            view.header.derive_budget();
        })
        .unwrap();
    let told: Vec<_> = all(&dir)
        .into_iter()
        .filter(|event| event.kind == EventKind::Budget)
        .map(|event| (event.reason, event.free, event.budget, event.peer.map(|peer| peer.name)))
        .collect();
    let derived = Bytes::gib(4).part(tidekv_shm::DEFAULT_UTILIZATION);
    let expected = [
        (Reason::Given, Bytes::ZERO, Bytes::mib(256), Some("pool".to_owned())),
        (Reason::Operator, Bytes::mib(256), Bytes::gib(1), None),
        (Reason::Operator, Bytes::gib(1), derived, None),
        (Reason::OtherUsers, derived, derived.saturating_sub(Bytes::gib(2)), None),
    ];
    assert_eq!(told, expected);
}

#[test]
fn a_pool_tells_its_own_story_with_all_that_explains_it() {
    let (_folder, dir) = folder();
    let (a, b) = (open(&dir).register(soon(), spec("a")).unwrap(), open(&dir).register(soon(), spec("b")).unwrap());
    let ask = |view: &mut LedgerView, me: usize| {
        view.header.budget = Bytes::mib(100);
        (view.entries[me].reserved, view.entries[me].in_use) = (Bytes::mib(20), Bytes::mib(20));
        view.entries[me].demand = Bytes::mib(40);
        let note = Note::new(EventKind::Asked, Reason::Need, Bytes::mib(40));
        view.note(view.entries[me].slot, Note { free: Bytes::mib(10), ..note });
    };
    b.update(soon(), ask).unwrap();
    let give = Note { peer: Some(1), ..Note::new(EventKind::Reclaimed, Reason::Neighbours, Bytes::mib(6)) };
    a.note(give);
    assert_eq!(all(&dir).len(), 4, "a note outside of an update waits for the next one");
    a.update(soon(), |view, me| view.entries[me].reserved = Bytes::mib(30)).unwrap();
    let told = all(&dir);
    let [.., asked, given] = &told[..] else { panic!("{told:?}") };
    assert_eq!((asked.kind, asked.reason, asked.count), (EventKind::Asked, Reason::Need, 1));
    assert_eq!((asked.bytes, asked.held, asked.demand), (Bytes::mib(40), Bytes::mib(20), Bytes::mib(40)));
    assert_eq!((asked.share, asked.budget, asked.free), (Bytes::mib(60), Bytes::mib(100), Bytes::mib(10)));
    let names = |event: &Event| {
        let name = |pool: &Option<tidekv_shm::events::PoolRef>| pool.clone().map(|pool| (pool.name, pool.group));
        (name(&event.pool), name(&event.peer))
    };
    let named = |name: &str| Some((name.to_owned(), GroupId(0)));
    assert_eq!(names(given), (named("a"), named("b")));
    assert_eq!((given.bytes, given.held), (Bytes::mib(6), Bytes::mib(30)));
}

#[test]
fn a_storm_of_one_sort_becomes_few_events_and_none_is_lost() {
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    for _ in 0..5000 {
        let grant = |view: &mut LedgerView, me: usize| {
            view.note(view.entries[me].slot, Note::new(EventKind::Granted, Reason::Need, Bytes(2)));
        };
        entry.update(soon(), grant).unwrap();
    }
    let mut open_before = reader(&dir);
    drop(entry);
    let told = open_before.read().unwrap().events;
    let granted: Vec<_> = told.iter().filter(|event| event.kind == EventKind::Granted).collect();
    assert_eq!(granted[0].count, 1, "the first at once");
    assert_eq!(granted.iter().map(|event| event.count).sum::<u32>(), 5000);
    assert_eq!(granted.iter().map(|event| event.bytes.0).sum::<u64>(), 10_000);
    assert!(granted.len() < 100, "{} events", granted.len());
}

#[test]
fn an_update_without_news_does_not_touch_the_file() {
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    let before = fs::metadata(path(&dir)).unwrap();
    for value in 0..10 {
        entry.update(soon(), |view, me| view.entries[me].reserved = Bytes(value)).unwrap();
    }
    let after = fs::metadata(path(&dir)).unwrap();
    assert_eq!((before.mtime(), before.mtime_nsec()), (after.mtime(), after.mtime_nsec()));
}

#[test]
fn readers_go_on_where_they_stopped_and_hear_what_they_missed() {
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    let mut slow = reader(&dir);
    assert_eq!(sequences(&slow.read().unwrap()), [1]);
    assert_eq!(slow.read().unwrap(), Batch::default());
    for value in 0..5 {
        tell(entry.ledger(), value);
    }
    assert_eq!(sequences(&slow.read().unwrap()), [2, 3, 4, 5, 6]);
    for value in 0..CAPACITY + 37 {
        tell(entry.ledger(), value);
    }
    let batch = slow.read().unwrap();
    assert_eq!((batch.overwritten, batch.skipped, batch.events.len() as u64), (37, 0, CAPACITY));
    assert_eq!(batch.events[0].sequence, 7 + 37);
    assert!(batch.events.iter().zip(&batch.events[1..]).all(|(a, b)| a.sequence + 1 == b.sequence));
    let fresh = reader(&dir).read().unwrap();
    assert_eq!((fresh.overwritten, fresh.events), (0, batch.events), "a first look has missed nothing");
}

#[test]
fn a_record_that_is_not_there_yet_is_waited_for_and_a_damaged_one_is_skipped() {
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    tell(entry.ledger(), 2);
    tell(entry.ledger(), 3);
    // Number 3 is half written, as a reader can catch it.
    let file = fs::File::options().read(true).write(true).open(path(&dir)).unwrap();
    let at = 4096 + 3 * RECORD + 100;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    let mut reader = reader(&dir);
    assert_eq!(sequences(&reader.read().unwrap()), [1, 2]);
    assert_eq!(reader.read().unwrap(), Batch::default());
    file.write_all_at(&byte, at).unwrap();
    assert_eq!(sequences(&reader.read().unwrap()), [3]);
    // Number 4 is damaged for good.
    tell(entry.ledger(), 4);
    tell(entry.ledger(), 5);
    file.write_all_at(&[0; 256], 4096 + 4 * RECORD).unwrap();
    let batch = reader.read().unwrap();
    assert_eq!((sequences(&batch), batch.skipped, batch.overwritten), (vec![5], 1, 0));
}

#[test]
fn a_deleted_or_damaged_file_is_made_anew_and_no_update_fails() {
    let spoils: [Deed; 5] = [
        ("deleted", |path| fs::remove_file(path).unwrap()),
        ("emptied", |path| fs::File::options().write(true).open(path).unwrap().set_len(0).unwrap()),
        ("cut short", |path| fs::File::options().write(true).open(path).unwrap().set_len(5000).unwrap()),
        ("zeroed", |path| fs::File::options().write(true).open(path).unwrap().write_all_at(&[0; 64], 0).unwrap()),
        ("scratched", |path| fs::File::options().write(true).open(path).unwrap().write_all_at(&[9], 40).unwrap()),
    ];
    for (what, spoil) in spoils {
        let (_folder, dir) = folder();
        let entry = open(&dir).register(soon(), spec("pool")).unwrap();
        let mut old = reader(&dir);
        old.read().unwrap();
        spoil(&path(&dir));
        // Noticed at once by a new handle, and within a second by one that has trusted the file.
        let deadline = soon();
        while old.is_linked() || !path(&dir).exists() {
            assert!(Instant::now() < deadline, "{what} was not noticed");
            tell(entry.ledger(), 7);
        }
        let told = all(&dir);
        assert_eq!((told[0].sequence, told[0].bytes), (1, Bytes(7)), "{what}");
        assert_eq!(entry.ledger().dropped_events(soon()).unwrap(), 0, "{what}");
        drop(entry);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{what}");
    }
}

#[test]
fn what_is_not_ours_is_left_alone_and_no_update_fails() {
    let device = DeviceName::host();
    let plants: [Deed; 5] = [
        ("a folder", |path| fs::create_dir(path).unwrap()),
        ("a link", |path| symlink("/dev/null", path).unwrap()),
        ("another mode", |path| {
            fs::write(path, []).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        }),
        ("other contents", |path| {
            fs::write(path, [7; 100]).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        }),
        ("another release's", |path| {
            let mut bytes = vec![0; FILE_BYTES];
            bytes[..12].copy_from_slice(b"TIDEEVNT\x02\0\0\0");
            fs::write(path, bytes).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
        }),
    ];
    for (what, plant) in plants {
        let (_folder, dir) = folder();
        plant(&path(&dir));
        let before = fs::symlink_metadata(path(&dir)).unwrap();
        let entry = open(&dir).register(soon(), spec("pool")).unwrap();
        tell(entry.ledger(), 1);
        entry.update(soon(), |view, me| view.entries[me].reserved = Bytes(5)).unwrap();
        assert_eq!(entry.read().unwrap().reserved, Bytes(5), "{what}");
        assert_eq!(entry.ledger().dropped_events(soon()).unwrap(), 2, "{what}: joined and granted");
        let error = EventReader::open(&dir, &device).and_then(|reader| reader.expect("there").read()).unwrap_err();
        match (what, error) {
            ("another release's", EventsError::Version { found: 2, .. })
            | ("a folder" | "a link", EventsError::NotOurs { why: Foreign::NotAFile, .. })
            | ("another mode", EventsError::NotOurs { why: Foreign::Mode { mode: 0o644 }, .. })
            | ("other contents", EventsError::NotOurs { why: Foreign::Contents, .. }) => {}
            (what, error) => panic!("{what}: {error}"),
        }
        drop(entry);
        let after = fs::symlink_metadata(path(&dir)).unwrap();
        assert_eq!((before.ino(), before.len()), (after.ino(), after.len()), "{what} is not touched");
    }
}

#[test]
fn a_folder_that_refuses_new_files_costs_the_events_alone() {
    if rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: root may write everywhere");
        return;
    }
    let (_folder, dir) = folder();
    let ledger = open(&dir);
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o500)).unwrap();
    let entry = ledger.register(soon(), spec("pool")).unwrap();
    entry.update(soon(), |view, me| view.entries[me].reserved = Bytes(5)).unwrap();
    assert_eq!(entry.read().unwrap().reserved, Bytes(5));
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o700)).unwrap();
    assert!(entry.ledger().dropped_events(soon()).unwrap() > 0);
}

#[test]
fn another_users_file_is_refused() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can make a file of another user");
        return;
    }
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    std::os::unix::fs::chown(path(&dir), Some(12345), None).unwrap();
    let error = EventReader::open(&dir, &DeviceName::host()).unwrap_err();
    assert!(matches!(error, EventsError::NotOurs { why: Foreign::Owner { uid: 12345 }, .. }), "{error}");
    drop(entry);
}

#[test]
fn events_without_a_ledger_go_with_an_empty_one() {
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    let copy = fs::read(path(&dir)).unwrap();
    drop(entry);
    for bytes in [&copy[..], &[]] {
        fs::write(path(&dir), bytes).unwrap();
        fs::set_permissions(path(&dir), fs::Permissions::from_mode(0o600)).unwrap();
        assert!(open(&dir).remove_if_empty(soon()).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

/// SIGKILL at any instruction, many times: what is left is read without harm, and the next writer goes on.
#[test]
fn killed_writers_leave_nothing_torn() {
    let (_folder, dir) = folder();
    let survivor = open(&dir).register(soon(), spec("survivor")).unwrap();
    let mut reader = reader(&dir);
    let (mut last, mut died) = (0, 0);
    for round in 0..40 {
        let mut worker = Worker::start(&dir, "tell");
        worker.expect("ready");
        // A moment that differs from round to round, in steps shorter than an update.
        let until = Instant::now() + Duration::from_micros(500 + round * 37);
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        worker.kill();
        survivor.update(soon(), |view, _| view.reap(tidekv_shm::now_ms())).unwrap();
        tell(survivor.ledger(), round);
        let batch = reader.read().unwrap();
        for event in &batch.events {
            assert_eq!(event.sequence, last + 1, "no number is left out, none given out twice");
            last = event.sequence;
        }
        assert_eq!((batch.skipped, batch.overwritten), (0, 0));
        died += batch.events.iter().filter(|event| event.kind == EventKind::Died).count();
        let end = batch.events.last().unwrap();
        assert_eq!((end.kind, end.bytes), (EventKind::Granted, Bytes(round)), "the next writer goes on");
    }
    assert_eq!(died, 40);
    drop(survivor);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn two_processes_at_once_get_numbers_of_their_own() {
    const EACH: usize = 1500;
    let (_folder, dir) = folder();
    let keep = open(&dir).register(soon(), spec("keep")).unwrap();
    let mut reader = reader(&dir);
    reader.read().unwrap();
    let mut workers = [Worker::start(&dir, "count"), Worker::start(&dir, "count")];
    workers.iter_mut().for_each(|worker| worker.expect("ready"));
    workers.iter_mut().for_each(|worker| worker.tell(&EACH.to_string()));
    let mut events = Vec::new();
    let watch = EventsWatch::new(&dir).unwrap();
    watch.add(&path(&dir)).unwrap();
    // Reads along without a lock, while they write.
    while events.iter().filter(|event: &&Event| event.kind == EventKind::Granted).count() < 2 * EACH {
        let batch = reader.read().unwrap();
        assert_eq!((batch.overwritten, batch.skipped), (0, 0), "nothing is missed, nothing torn");
        events.extend(batch.events);
        let mut fds = [PollFd::new(&watch, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 })).unwrap();
        watch.drain().unwrap();
    }
    workers.iter_mut().for_each(|worker| worker.expect("done"));
    assert!(events.iter().zip(&events[1..]).all(|(a, b)| a.sequence + 1 == b.sequence), "without a gap or a repeat");
    drop(workers);
    drop(keep);
}

#[test]
fn a_watch_wakes_for_events_and_for_new_files() {
    let (_folder, dir) = folder();
    let watch = EventsWatch::new(&dir).unwrap();
    let wakes = || {
        let mut fds = [PollFd::from_borrowed_fd(watch.as_fd(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::try_from(PATIENCE).unwrap())).unwrap() == 1 && watch.drain().unwrap()
    };
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    assert!(wakes(), "a new file");
    assert!(watch.add(&path(&dir)).unwrap());
    while watch.drain().unwrap() {}
    tell(entry.ledger(), 1);
    assert!(wakes(), "an event");
    drop(entry);
    assert!(wakes(), "the end of the file");
    assert!(!watch.add(&path(&dir)).unwrap(), "there is nothing to watch");
}

/// Run by hand: `cargo test --release -p tidekv-shm --test events -- --ignored --nocapture cost`
#[test]
#[ignore = "a measurement"]
fn cost_of_an_event() {
    const ROUNDS: u32 = 50_000;
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let dir = RuntimeDir::at(folder.path());
    for pools in [1, 10] {
        let entries: Vec<_> = (0..pools).map(|_| open(&dir).register(soon(), spec("pool")).unwrap()).collect();
        let run = |noted: bool| {
            let ledger = entries[0].ledger();
            let started = Instant::now();
            for round in 0..ROUNDS {
                let change = |view: &mut LedgerView| {
                    view.entries[0].reserved = Bytes(u64::from(round));
                    if noted {
                        view.note(0, Note::new(EventKind::Granted, Reason::Need, Bytes(1)));
                    }
                };
                ledger.update(soon(), change).unwrap();
            }
            started.elapsed() / ROUNDS
        };
        run(true);
        for _ in 0..3 {
            println!("{pools} pools: an update {:?}, with an event {:?}", run(false), run(true));
        }
    }
}
