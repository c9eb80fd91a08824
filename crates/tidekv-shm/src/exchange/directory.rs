//! The directory: one block of the arena that everybody at the exchange holds.
//!
//! ```text
//!   0      64         128    192    256                  4,352      + 8 * log          + 64 * entries
//!   | head | log head | news | room | 64 subscribers     | log ...  | entries ...      |
//!
//!   key -> home = spread(key) modulo entries;  it lies in one of the WINDOW entries from there on, round the end
//! ```
//!
//! Its sizes are read once, checked against the block, and kept here. Everything in it is an atomic, so whatever others
//! write there gives wrong answers at worst: an entry's number is checked against the table, and a handle is looked up in
//! the arena like one that came by post.

use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::bell::Bell;
use super::entry::Entry;
use super::error::ExchangeError;
use super::key::Key;
use super::log;
use crate::arena::{Arena, Block};

/// The format that this code reads and writes.
pub const VERSION: u32 = 1;
/// Subscriptions that there can be at the same time.
pub const SUBSCRIBERS: usize = 64;
/// The fewest and the most entries of a directory.
pub const MIN_ENTRIES: u32 = 64;
/// See [`MIN_ENTRIES`].
pub const MAX_ENTRIES: u32 = 1 << 16;
/// Entries that one key can be in.
pub(super) const WINDOW: u32 = 32;
/// The log is at least this long.
const MIN_LOG: u32 = 4096;

/// `TIDEEXCH`, little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"TIDEEXCH");

const _: () = assert!(MAX_ENTRIES <= log::MAX_ENTRIES && WINDOW <= MIN_ENTRIES);

/// What a subscription has in the directory.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Subscriber {
    /// A block that it holds for as long as it lives: 0, or one that is not held any more, is nobody.
    pub(super) token: AtomicU64,
    /// The position that it reads next.
    pub(super) cursor: AtomicU64,
    unused: [AtomicU64; 6],
}

/// The part before the tables.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Front {
    magic: AtomicU64,
    version: AtomicU32,
    entries: AtomicU32,
    log: AtomicU32,
    subscriber_count: AtomicU32,
    unused: [AtomicU64; 5],
    /// The position that is announced next.
    pub(super) log_head: AtomicU64,
    unused_too: [AtomicU64; 7],
    /// Rung when something was published.
    pub(super) news: Bell,
    /// Rung when somebody let go of something.
    pub(super) room: Bell,
    pub(super) subscribers: [Subscriber; SUBSCRIBERS],
}

const FRONT: usize = 4352;
const _: () = {
    assert!(size_of::<Front>() == FRONT, "the layout is a format: docs/formats/exchange.md");
    assert!(std::mem::offset_of!(Front, log_head) == 64 && std::mem::offset_of!(Front, news) == 128);
    assert!(std::mem::offset_of!(Front, room) == 192 && std::mem::offset_of!(Front, subscribers) == 256);
};

/// Where the parts of a directory are in this process.
#[derive(Debug)]
pub(super) struct Directory {
    front: NonNull<Front>,
    log: NonNull<[AtomicU64]>,
    entries: NonNull<[Entry]>,
}

// SAFETY: pointers to atomics in memory that is the process's, not a thread's.
unsafe impl Send for Directory {}
// SAFETY: as above.
unsafe impl Sync for Directory {}

impl Directory {
    /// Bytes of a directory with this many entries.
    pub(super) fn bytes(entries: u32) -> Result<usize, ExchangeError> {
        if !entries.is_power_of_two() || !(MIN_ENTRIES..=MAX_ENTRIES).contains(&entries) {
            return Err(ExchangeError::Config { entries });
        }
        Ok(FRONT + 8 * log_length(entries) as usize + size_of::<Entry>() * entries as usize)
    }

