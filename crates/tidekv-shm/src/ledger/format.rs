//! The bytes of a ledger file, version 1. `docs/formats/ledger.md` is this file in words.
//!
//! ```text
//!   0      512      1024         4096    4608    5120                        69632
//!   | head | budget |  zero ...   | slot 0 | slot 1 | ...            | slot 127 |
//!
//!   head:  magic, version, sizes, uid, words of the device ...  checksum        512 bytes
//!          slots used: those from there on are free, and need not even be read
//!   budget: who decided it ...                                   checksum       512 bytes, all zero where nobody did
//!   slot:  sequence, state, words and name of one pool ...      checksum        512 bytes, all zero when free
//! ```
//!
//! Numbers are little-endian. Head and slots are each written by one `pwrite` that stays inside a page, which the
//! kernel carries out whole or not at all even if the writer is killed in it; so under the lock they are always whole.
//! A reader without the lock can see half of such a write, and the checksum tells it so.
//!
//! Pure: bytes in, values out. Any bytes give a view or an error, never a panic.

use super::budget::{AuthorName, BudgetAuthor, BudgetRight, BudgetSetting};
use super::view::{Counters, EntryState, LedgerEntry, LedgerHeader, LedgerView, UNLIMITED};
use crate::checksum::checksum;
use crate::names::{GROUPED_NAME_MAX, is_name_byte};
use tidekv_core::units::{Bytes, GroupId};

/// First eight bytes of every ledger.
pub(super) const MAGIC: [u8; 8] = *b"TIDELEDG";
/// The format that this release reads and writes.
pub(super) const VERSION: u32 = 1;
/// Where slot 0 begins.
pub(super) const HEADER_BYTES: usize = 4096;
/// Head and slots are written in units of this.
pub(super) const RECORD_BYTES: usize = 512;
/// How many pools a device can have.
pub(super) const SLOTS: u32 = 128;
/// The whole file.
pub(super) const FILE_BYTES: usize = HEADER_BYTES + SLOTS as usize * RECORD_BYTES;
/// Byte whose lock is the table's. Locks need no byte of the file behind them.
pub(super) const TABLE_BYTE: u64 = 0;

const NAME_BYTES: usize = 80;
const CHECKSUM_AT: usize = RECORD_BYTES - 8;

const _: () = assert!(FILE_BYTES == 69_632, "the size is part of the format");
const _: () = assert!(
    4096_usize.is_multiple_of(RECORD_BYTES) && HEADER_BYTES.is_multiple_of(4096),
    "a record never crosses a page"
);
const _: () = assert!(GROUPED_NAME_MAX <= NAME_BYTES && slot_at::NAME + NAME_BYTES <= CHECKSUM_AT);
const _: () = assert!(head_at::SLOTS_USED + 4 <= CHECKSUM_AT);
const _: () = assert!(super::budget::NAME_BYTES == NAME_BYTES && budget_at::NAME + NAME_BYTES <= CHECKSUM_AT);

/// A record of the file.
pub(super) type Record = [u8; RECORD_BYTES];

/// Where the budget's record begins. Older releases neither read nor write it.
pub(super) const BUDGET_RECORD: usize = 512;

/// A slot that nobody has.
const FREE: Record = [0; RECORD_BYTES];

/// Offsets in the head.
mod head_at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const VERSION: usize = 8;
    pub(super) const HEADER_BYTES: usize = 12;
    pub(super) const RECORD_BYTES: usize = 16;
    pub(super) const SLOTS: usize = 20;
    pub(super) const UID: usize = 24;
    pub(super) const FLAGS: usize = 28;
    pub(super) const TOTAL: usize = 32;
    pub(super) const NON_POOL: usize = 40;
    pub(super) const BUDGET: usize = 48;
    pub(super) const REFRESHED_MS: usize = 56;
    pub(super) const CHANGES: usize = 64;
    pub(super) const SLOTS_USED: usize = 72;
}

