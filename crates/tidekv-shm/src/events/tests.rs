//! Tests of the format: round trips, torn and arbitrary bytes, the ring's end.

use proptest::prelude::*;
use tidekv_core::units::{Bytes, GroupId};

use super::format::{self, CAPACITY, FILE_BYTES, FormatError, HEAD_BYTES, RECORD_BYTES};
use super::{Event, EventKind, PoolRef, Reason, parse};

const UID: u32 = 1000;

fn event(sequence: u64, kind: EventKind, reason: Reason, words: [u64; 9], halves: [u32; 5]) -> Event {
    let [at_ms, wall_ms, bytes, held, demand, share, budget, limit, free] = words;
    let [count, pid, slot, weight, priority] = halves;
    Event {
        sequence,
        at_ms,
        wall_ms,
        kind,
        reason,
        count,
        pool: None,
        pid,
        slot,
        bytes: Bytes(bytes),
        held: Bytes(held),
        demand: Bytes(demand),
        share: Bytes(share),
        budget: Bytes(budget),
        limit: Bytes(limit),
        free: Bytes(free),
        weight,
        priority: priority.cast_signed(),
        peer: None,
    }
}

fn plain(sequence: u64) -> Event {
    event(sequence, EventKind::Granted, Reason::Need, [sequence; 9], [1; 5])
}

fn any_pool() -> impl Strategy<Value = Option<PoolRef>> {
    prop::option::of(
        ("[A-Za-z0-9_-]{1,64}", any::<u32>()).prop_map(|(name, group)| PoolRef { name, group: GroupId(group) }),
    )
}

prop_compose! {
    fn any_event()(
        sequence in 1..1u64 << 63,
        kind in prop::sample::select(EventKind::ALL),
        reason in prop::sample::select(Reason::ALL),
        words in any::<[u64; 9]>(),
        halves in any::<[u32; 5]>(),
        pool in any_pool(),
        peer in any_pool(),
    ) -> Event {
        Event { pool, peer, ..event(sequence, kind, reason, words, halves) }
    }
}

/// A file whose next number is this, with the last of the ring before it.
fn file(next: u64) -> Vec<u8> {
    let mut bytes = vec![0; FILE_BYTES];
    bytes[..HEAD_BYTES].copy_from_slice(&format::encode_head(UID));
    for sequence in oldest(next)..next {
        put(&mut bytes, &plain(sequence));
    }
    bytes
}

fn oldest(next: u64) -> u64 {
    next.saturating_sub(u64::from(CAPACITY)).max(1)
}

fn put(bytes: &mut [u8], event: &Event) {
    let at = format::offset_of(event.sequence);
    bytes[at..at + RECORD_BYTES].copy_from_slice(&format::encode(event));
}

fn sequences(bytes: &[u8]) -> Vec<u64> {
    parse(bytes).unwrap().iter().map(|event| event.sequence).collect()
}

/// The page `docs/formats/events.md` says where things are.
#[test]
fn the_offsets_of_the_format_page() {
    let pool = |name: &str, group| Some(PoolRef { name: name.to_owned(), group: GroupId(group) });
    let words = [2, 3, 4, 5, 6, 7, 8, 9, 10];
    let whole = Event {
        pool: pool("qwen", 11),
        peer: pool("llama", 12),
        ..event(1, EventKind::Reclaimed, Reason::Neighbours, words, [13, 14, 15, 16, 17])
    };
    let record = format::encode(&whole);
    let word = |at: usize| u64::from_le_bytes(record[at..at + 8].try_into().unwrap());
    let half = |at: usize| u32::from_le_bytes(record[at..at + 4].try_into().unwrap());
    assert_eq!([0, 8, 16].map(word), [1, 2, 3]);
    assert_eq!((record[24], record[25], record[26], record[27]), (10, 0, 12, 0), "kind and reason");
    assert_eq!([28, 32, 36, 40, 44].map(half), [13, 11, 14, 15, 12]);
    assert_eq!((record[48], record[49], &record[50..56]), (4, 5, &[0; 6][..]));
    assert_eq!([56, 64, 72, 80, 88, 96, 104].map(word), [4, 5, 6, 7, 8, 9, 10]);
    assert_eq!([112, 116].map(half), [16, 17]);
    assert_eq!((&record[120..125], &record[184..190]), (&b"qwen\0"[..], &b"llama\0"[..]));
    let head = format::encode_head(UID);
    assert_eq!(&head[..8], b"TIDEEVNT");
    let half = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap());
    assert_eq!([8, 12, 16, 20, 24].map(half), [1, 4096, 256, 4096, UID]);
}