    /// Makes a block that is ours alone a directory.
    pub(super) fn write(block: &Block<'_>, entries: u32) -> Result<(), ExchangeError> {
        let zeros = vec![0; 64 << 10];
        for offset in (0..block.len()).step_by(zeros.len()) {
            block.copy_in(offset, &zeros[..zeros.len().min(block.len() - offset)])?;
        }
        block.copy_in(8, &VERSION.to_le_bytes())?;
        block.copy_in(12, &entries.to_le_bytes())?;
        block.copy_in(16, &log_length(entries).to_le_bytes())?;
        block.copy_in(20, &(SUBSCRIBERS as u32).to_le_bytes())?;
        block.copy_in(64, &log::FIRST.to_le_bytes())?;
        block.copy_in(0, &MAGIC.to_le_bytes())?;
        Ok(())
    }

    /// The parts of a block that somebody made a directory. The caller holds it, and keeps the arena.
    pub(super) fn find(block: &Block<'_>) -> Result<Self, ExchangeError> {
        let damaged = |what| ExchangeError::Damaged { what };
        if block.len() < FRONT {
            return Err(damaged("its directory is too short"));
        }
        let front = NonNull::new(block.as_ptr().cast::<Front>()).ok_or(damaged("it lies nowhere"))?;
        // SAFETY: the block is mapped for as long as the arena is attached, begins at a grain of at least 4 KiB, has the
        // bytes of a `Front` as was just checked, and `Front` is atomics without padding: any contents are valid.
        let head = unsafe { front.as_ref() };
        if head.magic.load(Ordering::Acquire) != MAGIC {
            return Err(damaged("its directory has another mark"));
        }
        let version = head.version.load(Ordering::Relaxed);
        if version != VERSION {
            return Err(ExchangeError::Version { found: version, ours: VERSION });
        }
        let entries = head.entries.load(Ordering::Relaxed);
        let needed = Self::bytes(entries).map_err(|_| damaged("its sizes do not fit together"))?;
        let sizes = (head.log.load(Ordering::Relaxed), head.subscriber_count.load(Ordering::Relaxed));
        if sizes != (log_length(entries), SUBSCRIBERS as u32) || needed > block.len() {
            return Err(damaged("its sizes do not fit together"));
        }
        // SAFETY: `needed` bytes are in the block, and the log begins after the front.
        let log = unsafe { front.cast::<u8>().add(FRONT) };
        // SAFETY: the same; the entries begin after the log.
        let table = unsafe { log.add(8 * log_length(entries) as usize) };
        Ok(Self {
            front,
            log: NonNull::slice_from_raw_parts(log.cast(), log_length(entries) as usize),
            entries: NonNull::slice_from_raw_parts(table.cast(), entries as usize),
        })
    }

    /// The parts, for whoever has made sure that this is the process that attached the arena.
    pub(super) fn parts(&self, _arena: &Arena) -> Parts<'_> {
        // SAFETY: `find` has checked that it lies inside a block of the arena, which is mapped as long as the arena is
        // attached; atomics may be shared with anybody.
        let front = unsafe { self.front.as_ref() };
        // SAFETY: as above.
        let log: &[AtomicU64] = unsafe { slice::from_raw_parts(self.log.as_ptr().cast(), self.log.len()) };
        // SAFETY: as above; an entry is eight atomics.
        let entries: &[Entry] = unsafe { slice::from_raw_parts(self.entries.as_ptr().cast(), self.entries.len()) };
        Parts { front, log, entries }
    }
}

/// A directory that may be touched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    pub(super) front: &'a Front,
    pub(super) log: &'a [AtomicU64],
    pub(super) entries: &'a [Entry],
}

impl<'a> Parts<'a> {
    /// The entries in which a key can be, with their places, in the order in which they are tried.
    pub(super) fn window(self, key: Key) -> impl Iterator<Item = (usize, &'a Entry)> {
        let mask = self.entries.len() - 1;
        let home = key.spread() as usize;
        (0..WINDOW as usize).map(move |step| {
            let at = home.wrapping_add(step) & mask;
            (at, &self.entries[at])
        })
    }
}

fn log_length(entries: u32) -> u32 {
    entries.max(MIN_LOG)
}
