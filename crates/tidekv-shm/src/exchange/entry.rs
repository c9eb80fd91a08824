//! One entry of the directory: who has it, and what he says.
//!
//! ```text
//!   word   0        1         2, 3    4       5              6       7
//!        | claim  | sealed  | key   | bytes | tokens, crc  | extra | flags |        64 bytes
//! ```
//!
//! | claim | sealed | means |
//! | --- | --- | --- |
//! | 0 | - | free |
//! | h, of a block that is held | not h | being written by whoever published h |
//! | h, of a block that is held | h | published |
//! | h, of a block that is not held | - | free: its publisher died or let go |
//!
//! A handle is published once in its life, so no value of `claim` ever comes back, and the claim alone says whose the
//! other words are. Whoever claims an entry (one CAS) is the only one to write them, and stores `sealed` last. A reader
//! looks at the claim before and after: if it is the same, so is the record. Nobody has to say that he died:
//! recovery frees his block, and with that his entries.
//!
//! Ordering: every store of a record is a Release and every load an Acquire, so whoever reads a word of a later record
//! reads the later claim too. On x86 both are plain instructions.

use std::sync::atomic::{AtomicU64, Ordering};

use super::key::{Key, Meta};
use crate::arena::Atomic;

pub(super) const WORDS: usize = 8;
const CLAIM: usize = 0;
const SEALED: usize = 1;
const KEY_LOW: usize = 2;
const KEY_HIGH: usize = 3;
const BYTES: usize = 4;
const COUNTS: usize = 5;
const EXTRA: usize = 6;
const FLAGS: usize = 7;

/// The record has a checksum.
const HAS_CRC: u64 = 1;

pub(super) type Entry<A = AtomicU64> = [A; WORDS];

/// What is published: the bits of a handle, under which key, and what is said about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) handle: u64,
    pub(super) key: Key,
    pub(super) meta: Meta,
}

/// Whose the entry is: the bits of a handle, or 0.
pub(super) fn claimant<A: Atomic>(entry: &Entry<A>) -> u64 {
    entry[CLAIM].load(Ordering::Acquire)
}

/// Takes an entry that was found free with this claim.
pub(super) fn claim<A: Atomic>(entry: &Entry<A>, found: u64, handle: u64) -> bool {
    entry[CLAIM].replace(found, handle).is_ok()
}

/// Writes the record of an entry that the caller claimed for its handle.
#[expect(clippy::cast_possible_truncation, reason = "the low half of the key")]
pub(super) fn seal<A: Atomic>(entry: &Entry<A>, record: &Record) {
    let Record { handle, key: Key(key), meta } = *record;
    let flags = if meta.crc32c.is_some() { HAS_CRC } else { 0 };
    let counts = u64::from(meta.tokens) << 32 | u64::from(meta.crc32c.unwrap_or(0));
    let words = [
        (KEY_LOW, key as u64),
        (KEY_HIGH, (key >> 64) as u64),
        (BYTES, meta.bytes),
        (COUNTS, counts),
        (EXTRA, meta.extra),
        (FLAGS, flags),
        (SEALED, handle),
    ];
    for (at, word) in words {
        entry[at].store(word, Ordering::Release);
    }
}

/// What is published there, whole, or nothing. Whether the block is still held is not looked at.
#[expect(clippy::cast_possible_truncation, reason = "two halves of a word")]
pub(super) fn read<A: Atomic>(entry: &Entry<A>) -> Option<Record> {
    let handle = claimant(entry);
    let word = |at: usize| entry[at].load(Ordering::Acquire);
    if handle == 0 || word(SEALED) != handle {
        return None;
    }
    let key = Key(u128::from(word(KEY_HIGH)) << 64 | u128::from(word(KEY_LOW)));
    let (bytes, counts, extra, flags) = (word(BYTES), word(COUNTS), word(EXTRA), word(FLAGS));
    let crc32c = (flags & HAS_CRC != 0).then_some(counts as u32);
    let meta = Meta { bytes, tokens: (counts >> 32) as u32, crc32c, extra };
    // Relaxed: it cannot come before the loads above, which acquire.
    let same = entry[CLAIM].load(Ordering::Relaxed) == handle;
    same.then_some(Record { handle, key, meta })
}

/// Takes a publication away; `false` if somebody else did.
pub(super) fn remove<A: Atomic>(entry: &Entry<A>, handle: u64) -> bool {
    entry[CLAIM].replace(handle, 0).is_ok()
}

/// Leaves one publication of a key where two published it at the same moment: the one that lies first. `others` are the
/// places where the key can be, in their order, and `own` is the caller's, sealed. Says whether the caller's stays.
///
/// Each seals, then looks (`fence` in between is sequentially consistent): of two, one at least sees the other. The
/// later in order, if it sees the earlier, goes by itself; the earlier, if it sees the later, takes it away.
pub(super) fn settle_twins<'a, A: Atomic + 'a>(
    others: impl Iterator<Item = (usize, &'a Entry<A>)>,
    own: usize,
    record: &Record,
    fence: impl FnOnce(),
    is_held: impl Fn(u64) -> bool,
) -> bool {
    fence();
    let mut after_own = false;
    for (at, entry) in others {
        if at == own {
            after_own = true;
            continue;
        }
        let Some(twin) = read(entry).filter(|twin| twin.key == record.key && is_held(twin.handle)) else { continue };
        if after_own {
            remove(entry, twin.handle);
        } else {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> Entry {
        std::array::from_fn(|_| AtomicU64::new(0))
    }

    fn record(handle: u64) -> Record {
        let meta = Meta { bytes: u64::MAX, tokens: 7, crc32c: Some(u32::MAX), extra: 9 };
        Record { handle, key: Key(u128::MAX - u128::from(handle)), meta }
    }

    #[test]
    fn a_record_is_there_when_it_is_whole() {
        let entry = entry();
        assert!(claim(&entry, 0, 5) && !claim(&entry, 0, 6));
        assert_eq!(read(&entry), None, "claimed, not sealed");
        seal(&entry, &record(5));
        assert_eq!(read(&entry), Some(record(5)));
        assert!(!remove(&entry, 6) && remove(&entry, 5) && !remove(&entry, 5));
        assert_eq!(read(&entry), None);
        assert!(claim(&entry, 0, 6));
        assert_eq!(read(&entry), None, "the record of the one before is not taken for this one's");
    }

    #[test]
    fn no_checksum_is_not_a_checksum_of_zero() {
        let entry = entry();
        for crc32c in [None, Some(0)] {
            let record = Record { meta: Meta { crc32c, ..Meta::of_bytes(1) }, ..record(1) };
            seal(&entry, &record);
            claim(&entry, 0, 1);
            assert_eq!(read(&entry), Some(record));
        }
    }
}