/// Offsets in the budget's record.
mod budget_at {
    pub(super) const REVISION: usize = 0;
    pub(super) const RIGHT: usize = 8;
    pub(super) const PID: usize = 12;
    pub(super) const UTILIZATION: usize = 16;
    pub(super) const NAME_LENGTH: usize = 20;
    pub(super) const SIZE: usize = 24;
    pub(super) const NAME: usize = 32;
}

const RIGHT_POOL: u32 = 1;
const RIGHT_OPERATOR: u32 = 2;

/// Bit 0 of the head's flags.
const EXPLICIT_BUDGET: u32 = 1;

/// Offsets in a slot.
mod slot_at {
    pub(super) const SEQUENCE: usize = 0;
    pub(super) const STATE: usize = 8;
    pub(super) const GROUP: usize = 12;
    pub(super) const PID: usize = 16;
    pub(super) const WEIGHT: usize = 20;
    pub(super) const PRIORITY: usize = 24;
    pub(super) const NAME_LENGTH: usize = 28;
    pub(super) const STARTED: usize = 32;
    pub(super) const PAGE_BYTES: usize = 40;
    pub(super) const FLOOR: usize = 48;
    pub(super) const CEILING: usize = 56;
    pub(super) const LIMIT: usize = 64;
    pub(super) const LIMIT_REVISION: usize = 72;
    pub(super) const APPLIED_REVISION: usize = 80;
    pub(super) const RESERVED: usize = 88;
    pub(super) const IN_USE: usize = 96;
    pub(super) const IDLE: usize = 104;
    pub(super) const DEMAND: usize = 112;
    pub(super) const RECLAIM: usize = 120;
    pub(super) const MAPS: usize = 128;
    pub(super) const UNMAPS: usize = 136;
    pub(super) const WAITS: usize = 144;
    pub(super) const RECLAIMS: usize = 152;
    pub(super) const FAILURES: usize = 160;
    pub(super) const RETURNING_SINCE_MS: usize = 168;
    pub(super) const TRIM_REQUEST: usize = 176;
    pub(super) const TRIM_DONE: usize = 184;
    pub(super) const NAME: usize = 192;
    pub(super) const WISH: usize = 272;
    pub(super) const CACHED: usize = 280;
    pub(super) const TRIM_CACHED: usize = 288;
}

const STATE_LIVE: u32 = 1;
const STATE_RETURNING: u32 = 2;

/// Why bytes are not a ledger that we can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// Too short, or without the magic that is written last.
    #[error("the ledger is not complete")]
    HalfBuilt,
    /// Something else.
    #[error("this is not a ledger")]
    NotALedger,
    /// Written by an older release.
    #[error("format {found} is older than ours ({VERSION})")]
    OldVersion {
        /// Its format.
        found: u32,
    },
    /// Written by a newer release.
    #[error("format {found} is newer than ours ({VERSION})")]
    NewVersion {
        /// Its format.
        found: u32,
    },
}

/// The byte whose lock is held by the owner of a slot. Far behind the end of the file, so that no lock on the contents
/// ever meets it.
pub(super) const fn owner_byte(slot: u32) -> u64 {
    (1 << 32) + slot as u64
}

/// Where a slot begins.
pub(super) const fn slot_offset(slot: u32) -> usize {
    HEADER_BYTES + slot as usize * RECORD_BYTES
}

/// The slot that begins at an offset; none for the head.
pub(super) fn slot_at_offset(offset: usize) -> Option<u32> {
    u32::try_from(offset.checked_sub(HEADER_BYTES)? / RECORD_BYTES).ok()
}

/// Whether a file of this length that begins with these bytes is a ledger of our version, as far as what never changes
/// tells. The rest of the head may be in the middle of a write.
pub(super) fn check(bytes: &[u8], file_bytes: u64) -> Result<(), FormatError> {
    let Some(head) = bytes.first_chunk::<RECORD_BYTES>() else {
        let foreign = !MAGIC.starts_with(&bytes[..bytes.len().min(8)]) && bytes.iter().any(|&byte| byte != 0);
        return Err(if foreign { FormatError::NotALedger } else { FormatError::HalfBuilt });
    };
    let magic = word(head, head_at::MAGIC).to_le_bytes();
    if magic == [0; 8] {
        return Err(FormatError::HalfBuilt);
    }
    if magic != MAGIC {
        return Err(FormatError::NotALedger);
    }
    match half(head, head_at::VERSION) {
        VERSION => {}
        found if found < VERSION => return Err(FormatError::OldVersion { found }),
        found => return Err(FormatError::NewVersion { found }),
    }
    let sizes = [head_at::HEADER_BYTES, head_at::RECORD_BYTES, head_at::SLOTS].map(|at| half(head, at) as usize);
    if sizes != [HEADER_BYTES, RECORD_BYTES, SLOTS as usize] {
        return Err(FormatError::NotALedger);
    }
    if file_bytes < FILE_BYTES as u64 { Err(FormatError::HalfBuilt) } else { Ok(()) }
}

