//! Files of this user alone, in a folder that may be everybody's: opened with suspicion, read and written whole.

use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open, stat};
use rustix::io::{Errno, pread, pwrite};
use rustix::process::geteuid;
use tidekv_fork::ClosedInChild;

use crate::Foreign;

/// Why a file was not opened.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// It is no regular file of this user with mode 0600.
    NotOurs(Foreign),
    /// A call failed.
    Os { call: &'static str, error: Errno },
}

/// Opens a file that forked children do not get. Its name is looked up before: forks wait for an open, and should not wait
/// for a slow disk to find the name.
pub(crate) fn open_guarded(path: &Path, flags: OFlags, mode: Mode) -> Result<ClosedInChild, Errno> {
    let _ = stat(path);
    ClosedInChild::open(|| open(path, flags, mode))
}

/// Makes a file that only this user may read and write; an error if there is one of this name.
pub(crate) fn make_private(path: &Path) -> Result<ClosedInChild, Errno> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    open_guarded(path, flags, Mode::RUSR | Mode::WUSR)
}

/// Opens a file that is there, without following links, and refuses it unless it is a regular file of ours that nobody
/// else may read or write.
pub(crate) fn open_private(path: &Path) -> Result<Option<ClosedInChild>, OpenError> {
    // NONBLOCK: opening a pipe that somebody put there must not wait for its other end.
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = match open_guarded(path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return Err(OpenError::NotOurs(Foreign::NotAFile)),
        Err(Errno::ACCESS | Errno::PERM) => return Err(refused(path)),
        Err(error) => return Err(OpenError::Os { call: "open", error }),
    };
    let stat = fstat(&file).map_err(|error| OpenError::Os { call: "fstat", error })?;
    foreign(&stat).map_or(Ok(Some(file)), |why| Err(OpenError::NotOurs(why)))
}

/// Why we may not open it: most often because it is somebody else's.
fn refused(path: &Path) -> OpenError {
    match stat(path).ok().as_ref().and_then(foreign) {
        Some(why) => OpenError::NotOurs(why),
        None => OpenError::Os { call: "open", error: Errno::ACCESS },
    }
}

/// What makes a file not ours.
pub(crate) fn foreign(stat: &Stat) -> Option<Foreign> {
    let mode = Mode::from_raw_mode(stat.st_mode);
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        Some(Foreign::NotAFile)
    } else if stat.st_uid != geteuid().as_raw() {
        Some(Foreign::Owner { uid: stat.st_uid })
    } else if mode.intersects(Mode::RWXG | Mode::RWXO) {
        Some(Foreign::Mode { mode: mode.as_raw_mode() & 0o7777 })
    } else {
        None
    }
}

/// Reads as much of the file as there is from `offset` on, up to the buffer's length.
pub(crate) fn read_at(file: BorrowedFd<'_>, buffer: &mut [u8], offset: usize) -> Result<usize, Errno> {
    let mut done = 0;
    while done < buffer.len() {
        match pread(file, &mut buffer[done..], (offset + done) as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Writes all of `bytes`.
pub(crate) fn write_at(file: BorrowedFd<'_>, bytes: &[u8], offset: usize) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        match pwrite(file, &bytes[done..], (offset + done) as u64) {
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
