//! A folder that is ours alone: opened without following links, looked at, locked while its contents change.
//!
//! The lock (`flock` on the folder itself) is held for microseconds while a worker takes or leaves its place or a tool
//! clears up; it is the pool's folder for all stages. Whoever gets it makes sure that the folder still has its name,
//! because the last one who left may have removed it.

use std::fs::DirBuilder;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, lstat, mkdir, open};
use rustix::io::Errno;
use rustix::process::geteuid;
use tidekv_fork::ClosedInChild;

use crate::error::{IpcError, NotOurs};

const PAUSE: Duration = Duration::from_millis(1);
/// How long a folder's lock is waited for.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(2);

pub(crate) fn os(call: &'static str, path: &Path) -> impl FnOnce(Errno) -> IpcError {
    move |source| IpcError::Os { call, path: path.to_owned(), source }
}

/// Opens a folder of ours; `None` if it is not there.
pub(crate) fn open_private(path: &Path) -> Result<Option<ClosedInChild>, IpcError> {
    let not_ours = |why| IpcError::NotOurs { path: path.to_owned(), why };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = match ClosedInChild::open(|| open(path, flags, Mode::empty())) {
        Ok(folder) => folder,
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP | Errno::NOTDIR) => return Err(not_ours(NotOurs::NotAFolder)),
        Err(error) => {
            // Most often because it is somebody else's.
            let why = lstat(path).ok().as_ref().and_then(foreign);
            return Err(why.map_or_else(|| os("open", path)(error), not_ours));
        }
    };
    match foreign(&fstat(&folder).map_err(os("fstat", path))?) {
        None => Ok(Some(folder)),
        Some(why) => Err(not_ours(why)),
    }
}

/// Makes a folder for us alone, unless something of this name is there.
pub(crate) fn make_private(path: &Path) -> Result<(), IpcError> {
    match mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(os("mkdir", path)(error)),
    }
}

fn foreign(stat: &Stat) -> Option<NotOurs> {
    let mode = Mode::from_raw_mode(stat.st_mode);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        Some(NotOurs::NotAFolder)
    } else if stat.st_uid != geteuid().as_raw() {
        Some(NotOurs::Owner { uid: stat.st_uid })
    } else if mode.intersects(Mode::RWXG | Mode::RWXO) {
        Some(NotOurs::Mode { mode: mode.as_raw_mode() & 0o7777 })
    } else {
        None
    }
}

/// The lock on a pool's folder, given back on drop.
#[derive(Debug)]
pub(crate) struct FolderLock {
    path: PathBuf,
    folder: ClosedInChild,
}

impl FolderLock {
    /// Locks the folder, which is made if it is not there.
    pub(crate) fn make(path: &Path) -> Result<Self, IpcError> {
        let started = Instant::now();
        loop {
            if let Some(lock) = Self::take(path, LOCK_WAIT.saturating_sub(started.elapsed()))? {
                return Ok(lock);
            }
            check_time(path, started, LOCK_WAIT)?;
            if let Some(root) = path.parent() {
                make_root(root)?;
            }
            make_private(path)?;
        }
    }

    /// Locks the folder if it is there.
    pub(crate) fn take(path: &Path, wait: Duration) -> Result<Option<Self>, IpcError> {
        let started = Instant::now();
        loop {
            let Some(folder) = open_private(path)? else { return Ok(None) };
            while !try_lock(folder.as_fd()).map_err(os("flock", path))? {
                check_time(path, started, wait)?;
                std::thread::sleep(PAUSE);
            }
            if is_named(path, folder.as_fd()).map_err(os("stat", path))? {
                return Ok(Some(Self { path: path.to_owned(), folder }));
            }
            check_time(path, started, wait)?;
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        if !self.folder.is_foreign() {
            // Closing it would do the same, but a child that is being started may still have a copy.
            let _ = flock(&self.folder, FlockOperation::Unlock);
        }
    }
}

/// The folder can come and go as often as it likes, but only for so long.
fn check_time(path: &Path, started: Instant, wait: Duration) -> Result<(), IpcError> {
    match started.elapsed() {
        waited if waited >= wait => Err(IpcError::FolderBusy { path: path.to_owned(), waited }),
        _ => Ok(()),
    }
}

fn try_lock(folder: BorrowedFd<'_>) -> Result<bool, Errno> {
    match flock(folder, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the folder is still the one of this name.
fn is_named(path: &Path, folder: BorrowedFd<'_>) -> Result<bool, Errno> {
    let ours = fstat(folder)?;
    match lstat(path) {
        Ok(named) => Ok((named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The folder of the folders, which may be anybody's; made for us alone if it is not there.
fn make_root(root: &Path) -> Result<(), IpcError> {
    let refused = |error: io::Error| os("mkdir", root)(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    if root.as_os_str().is_empty() || root.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(root).map_err(refused)
}
