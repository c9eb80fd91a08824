//! Orders and answers as bytes, version 1. `docs/formats/control.md` is this folder in words.
//!
//! ```text
//!   0      4        6     7      8      12     16        24     32        40  48  56  60  64
//!   | magic | version | kind | flags | body | word | sequence | epoch | stamp | a | b | c | d | body ...
//!
//!            word         stamp      a              b          c              d                 body
//!   order    group        settled    step or rank   stage      spare pages    evictable pages   page ids, 4 bytes each
//!   answer   owed pages   instance   wanted         grantable  firm pages     grantable pages   page ids, or a reason
//! ```
//!
//! Numbers are little-endian. The head always has 64 bytes, so that one cache line tells everything about most
//! messages; the body has as many as the head says, never more than [`FRAME_BYTES_MAX`] with it. A field that a kind
//! does not use is zero, and one that is not is an error: the day somebody gives it a meaning, old readers say so.
//!
//! Pure: bytes in, values out. Any bytes give a value or an error, never a panic, and nothing is allocated before the
//! bytes that fill it are there.

mod decode;
mod encode;
#[cfg(test)]
mod tests;

pub use decode::{decode_answer, decode_order};
pub use encode::{TooManyPages, encode_answer, encode_order};

use crate::message::{PAGES_MAX, REASON_BYTES, RefusalKind};

/// First four bytes of every frame.
pub(crate) const MAGIC: [u8; 4] = *b"TIDC";
/// The format that this release reads and writes.
pub(crate) const VERSION: u16 = 1;
/// Before the body.
pub const HEAD_BYTES: usize = 64;
/// The longest frame.
pub const FRAME_BYTES_MAX: usize = HEAD_BYTES + PAGES_MAX * PAGE_ID_BYTES;

const PAGE_ID_BYTES: usize = 4;
const _: () = assert!(REASON_BYTES <= PAGES_MAX * PAGE_ID_BYTES, "a reason fits into a frame");

/// Where the fields of a head are.
mod at {
    pub(super) const VERSION: usize = 4;
    pub(super) const KIND: usize = 6;
    pub(super) const FLAGS: usize = 7;
    pub(super) const BODY: usize = 8;
    pub(super) const WORD: usize = 12;
    pub(super) const SEQUENCE: usize = 16;
    pub(super) const EPOCH: usize = 24;
    pub(super) const STAMP: usize = 32;
    pub(super) const A: usize = 40;
    pub(super) const B: usize = 48;
    pub(super) const C: usize = 56;
    pub(super) const D: usize = 60;
}

/// What a frame is. Answers have the highest bit.
mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const MAP: u8 = 2;
    pub(super) const UNMAP: u8 = 3;
    pub(super) const ABORT: u8 = 4;
    pub(super) const HELD: u8 = 5;
    pub(super) const PING: u8 = 6;
    pub(super) const DONE: u8 = 0x81;
    pub(super) const HOLDS: u8 = 0x82;
    pub(super) const REFUSED: u8 = 0x83;
}

/// What a kind may say beside its fields.
mod flag {
    /// Of an unmap: `a` is the step to wait for.
    pub(super) const AFTER: u8 = 1;
    /// Of a hello: the descriptor of a ring comes with it.
    pub(super) const RING: u8 = 2;
    /// Of a map: nobody waits for the pages.
    pub(super) const AHEAD: u8 = 4;
}

/// Refusals by number, which stands where other kinds have their flags. Numbers are never used again for something else.
const REFUSALS: [(u8, RefusalKind); 10] = [
    (1, RefusalKind::Exhausted),
    (2, RefusalKind::Device),
    (3, RefusalKind::Ledger),
    (4, RefusalKind::Driver),
    (5, RefusalKind::BadPage),
    (6, RefusalKind::UnknownGroup),
    (7, RefusalKind::StepTimeout),
    (8, RefusalKind::Stuck),
    (9, RefusalKind::Protocol),
    (10, RefusalKind::Busy),
];

/// What the frames of a connection travel on after the greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Channel {
    /// The socket itself.
    Socket,
    /// Shared memory whose descriptor came with the greeting. The socket stays open and says who lives.
    Ring,
}

