//! A pair of message rings in memory that two processes share: what one side sends, the other receives, in order.
//!
//! ```text
//!   creator                     memfd, sealed: it can neither shrink nor grow            other side
//!   RingEnd::create   --fd-->   | head | track 0: creator -> other | track 1: back |  <--  RingEnd::attach
//!
//!   track:  tail  (written by the sender)      position, and whether the receiver sleeps on it
//!           head  (written by the receiver)    position, and whether the sender sleeps on it
//!           data  16,384 words of 8 bytes:  [length][bytes, padded to a word] [length][...] ...
//! ```
//!
//! | file | what |
//! | --- | --- |
//! | `track` | one direction: positions, words, who must be woken. Safe code over atomics, runs under Miri |
//! | `memory` | the memory: made, sealed, checked, mapped. The only `unsafe` functions here |
//! | `spin` | how long to look before sleeping |
//! | `words` | bare futex words, to measure the ring against |
//!
//! The other side is another program that may be broken, so nothing of it is believed. Every shared word is an atomic;
//! positions that we write are kept privately and never read back; positions and lengths of the other side are checked
//! against the ring before they are used; bytes are copied out before anybody reads them. A side that scribbles over the
//! memory earns its neighbour an error, never a fault: the file is sealed against shrinking and its memory was committed
//! when it was made, so touching it cannot raise SIGBUS.
//!
//! Waiting is a futex on the position, shared between processes, and always bounded: whether the other side lives is
//! for the caller to find out between two waits (the kernel does not wake a futex whose waker was killed).

mod memory;
mod spin;
#[cfg(test)]
mod tests;
mod track;
mod words;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Timespec};

use memory::{AllAtomic, Memory};
use spin::Spin;
use track::Cursor;
pub use words::{FUTEX_WORDS, FutexWords};

/// A longer wait than this ends early, which is not worse than waking for nothing.
const LONGEST_WAIT: Duration = Duration::from_secs(60 * 60);

/// `TIDERING`, little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"TIDERING");
const VERSION: u32 = 1;

type Track = track::Track<16_384>;

/// The longest message.
pub const MESSAGE_BYTES_MAX: usize = Track::MESSAGE_BYTES_MAX;

/// Everything that the two sides share. `docs/formats/control.md` has the offsets.
#[repr(C, align(64))]
#[derive(Debug)]
struct Shared {
    magic: AtomicU64,
    version: AtomicU32,
    /// How many processes work together: a hint, written by the creator.
    parties: AtomicU32,
    unused: [AtomicU64; 6],
    /// From the creator to the other side, and back.
    tracks: [Track; 2],
}

const _: () = {
    assert!(size_of::<Shared>() == 64 + 2 * (64 + 64 + 131_072), "the layout is a format: docs/formats/control.md");
    assert!(std::mem::offset_of!(Shared, tracks) == 64);
};

// SAFETY: the fields above, those of `Cursor` (64 bytes) and of `Track` are atomics one behind the other; the sizes
// asserted here leave no room for padding.
unsafe impl AllAtomic for Shared {}

/// Why a ring cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The descriptor is something else, of another version, or could be cut short under us.
    #[error("the descriptor is not a sealed ring of this version")]
    NotARing,
    /// A position or length that no healthy other side writes.
    #[error("the ring is damaged: the other side wrote what makes no sense")]
    Damaged,
    /// A message that does not fit, however long one waits.
    #[error("a message of {bytes} bytes was to be sent, {MESSAGE_BYTES_MAX} are the most")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The ring belongs to the process that opened it.
    #[error("this ring was opened before a fork and belongs to the parent process")]
    Forked,
    /// The operating system refused a call.
    #[error("{call} failed")]
    Os {
        /// The system call.
        call: &'static str,
        /// Why.
        #[source]
        source: Errno,
    },
}

/// One side of a ring. One thread uses it at a time, which `&mut` ensures; two ends in one process are for tests.
#[derive(Debug)]
pub struct RingEnd {
    memory: Memory<Shared>,
    side: Side,
    /// Where we write next, in words.
    tail: u32,
    /// Where we read next, in words.
    head: u32,
    spin: Spin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Creator,
    Other,
}

