//! The bytes of an events file, version 1. `docs/formats/events.md` is this file in words.
//!
//! ```text
//!   0      64           4096       4352       4608                          1052672
//!   | head |  zero ...   | record 0 | record 1 | ...              | record 4095 |
//!
//!   head:    magic, version, sizes ...                          checksum      64 bytes, written once
//!   record:  sequence, times, kind, words, two names ...        checksum     256 bytes, all zero when never used
//!
//!   event n lies in record n modulo 4096; the next one gets the number after the highest that is there
//! ```
//!
//! Numbers are little-endian. A record is written by one `pwrite` that stays inside a page, which the kernel carries out
//! whole or not at all even if the writer is killed in it. No word says where the ring ends: the numbers do, so there is
//! nothing that a killed writer could leave out of step with them. A reader can see half of a write, and the checksum
//! tells it so.
//!
//! Pure: bytes in, values out. Any bytes give events or an error, never a panic.

use tidekv_core::units::{Bytes, GroupId};

use super::event::{Event, EventKind, PoolRef, Reason};
use crate::checksum::checksum;
use crate::names::{NAME_MAX, is_name_byte};

/// First eight bytes of every events file.
pub(super) const MAGIC: [u8; 8] = *b"TIDEEVNT";
/// The format that this release reads and writes.
pub(super) const VERSION: u32 = 1;
/// Where record 0 begins.
pub(super) const HEADER_BYTES: usize = 4096;
/// One event.
pub(super) const RECORD_BYTES: usize = 256;
/// How many events are kept.
pub(super) const CAPACITY: u32 = 4096;
/// The whole file. What was never written of it takes no memory.
pub(super) const FILE_BYTES: usize = HEADER_BYTES + CAPACITY as usize * RECORD_BYTES;
/// What the head is written in.
pub(super) const HEAD_BYTES: usize = 64;

const CHECKSUM_AT: usize = RECORD_BYTES - 8;

const _: () = assert!(FILE_BYTES == 1_052_672, "the size is part of the format");
const _: () = assert!(
    4096_usize.is_multiple_of(RECORD_BYTES) && HEADER_BYTES.is_multiple_of(4096),
    "a record never crosses a page"
);
const _: () = assert!(at::PEER + NAME_MAX == CHECKSUM_AT && NAME_MAX <= u8::MAX as usize);
const _: () = assert!(head_at::CHECKSUM + 8 == HEAD_BYTES);

/// A record of the file.
pub(super) type Record = [u8; RECORD_BYTES];
/// The head.
pub(super) type Head = [u8; HEAD_BYTES];

/// Offsets in the head.
mod head_at {
    pub(super) const VERSION: usize = 8;
    pub(super) const HEADER_BYTES: usize = 12;
    pub(super) const RECORD_BYTES: usize = 16;
    pub(super) const CAPACITY: usize = 20;
    pub(super) const UID: usize = 24;
    pub(super) const CHECKSUM: usize = 56;
}

/// Offsets in a record.
mod at {
    pub(super) const SEQUENCE: usize = 0;
    pub(super) const AT_MS: usize = 8;
    pub(super) const WALL_MS: usize = 16;
    pub(super) const KIND: usize = 24;
    pub(super) const REASON: usize = 26;
    pub(super) const COUNT: usize = 28;
    pub(super) const GROUP: usize = 32;
    pub(super) const PID: usize = 36;
    pub(super) const SLOT: usize = 40;
    pub(super) const PEER_GROUP: usize = 44;
    pub(super) const NAME_LENGTH: usize = 48;
    pub(super) const PEER_LENGTH: usize = 49;
    pub(super) const BYTES: usize = 56;
    pub(super) const HELD: usize = 64;
    pub(super) const DEMAND: usize = 72;
    pub(super) const SHARE: usize = 80;
    pub(super) const BUDGET: usize = 88;
    pub(super) const LIMIT: usize = 96;
    pub(super) const FREE: usize = 104;
    pub(super) const WEIGHT: usize = 112;
    pub(super) const PRIORITY: usize = 116;
    pub(super) const NAME: usize = 120;
    pub(super) const PEER: usize = 184;
}

/// Why bytes are not events that we can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Too short, without the magic that is written last, or with a damaged head.
    #[error("the file is not complete")]
    HalfBuilt,
    /// Something else.
    #[error("these are no events")]
    NotEvents,
    /// Written by another release.
    #[error("format {found} is not ours ({VERSION})")]
    Version {
        /// Its format.
        found: u32,
    },
}

