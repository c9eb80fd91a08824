//! An arena's file: made whole or not at all, opened with suspicion, removed only when nobody is attached.
//!
//! ```text
//!   create    temporary name -> mode 0600 -> memory behind it -> head, magic last -> link -> temporary name goes
//!   open      regular file, of this user, mode 0600; head read by pread and checked; size at least what it says
//!   remove    every member's lock at once: then nobody is attached, and nobody can attach before the name is gone
//! ```
//!
//! Unlike the ledger an arena is mapped (decision 0012): whoever truncates it under those who use it ends them. Memory is
//! put behind every part with `fallocate` before anybody touches it, so a full file system is an error of `create` or
//! `grow`, not a signal later.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, FsWord, Mode, fallocate, fchmod, fstat, fstatfs, ftruncate, link, stat, unlink};
use rustix::io::{Errno, pread};
use rustix::process::geteuid;
use tidekv_core::units::Bytes;
use tidekv_fork::ClosedInChild;

use super::config::ArenaConfig;
use super::error::ArenaError;
use super::format::{ArenaId, GROW_LOCK, HEAD_BYTES, Head, HeadError, MAGIC, MAKE_LOCK, MEMBER_LOCK, VERSION};
use super::geometry::{Geometry, HUGE, MEMBERS};
use super::name::ArenaName;
use super::tables::Tables;
use crate::lock::{LockError, is_locked, lock_byte, try_lock_byte, unlock_byte};
use crate::private_file::{self, OpenError, UNFINISHED, make_private, open_private};
use crate::{Foreign, RuntimeDir, now_ms};

/// `statfs` of hugetlbfs.
const HUGETLBFS: FsWord = 0x9584_58f6;
/// `statfs` of tmpfs.
const TMPFS: FsWord = 0x0102_1994;

/// Where an arena lies, and the calls on it with its name in their errors.
#[derive(Clone, Debug)]
pub(super) struct Place {
    dir: RuntimeDir,
    path: PathBuf,
}

impl Place {
    pub(super) fn new(dir: &RuntimeDir, name: &ArenaName) -> Self {
        Self { dir: dir.clone(), path: dir.path().join(name.file_name()) }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn os(&self, call: &'static str) -> impl FnOnce(Errno) -> ArenaError + use<'_> {
        move |source| ArenaError::Os { call, path: self.path.clone(), source: source.into() }
    }

    /// Makes the arena whole and links it into place.
    pub(super) fn create(&self, config: &ArenaConfig) -> Result<(), ArenaError> {
        let geometry = Geometry::from_config(config)?;
        let exists = || ArenaError::Exists { path: self.path.clone() };
        if self.path.symlink_metadata().is_ok() {
            return Err(exists());
        }
        self.dir.ensure()?;
        let unfinished = self.unfinished_path();
        let file = make_private(&unfinished).map_err(self.os("open"))?;
        let built = self.build(file.as_fd(), geometry, config).and_then(|()| match link(&unfinished, &self.path) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(exists()),
            Err(error) => Err(self.os("link")(error)),
        });
        // Whatever became of it, its first name goes.
        let _ = unlink(&unfinished);
        built
    }

    fn build(&self, file: BorrowedFd<'_>, geometry: Geometry, config: &ArenaConfig) -> Result<(), ArenaError> {
        // While this is held nobody takes the unfinished file for a leftover.
        if !try_lock_byte(file, MAKE_LOCK).map_err(self.os("fcntl"))? {
            return Err(ArenaError::Unsettled { path: self.path.clone(), tries: 1 });
        }
        // A strange umask changes the mode that `open` was given.
        fchmod(file, Mode::RUSR | Mode::WUSR).map_err(self.os("fchmod"))?;
        ftruncate(file, geometry.file_bytes()).map_err(self.os("ftruncate"))?;
        let wanted = config.initial.0.div_ceil(geometry.segment_bytes().0).clamp(1, u64::from(geometry.max_segments));
        // At most the number of segments.
        let segments = wanted as u32;
        self.back(file, geometry.fixed_part())?;
        for segment in 0..segments {
            self.back_segment(file, geometry, segment)?;
        }
        let tables = Tables::map(file, geometry).map_err(self.os("mmap"))?;
        tables.set_segments(segments);
        let id = random_id().map_err(|source| ArenaError::Os { call: "getrandom", path: self.path.clone(), source })?;
        let (uid, made_ms, huge_pages) = (geteuid().as_raw(), now_ms(), config.huge_pages);
        tables.write_head(&Head { id, uid, geometry, huge_pages, made_ms }.encode());
        Ok(())
    }

    /// Puts memory behind everything that a segment needs. Can be repeated.
    pub(super) fn back_segment(
        &self,
        file: BorrowedFd<'_>,
        geometry: Geometry,
        segment: u32,
    ) -> Result<(), ArenaError> {
        geometry.parts_of_segment(segment).into_iter().try_for_each(|part| self.back(file, part))
    }

    fn back(&self, file: BorrowedFd<'_>, (mut offset, mut bytes): (u64, u64)) -> Result<(), ArenaError> {
        if is_hugetlbfs(file) {
            let end = (offset + bytes).next_multiple_of(HUGE);
            offset -= offset % HUGE;
            bytes = end - offset;
        }
        loop {
            return match fallocate(file, FallocateFlags::empty(), offset, bytes) {
                Ok(()) => Ok(()),
                Err(Errno::INTR) => continue,
                Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
                    Err(ArenaError::NoSpace { path: self.path.clone(), wanted: Bytes(bytes) })
                }
                Err(error) => Err(self.os("fallocate")(error)),
            };
        }
    }

