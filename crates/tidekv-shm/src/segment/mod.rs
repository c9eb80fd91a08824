//! The pool segment: three numbers in a file, by which kvcached's tools see our pools and ours see theirs.
//!
//! ```text
//!   0          8          16         24
//!   |  limit   |   used   | prealloc |      native int64 each, bytes
//!
//!   written by operators | written by the pool, and by it alone
//! ```
//!
//! No magic and no version: the format is kvcached's and cannot grow. Everything else that we have to say stands in the
//! ledger. `docs/formats/pool-segment.md` is this in words.
//!
//! | lock | on | meaning |
//! | --- | --- | --- |
//! | `flock` | the file | kvcached's: whoever reads takes it shared, whoever writes takes it exclusive |
//! | range lock | byte 2^32 | ours: held for life by the pool that owns the segment; kvcached's own have none |

mod look;
mod owned;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Mode, OFlags, fstat, open, stat, unlink};
use rustix::io::{Errno, pread, pwrite};
use rustix::process::geteuid;
use tidekv_core::units::Bytes;

pub use look::Segments;
pub use owned::{PoolSegment, make_no_more};

use crate::RuntimeDir;
use crate::lock::{FileLock, LockError, is_locked, is_locked_anywhere};

/// The size of every segment.
pub const SEGMENT_BYTES: usize = 24;
/// The byte whose lock the owning pool holds.
const OWNER_BYTE: u64 = 1 << 32;
/// No pool's number reaches this: 4 PiB. The bytes of a double or of a text, read as a number, nearly always do.
const TOO_MUCH: i64 = 1 << 52;
/// A lower limit than this is none: less than one page of any machine.
const LEAST_LIMIT: i64 = 4096;
/// How long tools wait for a segment's lock. Its holders are done within microseconds, unless they are stopped.
const LOCK_WAIT: Duration = Duration::from_millis(100);
/// How long removing waits for a reader: the ledger's lock may be held meanwhile.
const REMOVE_WAIT: Duration = Duration::from_millis(5);

/// A segment's numbers, as they stand in the file: anybody may have written them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentView {
    /// What the pool may hold.
    pub limit: i64,
    /// What it needs now.
    pub used: i64,
    /// What it holds beyond that, ready for use.
    pub prealloc: i64,
}