/// What head and budget's record say of the device; `None` if the head is torn. A record that is torn says nothing.
pub(super) fn decode_device(bytes: &[u8]) -> Option<LedgerHeader> {
    let header = record(bytes, 0).and_then(decode_header)?;
    let Some(record) = record(bytes, BUDGET_RECORD).filter(|record| is_sealed(record)) else { return Some(header) };
    let right = match half(record, budget_at::RIGHT) {
        RIGHT_POOL => Some(BudgetRight::Pool),
        RIGHT_OPERATOR => Some(BudgetRight::Operator),
        _ => None,
    };
    let length = half(record, budget_at::NAME_LENGTH) as usize;
    let name = AuthorName::of_bytes(&record[budget_at::NAME..budget_at::NAME + length.min(NAME_BYTES)]);
    let author = right.map(|right| BudgetAuthor { right, pid: half(record, budget_at::PID), name });
    let setting = BudgetSetting {
        revision: word(record, budget_at::REVISION),
        author,
        utilization: half(record, budget_at::UTILIZATION).min(1_000_000),
    };
    let size = bytes_at(record, budget_at::SIZE);
    Some(header.with_setting(setting, (size != UNLIMITED).then_some(size)))
}

/// The budget's record, sealed; all zero where nobody decided anything.
pub(super) fn encode_setting(header: &LedgerHeader) -> Record {
    let mut record = [0; RECORD_BYTES];
    let BudgetSetting { revision, author, utilization } = header.setting;
    if header.setting == BudgetSetting::default() {
        return record;
    }
    let size = if header.explicit_budget { header.budget } else { UNLIMITED };
    put(&mut record, budget_at::REVISION, &revision.to_le_bytes());
    put(&mut record, budget_at::UTILIZATION, &utilization.to_le_bytes());
    put(&mut record, budget_at::SIZE, &size.0.to_le_bytes());
    if let Some(BudgetAuthor { right, pid, name }) = author {
        let right = match right {
            BudgetRight::Pool => RIGHT_POOL,
            BudgetRight::Operator => RIGHT_OPERATOR,
        };
        let name = name.as_str().as_bytes();
        let length = u32::try_from(name.len()).expect("at most NAME_BYTES");
        for (at, value) in [(budget_at::RIGHT, right), (budget_at::PID, pid), (budget_at::NAME_LENGTH, length)] {
            put(&mut record, at, &value.to_le_bytes());
        }
        put(&mut record, budget_at::NAME, name);
    }
    seal(&mut record);
    record
}

/// A head's words; `None` if it is torn. Without what the budget's record says: see [`decode_device`].
pub(super) fn decode_header(head: &Record) -> Option<LedgerHeader> {
    if !is_sealed(head) {
        return None;
    }
    Some(LedgerHeader {
        total: bytes_at(head, head_at::TOTAL),
        non_pool: bytes_at(head, head_at::NON_POOL),
        budget: bytes_at(head, head_at::BUDGET),
        explicit_budget: half(head, head_at::FLAGS) & EXPLICIT_BUDGET != 0,
        setting: BudgetSetting::default(),
        refreshed_ms: word(head, head_at::REFRESHED_MS),
        changes: word(head, head_at::CHANGES),
    })
}

/// How many slots have to be looked at: all, if the head does not say.
pub(super) fn slots_used(bytes: &[u8]) -> u32 {
    record(bytes, 0).filter(|head| is_sealed(head)).map_or(SLOTS, |head| half(head, head_at::SLOTS_USED).min(SLOTS))
}

