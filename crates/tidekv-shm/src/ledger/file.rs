//! Getting hold of a ledger file: safe opening, making one whole, noticing that it is gone.
//!
//! ```text
//!   nothing there     made under a temporary name, whole, then linked into place: nobody ever sees half of it.
//!                     The link fails if somebody was faster: then theirs is taken.
//!   there             opened without following links, and refused unless it is a regular file of ours with mode 0600
//!   not complete      (somebody truncated it) unlinked under its lock, then made anew
//!   lost its name     unlinked by the last pool that left; unlinked, renamed or replaced by a careless hand: everybody
//!                     who holds it starts over, or those who come later would make another and both would count
//! ```

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{fstat, link, stat, unlink};
use rustix::io::Errno;
use rustix::process::geteuid;
use tidekv_fork::ClosedInChild;

use super::error::{Foreign, LedgerError};
use super::format::{self, FILE_BYTES, FormatError, HEADER_BYTES, RECORD_BYTES, TABLE_BYTE, VERSION, slot_offset};
use super::view::LedgerHeader;
use crate::RuntimeDir;
use crate::lock::{LockError, lock_byte, unlock_byte};
use crate::private_file::{OpenError, UNFINISHED, make_private, open_private, read_at, remove_unfinished, write_at};

/// How often we start over before we say that the file does not settle.
pub(super) const TRIES: u32 = 16;
/// How long opening waits for the lock of a file that must be replaced.
const REPLACE_WAIT: Duration = Duration::from_millis(250);
/// What an update reads at once: the head and the slots of as many pools as most devices ever have.
const FIRST_READ: usize = HEADER_BYTES + 16 * RECORD_BYTES;

/// Where a ledger lies, and the calls on it with its name in their errors.
#[derive(Clone, Debug)]
pub(super) struct Place {
    dir: RuntimeDir,
    path: PathBuf,
}

impl Place {
    pub(super) fn new(dir: &RuntimeDir, path: PathBuf) -> Self {
        Self { dir: dir.clone(), path }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn dir(&self) -> &RuntimeDir {
        &self.dir
    }

    pub(super) fn os(&self, call: &'static str) -> impl FnOnce(Errno) -> LedgerError + use<'_> {
        move |source| LedgerError::Os { call, path: self.path.clone(), source: source.into() }
    }

    /// Opens the ledger, and makes it with this header if there is none.
    pub(super) fn open_or_make(&self, header: &LedgerHeader) -> Result<ClosedInChild, LedgerError> {
        for _ in 0..TRIES {
            self.dir.ensure()?;
            if let Some(file) = self.open_existing()? {
                return Ok(file);
            }
            if let Some(file) = self.make(header)? {
                return Ok(file);
            }
        }
        Err(LedgerError::Unsettled { path: self.path.clone(), tries: TRIES })
    }

    /// Opens the ledger if it is there. One that is not complete is taken away, and counts as not there.
    pub(super) fn open_existing(&self) -> Result<Option<ClosedInChild>, LedgerError> {
        let Some(file) = self.open_checked()? else { return Ok(None) };
        match self.check_contents(file.as_fd()) {
            Ok(()) => Ok(Some(file)),
            Err(LedgerError::HalfBuilt { .. }) => Ok(self.take_away_unless_complete(file.as_fd())?.then_some(file)),
            Err(error) => Err(error),
        }
    }

    /// Looks again under the lock; says whether the file is complete now.
    fn take_away_unless_complete(&self, file: BorrowedFd<'_>) -> Result<bool, LedgerError> {
        let _table = self.lock_table(file, Instant::now() + REPLACE_WAIT)?;
        match self.check_contents(file) {
            Err(LedgerError::HalfBuilt { .. }) => self.unlink_if_same(file).map(|()| false),
            other => other.map(|()| true),
        }
    }

    /// Another descriptor of the ledger that `same` is, with locks of its own.
    pub(super) fn open_again(&self, same: BorrowedFd<'_>) -> Result<ClosedInChild, LedgerError> {
        let unsettled = || LedgerError::Unsettled { path: self.path.clone(), tries: 1 };
        let file = self.open_checked()?.ok_or_else(unsettled)?;
        if self.identity(file.as_fd())? == self.identity(same)? { Ok(file) } else { Err(unsettled()) }
    }

    pub(super) fn lock_table<'a>(
        &'a self,
        file: BorrowedFd<'a>,
        deadline: Instant,
    ) -> Result<TableLock<'a>, LedgerError> {
        match lock_byte(file, TABLE_BYTE, deadline) {
            Ok(()) => Ok(TableLock(file)),
            Err(LockError::Timeout { waited }) => Err(LedgerError::LockTimeout { path: self.path.clone(), waited }),
            Err(LockError::Os(error)) => Err(self.os("fcntl")(error)),
        }
    }

