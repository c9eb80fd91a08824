//! Locks that the kernel drops with their holder.
//!
//! ```text
//!   range lock   one byte of a file, held by an open file description (F_OFD_SETLK)
//!                ends when the last copy of that descriptor closes: exit, SIGKILL and exec included
//!   file lock    flock on a whole segment, because kvcached's tools use it
//! ```
//!
//! Locks of open file descriptions, and not the older per-process locks, because those vanish when *any* descriptor of
//! the file is closed anywhere in the process. The price: two threads that use one descriptor do not exclude each
//! other, and a forked child shares the lock until it closes its copy; hence the ledger's turn and `tidekv-fork`.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::clock::Backoff;

/// Why a lock was not taken.
#[derive(Debug)]
pub(crate) enum LockError {
    /// Somebody else held it all the time.
    Timeout { waited: Duration },
    /// The system refused.
    Os(Errno),
}

/// Takes the write lock on one byte unless somebody else has a lock on it.
pub(crate) fn try_lock_byte(fd: BorrowedFd<'_>, byte: u64) -> Result<bool, Errno> {
    match range_lock(fd, libc::F_OFD_SETLK, libc::F_WRLCK, byte, 1) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Takes the write lock on one byte, trying until the deadline.
pub(crate) fn lock_byte(fd: BorrowedFd<'_>, byte: u64, deadline: Instant) -> Result<(), LockError> {
    retry(deadline, || try_lock_byte(fd, byte))
}

/// Gives the lock on one byte back.
pub(crate) fn unlock_byte(fd: BorrowedFd<'_>, byte: u64) -> Result<(), Errno> {
    range_lock(fd, libc::F_OFD_SETLK, libc::F_UNLCK, byte, 1).map(drop)
}

/// Whether anybody else has a lock on this byte. A lock of `fd` itself does not count.
pub(crate) fn is_locked(fd: BorrowedFd<'_>, byte: u64) -> Result<bool, Errno> {
    is_range_locked(fd, byte, 1)
}

/// Whether anybody else has a range lock anywhere in this file: one of ours, or a program's `fcntl` or `lockf`.
pub(crate) fn is_locked_anywhere(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    is_range_locked(fd, 0, 0)
}

fn is_range_locked(fd: BorrowedFd<'_>, byte: u64, length: libc::off_t) -> Result<bool, Errno> {
    let found = range_lock(fd, libc::F_OFD_GETLK, libc::F_WRLCK, byte, length)?;
    Ok(found.l_type != short(libc::F_UNLCK))
}

/// A length of 0 reaches to the end of all bytes.
fn range_lock(
    fd: BorrowedFd<'_>,
    command: i32,
    kind: i32,
    byte: u64,
    length: libc::off_t,
) -> Result<libc::flock, Errno> {
    let start = libc::off_t::try_from(byte).map_err(|_| Errno::INVAL)?;
    let mut lock =
        libc::flock { l_type: short(kind), l_whence: short(libc::SEEK_SET), l_start: start, l_len: length, l_pid: 0 };
    // SAFETY: the three commands used here read and write one `flock` through the pointer, which is ours alone for the
    // time of the call.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut lock) };
    if result == -1 {
        let error = std::io::Error::last_os_error();
        return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    }
    Ok(lock)
}

/// The constants of `fcntl` as its structure wants them.
fn short(constant: i32) -> libc::c_short {
    libc::c_short::try_from(constant).expect("a constant of fcntl is at most 3")
}

/// kvcached's lock on a segment, given back on drop.
#[derive(Debug)]
pub(crate) struct FileLock<'a>(BorrowedFd<'a>);

impl<'a> FileLock<'a> {
    pub(crate) fn shared(fd: &'a impl AsFd, deadline: Instant) -> Result<Self, LockError> {
        Self::take(fd.as_fd(), FlockOperation::NonBlockingLockShared, deadline)
    }

    pub(crate) fn exclusive(fd: &'a impl AsFd, deadline: Instant) -> Result<Self, LockError> {
        Self::take(fd.as_fd(), FlockOperation::NonBlockingLockExclusive, deadline)
    }

    fn take(fd: BorrowedFd<'a>, operation: FlockOperation, deadline: Instant) -> Result<Self, LockError> {
        retry(deadline, || match flock(fd, operation) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
            Err(error) => Err(error),
        })?;
        Ok(Self(fd))
    }
}

impl Drop for FileLock<'_> {
    fn drop(&mut self) {
        // It cannot fail on an open descriptor; if it did, closing the descriptor would release it all the same.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

fn retry(deadline: Instant, mut attempt: impl FnMut() -> Result<bool, Errno>) -> Result<(), LockError> {
    let mut backoff = Backoff::until(deadline);
    while !attempt().map_err(LockError::Os)? {
        backoff.pause().map_err(|waited| LockError::Timeout { waited })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn two_descriptions() -> (tempfile::NamedTempFile, File, File) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (a, b) = (open(), open());
        (file, a, b)
    }

    #[test]
    fn a_byte_has_one_holder_and_closing_frees_it() {
        let (_file, a, b) = two_descriptions();
        let byte = (1 << 32) + 5;
        assert!(try_lock_byte(a.as_fd(), byte).unwrap());
        assert!(!try_lock_byte(b.as_fd(), byte).unwrap());
        assert!(try_lock_byte(b.as_fd(), byte + 1).unwrap(), "another byte is another lock");
        assert!(is_locked(b.as_fd(), byte).unwrap());
        assert!(!is_locked(a.as_fd(), byte).unwrap(), "a holder does not see itself");
        drop(a);
        assert!(!is_locked(b.as_fd(), byte).unwrap());
        lock_byte(b.as_fd(), byte, Instant::now()).unwrap();
        unlock_byte(b.as_fd(), byte).unwrap();
    }

    #[test]
    fn a_held_lock_is_a_timeout_at_the_deadline() {
        let (_file, a, b) = two_descriptions();
        lock_byte(a.as_fd(), 0, Instant::now()).unwrap();
        let wait = Duration::from_millis(15);
        let error = lock_byte(b.as_fd(), 0, Instant::now() + wait).unwrap_err();
        assert!(matches!(error, LockError::Timeout { waited } if waited >= wait), "{error:?}");

        let held = FileLock::shared(&a, Instant::now()).unwrap();
        FileLock::shared(&b, Instant::now()).unwrap();
        let error = FileLock::exclusive(&b, Instant::now() + wait).unwrap_err();
        assert!(matches!(error, LockError::Timeout { .. }), "{error:?}");
        drop(held);
        FileLock::exclusive(&b, Instant::now()).unwrap();
    }
}