/// A head, sealed.
pub(super) fn encode_header(header: &LedgerHeader, slots_used: u32, uid: u32) -> Record {
    let mut head = [0; RECORD_BYTES];
    put(&mut head, head_at::MAGIC, &MAGIC);
    put(&mut head, head_at::VERSION, &VERSION.to_le_bytes());
    for (at, size) in [(head_at::HEADER_BYTES, HEADER_BYTES), (head_at::RECORD_BYTES, RECORD_BYTES)] {
        put(&mut head, at, &u32::try_from(size).expect("at most 4096").to_le_bytes());
    }
    put(&mut head, head_at::SLOTS, &SLOTS.to_le_bytes());
    put(&mut head, head_at::UID, &uid.to_le_bytes());
    put(&mut head, head_at::FLAGS, &(if header.explicit_budget { EXPLICIT_BUDGET } else { 0 }).to_le_bytes());
    put(&mut head, head_at::TOTAL, &header.total.0.to_le_bytes());
    put(&mut head, head_at::NON_POOL, &header.non_pool.0.to_le_bytes());
    put(&mut head, head_at::BUDGET, &header.budget.0.to_le_bytes());
    put(&mut head, head_at::REFRESHED_MS, &header.refreshed_ms.to_le_bytes());
    put(&mut head, head_at::CHANGES, &header.changes.to_le_bytes());
    put(&mut head, head_at::SLOTS_USED, &slots_used.to_le_bytes());
    seal(&mut head);
    head
}

/// Bytes of a slot that make no sense.
#[derive(Debug, PartialEq)]
pub(super) struct Torn;

/// What stands in a slot.
pub(super) fn decode_slot(slot: u32, record: &Record) -> Result<Option<LedgerEntry>, Torn> {
    if is_free(record) {
        return Ok(None);
    }
    if !is_sealed(record) {
        return Err(Torn);
    }
    decode_entry(slot, record).map(Some).ok_or(Torn)
}

/// Whether nobody has this slot. Its first two words tell, so that a table is read in no time.
pub(super) fn is_free(record: &Record) -> bool {
    word(record, slot_at::SEQUENCE) == 0 && word(record, slot_at::STATE) == 0
}

/// Whether two records of a slot are of one process.
pub(super) fn same_owner(a: &Record, b: &Record) -> bool {
    let owner = |record| (half(record, slot_at::PID), word(record, slot_at::STARTED));
    owner(a) == owner(b)
}

fn decode_entry(slot: u32, record: &Record) -> Option<LedgerEntry> {
    let state = match half(record, slot_at::STATE) {
        STATE_LIVE => EntryState::Live,
        STATE_RETURNING => EntryState::Returning,
        _ => return None,
    };
    let length = half(record, slot_at::NAME_LENGTH) as usize;
    let name = record[slot_at::NAME..slot_at::NAME + NAME_BYTES].get(..length)?;
    // It ends up on terminals and in paths: what we would not have written is damage.
    if name.is_empty() || !name.iter().copied().all(is_name_byte) {
        return None;
    }
    Some(LedgerEntry {
        slot,
        state,
        name: String::from_utf8(name.to_vec()).ok()?,
        group: GroupId(half(record, slot_at::GROUP)),
        pid: half(record, slot_at::PID),
        started: word(record, slot_at::STARTED),
        page_bytes: bytes_at(record, slot_at::PAGE_BYTES),
        floor: bytes_at(record, slot_at::FLOOR),
        ceiling: bytes_at(record, slot_at::CEILING),
        weight: half(record, slot_at::WEIGHT),
        priority: half(record, slot_at::PRIORITY).cast_signed(),
        limit: bytes_at(record, slot_at::LIMIT),
        limit_revision: word(record, slot_at::LIMIT_REVISION),
        applied_revision: word(record, slot_at::APPLIED_REVISION),
        reserved: bytes_at(record, slot_at::RESERVED),
        in_use: bytes_at(record, slot_at::IN_USE),
        idle: bytes_at(record, slot_at::IDLE),
        demand: bytes_at(record, slot_at::DEMAND),
        reclaim: bytes_at(record, slot_at::RECLAIM),
        counters: Counters {
            maps: word(record, slot_at::MAPS),
            unmaps: word(record, slot_at::UNMAPS),
            waits: word(record, slot_at::WAITS),
            reclaims: word(record, slot_at::RECLAIMS),
            failures: word(record, slot_at::FAILURES),
        },
        returning_since_ms: word(record, slot_at::RETURNING_SINCE_MS),
        trim_request: word(record, slot_at::TRIM_REQUEST),
        trim_done: word(record, slot_at::TRIM_DONE),
        wish: bytes_at(record, slot_at::WISH),
        cached: bytes_at(record, slot_at::CACHED),
        trim_cached: word(record, slot_at::TRIM_CACHED),
    })
}

