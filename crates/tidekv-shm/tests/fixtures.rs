//! Files that an earlier build wrote stay readable: a ledger, its events, pool segments, an arena with an exchange.
//!
//! ```text
//!   tests/fixtures/d2ae1f6/       written by the code of commit d2ae1f6, by `write_fixtures` below
//!     ledger.txt  events.txt      three pools: two whose owner was alive when the file was copied, one returning
//!     chat.txt  chat_g1.txt       the segments of the two
//!     arena.txt                   blocks of two processes, the last of which published one
//! ```
//!
//! A fixture is text: the size of the file, then each row of 32 bytes that is not all zero, after its offset. To keep the
//! files of a later build too, check that build out, run
//!
//! ```text
//!   TIDEKV_FIXTURES=crates/tidekv-shm/tests/fixtures/COMMIT cargo test -p tidekv-shm --test fixtures -- --ignored
//! ```
//!
//! and read the new folder by the same tests.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod support;

use std::fmt::Write;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use support::{Worker, folder, listen, open, role, say, soon, spec};
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::arena::{Arena, ArenaConfig, ArenaName, Handle, HandleError, Prefault};
use tidekv_shm::exchange::{Exchange, ExchangeConfig, Key, Meta, PublishOptions};
use tidekv_shm::{
    Counters, DeviceName, EntrySpec, EntryState, EventKind, EventReader, Ledger, LedgerView, Note, PoolName,
    PoolSegment, Reason, RuntimeDir, UNLIMITED, segment,
};

const ROW: usize = 32;
/// The builds whose files are kept.
const BUILDS: [&str; 1] = ["d2ae1f6"];
const PUBLISHED: &[u8] = b"keys and values of 16 tokens";

fn fixture(build: &str, name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(build).join(format!("{name}.txt"))
}

/// Puts a file of that build where this user's would be.
fn put(build: &str, name: &str, path: &Path) {
    let text = fs::read_to_string(fixture(build, name)).unwrap();
    let mut lines = text.lines();
    let size = lines.next().unwrap().strip_prefix("size ").unwrap().parse().unwrap();
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).unwrap();
    file.set_len(size).unwrap();
    for line in lines {
        let (offset, digits) = line.split_once(' ').unwrap();
        let row: Vec<u8> =
            (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect();
        file.write_all_at(&row, u64::from_str_radix(offset, 16).unwrap()).unwrap();
    }
}

/// The other way round.
fn keep(path: &Path, to: &Path) {
    let size = fs::metadata(path).unwrap().len();
    let mut bytes = vec![0; usize::try_from(size).unwrap()];
    File::open(path).unwrap().read_exact_at(&mut bytes, 0).unwrap();
    let mut text = format!("size {size}\n");
    for (row, offset) in bytes.chunks(ROW).zip((0..).step_by(ROW)).filter(|(row, _)| row.iter().any(|&byte| byte != 0))
    {
        write!(text, "{offset:06x} ").unwrap();
        row.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
        text.push('\n');
    }
    fs::write(to, text).unwrap();
}

fn arena_name() -> ArenaName {
    ArenaName::new("kept").unwrap()
}

