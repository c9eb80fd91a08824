//! Events files, which anybody of the same user may have damaged. Any bytes give events or an error; what is read is
//! sound enough to be shown; and damage to a whole file is noticed.
//!
//! The first byte of an input chooses what the rest is: a file's bytes, or a list of patches (two bytes of place, one
//! of length, then bytes) to a file with a few events, sealed again or not.

#![no_main]

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::events;
use tidekv_shm::{DeviceName, EntrySpec, EventKind, Ledger, LedgerView, Note, PoolName, Reason, RuntimeDir};

const RECORD: usize = 256;
const HEAD: usize = 64;
const HEADER: usize = 4096;
const CAPACITY: u64 = 4096;
/// Records that patches reach and seals mend.
const REACHED: usize = 8;

/// A whole file, made by the code that makes them.
static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let path = format!("/dev/shm/kvcached-fuzz-events-{}", std::process::id());
    let dir = RuntimeDir::at(&path);
    let device = DeviceName::host();
    let ledger = Ledger::open(&dir, &device).expect("a ledger");
    let deadline = Instant::now() + Duration::from_secs(10);
    let spec = |name| EntrySpec::new(PoolName::new(name).expect("a name"), GroupId(0), Bytes(1 << 21));
    let pools = ["a", "b"].map(|name| ledger.register(deadline, spec(name)).expect("a slot"));
    for (kind, bytes) in [(EventKind::Granted, 3), (EventKind::Refused, 4), (EventKind::Reclaimed, 5)] {
        let note = |view: &mut LedgerView| {
            view.note(0, Note { peer: Some(1), ..Note::new(kind, Reason::Need, Bytes(bytes)) });
        };
        ledger.update(deadline, note).expect("an update");
    }
    let bytes = std::fs::read(dir.events_path(&device)).expect("the events");
    drop(pools);
    std::fs::remove_dir_all(path).expect("our own folder");
    bytes
});

fuzz_target!(|data: &[u8]| {
    match data {
        [0, bytes @ ..] => look(bytes, false),
        [1, patches @ ..] => look(&patched(patches), false),
        [2, patches @ ..] => look(&sealed(patched(patches)), true),
        _ => {}
    }
});

fn patched(mut patches: &[u8]) -> Vec<u8> {
    let mut bytes = WHOLE.clone();
    while let [low, high, length, rest @ ..] = patches {
        let at = usize::from(u16::from_le_bytes([*low, *high])) % (HEADER + REACHED * RECORD);
        let (new, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        bytes[at..at + new.len()].copy_from_slice(new);
        patches = rest;
    }
    bytes
}

/// Gives the head and every record within reach the checksum that it should have, as the format's page tells.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let records = (HEADER..HEADER + (REACHED + 1) * RECORD).step_by(RECORD).map(|at| (at, RECORD));
    for (at, length) in [(0, HEAD)].into_iter().chain(records) {
        let (body, seal) = bytes[at..at + length].split_at_mut(length - 8);
        let sum = body.chunks_exact(8).fold(0xcbf2_9ce4_8422_2325_u64, |sum, word| {
            (sum ^ u64::from_le_bytes(word.try_into().expect("eight"))).wrapping_mul(0x0100_0000_01b3)
        });
        seal.copy_from_slice(&(sum ^ (sum >> 32)).to_le_bytes());
    }
    bytes
}

fn look(bytes: &[u8], is_sealed: bool) {
    let events = match events::parse(bytes) {
        Ok(events) => events,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert!(events.is_sorted_by(|a, b| a.sequence < b.sequence), "each number once, in order");
    if let (Some(first), Some(last)) = (events.first(), events.last()) {
        assert!(first.sequence > 0 && last.sequence - first.sequence < CAPACITY, "no more than the ring holds");
    }
    for event in &events {
        for pool in [&event.pool, &event.peer].into_iter().flatten() {
            assert!((1..=64).contains(&pool.name.len()) && PoolName::new(&pool.name).is_ok());
            assert!(pool.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)));
        }
        assert!(!event.kind.word().is_empty() && !event.reason.word().is_empty());
        if !is_sealed {
            assert!((1..=5).contains(&event.sequence), "damage went unnoticed: {event:?}");
        }
    }
}
