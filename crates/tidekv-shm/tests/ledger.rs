//! A ledger's file as one process sees it: what is refused, what is replaced, who unlinks it.

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use support::{folder, open, soon, spec};
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::{DeviceName, EntryState, Foreign, Ledger, LedgerError, RuntimeDir};

fn inode(path: &Path) -> u64 {
    fs::metadata(path).expect("it is there").ino()
}

#[test]
fn a_new_ledger_is_empty_and_for_this_user_alone() {
    let (_folder, dir) = folder();
    assert!(Ledger::open_existing(&dir, &DeviceName::host()).unwrap().is_none());
    assert_eq!(Ledger::list(&dir).unwrap(), []);
    let ledger = open(&dir);
    let metadata = fs::metadata(ledger.path()).unwrap();
    assert_eq!((metadata.len(), metadata.permissions().mode() & 0o7777), (69_632, 0o600));
    let name = ledger.path().file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(name, format!("kvcached-ledger-{}-host", metadata.uid()));
    let view = ledger.read().unwrap();
    assert!(view.entries.is_empty() && view.torn.is_empty());
    assert_eq!(Ledger::list(&dir).unwrap(), [DeviceName::host()]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn an_update_is_seen_by_others_and_counts_only_when_it_changes_something() {
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    let other = Ledger::open_existing(&dir, &DeviceName::host()).unwrap().unwrap();
    let changes = other.read().unwrap().header.changes;
    entry.update(soon(), |view, me| view.entries[me].reserved = Bytes(5)).unwrap();
    let view = other.read().unwrap();
    assert_eq!((view.header.changes, view.reserved()), (changes + 1, Bytes(5)));
    assert_eq!(entry.update(soon(), |view, me| view.entries[me].reserved).unwrap(), Bytes(5));
    other.update(soon(), |view| view.entries.len()).unwrap();
    assert_eq!(other.read().unwrap().header.changes, changes + 1, "nothing changed, nothing was written");
    other.update(soon(), |view| view.by_name_mut("pool", GroupId(0)).unwrap().limit = Bytes(77)).unwrap();
    assert_eq!(entry.read().unwrap().limit, Bytes(77));
    assert_eq!(entry.read().unwrap().pid, std::process::id());
}

#[test]
fn what_is_not_a_ledger_of_ours_is_refused_and_left_alone() {
    let (_folder, dir) = folder();
    let device = DeviceName::host();
    let path = dir.ledger_path(&device);
    let why = |expected: Foreign| {
        let (opened, existing) = (Ledger::open(&dir, &device), Ledger::open_existing(&dir, &device));
        for error in [opened.unwrap_err(), existing.unwrap_err()] {
            assert!(!error.is_transient(), "{error}");
            assert!(matches!(&error, LedgerError::NotOurs { why, .. } if *why == expected), "{error:?}");
        }
        assert!(path.symlink_metadata().is_ok(), "it is still there");
    };
    fs::write(dir.path().join("target"), []).unwrap();
    symlink(dir.path().join("target"), &path).unwrap();
    why(Foreign::NotAFile);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    why(Foreign::NotAFile);
    fs::remove_dir(&path).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    why(Foreign::NotAFile);
    fs::remove_file(&path).unwrap();
    fs::write(&path, [b'x'; 24]).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    why(Foreign::Contents);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    why(Foreign::Mode { mode: 0o640 });
    fs::remove_file(&path).unwrap();

    let ledger = open(&dir);
    for (version, newer) in [(0_u32, false), (2, true)] {
        let mut bytes = fs::read(ledger.path()).unwrap();
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        fs::write(ledger.path(), &bytes).unwrap();
        for error in [Ledger::open(&dir, &device).unwrap_err(), ledger.update(soon(), |_| ()).unwrap_err()] {
            let told = match error {
                LedgerError::OldVersion { found, ours: 1, .. } => (found, false),
                LedgerError::NewVersion { found, ours: 1, .. } => (found, true),
                other => panic!("{other:?}"),
            };
            assert_eq!(told, (version, newer));
        }
        assert_eq!(fs::read(ledger.path()).unwrap(), bytes, "another release's ledger is not touched");
    }
}

#[test]
fn another_users_file_is_refused() {
    let (_folder, dir) = folder();
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can make a file of another user");
        return;
    }
    let path = open(&dir).path().to_owned();
    std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
    let error = Ledger::open(&dir, &DeviceName::host()).unwrap_err();
    assert!(matches!(error, LedgerError::NotOurs { why: Foreign::Owner { uid: 12345 }, .. }), "{error:?}");
}

#[test]
fn the_last_pool_unlinks_and_an_opener_from_before_starts_over() {
    let (_folder, dir) = folder();
    let early = open(&dir);
    let first = open(&dir).register(soon(), spec("first")).unwrap();
    let second = first.ledger().register(soon(), spec("second")).unwrap();
    assert_eq!((first.slot(), second.slot()), (0, 1));
    drop(first);
    assert_eq!(early.read().unwrap().entries.len(), 1);
    drop(second);
    assert!(!early.path().exists(), "the last one unlinks");
    let entry = early.register(soon(), spec("late")).unwrap();
    let found = Ledger::open_existing(&dir, &DeviceName::host()).unwrap().expect("a new file");
    assert_eq!(found.read().unwrap().entries, [entry.read().unwrap()]);
}

#[test]
fn gc_unlinks_an_empty_ledger_and_no_other() {
    let (_folder, dir) = folder();
    let ledger = open(&dir);
    let entry = ledger.register(soon(), spec("pool")).unwrap();
    assert!(!ledger.remove_if_empty(soon()).unwrap());
    drop(entry);
    let ledger = open(&dir);
    assert!(ledger.remove_if_empty(soon()).unwrap());
    assert!(!ledger.path().exists());

    let leftover = format!("{}.4711-1-0", dir.ledger_path(&DeviceName::host()).display());
    fs::write(&leftover, [0; 100]).unwrap();
    fs::set_permissions(&leftover, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(Ledger::list(&dir).unwrap(), [], "a leftover is no ledger");
    assert_eq!(Ledger::remove_leftovers(&dir).unwrap(), [Path::new(&leftover)]);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// Two living pools, two handles: both find each other again in the new file, with all they had.
fn both_move(dir: &RuntimeDir, spoil: impl Fn(&Path)) {
    let a = open(dir).register(soon(), spec("a")).expect("a slot");
    let b = open(dir).register(soon(), spec("b")).expect("a slot");
    let watch = b.ledger().watch().expect("a watch");
    a.update(soon(), |view, me| {
        (view.header.budget, view.header.explicit_budget) = (Bytes(1000), true);
        view.entries[me].reserved = Bytes(7);
    })
    .expect("an update");
    b.update(soon(), |view, me| view.entries[me].reserved = Bytes(8)).expect("an update");
    let before = a.ledger().read().expect("a view");
    while watch.wait(Duration::ZERO).expect("a watch") {}

    spoil(a.ledger().path());
    a.update(soon(), |view, me| assert_eq!(view.entries[me].reserved, Bytes(7))).expect("it starts over");
    assert!(watch.wait(support::PATIENCE).expect("a watch"), "the others are woken");
    let (header, entries) = b.update(soon(), |view, _| (view.header, view.entries.clone())).expect("it starts over");
    assert_eq!((header.budget, header.explicit_budget), (Bytes(1000), true));
    assert_eq!(entries, before.entries);
    let found = Ledger::open_existing(dir, &DeviceName::host()).expect("whole").expect("there");
    assert_eq!(found.read().expect("a view").entries, entries);
    assert_eq!(inode(a.ledger().path()), inode(found.path()));
    // The watch follows to the new file.
    while watch.wait(Duration::from_millis(20)).expect("a watch") {}
    a.update(soon(), |view, me| view.entries[me].reserved = Bytes(9)).expect("an update");
    assert!(watch.wait(support::PATIENCE).expect("a watch"));
    drop(a);
    drop(b);
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
}

#[test]
fn a_deleted_ledger_is_made_again() {
    let (_folder, dir) = folder();
    both_move(&dir, |path| fs::remove_file(path).unwrap());
}

/// It kept its link, so its pools used it on, while those that came later made and used another.
#[test]
fn a_renamed_ledger_is_made_again() {
    let (_folder, dir) = folder();
    let away = tempfile::tempdir().unwrap();
    both_move(&dir, |path| fs::rename(path, away.path().join("renamed")).unwrap());
}

#[test]
fn a_ledger_in_the_place_of_another_is_used_by_all() {
    let ((_folder, dir), (_other_folder, other_dir)) = (folder(), folder());
    let first = open(&dir).register(soon(), spec("first")).unwrap();
    let second = open(&other_dir).register(soon(), spec("second")).unwrap();
    fs::rename(second.ledger().path(), first.ledger().path()).unwrap();
    assert_eq!(first.ledger().read().unwrap().entries[0].name, "second");
    let names = first.update(soon(), |view, _| view.entries.iter().map(|entry| entry.name.clone()).collect::<Vec<_>>());
    assert_eq!(names.unwrap(), ["second", "first"]);
}

#[test]
fn a_truncated_ledger_is_made_again() {
    for length in [0, 1, 7, 8, 79, 511, 512, 4096, 4700, 69_631] {
        let (_folder, dir) = folder();
        both_move(&dir, |path| fs::File::options().write(true).open(path).unwrap().set_len(length).unwrap());
    }
}

#[test]
fn a_truncated_ledger_that_nobody_uses_is_made_again_by_whoever_opens_it() {
    for length in [0, 3, 300, 5000] {
        let (_folder, dir) = folder();
        let path = open(&dir).path().to_owned();
        fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        assert_eq!(open(&dir).read().unwrap().entries, []);
        assert_eq!(fs::metadata(&path).unwrap().len(), 69_632);
    }
}

/// Readers move to the new file by themselves, and what has a pool's old slot there may be its neighbour.
#[test]
fn a_pool_without_a_seat_in_the_new_file_finds_itself_nowhere() {
    let (_folder, dir) = folder();
    let a = open(&dir).register(soon(), spec("a")).unwrap();
    let b = open(&dir).register(soon(), spec("b")).unwrap();
    b.update(soon(), |view, me| view.entries[me].limit = Bytes(5)).unwrap();
    assert_eq!(a.index_in(&a.ledger().read().unwrap()), Some(0));
    fs::remove_file(a.ledger().path()).unwrap();
    b.update(soon(), |_, me| assert_eq!(me, 0, "it takes the first slot of the new file")).unwrap();
    let view = a.ledger().read().unwrap();
    assert_eq!(view.entries[0].name, "b");
    assert_eq!(a.index_in(&view), None);
    assert_eq!(a.read().unwrap().name, "a", "as it last was");
    a.update(soon(), |view, me| assert_eq!((me, view.entries[me].name.as_str()), (1, "a"))).unwrap();
    assert_eq!(a.index_in(&a.ledger().read().unwrap()), Some(1));
    assert_eq!(a.index_in(&view), None, "a view from before");
}

#[test]
fn a_pool_whose_entry_was_overwritten_puts_it_back() {
    use std::os::unix::fs::FileExt;
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    let other = entry.ledger().register(soon(), spec("other")).unwrap();
    entry.update(soon(), |view, me| view.entries[me].reserved = Bytes(7)).unwrap();
    let file = fs::File::options().write(true).open(entry.ledger().path()).unwrap();
    for garbage in [[0; 512], [0xff; 512]] {
        file.write_all_at(&garbage, 4096).unwrap();
        assert_eq!(entry.ledger().read().unwrap().torn.len(), usize::from(garbage[0] != 0));
        other.update(soon(), |view, _| assert!(view.by_slot(0).is_none())).unwrap();
        assert_eq!(entry.update(soon(), |view, me| view.entries[me].reserved).unwrap(), Bytes(7));
        assert!(entry.ledger().read().unwrap().torn.is_empty());
    }
}

#[test]
fn a_full_table_says_so_and_a_free_slot_is_used_again() {
    let (_folder, dir) = folder();
    let ledger = open(&dir);
    let mut entries: Vec<_> = (0..128).map(|_| ledger.register(soon(), spec("pool")).unwrap()).collect();
    let error = ledger.register(soon(), spec("pool")).unwrap_err();
    assert!(matches!(error, LedgerError::Full { slots: 128, .. }) && !error.is_transient(), "{error}");
    assert_eq!(entries.swap_remove(70).slot(), 70);
    assert_eq!(ledger.register(soon(), spec("pool")).unwrap().slot(), 70);
}

#[test]
fn threads_take_turns_and_a_panic_in_an_update_changes_nothing() {
    let (_folder, dir) = folder();
    let entry = open(&dir).register(soon(), spec("pool")).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..250 {
                    entry.update(soon(), |view, me| view.entries[me].reserved.0 += 1).unwrap();
                }
            });
        }
    });
    assert_eq!(entry.read().unwrap().reserved, Bytes(1000));
    std::thread::scope(|scope| {
        let failed = scope.spawn(|| {
            entry.update(soon(), |view, me| {
                view.entries[me].reserved = Bytes(1);
                panic!("on purpose");
            })
        });
        assert!(failed.join().is_err());
    });
    assert_eq!(entry.update(soon(), |view, me| view.entries[me].reserved).unwrap(), Bytes(1000));
}