/// Bytes that are not a frame that belongs here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Something else entirely.
    #[error("these bytes do not begin like a frame")]
    Magic,
    /// Another release's.
    #[error("the frame has version {found}, this release speaks {VERSION}: both sides must be of one release")]
    Version {
        /// Its version.
        found: u16,
    },
    /// A kind that does not exist, or that the other side sends.
    #[error("the frame has kind {found}, which nobody sends in this direction")]
    Kind {
        /// Its number.
        found: u8,
    },
    /// A flag that this kind does not have.
    #[error("the flags {found:#x} do not belong to kind {kind}")]
    Flags {
        /// The frame's kind.
        kind: u8,
        /// Its flags.
        found: u8,
    },
    /// Longer than any frame is.
    #[error("the frame says that it has {bytes} bytes, {FRAME_BYTES_MAX} are the most")]
    TooLong {
        /// What it says.
        bytes: u64,
    },
    /// Less than the head promises.
    #[error("the frame has {bytes} of {wanted} bytes")]
    Truncated {
        /// How many there are.
        bytes: usize,
        /// How many there should be.
        wanted: usize,
    },
    /// More than the head promises.
    #[error("{extra} bytes follow the frame")]
    Trailing {
        /// How many.
        extra: usize,
    },
    /// A body that this kind cannot have.
    #[error("a body of {bytes} bytes does not fit kind {kind}")]
    Body {
        /// The frame's kind.
        kind: u8,
        /// The body's length.
        bytes: usize,
    },
    /// A field that this kind does not use, and that is not zero.
    #[error("the field at byte {offset} is not zero in a frame of kind {kind}")]
    Unused {
        /// The frame's kind.
        kind: u8,
        /// Where the field begins.
        offset: usize,
    },
    /// Pages held must come sorted, each once.
    #[error("the pages are not sorted, or one comes twice")]
    Unsorted,
    /// A reason for people that is not text.
    #[error("the reason is not UTF-8")]
    Reason,
    /// A number that stands for no refusal.
    #[error("{found} is no sort of refusal")]
    RefusalKind {
        /// The number.
        found: u8,
    },
    /// Orders count from 1; 0 is only ever a refusal of the whole connection.
    #[error("the sequence must not be 0 here")]
    NoSequence,
    /// An answer to an order that was never sent.
    #[error("answer {found} came, but {last} was the last order")]
    Unasked {
        /// The answer's sequence.
        found: u64,
        /// The last order's.
        last: u64,
    },
    /// So many answers in a row that came too late, or twice, that no worker can have been so far behind.
    #[error("{found} answers came that nobody waits for any more: the worker repeats itself without end")]
    Flood {
        /// How many.
        found: usize,
    },
    /// An answer that says it is from another start of the worker, on a connection that cannot survive one.
    #[error("the answer is from instance {found:#x}, the connection is to {expected:#x}")]
    Instance {
        /// Who answered.
        found: u64,
        /// Who should.
        expected: u64,
    },
    /// A greeting that promised a ring came without one, or with something that is none.
    #[error("the greeting came without a usable ring")]
    NoRing,
    /// The positions or lengths in shared memory make no sense: the other side is broken.
    #[error("the shared ring is damaged")]
    Ring,
    /// Bytes on the socket of a connection whose frames travel on a ring.
    #[error("bytes came on the socket although the ring is in use")]
    WrongChannel,
}

/// How long the frame is that these bytes begin with, as far as its head tells; `None` while the head is not complete.
/// What can be known to be wrong from the head alone is an error now, before anybody waits for the rest.
pub fn frame_bytes(bytes: &[u8]) -> Result<Option<usize>, FrameError> {
    let seen = bytes.len().min(MAGIC.len());
    if bytes[..seen] != MAGIC[..seen] {
        return Err(FrameError::Magic);
    }
    let Some(head) = bytes.first_chunk::<HEAD_BYTES>() else { return Ok(None) };
    let found = u16_at(head, at::VERSION);
    if found != VERSION {
        return Err(FrameError::Version { found });
    }
    let body = u32_at(head, at::BODY);
    match usize::try_from(body) {
        Ok(body) if body <= FRAME_BYTES_MAX - HEAD_BYTES => Ok(Some(HEAD_BYTES + body)),
        _ => Err(FrameError::TooLong { bytes: HEAD_BYTES as u64 + u64::from(body) }),
    }
}

fn u16_at(head: &[u8; HEAD_BYTES], offset: usize) -> u16 {
    u16::from_le_bytes(bytes_at(head, offset))
}

fn u32_at(head: &[u8; HEAD_BYTES], offset: usize) -> u32 {
    u32::from_le_bytes(bytes_at(head, offset))
}

fn u64_at(head: &[u8; HEAD_BYTES], offset: usize) -> u64 {
    u64::from_le_bytes(bytes_at(head, offset))
}

fn bytes_at<const N: usize>(head: &[u8; HEAD_BYTES], offset: usize) -> [u8; N] {
    *head[offset..].first_chunk().expect("every field lies inside the head")
}