/// The slot's new bytes, or `None` if they say the same as the old ones.
fn encode_entry(entry: &LedgerEntry, old: &Record) -> Option<Record> {
    let mut record = [0; RECORD_BYTES];
    let state = match entry.state {
        EntryState::Live => STATE_LIVE,
        EntryState::Returning => STATE_RETURNING,
    };
    let name = &entry.name.as_bytes()[..entry.name.len().min(NAME_BYTES)];
    let name_length = u32::try_from(name.len()).expect("at most NAME_BYTES");
    for (at, value) in [
        (slot_at::STATE, state),
        (slot_at::GROUP, entry.group.0),
        (slot_at::PID, entry.pid),
        (slot_at::WEIGHT, entry.weight),
        (slot_at::PRIORITY, entry.priority.cast_unsigned()),
        (slot_at::NAME_LENGTH, name_length),
    ] {
        put(&mut record, at, &value.to_le_bytes());
    }
    for (at, value) in [
        (slot_at::STARTED, entry.started),
        (slot_at::PAGE_BYTES, entry.page_bytes.0),
        (slot_at::FLOOR, entry.floor.0),
        (slot_at::CEILING, entry.ceiling.0),
        (slot_at::LIMIT, entry.limit.0),
        (slot_at::LIMIT_REVISION, entry.limit_revision),
        (slot_at::APPLIED_REVISION, entry.applied_revision),
        (slot_at::RESERVED, entry.reserved.0),
        (slot_at::IN_USE, entry.in_use.0),
        (slot_at::IDLE, entry.idle.0),
        (slot_at::DEMAND, entry.demand.0),
        (slot_at::RECLAIM, entry.reclaim.0),
        (slot_at::MAPS, entry.counters.maps),
        (slot_at::UNMAPS, entry.counters.unmaps),
        (slot_at::WAITS, entry.counters.waits),
        (slot_at::RECLAIMS, entry.counters.reclaims),
        (slot_at::FAILURES, entry.counters.failures),
        (slot_at::RETURNING_SINCE_MS, entry.returning_since_ms),
        (slot_at::TRIM_REQUEST, entry.trim_request),
        (slot_at::TRIM_DONE, entry.trim_done),
        (slot_at::WISH, entry.wish.0),
        (slot_at::CACHED, entry.cached.0),
        (slot_at::TRIM_CACHED, entry.trim_cached),
    ] {
        put(&mut record, at, &value.to_le_bytes());
    }
    put(&mut record, slot_at::NAME, name);
    if record[slot_at::STATE..CHECKSUM_AT] == old[slot_at::STATE..CHECKSUM_AT] && is_sealed(old) {
        return None;
    }
    // Zero is a free slot's.
    let sequence = word(old, slot_at::SEQUENCE).wrapping_add(1).max(1);
    put(&mut record, slot_at::SEQUENCE, &sequence.to_le_bytes());
    seal(&mut record);
    Some(record)
}

/// One `pwrite`: where, and what.
pub(super) type Write = (usize, Record);

