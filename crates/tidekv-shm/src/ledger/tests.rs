//! Tests of the format: round trips, torn and truncated bytes, and what a writer leaves that is killed between any two
//! of its writes.

use proptest::prelude::*;
use tidekv_core::units::{Bytes, GroupId};

use super::format::{self, FILE_BYTES, FormatError, RECORD_BYTES, SLOTS};
use super::{
    AuthorName, BudgetAuthor, BudgetRight, BudgetSetting, Counters, EntryState, LedgerEntry, LedgerHeader, LedgerView,
};

const UID: u32 = 1000;

/// A file that says what the view says.
fn bytes_of(view: &LedgerView) -> Vec<u8> {
    let mut bytes = vec![0; FILE_BYTES];
    bytes[..RECORD_BYTES].copy_from_slice(&format::encode_header(&LedgerHeader::default(), 0, UID));
    let mut view = view.clone();
    view.header.changes = view.header.changes.wrapping_sub(1);
    for write in format::plan_writes(&bytes.clone(), &mut view, UID) {
        apply(&mut bytes, &write);
    }
    bytes
}

fn apply(bytes: &mut [u8], (at, record): &format::Write) {
    bytes[*at..*at + record.len()].copy_from_slice(record);
}

fn empty() -> LedgerView {
    format::decode_slots(&[0; FILE_BYTES], LedgerHeader::default())
}

fn entry(slot: u32, words: [u64; 19], halves: [u32; 4], name: String, live: bool) -> LedgerEntry {
    let [started, page, floor, ceiling, limit, revision, applied, reserved, in_use, idle, demand, ..] = words;
    let [.., reclaim, maps, unmaps, waits, reclaims, failures, since, trim] = words;
    let [group, pid, weight, priority] = halves;
    LedgerEntry {
        slot,
        state: if live { EntryState::Live } else { EntryState::Returning },
        name,
        group: GroupId(group),
        pid,
        started,
        page_bytes: Bytes(page),
        floor: Bytes(floor),
        ceiling: Bytes(ceiling),
        weight,
        priority: priority.cast_signed(),
        limit: Bytes(limit),
        limit_revision: revision,
        applied_revision: applied,
        reserved: Bytes(reserved >> 8),
        in_use: Bytes(in_use),
        idle: Bytes(idle),
        demand: Bytes(demand),
        reclaim: Bytes(reclaim),
        counters: Counters { maps, unmaps, waits, reclaims, failures },
        returning_since_ms: since,
        trim_request: trim,
        trim_done: trim.wrapping_sub(1),
        wish: Bytes(trim.wrapping_add(1)),
        cached: Bytes(trim.wrapping_add(2)),
        trim_cached: trim.wrapping_add(3),
    }
}

prop_compose! {
    fn any_entry(slot: u32)(
        words in any::<[u64; 19]>(),
        halves in any::<[u32; 4]>(),
        name in "[A-Za-z0-9_-]{1,76}",
        live in any::<bool>(),
    ) -> LedgerEntry {
        entry(slot, words, halves, name, live)
    }
}

prop_compose! {
    fn any_setting()(
        revision in any::<u64>(),
        utilization in 0..=1_000_000u32,
        author in proptest::option::of((any::<bool>(), any::<u32>(), "[A-Za-z0-9_-]{0,80}")),
    ) -> BudgetSetting {
        let author = author.map(|(operator, pid, name)| {
            let right = if operator { BudgetRight::Operator } else { BudgetRight::Pool };
            BudgetAuthor { right, pid, name: AuthorName::new(&name) }
        });
        BudgetSetting { revision, author, utilization }
    }
}

prop_compose! {
    fn any_header()(
        words in any::<[u64; 5]>(),
        explicit_budget in any::<bool>(),
        setting in any_setting(),
    ) -> LedgerHeader {
        let [total, non_pool, budget, refreshed_ms, changes] = words;
        let (total, non_pool, budget) = (Bytes(total), Bytes(non_pool), Bytes(budget));
        LedgerHeader { total, non_pool, budget, explicit_budget, setting, refreshed_ms, changes }
    }
}

fn any_view() -> impl Strategy<Value = LedgerView> {
    let slots = proptest::collection::btree_set(0..SLOTS, 0..6);
    let entries = slots.prop_flat_map(|slots| slots.into_iter().map(any_entry).collect::<Vec<_>>());
    (any_header(), entries).prop_map(|(header, entries)| LedgerView { header, entries, ..empty() })
}