impl RingEnd {
    /// Makes a ring for two of `parties` processes that work together, and the descriptor to pass to the other side.
    /// With few processors for so many nobody spins: it would keep the one it waits for from running.
    pub fn create(parties: u32) -> Result<(Self, OwnedFd), RingError> {
        let (memory, file) = Memory::<Shared>::create("tidekv-ring")?;
        let shared = memory.get()?;
        shared.version.store(VERSION, Ordering::Relaxed);
        shared.parties.store(parties, Ordering::Relaxed);
        shared.magic.store(MAGIC, Ordering::Release);
        Ok((Self::new(memory, Side::Creator, parties), file))
    }

    /// The other side of a ring that somebody made. The descriptor may be closed afterwards.
    pub fn attach(file: &OwnedFd) -> Result<Self, RingError> {
        let memory = Memory::<Shared>::attach(file)?;
        let shared = memory.get()?;
        let is_ring =
            shared.magic.load(Ordering::Acquire) == MAGIC && shared.version.load(Ordering::Relaxed) == VERSION;
        if !is_ring {
            return Err(RingError::NotARing);
        }
        let parties = shared.parties.load(Ordering::Relaxed);
        Ok(Self::new(memory, Side::Other, parties))
    }

    fn new(memory: Memory<Shared>, side: Side, parties: u32) -> Self {
        Self { memory, side, tail: 0, head: 0, spin: Spin::new(parties) }
    }

    /// Sends a message whole; `false` if there is no room for it now.
    pub fn send(&mut self, message: &[u8]) -> Result<bool, RingError> {
        let [out, _] = tracks(&self.memory, self.side)?;
        let Some(tail) = out.push(self.tail, message)? else { return Ok(false) };
        wake_sleeper(&out.tail);
        self.tail = tail;
        Ok(true)
    }

    /// Replaces `message` by the next one that came; `false` if none is there.
    pub fn receive(&mut self, message: &mut Vec<u8>) -> Result<bool, RingError> {
        let [_, inward] = tracks(&self.memory, self.side)?;
        let Some(head) = inward.pop(self.head, message)? else { return Ok(false) };
        wake_sleeper(&inward.head);
        self.head = head;
        Ok(true)
    }

    /// Waits until a message is there, or the time is over, or something woke us for nothing.
    pub fn wait_message(&mut self, timeout: Duration) -> Result<(), RingError> {
        let [_, inward] = tracks(&self.memory, self.side)?;
        let cursor = &inward.tail;
        if self.spin.until(|| cursor.position() != self.head) {
            return Ok(());
        }
        sleep(cursor, self.head, timeout)
    }

    /// Waits until there is room for a message of this length, or the time is over, or something woke us for nothing.
    pub fn wait_room(&mut self, bytes: usize, timeout: Duration) -> Result<(), RingError> {
        let [out, _] = tracks(&self.memory, self.side)?;
        match out.full_at(self.tail, bytes)? {
            Some(head) => sleep(&out.head, head, timeout),
            None => Ok(()),
        }
    }
}

impl Drop for RingEnd {
    /// Whoever sleeps on this ring should look around: there is nobody to wake it any more.
    fn drop(&mut self) {
        if let Ok([out, inward]) = tracks(&self.memory, self.side) {
            wake_sleeper(&out.tail);
            wake_sleeper(&inward.head);
        }
    }
}

/// What a side writes to, and what it reads from.
fn tracks(memory: &Memory<Shared>, side: Side) -> Result<[&Track; 2], RingError> {
    let [first, second] = &memory.get()?.tracks;
    Ok(match side {
        Side::Creator => [first, second],
        Side::Other => [second, first],
    })
}

fn wake_sleeper(cursor: &Cursor) {
    if cursor.has_sleeper() {
        // It cannot fail on memory that is mapped; if it did, the sleeper's slice of time would end all the same.
        let _ = futex::wake(cursor.futex(), Flags::empty(), 1);
    }
}

/// Sleeps while the position is `seen`. Whoever moves it next sees the announcement, or we see the new position.
fn sleep(cursor: &Cursor, seen: u32, timeout: Duration) -> Result<(), RingError> {
    cursor.announce_sleep();
    let result = if cursor.position() == seen { futex_wait(cursor.futex(), seen, timeout) } else { Ok(()) };
    cursor.end_sleep();
    result
}

fn futex_wait(word: &AtomicU32, seen: u32, timeout: Duration) -> Result<(), RingError> {
    let timeout = Timespec::try_from(timeout.min(LONGEST_WAIT)).expect("an hour fits");
    match futex::wait(word, Flags::empty(), seen, Some(&timeout)) {
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
        Err(source) => Err(RingError::Os { call: "futex", source }),
    }
}