impl SegmentView {
    /// Reads a file's bytes by kvcached's rule: a segment is exactly 24 bytes, and its first number is above zero.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let view = Self::decode(bytes.try_into().ok()?);
        (view.limit > 0).then_some(view)
    }

    /// Whether a pool can have written these. 24 bytes of doubles, of text, of a token, of zeros or of small counts are no
    /// segment, though kvcached's rule takes some of them for one.
    pub fn is_plausible(self) -> bool {
        (LEAST_LIMIT..TOO_MUCH).contains(&self.limit) && self.may_be()
    }

    /// The same for a file whose name says already that it should be one: an operator can have set any limit.
    fn may_be(self) -> bool {
        self.limit >= 0 && (0..TOO_MUCH).contains(&self.used) && (0..TOO_MUCH).contains(&self.prealloc)
    }

    /// The three numbers, whatever they are.
    fn decode(bytes: &[u8; SEGMENT_BYTES]) -> Self {
        let word = |at: usize| i64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Self { limit: word(0), used: word(8), prealloc: word(16) }
    }

    /// The file's bytes.
    pub fn to_bytes(self) -> [u8; SEGMENT_BYTES] {
        let mut bytes = [0; SEGMENT_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip([self.limit, self.used, self.prealloc]) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// An operation on a segment that was not carried out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SegmentError {
    /// The folder is not one to put it in.
    #[error(transparent)]
    Folder(#[from] crate::FolderError),
    /// Somebody held the file's lock all the time; most likely it is stopped. Trying again can help.
    #[error("{} was locked for all of {waited:?}: a process that uses it may be stopped", .path.display())]
    LockTimeout {
        /// The segment.
        path: PathBuf,
        /// How long we tried.
        waited: Duration,
    },
    /// Another living pool has this name.
    #[error("{} belongs to another pool that is alive: choose another name", .path.display())]
    InUse {
        /// The segment.
        path: PathBuf,
    },
    /// There is something of this name that is no segment, or not one of this user.
    #[error("{} is not a segment of this user: choose another name, or move it away", .path.display())]
    NotOurs {
        /// The file.
        path: PathBuf,
    },
    /// It has other names besides this one: what is written here would change a file elsewhere.
    #[error("{} is a hard link to a file that has another name: choose another one for the pool, or remove this", .path.display())]
    Linked {
        /// The file.
        path: PathBuf,
    },
    /// There is no such segment.
    #[error("{} is not there, or not a segment", .path.display())]
    NotFound {
        /// The file.
        path: PathBuf,
    },
    /// This process was told to end and makes no segment any more ([`make_no_more`]).
    #[error("{} is not made: this process is ending", .path.display())]
    Ending {
        /// The segment.
        path: PathBuf,
    },
    /// More bytes than the format can say.
    #[error("{bytes} bytes do not fit a segment")]
    TooLarge {
        /// As asked for.
        bytes: u64,
    },
    /// The segment belongs to the process that made it.
    #[error("this segment was made before a fork and belongs to the parent process")]
    Forked,
    /// The operating system refused a call.
    #[error("{call} of {} failed", .path.display())]
    Os {
        /// The system call.
        call: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl SegmentError {
    /// Whether the same call can succeed later without anybody changing anything about it.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::LockTimeout { .. })
    }

    fn os(call: &'static str, path: &Path) -> impl FnOnce(Errno) -> Self {
        let path = path.to_owned();
        move |source| Self::Os { call, path, source: source.into() }
    }
}

/// Reads a segment; `None` if there is no file or it is not one. The lock is waited for only a moment, so that a
/// stopped process does not hide a pool: 24 bytes in one call are as good as locked.
pub fn read(path: &Path) -> Result<Option<SegmentView>, SegmentError> {
    let Some(file) = open_segment(path, OFlags::RDONLY)? else { return Ok(None) };
    let _lock = FileLock::shared(&file, Instant::now() + LOCK_WAIT).ok();
    read_open(&file, path)
}

fn read_open(file: &OwnedFd, path: &Path) -> Result<Option<SegmentView>, SegmentError> {
    // One byte more than there may be, to see that there is not.
    let mut bytes = [0; SEGMENT_BYTES + 1];
    let length = read_bytes(file.as_fd(), &mut bytes).map_err(SegmentError::os("pread", path))?;
    Ok(SegmentView::parse(&bytes[..length]))
}

/// Writes an operator's limit, and nothing else.
pub fn write_limit(path: &Path, limit: Bytes) -> Result<(), SegmentError> {
    let word = number(limit)?;
    let not_found = || SegmentError::NotFound { path: path.to_owned() };
    let file = open_segment(path, OFlags::RDWR)?.ok_or_else(not_found)?;
    let _lock = lock_exclusive(&file, path, Instant::now() + LOCK_WAIT)?;
    // Looked at under the lock: a file that is anything but a segment is not written to.
    refuse_linked(file.as_fd(), path)?;
    if !is_segment(&file, path)? {
        return Err(not_found());
    }
    write_bytes(file.as_fd(), &word.to_ne_bytes(), 0).map_err(SegmentError::os("pwrite", path))
}

/// Writes what is used of a segment that no pool of ours owns, and nothing else.
pub fn write_usage(path: &Path, used: Bytes, prealloc: Bytes) -> Result<(), SegmentError> {
    let words = [number(used)?.to_ne_bytes(), number(prealloc)?.to_ne_bytes()].concat();
    let not_found = || SegmentError::NotFound { path: path.to_owned() };
    let file = open_segment(path, OFlags::RDWR)?.ok_or_else(not_found)?;
    let _lock = lock_exclusive(&file, path, Instant::now() + LOCK_WAIT)?;
    refuse_owned(file.as_fd(), path)?;
    refuse_linked(file.as_fd(), path)?;
    if !read_whole(file.as_fd()).is_some_and(SegmentView::may_be) {
        return Err(not_found());
    }
    write_bytes(file.as_fd(), &words, 8).map_err(SegmentError::os("pwrite", path))
}

/// Makes a segment that nobody owns, with this limit and nothing used, or writes the same to one that is there: what
/// kvcached's Python tools do. It stays until somebody deletes it.
pub fn write_new(path: &Path, limit: Bytes) -> Result<(), SegmentError> {
    let view = SegmentView { limit: number(limit)?, used: 0, prealloc: 0 };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = open(path, flags, Mode::RUSR | Mode::WUSR).map_err(SegmentError::os("open", path))?;
    let _lock = lock_exclusive(&file, path, Instant::now() + LOCK_WAIT)?;
    refuse_owned(file.as_fd(), path)?;
    refuse_foreign(file.as_fd(), path)?;
    write_bytes(file.as_fd(), &view.to_bytes(), 0).map_err(SegmentError::os("pwrite", path))
}

fn refuse_owned(file: BorrowedFd<'_>, path: &Path) -> Result<(), SegmentError> {
    if is_locked(file, OWNER_BYTE).map_err(SegmentError::os("fcntl", path))? {
        return Err(SegmentError::InUse { path: path.to_owned() });
    }
    Ok(())
}

/// All segments of a folder, as [`Segments::look`] gives them, for whoever looks once.
pub fn list(dir: &RuntimeDir) -> Vec<(String, SegmentView)> {
    Segments::default().look(dir)
}

/// Unlinks a segment; says whether it was there. A living pool notices and makes it again. A file that is no segment stays.
pub fn delete(path: &Path) -> Result<bool, SegmentError> {
    match open_segment(path, OFlags::RDONLY)? {
        Some(file) if is_segment(&file, path)? => unlink_path(path),
        _ => Ok(false),
    }
}

/// Whether this is what a dead pool left: a segment of this user, or one that was never written, with one name, on which
/// nobody has a lock of any kind. Only for the name of a ledger entry whose owner is dead. Nothing in the file says whose it
/// is, so without that entry the same bytes may be anybody's.
pub fn is_abandoned(path: &Path) -> Result<bool, SegmentError> {
    abandoned(path, Instant::now(), || Ok(true))
}

/// Unlinks what a dead pool left, if [`is_abandoned`]; says whether it did.
pub fn remove_abandoned(path: &Path) -> Result<bool, SegmentError> {
    abandoned(path, Instant::now() + REMOVE_WAIT, || unlink_path(path))
}

fn abandoned(
    path: &Path,
    deadline: Instant,
    then: impl FnOnce() -> Result<bool, SegmentError>,
) -> Result<bool, SegmentError> {
    let Some(file) = open_checked(path, OFlags::RDWR)? else { return Ok(false) };
    match refuse_foreign(file.as_fd(), path) {
        Ok(()) => {}
        Err(SegmentError::NotOurs { .. } | SegmentError::Linked { .. }) => return Ok(false),
        Err(error) => return Err(error),
    }
    // A pool that is about to own the file writes it under this lock, and then looks whether it still has its name.
    let _lock = match FileLock::exclusive(&file, deadline) {
        Ok(lock) => lock,
        Err(LockError::Timeout { .. }) => return Ok(false),
        Err(LockError::Os(error)) => return Err(SegmentError::os("flock", path)(error)),
    };
    if is_locked_anywhere(file.as_fd()).map_err(SegmentError::os("fcntl", path))? || !is_named(path, file.as_fd()) {
        return Ok(false);
    }
    then()
}

fn unlink_path(path: &Path) -> Result<bool, SegmentError> {
    match unlink(path) {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(SegmentError::os("unlink", path)(error)),
    }
}

/// Whether a living pool of ours owns this segment. kvcached's own pools hold no lock and cannot be told from dead ones.
pub fn has_owner(path: &Path) -> Result<bool, SegmentError> {
    let Some(file) = open_segment(path, OFlags::RDONLY)? else { return Ok(false) };
    is_locked(file.as_fd(), OWNER_BYTE).map_err(SegmentError::os("fcntl", path))
}

/// Opens a file that has the shape of a segment.
fn open_segment(path: &Path, access: OFlags) -> Result<Option<OwnedFd>, SegmentError> {
    let Some(file) = open_checked(path, access)? else { return Ok(None) };
    Ok(is_segment_size(file.as_fd(), path)?.then_some(file))
}

/// Opens what is there, whatever it is. Never waits, follows no link.
fn open_checked(path: &Path, access: OFlags) -> Result<Option<OwnedFd>, SegmentError> {
    let flags = access | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match open(path, flags, Mode::empty()) {
        Ok(file) => Ok(Some(file)),
        Err(Errno::NOENT | Errno::LOOP | Errno::ISDIR | Errno::NXIO | Errno::NOTDIR) => Ok(None),
        Err(error) => Err(SegmentError::os("open", path)(error)),
    }
}

/// Whether these 24 bytes are a pool's: a living one has its lock on them, or they can be nothing else.
fn is_segment(file: &OwnedFd, path: &Path) -> Result<bool, SegmentError> {
    let owned = is_locked(file.as_fd(), OWNER_BYTE).map_err(SegmentError::os("fcntl", path))?;
    Ok(is_segment_size(file.as_fd(), path)?
        && (owned || read_whole(file.as_fd()).is_some_and(SegmentView::is_plausible)))
}

/// Refuses a file that a pool of this user may not overwrite: anything but an empty file or a segment of this user with one
/// name.
fn refuse_foreign(file: BorrowedFd<'_>, path: &Path) -> Result<(), SegmentError> {
    let stat = fstat(file).map_err(SegmentError::os("fstat", path))?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    let ours = regular && stat.st_uid == geteuid().as_raw();
    // One that was just made is empty. A limit of 0 is an operator's word.
    let fits = stat.st_size == 0 || (is_segment_size(file, path)? && read_whole(file).is_some_and(SegmentView::may_be));
    if !ours || !fits {
        return Err(SegmentError::NotOurs { path: path.to_owned() });
    }
    refuse_linked(file, path)
}

fn refuse_linked(file: BorrowedFd<'_>, path: &Path) -> Result<(), SegmentError> {
    let stat = fstat(file).map_err(SegmentError::os("fstat", path))?;
    // With no name it was unlinked a moment ago.
    if stat.st_nlink > 1 { Err(SegmentError::Linked { path: path.to_owned() }) } else { Ok(()) }
}

/// Whether the name leads to this very file.
fn is_named(path: &Path, file: BorrowedFd<'_>) -> bool {
    let (Ok(named), Ok(open)) = (stat(path), fstat(file)) else { return false };
    (named.st_dev, named.st_ino) == (open.st_dev, open.st_ino)
}

fn read_whole(file: BorrowedFd<'_>) -> Option<SegmentView> {
    let mut bytes = [0; SEGMENT_BYTES];
    let length = read_bytes(file, &mut bytes).ok()?;
    (length == SEGMENT_BYTES).then(|| SegmentView::decode(&bytes))
}

fn is_segment_size(file: BorrowedFd<'_>, path: &Path) -> Result<bool, SegmentError> {
    let stat = fstat(file).map_err(SegmentError::os("fstat", path))?;
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    Ok(regular && u64::try_from(stat.st_size) == Ok(SEGMENT_BYTES as u64))
}

fn lock_exclusive<'a>(file: &'a impl AsFd, path: &Path, deadline: Instant) -> Result<FileLock<'a>, SegmentError> {
    FileLock::exclusive(file, deadline).map_err(|error| match error {
        LockError::Timeout { waited } => SegmentError::LockTimeout { path: path.to_owned(), waited },
        LockError::Os(error) => SegmentError::os("flock", path)(error),
    })
}

fn number(bytes: Bytes) -> Result<i64, SegmentError> {
    i64::try_from(bytes.0).map_err(|_| SegmentError::TooLarge { bytes: bytes.0 })
}

fn read_bytes(file: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    loop {
        match pread(file, &mut *buffer, 0) {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

/// A few bytes inside one page: written whole, or not at all.
fn write_bytes(file: BorrowedFd<'_>, bytes: &[u8], offset: u64) -> Result<(), Errno> {
    loop {
        match pwrite(file, bytes, offset) {
            Ok(count) if count == bytes.len() => return Ok(()),
            Ok(_) => return Err(Errno::NOSPC),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}