fn segments(dir: &RuntimeDir) -> [(&'static str, PathBuf); 2] {
    ["chat", "chat_g1"].map(|name| (name, dir.path().join(name)))
}

/// A pool that dies without a word.
#[test]
fn worker() {
    let Some((role, dir)) = role() else { return };
    assert_eq!(role, "hold 64 MiB");
    let entry = open(&dir).register(soon(), spec("gone")).unwrap();
    entry.update(soon(), |view, me| view.entries[me].reserved = Bytes::mib(64)).unwrap();
    say("held");
    listen();
}

fn write_ledger(dir: &RuntimeDir, to: &Path) {
    let chat = PoolName::new("chat").unwrap();
    let terms = EntrySpec {
        floor: Bytes::mib(20),
        ceiling: Bytes::mib(900),
        weight: 3,
        priority: -2,
        limit: Bytes::mib(800),
        ..EntrySpec::new(chat.clone(), GroupId(0), Bytes::mib(2))
    };
    let first = open(dir).register(soon(), terms).unwrap();
    let second = open(dir).register(soon(), EntrySpec::new(chat.clone(), GroupId(1), Bytes::mib(4))).unwrap();
    let between = open(dir).register(soon(), spec("left")).unwrap();
    let mut gone = Worker::start(dir, "hold 64 MiB");
    gone.expect("held");
    gone.kill();
    drop(between);
    let words = |view: &mut LedgerView, me: usize| {
        view.header.total = Bytes::gib(8);
        view.header.non_pool = Bytes::mib(500);
        view.header.budget = Bytes::gib(1);
        view.header.explicit_budget = true;
        view.header.refreshed_ms = 77;
        let entry = &mut view.entries[me];
        (entry.limit_revision, entry.applied_revision) = (5, 4);
        (entry.reserved, entry.in_use, entry.idle) = (Bytes::mib(300), Bytes::mib(280), Bytes::mib(20));
        (entry.demand, entry.reclaim, entry.wish) = (Bytes::mib(10), Bytes::mib(6), Bytes::mib(12));
        entry.counters = Counters { maps: 1, unmaps: 2, waits: 3, reclaims: 4, failures: 5 };
        (entry.trim_request, entry.trim_done) = (9, 8);
        let slot = entry.slot;
        view.note(slot, Note::new(EventKind::Granted, Reason::Need, Bytes::mib(300)));
        let asked = Note { free: Bytes::mib(2), ..Note::new(EventKind::Asked, Reason::Ahead, Bytes::mib(10)) };
        view.note(slot, asked);
        view.note(slot, Note { peer: Some(1), ..Note::new(EventKind::Refused, Reason::Held, Bytes::mib(10)) });
        view.note(slot, Note::new(EventKind::Budget, Reason::Given, Bytes::mib(500)));
    };
    first.update(soon(), words).unwrap();
    // What an operator's tool does.
    open(dir).update(soon(), |view| view.by_name_mut("chat", GroupId(1)).unwrap().trim_request = 1).unwrap();
    for (group, (_, path)) in segments(dir).iter().enumerate() {
        let name = chat.with_group(GroupId(u32::try_from(group).unwrap()));
        let segment = PoolSegment::create(dir, &name, Bytes::mib(800 + group as u64)).unwrap();
        segment.publish(Bytes::mib(280), Bytes::mib(20)).unwrap();
        keep(path, &to.join(path.file_name().unwrap()).with_extension("txt"));
    }
    keep(&dir.ledger_path(&DeviceName::host()), &to.join("ledger.txt"));
    keep(&dir.events_path(&DeviceName::host()), &to.join("events.txt"));
    drop(second);
}

fn write_arena(dir: &RuntimeDir, to: &Path) {
    let config =
        ArenaConfig { segment: Bytes::mib(1), limit: Bytes::mib(2), initial: Bytes::mib(1), ..ArenaConfig::default() };
    // The place of member 0 is free in the kept file, so that whoever attaches takes back nothing by that alone.
    let first = Arena::create(dir, &arena_name(), &config, Prefault::Off).unwrap();
    let [writer, other] = [(); 2].map(|()| Arena::attach(dir, &arena_name(), Prefault::Off).unwrap());
    let (mut local, mut others) = (writer.local().unwrap(), other.local().unwrap());
    let mut fill = |bytes: usize, text: &[u8]| -> Handle {
        let handle = local.alloc(bytes).unwrap();
        writer.block(handle).unwrap().copy_in(0, text).unwrap();
        handle
    };
    let (_alone, shared, freed, published) =
        (fill(5000, b"alone"), fill(4096, b"shared"), fill(4096, b""), fill(4096, PUBLISHED));
    let _large = fill(300 << 10, b"large");
    local.share(shared).unwrap();
    others.retain(shared).unwrap();
    others.free(freed).unwrap();
    let exchange = Exchange::open(&writer, &ExchangeConfig { entries: 64 }).unwrap();
    let mut publisher = exchange.publisher(PublishOptions::default());
    let bytes = PUBLISHED.len() as u64;
    let meta = Meta { bytes, tokens: 16, crc32c: Some(crc32c::crc32c(PUBLISHED)), extra: 7 };
    publisher.publish(Key::of_name("prefix"), published, meta).unwrap();
    drop(first);
    keep(writer.path(), &to.join("arena.txt"));
}

#[test]
#[ignore = "writes the fixtures of the build that it is part of into the folder TIDEKV_FIXTURES"]
fn write_fixtures() {
    let to = PathBuf::from(std::env::var_os("TIDEKV_FIXTURES").expect("TIDEKV_FIXTURES names a folder"));
    fs::create_dir_all(&to).unwrap();
    let (_folder, dir) = folder();
    write_ledger(&dir, &to);
    write_arena(&dir, &to);
}

#[test]
fn a_ledger_says_all_that_was_written() {
    for build in BUILDS {
        let (_folder, dir) = folder();
        put(build, "ledger", &dir.ledger_path(&DeviceName::host()));
        let view = Ledger::open_existing(&dir, &DeviceName::host()).unwrap().unwrap().read().unwrap();
        let header = view.header;
        assert_eq!((header.total, header.non_pool, header.budget), (Bytes::gib(8), Bytes::mib(500), Bytes::gib(1)));
        assert_eq!((header.explicit_budget, header.refreshed_ms), (true, 77));
        assert!(header.changes > 5 && view.torn.is_empty());
        let pools: Vec<_> =
            view.entries.iter().map(|pool| (pool.slot, pool.name.as_str(), pool.group, pool.state)).collect();
        let (live, returning) = (EntryState::Live, EntryState::Returning);
        let expected =
            [(0, "chat", GroupId(0), live), (1, "chat", GroupId(1), live), (3, "gone", GroupId(0), returning)];
        assert_eq!(pools, expected);

        let [chat, second, gone] = &view.entries[..] else { unreachable!() };
        assert!(chat.pid > 0 && chat.started > 0);
        assert_eq!((chat.page_bytes, chat.floor, chat.ceiling), (Bytes::mib(2), Bytes::mib(20), Bytes::mib(900)));
        assert_eq!((chat.weight, chat.priority), (3, -2));
        assert_eq!((chat.limit, chat.limit_revision, chat.applied_revision), (Bytes::mib(800), 5, 4));
        assert_eq!((chat.reserved, chat.in_use, chat.idle), (Bytes::mib(300), Bytes::mib(280), Bytes::mib(20)));
        assert_eq!((chat.demand, chat.reclaim, chat.wish), (Bytes::mib(10), Bytes::mib(6), Bytes::mib(12)));
        assert_eq!(
            (chat.cached, chat.trim_cached, chat.usage().needed),
            (Bytes::ZERO, 0, Bytes::mib(280)),
            "it did not say"
        );
        assert_eq!(chat.counters, Counters { maps: 1, unmaps: 2, waits: 3, reclaims: 4, failures: 5 });
        assert_eq!((chat.trim_request, chat.trim_done, chat.returning_since_ms), (9, 8, 0));

        assert_eq!(
            (second.page_bytes, second.floor, second.weight, second.priority),
            (Bytes::mib(4), Bytes::ZERO, 1, 0)
        );
        assert_eq!((second.limit, second.ceiling, second.limit_revision), (UNLIMITED, UNLIMITED, 0));
        assert_eq!((second.reserved, second.trim_request, second.trim_done), (Bytes::ZERO, 1, 0));
        assert_eq!((gone.reserved, gone.in_use, gone.demand), (Bytes::mib(64), Bytes::ZERO, Bytes::ZERO));
        assert!(gone.returning_since_ms > 0);
    }
}

#[test]
fn a_pool_joins_a_ledger_and_its_events() {
    for build in BUILDS {
        let (_folder, dir) = folder();
        put(build, "ledger", &dir.ledger_path(&DeviceName::host()));
        put(build, "events", &dir.events_path(&DeviceName::host()));
        let pool = open(&dir).register(soon(), spec("new")).unwrap();
        let view = open(&dir).read().unwrap();
        // The owners of the kept file are gone. What they held stays counted until the device has it back.
        let pools: Vec<_> =
            view.entries.iter().map(|pool| (pool.slot, pool.name.as_str(), pool.state, pool.reserved)).collect();
        let (live, returning) = (EntryState::Live, EntryState::Returning);
        let expected = [
            (0, "chat", returning, Bytes::mib(300)),
            (1, "new", live, Bytes::ZERO),
            (3, "gone", returning, Bytes::mib(64)),
        ];
        assert_eq!(pools, expected);
        assert!(view.header.explicit_budget && view.header.budget == Bytes::gib(1));

        let batch = EventReader::open(&dir, &DeviceName::host()).unwrap().unwrap().read().unwrap();
        assert_eq!((batch.overwritten, batch.skipped), (0, 0));
        let sequences: Vec<u64> = batch.events.iter().map(|event| event.sequence).collect();
        assert_eq!(sequences, (1..).take(sequences.len()).collect::<Vec<_>>(), "the numbers go on");
        let added: Vec<_> = batch.events.iter().rev().take_while(|event| event.kind != EventKind::TrimAsked).collect();
        let died = added.iter().filter(|event| event.kind == EventKind::Died).count();
        assert_eq!((died, added[0].kind), (2, EventKind::Joined), "{added:#?}");
        drop(pool);
    }
}

#[test]
fn events_say_all_that_was_written() {
    for build in BUILDS {
        let (_folder, dir) = folder();
        put(build, "events", &dir.events_path(&DeviceName::host()));
        let batch = EventReader::open(&dir, &DeviceName::host()).unwrap().unwrap().read().unwrap();
        assert_eq!((batch.overwritten, batch.skipped), (0, 0));
        let told: Vec<_> = batch
            .events
            .iter()
            .map(|event| {
                let name = event.pool.as_ref().map(|pool| (pool.name.as_str(), pool.group.0));
                (name, event.kind, event.reason, event.bytes)
            })
            .collect();
        let (chat, second) = (Some(("chat", 0)), Some(("chat", 1)));
        let expected = [
            (chat, EventKind::Joined, Reason::None, Bytes::mib(20)),
            (second, EventKind::Joined, Reason::None, Bytes::ZERO),
            (Some(("left", 0)), EventKind::Joined, Reason::None, Bytes::ZERO),
            (Some(("gone", 0)), EventKind::Joined, Reason::None, Bytes::ZERO),
            (Some(("gone", 0)), EventKind::Died, Reason::None, Bytes::mib(64)),
            (Some(("left", 0)), EventKind::Left, Reason::None, Bytes::ZERO),
            (chat, EventKind::Granted, Reason::Need, Bytes::mib(300)),
            (chat, EventKind::Asked, Reason::Ahead, Bytes::mib(10)),
            (chat, EventKind::Refused, Reason::Held, Bytes::mib(10)),
            (None, EventKind::Budget, Reason::Given, Bytes::mib(500)),
            (second, EventKind::TrimAsked, Reason::Operator, Bytes::ZERO),
        ];
        assert_eq!(told, expected, "{:#?}", batch.events);
        let refused = &batch.events[8];
        assert_eq!((refused.held, refused.demand, refused.budget), (Bytes::mib(300), Bytes::mib(10), Bytes::gib(1)));
        assert_eq!((refused.limit, refused.weight, refused.priority), (Bytes::mib(800), 3, -2));
        assert_eq!(refused.peer.as_ref().map(|peer| (peer.name.as_str(), peer.group)), Some(("chat", GroupId(1))));
        assert_eq!((refused.slot, refused.count, batch.events[7].free), (0, 1, Bytes::mib(2)));
        assert!(batch.events.iter().all(|event| event.wall_ms > 0 && event.at_ms > 0));
    }
}

#[test]
fn segments_are_read_written_and_taken_over() {
    for build in BUILDS {
        let (_folder, dir) = folder();
        for (group, (name, path)) in (0..).zip(segments(&dir)) {
            put(build, name, &path);
            let view = segment::read(&path).unwrap().unwrap();
            let bytes = [view.limit, view.used, view.prealloc].map(|word| u64::try_from(word).unwrap());
            assert_eq!(bytes.map(Bytes), [Bytes::mib(800 + group), Bytes::mib(280), Bytes::mib(20)]);
            segment::write_limit(&path, Bytes::mib(7)).unwrap();
            assert_eq!(segment::read(&path).unwrap().unwrap().used, view.used);
        }
        assert_eq!(segment::list(&dir).len(), 2);
        let pool = PoolSegment::create(&dir, &PoolName::new("chat").unwrap(), Bytes::mib(9)).unwrap();
        assert_eq!(pool.limit(), Some(Bytes::mib(9)), "its owner is gone");
    }
}

#[test]
fn an_arena_is_read_in_place_and_what_the_dead_held_comes_back() {
    for build in BUILDS {
        let (_folder, dir) = folder();
        let path = dir.path().join(format!("kvcached-arena-{}-{}", rustix::process::geteuid().as_raw(), arena_name()));
        put(build, "arena", &path);
        let report = Arena::inspect(&dir, &arena_name()).unwrap();
        assert!(report.problems.is_empty(), "{:#?}", report.problems);
        assert_eq!((report.segments, report.segment_bytes, report.limit), (2, Bytes::mib(1), Bytes::mib(2)));
        assert_eq!((report.live, report.freed), (2, 1), "alone and large; one that was freed from afar");
        assert_eq!(report.shared, 3, "shared, published, the directory");
        let members: Vec<_> = report.members.iter().map(|member| (member.member, member.alive)).collect();
        assert_eq!(members, [(1, false), (2, false)]);

        let arena = Arena::attach(&dir, &arena_name(), Prefault::Off).unwrap();
        assert_eq!((arena.member(), arena.grain()), (0, Bytes::kib(4)));
        let exchange = Exchange::open(&arena, &ExchangeConfig { entries: 64 }).unwrap();
        let bytes = PUBLISHED.len() as u64;
        let meta = Meta { bytes, tokens: 16, crc32c: Some(crc32c::crc32c(PUBLISHED)), extra: 7 };
        assert_eq!(exchange.published().unwrap(), [(Key::of_name("prefix"), meta)]);
        let borrowed = exchange.borrow(Key::of_name("prefix")).unwrap().unwrap();
        let mut found = vec![0; PUBLISHED.len()];
        borrowed.copy_out(&mut found).unwrap();
        assert_eq!((found.as_slice(), borrowed.is_intact().unwrap()), (PUBLISHED, Some(true)));

        let recovered = arena.recover().unwrap();
        assert_eq!((recovered.members, recovered.blocks), (2, 3), "what was theirs alone: alone, large, shared");
        assert_eq!(borrowed.is_intact().unwrap(), Some(true), "what is borrowed outlives its publisher");
        let handle = borrowed.handle();
        drop(borrowed);
        assert_eq!(arena.address(handle), Err(HandleError::Stale));
        drop(exchange);
        let report = arena.verify().unwrap();
        assert_eq!((report.live, report.shared, report.problems.len()), (0, 0, 0), "{report:#?}");
        let mut local = arena.local().unwrap();
        let handle = local.alloc(900 << 10).unwrap();
        local.free(handle).unwrap();
    }
}