/// Where the event of this number lies.
pub(super) fn offset_of(sequence: u64) -> usize {
    let record = usize::try_from(sequence % u64::from(CAPACITY)).expect("below CAPACITY");
    HEADER_BYTES + record * RECORD_BYTES
}

/// Whether a file of this length that begins with these bytes is an events file of our version.
pub(super) fn check(bytes: &[u8], file_bytes: u64) -> Result<(), FormatError> {
    let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else {
        let foreign = !MAGIC.starts_with(&bytes[..bytes.len().min(8)]) && bytes.iter().any(|&byte| byte != 0);
        return Err(if foreign { FormatError::NotEvents } else { FormatError::HalfBuilt });
    };
    match head.first_chunk::<8>() {
        Some(&MAGIC) => {}
        Some(&[0, 0, 0, 0, 0, 0, 0, 0]) => return Err(FormatError::HalfBuilt),
        _ => return Err(FormatError::NotEvents),
    }
    let version = half(head, head_at::VERSION);
    if version != VERSION {
        return Err(FormatError::Version { found: version });
    }
    let sizes = [head_at::HEADER_BYTES, head_at::RECORD_BYTES, head_at::CAPACITY].map(|at| half(head, at) as usize);
    if sizes != [HEADER_BYTES, RECORD_BYTES, CAPACITY as usize] {
        return Err(FormatError::NotEvents);
    }
    let sealed = word(head, head_at::CHECKSUM) == checksum(&head[..head_at::CHECKSUM]);
    if file_bytes < FILE_BYTES as u64 || !sealed { Err(FormatError::HalfBuilt) } else { Ok(()) }
}

/// A head, sealed.
pub(super) fn encode_head(uid: u32) -> Head {
    let mut head = [0; HEAD_BYTES];
    put(&mut head, 0, &MAGIC);
    put(&mut head, head_at::VERSION, &VERSION.to_le_bytes());
    for (at, size) in [(head_at::HEADER_BYTES, HEADER_BYTES), (head_at::RECORD_BYTES, RECORD_BYTES)] {
        put(&mut head, at, &u32::try_from(size).expect("at most 4096").to_le_bytes());
    }
    put(&mut head, head_at::CAPACITY, &CAPACITY.to_le_bytes());
    put(&mut head, head_at::UID, &uid.to_le_bytes());
    let sum = checksum(&head[..head_at::CHECKSUM]);
    put(&mut head, head_at::CHECKSUM, &sum.to_le_bytes());
    head
}

/// A record, sealed.
pub(super) fn encode(event: &Event) -> Record {
    let mut record = [0; RECORD_BYTES];
    for (at, value) in [(at::KIND, event.kind.number()), (at::REASON, event.reason.number())] {
        put(&mut record, at, &value.to_le_bytes());
    }
    let group = |pool: &Option<PoolRef>| pool.as_ref().map_or(0, |pool| pool.group.0);
    for (at, value) in [
        (at::COUNT, event.count),
        (at::GROUP, group(&event.pool)),
        (at::PID, event.pid),
        (at::SLOT, event.slot),
        (at::PEER_GROUP, group(&event.peer)),
        (at::WEIGHT, event.weight),
        (at::PRIORITY, event.priority.cast_unsigned()),
    ] {
        put(&mut record, at, &value.to_le_bytes());
    }
    for (at, value) in [
        (at::SEQUENCE, event.sequence),
        (at::AT_MS, event.at_ms),
        (at::WALL_MS, event.wall_ms),
        (at::BYTES, event.bytes.0),
        (at::HELD, event.held.0),
        (at::DEMAND, event.demand.0),
        (at::SHARE, event.share.0),
        (at::BUDGET, event.budget.0),
        (at::LIMIT, event.limit.0),
        (at::FREE, event.free.0),
    ] {
        put(&mut record, at, &value.to_le_bytes());
    }
    for (pool, name_at, length_at) in
        [(&event.pool, at::NAME, at::NAME_LENGTH), (&event.peer, at::PEER, at::PEER_LENGTH)]
    {
        let name = pool.as_ref().map_or(&[][..], |pool| pool.name.as_bytes());
        let name = &name[..name.len().min(NAME_MAX)];
        put(&mut record, name_at, name);
        record[length_at] = u8::try_from(name.len()).expect("at most NAME_MAX");
    }
    let sum = checksum(&record[..CHECKSUM_AT]);
    put(&mut record, CHECKSUM_AT, &sum.to_le_bytes());
    record
}