    /// How long the file is.
    pub(super) fn length(&self, file: BorrowedFd<'_>) -> Result<u64, LedgerError> {
        let stat = fstat(file).map_err(self.os("fstat"))?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    /// Whether the ledger's name is this file's. A link count would not tell: a file that was renamed keeps it.
    pub(super) fn is_named(&self, file: BorrowedFd<'_>) -> Result<bool, LedgerError> {
        match stat(&self.path) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == self.identity(file)?),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(self.os("stat")(error)),
        }
    }

    /// Takes the name away from this file. The caller holds its table lock, so nobody else does the same.
    pub(super) fn unlink_if_same(&self, file: BorrowedFd<'_>) -> Result<(), LedgerError> {
        if !self.is_named(file)? {
            return Ok(());
        }
        match unlink(&self.path) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.os("unlink")(error)),
        }
    }

    /// Reads the head and the slots in use into `bytes`, which has room for everything. `Ok(Err(_))` if it is no ledger.
    pub(super) fn load(&self, file: BorrowedFd<'_>, bytes: &mut [u8]) -> Result<Result<(), FormatError>, LedgerError> {
        let whole = self.length(file)?;
        let length = self.read(file, &mut bytes[..FIRST_READ], 0)?;
        if let Err(error) = format::check(&bytes[..length], whole) {
            return Ok(Err(error));
        }
        let needed = slot_offset(format::slots_used(&bytes[..length]));
        if needed > length {
            self.read(file, &mut bytes[length..needed], length)?;
        }
        Ok(Ok(()))
    }

    /// Reads as much of the file as there is from `offset` on, up to the buffer's length.
    pub(super) fn read(&self, file: BorrowedFd<'_>, buffer: &mut [u8], offset: usize) -> Result<usize, LedgerError> {
        read_at(file, buffer, offset).map_err(self.os("pread"))
    }

    /// Writes one record, or a whole new file.
    pub(super) fn write(&self, file: BorrowedFd<'_>, bytes: &[u8], offset: usize) -> Result<(), LedgerError> {
        write_at(file, bytes, offset).map_err(self.os("pwrite"))
    }

    pub(super) fn format_error(&self, error: FormatError) -> LedgerError {
        let path = self.path.clone();
        match error {
            FormatError::HalfBuilt => LedgerError::HalfBuilt { path },
            FormatError::NotALedger => LedgerError::NotOurs { path, why: Foreign::Contents },
            FormatError::OldVersion { found } => LedgerError::OldVersion { path, found, ours: VERSION },
            FormatError::NewVersion { found } => LedgerError::NewVersion { path, found, ours: VERSION },
        }
    }

    fn open_checked(&self) -> Result<Option<ClosedInChild>, LedgerError> {
        open_private(&self.path).map_err(|error| match error {
            OpenError::NotOurs(why) => LedgerError::NotOurs { path: self.path.clone(), why },
            OpenError::Os { call, error } => self.os(call)(error),
        })
    }

    fn check_contents(&self, file: BorrowedFd<'_>) -> Result<(), LedgerError> {
        let whole = self.length(file)?;
        let mut head = [0; RECORD_BYTES];
        let length = self.read(file, &mut head, 0)?;
        format::check(&head[..length], whole).map_err(|error| self.format_error(error))
    }

    fn identity(&self, file: BorrowedFd<'_>) -> Result<(u64, u64), LedgerError> {
        fstat(file).map(|stat| (stat.st_dev, stat.st_ino)).map_err(self.os("fstat"))
    }

    /// Makes the file whole and links it into place; `None` if somebody was faster.
    fn make(&self, header: &LedgerHeader) -> Result<Option<ClosedInChild>, LedgerError> {
        let unfinished = self.unfinished_path();
        let file = make_private(&unfinished).map_err(self.os("open"))?;
        let built = self.build(file.as_fd(), header).and_then(|()| match link(&unfinished, &self.path) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(error) => Err(self.os("link")(error)),
        });
        // Whatever became of it, its first name goes.
        let _ = unlink(&unfinished);
        Ok(built?.then_some(file))
    }

    /// Every byte is written, so that a full file system refuses now and not in the middle of an update.
    fn build(&self, file: BorrowedFd<'_>, header: &LedgerHeader) -> Result<(), LedgerError> {
        // While this is held nobody takes the unfinished file for a leftover.
        let _table = self.lock_table(file, Instant::now() + REPLACE_WAIT)?;
        self.write(file, &vec![0; FILE_BYTES], 0)?;
        self.write(file, &format::encode_setting(header), format::BUDGET_RECORD)?;
        let head = format::encode_header(header, 0, geteuid().as_raw());
        self.write(file, &head[8..], 8)?;
        self.write(file, &head[..8], 0)
    }

    fn unfinished_path(&self) -> PathBuf {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let (pid, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        // Process numbers repeat across containers that share the folder; the clock hardly does.
        let moment = crate::now_ms();
        let mut path = self.path.clone().into_os_string();
        path.push(format!("{UNFINISHED}{pid}-{moment}-{number}"));
        path.into()
    }
}

/// The table's lock, given back on drop.
#[derive(Debug)]
pub(super) struct TableLock<'a>(BorrowedFd<'a>);

impl Drop for TableLock<'_> {
    fn drop(&mut self) {
        // It cannot fail on an open descriptor. If it did, neighbours would time out and say so.
        let _ = unlock_byte(self.0, TABLE_BYTE);
    }
}

/// What is left of ledgers whose makers were killed while making them, by file name.
pub(super) fn is_leftover(name: &str) -> bool {
    name.starts_with(&crate::names::ledger_prefix()) && name.contains(UNFINISHED)
}

/// Removes a leftover unless somebody is still at work on it.
pub(super) fn remove_leftover(path: &Path) -> bool {
    remove_unfinished(path, TABLE_BYTE, format::MAGIC)
}
