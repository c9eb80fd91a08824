//! Every interleaving, and every reordering that the memory model allows, of the lock-free parts: `entry`, `log` and `bell`
//! with loom's atomics.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p tidekv-shm --lib --release exchange::model`

use std::sync::atomic::Ordering;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, AtomicU64};
use loom::thread;

use super::bell::{self, Atomic32};
use super::entry::{self, Entry, Record};
use super::key::{Key, Meta};
use super::log::{self, Found};

type Entries = Arc<Vec<Entry<AtomicU64>>>;

fn entries(count: usize) -> Entries {
    Arc::new((0..count).map(|_| std::array::from_fn(|_| AtomicU64::new(0))).collect())
}

/// A record all of whose words follow from its handle.
fn record(handle: u64) -> Record {
    let meta = Meta { bytes: handle, tokens: handle as u32, crc32c: Some(handle as u32), extra: handle };
    Record { handle, key: Key(u128::from(handle) << 64 | u128::from(handle)), meta }
}

/// A record is read whole or not at all, while it is written, removed and replaced by another's.
#[test]
fn records_are_never_mixed() {
    loom::model(|| {
        let entries = entries(1);
        assert!(entry::claim(&entries[0], 0, 1));
        entry::seal(&entries[0], &record(1));
        let writer = {
            let entries = Arc::clone(&entries);
            thread::spawn(move || {
                if entry::remove(&entries[0], 1) && entry::claim(&entries[0], 0, 2) {
                    entry::seal(&entries[0], &record(2));
                }
            })
        };
        if let Some(found) = entry::read(&entries[0]) {
            assert_eq!(found, record(found.handle));
        }
        writer.join().expect("no panic");
        assert_eq!(entry::read(&entries[0]), Some(record(2)));
    });
}

/// The entry of one who died unsealed is claimed by another while somebody reads it.
#[test]
fn what_the_dead_left_half_written_is_nobodys() {
    loom::model(|| {
        let entries = entries(1);
        assert!(entry::claim(&entries[0], 0, 1));
        let heir = {
            let entries = Arc::clone(&entries);
            thread::spawn(move || {
                assert!(entry::claim(&entries[0], 1, 2));
                entry::seal(&entries[0], &record(2));
            })
        };
        let found = entry::read(&entries[0]);
        assert!(found.is_none() || found == Some(record(2)), "{found:?}");
        heir.join().expect("no panic");
    });
}

/// Two take one publication: one gets it.
#[test]
fn a_publication_is_taken_once() {
    loom::model(|| {
        let entries = entries(1);
        assert!(entry::claim(&entries[0], 0, 1));
        entry::seal(&entries[0], &record(1));
        let other = {
            let entries = Arc::clone(&entries);
            thread::spawn(move || entry::remove(&entries[0], 1))
        };
        let ours = entry::remove(&entries[0], 1);
        assert!(ours ^ other.join().expect("no panic"));
    });
}

/// Two publish one key at the same moment: one of them stays.
#[test]
fn of_twins_one_stays() {
    loom::model(|| {
        let entries = entries(2);
        let publish = |entries: &Entries, at: usize, handle: u64| {
            let own = Record { key: Key(7), ..record(handle) };
            assert!(entry::claim(&entries[at], 0, handle));
            entry::seal(&entries[at], &own);
            let fence = || bell::fence(Ordering::SeqCst);
            let stays = entry::settle_twins(entries.iter().enumerate(), at, &own, fence, |_| true);
            if !stays {
                entry::remove(&entries[at], handle);
            }
        };
        let other = {
            let entries = Arc::clone(&entries);
            thread::spawn(move || publish(&entries, 1, 2))
        };
        publish(&entries, 0, 1);
        other.join().expect("no panic");
        let left: Vec<u64> = entries.iter().filter_map(entry::read).map(|record| record.handle).collect();
        assert_eq!(left, [1]);
    });
}

/// Two announce, one of whom may die before it moves the head: each has a position of its own, and there is no gap.
#[test]
fn announcements_have_no_gap() {
    loom::model(|| {
        let log: Arc<Vec<AtomicU64>> = Arc::new((0..3).map(|_| AtomicU64::new(0)).collect());
        let head = Arc::new(AtomicU64::new(log::FIRST));
        let other = {
            let (head, log) = (Arc::clone(&head), Arc::clone(&log));
            thread::spawn(move || log::append(&*head, &log, 8).expect("sound"))
        };
        let ours = log::append(&*head, &log, 7).expect("sound");
        let theirs = other.join().expect("no panic");
        assert_ne!(ours, theirs);
        assert_eq!(log::look(&*head, &log, ours), Found::Entry(7));
        assert_eq!(log::look(&*head, &log, theirs), Found::Entry(8));
        assert_eq!(ours + theirs, 2 * log::FIRST + 1);
        assert_eq!(log::look(&*head, &log, log::FIRST + 2), Found::Nothing);
    });
}

/// Whoever hears of an entry sees its record.
#[test]
fn what_is_announced_is_there() {
    loom::model(|| {
        let (entries, log) = (entries(1), Arc::new(vec![AtomicU64::new(0), AtomicU64::new(0)]));
        let head = Arc::new(AtomicU64::new(log::FIRST));
        let publisher = {
            let (entries, head, log) = (Arc::clone(&entries), Arc::clone(&head), Arc::clone(&log));
            thread::spawn(move || {
                assert!(entry::claim(&entries[0], 0, 1));
                entry::seal(&entries[0], &record(1));
                log::append(&*head, &log, 0);
            })
        };
        if log::look(&*head, &log, log::FIRST) == Found::Entry(0) {
            assert_eq!(entry::read(&entries[0]), Some(record(1)));
        }
        publisher.join().expect("no panic");
    });
}

/// One changes something and rings, the other looks for the last time: nobody sleeps through it.
#[test]
fn nobody_sleeps_through_a_change() {
    loom::model(|| {
        let words = Arc::new((AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0)));
        let changer = {
            let words = Arc::clone(&words);
            thread::spawn(move || {
                let (count, asleep, change) = &*words;
                change.store(1, Ordering::Release);
                bell::must_wake(count, asleep)
            })
        };
        let (count, asleep, change) = &*words;
        let seen = bell::announce(count, asleep);
        let saw_change = change.load(Ordering::Acquire) == 1;
        let wakes = changer.join().expect("no panic");
        let counted = Atomic32::load(count, Ordering::Acquire) != seen;
        assert!(saw_change || (wakes && counted), "asleep for good");
    });
}