/// What has to be written so that a file with these bytes says what the view says, in an order that is safe to be
/// interrupted anywhere: the head if it must say that more slots are used; slots whose `reserved` grows; the other
/// slots; the budget's record; the head. The view's `changes` grows if anything is written.
pub(super) fn plan_writes(bytes: &[u8], view: &mut LedgerView, uid: u32) -> Vec<Write> {
    // Whoever changed the view may have left the entries in any order; one entry to a slot.
    view.entries.sort_by_key(|entry| entry.slot);
    view.entries.dedup_by_key(|entry| entry.slot);
    view.entries.retain(|entry| entry.slot < SLOTS);
    let used_before = slots_used(bytes);
    let used = view.entries.last().map_or(0, |entry| entry.slot + 1).max(used_before);
    let (mut growing, mut others) = (Vec::new(), Vec::new());
    let mut entries = view.entries.iter().peekable();
    for slot in 0..used {
        let at = slot_offset(slot);
        let old = record(bytes, at).filter(|_| slot < used_before).unwrap_or(&FREE);
        if let Some(entry) = entries.next_if(|entry| entry.slot == slot) {
            let Some(new) = encode_entry(entry, old) else { continue };
            let grows = is_free(old) || entry.reserved > bytes_at(old, slot_at::RESERVED);
            if grows { growing.push((at, new)) } else { others.push((at, new)) }
        } else if !is_free(old) && !view.torn.contains(&slot) {
            others.push((at, FREE));
        }
    }
    let mut writes = Vec::new();
    if used > used_before {
        writes.push((0, encode_header(&view.header, used, uid)));
    }
    writes.append(&mut growing);
    writes.append(&mut others);
    let setting = encode_setting(&view.header);
    if record(bytes, BUDGET_RECORD) != Some(&setting) {
        writes.push((BUDGET_RECORD, setting));
    }
    let head = LedgerHeader { setting: BudgetSetting::default(), ..view.header };
    if !writes.is_empty() || record(bytes, 0).and_then(decode_header) != Some(head) {
        view.header.changes = view.header.changes.wrapping_add(1);
        writes.push((0, encode_header(&view.header, used, uid)));
    }
    writes
}

/// Everything, from bytes that passed [`check`]. A head in the middle of a write is not complete.
pub(super) fn decode(bytes: &[u8]) -> Result<LedgerView, FormatError> {
    let header = decode_device(bytes).ok_or(FormatError::HalfBuilt)?;
    Ok(decode_slots(bytes, header))
}

/// The slots in use; the header is the caller's. The bytes passed [`check`] and reach as far as slots are used.
pub(super) fn decode_slots(bytes: &[u8], header: LedgerHeader) -> LedgerView {
    let mut view =
        LedgerView { header, entries: Vec::new(), torn: Vec::new(), notes: Vec::new(), file: None, generation: 0 };
    for slot in 0..slots_used(bytes) {
        match record(bytes, slot_offset(slot)).ok_or(Torn).and_then(|record| decode_slot(slot, record)) {
            Ok(entry) => view.entries.extend(entry),
            Err(Torn) => view.torn.push(slot),
        }
    }
    view
}

impl LedgerView {
    /// Reads a ledger's bytes, which may be anything. A view made this way knows nothing of locks: no owner looks dead.
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        check(bytes, bytes.len() as u64)?;
        decode(bytes)
    }
}

/// One record of the file's bytes.
pub(super) fn record(bytes: &[u8], at: usize) -> Option<&Record> {
    bytes.get(at..)?.first_chunk()
}

fn seal(record: &mut Record) {
    let sum = checksum(&record[..CHECKSUM_AT]);
    put(record, CHECKSUM_AT, &sum.to_le_bytes());
}

fn is_sealed(record: &Record) -> bool {
    word(record, CHECKSUM_AT) == checksum(&record[..CHECKSUM_AT])
}

fn put(record: &mut Record, at: usize, value: &[u8]) {
    record[at..at + value.len()].copy_from_slice(value);
}

fn word(record: &Record, at: usize) -> u64 {
    u64::from_le_bytes(record[at..at + 8].try_into().expect("eight bytes"))
}

fn half(record: &Record, at: usize) -> u32 {
    u32::from_le_bytes(record[at..at + 4].try_into().expect("four bytes"))
}

fn bytes_at(record: &Record, at: usize) -> Bytes {
    Bytes(word(record, at))
}
