//! Ledgers, which anybody of the same user may have damaged. Any bytes give a view or an error; what is read is sound
//! enough for everything that is done with it; and damage to a whole ledger is noticed, or harmless.
//!
//! The first byte of an input chooses what the rest is: a file's bytes, or a list of patches (two bytes of place, one
//! of length, then bytes) to a ledger with three pools, sealed again or not.

#![no_main]

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use tidekv_core::share;
use tidekv_core::units::{Bytes, GroupId};
use tidekv_shm::{DeviceName, EntrySpec, Ledger, LedgerView, PoolName, RuntimeDir};

const RECORD: usize = 512;
const HEADER: usize = 4096;

/// A whole ledger, made by the code that makes them.
static WHOLE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let path = format!("/dev/shm/kvcached-fuzz-ledger-{}", std::process::id());
    let ledger = Ledger::open(&RuntimeDir::at(&path), &DeviceName::host()).expect("a ledger");
    let deadline = Instant::now() + Duration::from_secs(10);
    let name = |name| PoolName::new(name).expect("a name");
    let spec = |pool| EntrySpec { floor: Bytes(1 << 20), ..EntrySpec::new(name(pool), GroupId(0), Bytes(1 << 21)) };
    let pools = ["a", "b", "c"].map(|pool| ledger.register(deadline, spec(pool)).expect("a slot"));
    for (at, pool) in (1..).zip(&pools) {
        let change = |view: &mut LedgerView, me: usize| {
            (view.header.budget, view.entries[me].reserved) = (Bytes(1 << 30), Bytes(at << 21));
            view.entries[me].demand = Bytes(1 << 22);
        };
        pool.update(deadline, change).expect("an update");
    }
    let bytes = std::fs::read(ledger.path()).expect("the ledger");
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
        let at = usize::from(u16::from_le_bytes([*low, *high])) % (HEADER + 4 * RECORD);
        let (new, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        bytes[at..at + new.len()].copy_from_slice(new);
        patches = rest;
    }
    bytes
}

/// Gives every record in use the checksum that it should have, as the format's page tells.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    for at in [0].into_iter().chain((HEADER..HEADER + 5 * RECORD).step_by(RECORD)) {
        let (body, seal) = bytes[at..at + RECORD].split_at_mut(RECORD - 8);
        let sum = body.chunks_exact(8).fold(0xcbf2_9ce4_8422_2325_u64, |sum, word| {
            (sum ^ u64::from_le_bytes(word.try_into().expect("eight"))).wrapping_mul(0x0100_0000_01b3)
        });
        seal.copy_from_slice(&(sum ^ (sum >> 32)).to_le_bytes());
    }
    bytes
}

fn look(bytes: &[u8], is_sealed: bool) {
    let mut view = match LedgerView::parse(bytes) {
        Ok(view) => view,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert!(view.entries.is_sorted_by_key(|entry| entry.slot), "one entry to a slot");
    assert!(view.entries.len() + view.torn.len() <= 128);
    for entry in &view.entries {
        assert!(!entry.name.is_empty() && PoolName::new(&entry.name).is_ok());
        assert!(entry.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)));
        // Found again under its name, though perhaps another of the same name is.
        assert_eq!(view.by_name(&entry.name, entry.group).map(|found| &found.name), Some(&entry.name));
        assert_eq!(view.by_slot(entry.slot), Some(entry));
        if !is_sealed {
            assert!(["a", "b", "c"].contains(&entry.name.as_str()), "damage went unnoticed: {entry:?}");
        }
    }
    let claims = view.pool_claims();
    assert_eq!(claims.len(), view.entries.len());
    for me in 0..claims.len() {
        let _ = share::grantable(view.header.budget, &claims, me);
        let _ = share::owed(view.header.budget, &claims, me);
    }
    let before = view.entries.len();
    assert_eq!(view.reap(1), Default::default(), "bytes have no locks, so nobody looks dead");
    assert_eq!(view.entries.len(), before);
}