#[test]
fn the_ring_keeps_the_last_ones() {
    assert_eq!(sequences(&file(1)), []);
    assert_eq!(sequences(&file(4)), [1, 2, 3]);
    let capacity = u64::from(CAPACITY);
    assert_eq!(sequences(&file(capacity)).len() as u64, capacity - 1);
    for next in [capacity + 1, capacity + 700, 3 * capacity + 5] {
        assert_eq!(sequences(&file(next)), (next - capacity..next).collect::<Vec<_>>());
    }
}

#[test]
fn a_torn_record_is_left_out_and_so_is_one_that_lies_in_anothers_place() {
    let mut bytes = file(10);
    bytes[format::offset_of(5) + 60] ^= 1;
    assert_eq!(sequences(&bytes), [1, 2, 3, 4, 6, 7, 8, 9]);
    let (from, to) = (format::offset_of(7), format::offset_of(100));
    bytes.copy_within(from..from + RECORD_BYTES, to);
    assert_eq!(sequences(&bytes), [1, 2, 3, 4, 6, 7, 8, 9]);
    // A number far ahead: those that the ring cannot hold beside it are left out, and nothing overflows.
    put(&mut bytes, &plain((1 << 63) - 1));
    assert_eq!(sequences(&bytes), [(1 << 63) - 1]);
    put(&mut bytes, &plain(1 << 63));
    assert_eq!(sequences(&bytes), [(1 << 63) - 1], "no ring gets that far");
}

#[test]
fn what_is_no_events_file_says_what_it_is() {
    let whole = file(3);
    let damaged = |at: usize, byte: u8| {
        let mut bytes = whole.clone();
        bytes[at] = byte;
        parse(&bytes).unwrap_err()
    };
    assert_eq!(damaged(0, b'X'), FormatError::NotEvents);
    assert_eq!(damaged(8, 2), FormatError::Version { found: 2 });
    assert_eq!(damaged(8, 0), FormatError::Version { found: 0 });
    assert_eq!(damaged(20, 7), FormatError::NotEvents);
    assert_eq!(damaged(25, 7), FormatError::HalfBuilt, "a head that does not fit its checksum");
    for length in [0, 7, 8, 63, 64, 4096, FILE_BYTES - 1] {
        assert_eq!(parse(&whole[..length]).unwrap_err(), FormatError::HalfBuilt, "{length}");
    }
    assert_eq!(parse(&vec![0; FILE_BYTES]).unwrap_err(), FormatError::HalfBuilt);
    assert_eq!(parse(b"\x7fELF").unwrap_err(), FormatError::NotEvents);
}

#[test]
fn a_name_that_no_pool_has_is_damage() {
    let record = |name: &str| {
        let pool = Some(PoolRef { name: name.to_owned(), group: GroupId(0) });
        format::decode(&format::encode(&Event { pool, ..plain(1) }))
    };
    assert!(record("qwen").is_some());
    assert_eq!(record("\x1b[31mred"), None);
    assert_eq!(record(&"x".repeat(70)).unwrap().pool.unwrap().name.len(), 64, "longer ones are cut");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_written_is_read(event in any_event()) {
        prop_assert_eq!(format::decode(&format::encode(&event)), Some(event));
    }

    #[test]
    fn a_flipped_bit_is_noticed(event in any_event(), at in 0..RECORD_BYTES, bit in 0..8u8) {
        let mut record = format::encode(&event);
        record[at] ^= 1 << bit;
        prop_assert_eq!(format::decode(&record), None);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = parse(&bytes);
        let mut record = [0; RECORD_BYTES];
        let length = bytes.len().min(RECORD_BYTES);
        record[..length].copy_from_slice(&bytes[..length]);
        let _ = format::decode(&record);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn patched_files_give_events_of_the_ring_or_an_error(
        next in 1..20_000u64,
        patches in prop::collection::vec((0..FILE_BYTES - 300, any::<[u8; 32]>()), 0..20),
    ) {
        let mut bytes = file(next);
        for (at, patch) in patches {
            bytes[at..at + patch.len()].copy_from_slice(&patch);
        }
        if let Ok(events) = parse(&bytes) {
            prop_assert!(events.is_sorted_by(|a, b| a.sequence < b.sequence));
            prop_assert!(events.iter().all(|event| (oldest(next)..next).contains(&event.sequence)));
        }
    }
}