    /// Opens the arena and checks that it is one.
    pub(super) fn open(&self) -> Result<(ClosedInChild, Head), ArenaError> {
        let file = self.open_any()?;
        let state = fstat(&file).map_err(self.os("fstat"))?;
        let head = self.read_head(file.as_fd(), u64::try_from(state.st_size).unwrap_or(0))?;
        Ok((file, head))
    }

    /// Opens a file of this user that has an arena's name, whatever is in it.
    pub(super) fn open_any(&self) -> Result<ClosedInChild, ArenaError> {
        self.dir.check()?;
        match open_private(&self.path) {
            Ok(Some(file)) => Ok(file),
            Ok(None) => Err(ArenaError::NotFound { path: self.path.clone() }),
            Err(OpenError::NotOurs(why)) => Err(ArenaError::NotOurs { path: self.path.clone(), why }),
            Err(OpenError::Os { call, error }) => Err(self.os(call)(error)),
        }
    }

    fn read_head(&self, file: BorrowedFd<'_>, bytes: u64) -> Result<Head, ArenaError> {
        let mut buffer = [0; HEAD_BYTES];
        let length = loop {
            match pread(file, &mut buffer, 0) {
                Err(Errno::INTR) => {}
                other => break other.map_err(self.os("pread"))?,
            }
        };
        let path = self.path.clone();
        let head = Head::decode(&buffer[..length]).map_err(|error| match error {
            HeadError::HalfBuilt => ArenaError::Truncated { path, bytes, needed: HEAD_BYTES as u64 },
            HeadError::NotAnArena => ArenaError::NotOurs { path, why: Foreign::Contents },
            HeadError::Version(found) => ArenaError::Version { path, found, ours: VERSION },
            HeadError::Damaged(what) => ArenaError::Damaged { path, what },
        })?;
        let needed = head.geometry.file_bytes();
        if bytes < needed {
            return Err(ArenaError::Truncated { path: self.path.clone(), bytes, needed });
        }
        if head.uid != geteuid().as_raw() {
            return Err(ArenaError::NotOurs { path: self.path.clone(), why: Foreign::Owner { uid: head.uid } });
        }
        Ok(head)
    }

    /// Whether the file still has its name.
    pub(super) fn is_linked(&self, file: BorrowedFd<'_>) -> Result<bool, ArenaError> {
        Ok(fstat(file).map_err(self.os("fstat"))?.st_nlink > 0)
    }