#[test]
fn an_update_inside_an_update_is_a_timeout() {
    let (_folder, dir) = folder();
    let ledger = open(&dir);
    let wait = Duration::from_millis(20);
    let inner = ledger.update(soon(), |_| ledger.update(Instant::now() + wait, |_| ())).unwrap();
    assert!(matches!(inner, Err(LedgerError::LockTimeout { waited, .. }) if waited >= wait), "{inner:?}");
    let other = open(&dir);
    let inner = ledger.update(soon(), |_| other.update(Instant::now() + wait, |_| ())).unwrap();
    assert!(inner.unwrap_err().is_transient());
}

#[test]
fn reaping_keeps_bytes_until_somebody_says_they_are_back() {
    let (_folder, dir) = folder();
    let ledger = open(&dir);
    let entry = ledger.register(soon(), spec("pool")).unwrap();
    entry
        .update(soon(), |view, me| (view.entries[me].reserved, view.entries[me].demand) = (Bytes(7), Bytes(3)))
        .unwrap();
    ledger
        .update(soon(), |view| {
            assert_eq!(view.reap(5), Default::default(), "its owner lives");
            // An entry without an owner, as a killed process leaves it.
            let mut orphan = view.entries[0].clone();
            orphan.slot = 9;
            view.entries.push(orphan);
        })
        .unwrap();
    let view = ledger.read().unwrap();
    assert_eq!((view.is_owner_alive(entry.slot()), view.is_owner_alive(9)), (true, false));
    ledger.update(soon(), |view| assert_eq!(view.reap(5).died, [9])).unwrap();
    let orphan = ledger.read().unwrap().by_slot(9).unwrap().clone();
    assert_eq!((orphan.state, orphan.returning_since_ms), (EntryState::Returning, 5));
    assert_eq!((orphan.reserved, orphan.demand), (Bytes(7), Bytes::ZERO));
    ledger
        .update(soon(), |view| {
            assert_eq!(view.reap(6), Default::default(), "it is known, and its bytes are not back");
            view.entries[1].reserved = Bytes::ZERO;
        })
        .unwrap();
    ledger.update(soon(), |view| assert_eq!(view.reap(7).freed, [9])).unwrap();
    assert_eq!(ledger.read().unwrap().entries.len(), 1);
}