fn small_entry() -> LedgerEntry {
    entry(3, std::array::from_fn(|at| at as u64 + 1), [1, 2, 3, 4], "pool".to_owned(), true)
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(view in any_view()) {
        let read = LedgerView::parse(&bytes_of(&view)).unwrap();
        prop_assert_eq!(read.header, view.header);
        prop_assert_eq!(read.entries, view.entries);
        prop_assert!(read.torn.is_empty());
    }

    /// Old and new contents share no more than chance gives, which is the hardest case.
    #[test]
    fn a_writer_killed_between_any_two_writes_leaves_whole_entries_and_counts_enough(
        old in any_view(),
        new in any_view(),
    ) {
        let mut bytes = bytes_of(&old);
        let (mut target, least) = (new.clone(), old.reserved().min(new.reserved()));
        let writes = format::plan_writes(&bytes.clone(), &mut target, UID);
        for write in &writes {
            apply(&mut bytes, write);
            let now = LedgerView::parse(&bytes).unwrap();
            prop_assert!(now.torn.is_empty());
            prop_assert!(now.reserved() >= least, "{} counted, {} promised", now.reserved(), least);
            for entry in &now.entries {
                prop_assert!(old.entries.contains(entry) || new.entries.contains(entry), "a mixture: {:?}", entry);
            }
        }
        let now = LedgerView::parse(&bytes).unwrap();
        prop_assert_eq!(&now.entries, &new.entries);
        prop_assert_eq!(now.header.changes, new.header.changes.wrapping_add(u64::from(!writes.is_empty())));
        // Nothing is left to write.
        let mut same = now.clone();
        prop_assert_eq!(format::plan_writes(&bytes, &mut same, UID).len(), 0);
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(noise in proptest::collection::vec(any::<u8>(), 0..2000), at in 0..FILE_BYTES) {
        prop_assert!(LedgerView::parse(&noise).is_err());
        let view = LedgerView { entries: vec![small_entry()], ..empty() };
        let mut bytes = bytes_of(&view);
        let end = FILE_BYTES.min(at + noise.len());
        bytes[at..end].copy_from_slice(&noise[..end - at]);
        let _ = LedgerView::parse(&bytes);
    }
}

#[test]
fn every_offset_of_the_documentation_holds() {
    let view = LedgerView { entries: vec![small_entry()], ..empty() };
    let bytes = bytes_of(&view);
    assert_eq!(&bytes[..8], b"TIDELEDG");
    let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!([8, 12, 16, 20, 24, 28, 72].map(half), [1, 4096, 512, 128, UID, 0, 4]);
    let slot = 4096 + 3 * 512;
    assert_eq!(word(slot), 1, "first write of the slot");
    assert_eq!([8, 12, 16, 20, 24, 28].map(|at| half(slot + at)), [1, 1, 2, 3, 4, 4]);
    let words: Vec<u64> = (32..192).step_by(8).map(|at| word(slot + at)).collect();
    let expected = [1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 18];
    assert_eq!(words, expected, "started .. trim_done");
    assert_eq!(&bytes[slot + 192..slot + 197], b"pool\0");
    assert_eq!([272, 280, 288].map(|at| word(slot + at)), [20, 21, 22], "wish, cached, trim cached");
    assert!(bytes[512..4096].iter().all(|&byte| byte == 0), "nobody decided anything");

    let author = BudgetAuthor { right: BudgetRight::Operator, pid: 7, name: AuthorName::new("kvctl") };
    let setting = BudgetSetting { revision: 3, author: Some(author), utilization: 500_000 };
    let header = LedgerHeader { budget: Bytes(9), explicit_budget: true, setting, ..LedgerHeader::default() };
    let bytes = bytes_of(&LedgerView { header, ..empty() });
    let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    assert_eq!(
        (word(512), word(536), half(28), word(48)),
        (3, 9, 1, 9),
        "revision, size, flags and budget of the head"
    );
    assert_eq!([520, 524, 528, 532].map(half), [2, 7, 500_000, 5], "right, pid, utilization, length of the name");
    assert_eq!(&bytes[544..550], b"kvctl\0");
    assert!(bytes[1024..4096].iter().all(|&byte| byte == 0));
}

#[test]
fn a_file_cut_at_any_length_is_not_complete() {
    let bytes = bytes_of(&LedgerView { entries: vec![small_entry()], ..empty() });
    for length in (0..600).chain((600..FILE_BYTES).step_by(97)).chain([FILE_BYTES - 1]) {
        assert_eq!(LedgerView::parse(&bytes[..length]).unwrap_err(), FormatError::HalfBuilt, "{length} bytes");
    }
    assert!(LedgerView::parse(&bytes).is_ok());
}

#[test]
fn a_change_of_any_bit_of_a_slot_is_seen() {
    let bytes = bytes_of(&LedgerView { entries: vec![small_entry()], ..empty() });
    let slot = format::slot_offset(3);
    for bit in 0..RECORD_BYTES * 8 {
        let mut damaged = bytes.clone();
        damaged[slot + bit / 8] ^= 1 << (bit % 8);
        let view = LedgerView::parse(&damaged).unwrap();
        assert_eq!((view.entries.len(), view.torn.as_slice()), (0, [3].as_slice()), "bit {bit}");
    }
}

/// A release that does not know the budget's record writes the head whole, and nothing behind it.
#[test]
fn an_operators_budget_survives_a_head_of_an_older_release() {
    let mut view = empty();
    view.header.total = Bytes::gib(8);
    view.header.decide_budget(Some(Bytes::mib(256)), BudgetAuthor::here(BudgetRight::Operator, "kvctl"));
    let mut bytes = bytes_of(&view);
    let older = LedgerHeader { budget: Bytes::gib(1), explicit_budget: true, ..view.header };
    bytes[..RECORD_BYTES].copy_from_slice(&format::encode_header(&older, 0, UID));
    let mut read = LedgerView::parse(&bytes).unwrap();
    assert_eq!((read.header.budget, read.header.setting), (Bytes::mib(256), view.header.setting));
    let writes = format::plan_writes(&bytes, &mut read, UID);
    assert_eq!(writes.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [0], "the next update puts the head right");
    apply(&mut bytes, &writes[0]);
    assert_eq!(u64::from_le_bytes(bytes[48..56].try_into().unwrap()), Bytes::mib(256).0);
    // A record that is damaged says nothing, and is written anew.
    bytes[600] ^= 1;
    let mut read = LedgerView::parse(&bytes).unwrap();
    assert_eq!((read.header.budget, read.header.setting), (Bytes::mib(256), BudgetSetting::default()));
    assert_eq!(format::plan_writes(&bytes, &mut read, UID).len(), 2);
}

#[test]
fn half_of_a_write_is_torn() {
    let old = LedgerView { entries: vec![small_entry()], ..empty() };
    let mut new = old.clone();
    new.entries[0].reserved = Bytes(77);
    new.entries[0].trim_done = 99;
    let (before, after) = (bytes_of(&old), bytes_of(&new));
    let slot = format::slot_offset(3);
    let mut torn = before.clone();
    torn[slot..slot + 120].copy_from_slice(&after[slot..slot + 120]);
    assert_eq!(LedgerView::parse(&torn).unwrap().torn, [3]);
    // Under the lock a damaged slot keeps its place until somebody says what becomes of it.
    let mut view = LedgerView::parse(&torn).unwrap();
    assert!(format::plan_writes(&torn, &mut view, UID).is_empty());
    view.torn.clear();
    assert_eq!(format::plan_writes(&torn, &mut view, UID).len(), 2, "the slot is freed, and the head counts it");
}

#[test]
fn other_versions_and_other_files_are_told_apart() {
    let bytes = bytes_of(&empty());
    let with = |at: usize, new: &[u8]| {
        let mut bytes = bytes.clone();
        bytes[at..at + new.len()].copy_from_slice(new);
        LedgerView::parse(&bytes).unwrap_err()
    };
    assert_eq!(with(8, &[0]), FormatError::OldVersion { found: 0 });
    assert_eq!(with(8, &[2]), FormatError::NewVersion { found: 2 });
    assert_eq!(with(0, b"TIDELEDX"), FormatError::NotALedger);
    assert_eq!(with(0, &[0; 8]), FormatError::HalfBuilt);
    assert_eq!(with(20, &[64]), FormatError::NotALedger, "another number of slots");
    assert_eq!(with(40, &[1]), FormatError::HalfBuilt, "a head that is damaged or in the middle of a write");
    assert_eq!(LedgerView::parse(b"\x7fELF").unwrap_err(), FormatError::NotALedger);
}

#[test]
fn names_that_nobody_of_us_writes_are_damage() {
    for name in ["", "a/b", "tab\t", "\u{1b}[31m"] {
        let mut odd = small_entry();
        odd.name = name.to_owned();
        let view = LedgerView::parse(&bytes_of(&LedgerView { entries: vec![odd], ..empty() })).unwrap();
        assert_eq!(view.torn, [3], "{name:?}");
    }
}

#[test]
fn returning_pools_hold_their_bytes_and_cannot_give() {
    let mut view = LedgerView { entries: vec![small_entry(), small_entry()], ..empty() };
    (view.entries[0].reserved, view.entries[0].limit, view.entries[0].ceiling) = (Bytes(50), Bytes(70), Bytes(90));
    (view.entries[1].reserved, view.entries[1].state) = (Bytes(30), EntryState::Returning);
    let claims = view.pool_claims();
    assert_eq!((claims[0].held, claims[0].ceiling), (Bytes(50), Bytes(70)), "the lower of limit and ceiling");
    let gone = claims[1];
    assert_eq!((gone.held, gone.in_use, gone.ceiling, gone.demand), (Bytes(30), Bytes(30), Bytes(30), Bytes::ZERO));
    assert_eq!(view.reserved(), Bytes(80));
    assert_eq!(view.by_name("pool", GroupId(1)).map(|entry| entry.state), Some(EntryState::Live));
}