/// The number of a record; nothing if it was never used, is caught in the middle of a write or is damaged.
pub(super) fn sequence(record: &Record) -> Option<u64> {
    let sequence = word(record, at::SEQUENCE);
    // No ring ever gets to 2^63: below it, numbers can be added without a care.
    let is_number = (1..1 << 63).contains(&sequence);
    (is_number && word(record, CHECKSUM_AT) == checksum(&record[..CHECKSUM_AT])).then_some(sequence)
}

/// What a record says; nothing if it has no number, or is of a kind that this release does not know.
pub(super) fn decode(record: &Record) -> Option<Event> {
    let sequence = sequence(record)?;
    let bytes = |at| Bytes(word(record, at));
    Some(Event {
        sequence,
        at_ms: word(record, at::AT_MS),
        wall_ms: word(record, at::WALL_MS),
        kind: EventKind::from_number(quarter(record, at::KIND))?,
        reason: Reason::from_number(quarter(record, at::REASON))?,
        count: half(record, at::COUNT),
        pool: pool(record, at::NAME, at::NAME_LENGTH, at::GROUP)?,
        pid: half(record, at::PID),
        slot: half(record, at::SLOT),
        bytes: bytes(at::BYTES),
        held: bytes(at::HELD),
        demand: bytes(at::DEMAND),
        share: bytes(at::SHARE),
        budget: bytes(at::BUDGET),
        limit: bytes(at::LIMIT),
        free: bytes(at::FREE),
        weight: half(record, at::WEIGHT),
        priority: half(record, at::PRIORITY).cast_signed(),
        peer: pool(record, at::PEER, at::PEER_LENGTH, at::PEER_GROUP)?,
    })
}

/// A pool's name and group; the outer nothing means damage.
fn pool(record: &Record, name_at: usize, length_at: usize, group_at: usize) -> Option<Option<PoolRef>> {
    let name = record[name_at..name_at + NAME_MAX].get(..usize::from(record[length_at]))?;
    // It ends up on terminals: what we would not have written is damage.
    if !name.iter().copied().all(is_name_byte) {
        return None;
    }
    if name.is_empty() {
        return Some(None);
    }
    let name = String::from_utf8(name.to_vec()).ok()?;
    Some(Some(PoolRef { name, group: GroupId(half(record, group_at)) }))
}

/// The records of a file's bytes and their numbers, in the order of the numbers. One that lies in another's place, or is
/// older than the ring is long, is left out.
pub(super) fn records(bytes: &[u8]) -> Vec<(u64, &Record)> {
    let slots = (0..u64::from(CAPACITY)).filter_map(|slot| Some((slot, record_at(bytes, offset_of(slot))?)));
    let numbered = slots.filter_map(|(slot, record)| Some((slot, sequence(record)?, record)));
    let in_place = numbered.filter(|(slot, sequence, _)| sequence % u64::from(CAPACITY) == *slot);
    let mut records: Vec<_> = in_place.map(|(_, sequence, record)| (sequence, record)).collect();
    records.sort_by_key(|(sequence, _)| *sequence);
    let newest = records.last().map_or(0, |(sequence, _)| *sequence);
    records.retain(|(sequence, _)| sequence + u64::from(CAPACITY) > newest);
    records
}

/// The events of a file's bytes, which may be anything; the oldest first. What cannot be read is left out.
pub fn parse(bytes: &[u8]) -> Result<Vec<Event>, FormatError> {
    check(bytes, bytes.len() as u64)?;
    Ok(records(bytes).into_iter().filter_map(|(_, record)| decode(record)).collect())
}

/// One record of bytes.
pub(super) fn record_at(bytes: &[u8], at: usize) -> Option<&Record> {
    bytes.get(at..)?.first_chunk()
}

fn put(record: &mut [u8], at: usize, value: &[u8]) {
    record[at..at + value.len()].copy_from_slice(value);
}

fn word(record: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(record[at..at + 8].try_into().expect("eight bytes"))
}

fn half(record: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(record[at..at + 4].try_into().expect("four bytes"))
}

fn quarter(record: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(record[at..at + 2].try_into().expect("two bytes"))
}