    /// Takes the name away, whoever is attached. Says whether there was one.
    pub(super) fn unlink(&self) -> Result<bool, ArenaError> {
        match unlink(&self.path) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(self.os("unlink")(error)),
        }
    }

    /// Takes the name away if nobody is attached. Says whether it is gone.
    pub(super) fn unlink_if_unused(&self, file: BorrowedFd<'_>) -> Result<bool, ArenaError> {
        for member in 0..MEMBERS {
            if !try_lock_byte(file, member_lock(member)).map_err(self.os("fcntl"))? {
                // Given back at once, and not with the last copy of the descriptor.
                for taken in 0..member {
                    let _ = unlock_byte(file, member_lock(taken));
                }
                return Ok(false);
            }
        }
        // Whoever has opened it already finds that it has no name; whoever comes now finds nothing.
        let ours = fstat(file).map_err(self.os("fstat"))?;
        match stat(&self.path) {
            Ok(named) if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino) => self.unlink(),
            Ok(_) => Ok(false),
            Err(Errno::NOENT) => Ok(true),
            Err(error) => Err(self.os("stat")(error)),
        }
    }

    /// Takes the lock under which segments are added.
    pub(super) fn lock_growth<'a>(
        &self,
        file: BorrowedFd<'a>,
        deadline: Instant,
    ) -> Result<GrowthLock<'a>, ArenaError> {
        match lock_byte(file, GROW_LOCK, deadline) {
            Ok(()) => Ok(GrowthLock(file)),
            Err(LockError::Timeout { waited }) => Err(self.locked(waited)),
            Err(LockError::Os(error)) => Err(self.os("fcntl")(error)),
        }
    }

    pub(super) fn locked(&self, waited: Duration) -> ArenaError {
        ArenaError::LockTimeout { path: self.path.clone(), waited }
    }

    fn unfinished_path(&self) -> PathBuf {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let (pid, number) = (std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let mut path = self.path.clone().into_os_string();
        // Process numbers repeat across containers that share the folder; the clock hardly does.
        path.push(format!("{UNFINISHED}{pid}-{}-{number}", now_ms()));
        path.into()
    }
}

/// The lock under which segments are added, given back on drop.
#[derive(Debug)]
pub(super) struct GrowthLock<'a>(BorrowedFd<'a>);

impl Drop for GrowthLock<'_> {
    fn drop(&mut self) {
        // It cannot fail on an open descriptor. If it did, others would time out and say so.
        let _ = unlock_byte(self.0, GROW_LOCK);
    }
}

pub(super) fn member_lock(member: u32) -> u64 {
    MEMBER_LOCK + u64::from(member)
}

/// Whether a member's process lives. Not for the asker's own.
pub(super) fn is_alive(file: BorrowedFd<'_>, member: u32) -> Result<bool, Errno> {
    is_locked(file, member_lock(member))
}

pub(super) fn is_tmpfs(file: BorrowedFd<'_>) -> bool {
    fstatfs(file).is_ok_and(|state| state.f_type == TMPFS)
}

pub(super) fn is_hugetlbfs(file: BorrowedFd<'_>) -> bool {
    fstatfs(file).is_ok_and(|state| state.f_type == HUGETLBFS)
}

/// The names in the folder. A folder that is not there is an empty one.
pub(super) fn file_names(dir: &RuntimeDir) -> Result<Vec<String>, ArenaError> {
    let os = |source| ArenaError::Os { call: "readdir", path: dir.path().to_owned(), source };
    let entries = match fs::read_dir(dir.path()) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(os(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(os)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// Removes a file that its maker did not finish, unless somebody is still at work on it.
pub(super) fn remove_unfinished(path: &Path) -> bool {
    private_file::remove_unfinished(path, MAKE_LOCK, MAGIC)
}

fn random_id() -> io::Result<ArenaId> {
    let mut bytes = [0_u8; 16];
    // SAFETY: writes at most 16 bytes to a buffer of 16.
    let count = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if count == 16 { Ok(ArenaId(bytes)) } else { Err(io::Error::last_os_error()) }
}
