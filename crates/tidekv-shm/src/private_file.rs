//! Files of this user alone, in a folder that may be everybody's: opened with suspicion, read and written whole.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;

use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, lstat, open, stat, unlink};
use rustix::io::{Errno, pread, pwrite};
use rustix::process::geteuid;
use tidekv_fork::ClosedInChild;

use crate::Foreign;
use crate::lock::{FileLock, is_locked_anywhere, try_lock_byte};

/// Between the name of a file and the numbers of its first name, under which it is made. No device and no arena has it in its
/// name.
pub(crate) const UNFINISHED: char = '.';

/// Why a file was not opened.
#[derive(Debug)]
pub(crate) enum OpenError {
    /// It is no regular file of this user with mode 0600 and one name.
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
/// else may read or write, and that has no other name.
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
    let look = || fstat(&file).map_err(|error| OpenError::Os { call: "fstat", error });
    let mut found = look()?;
    if let Some(why) = foreign(&found) {
        return Err(OpenError::NotOurs(why));
    }
    if found.st_nlink > 1 {
        remove_first_names(path, &found);
        found = look()?;
    }
    // With no name it was unlinked a moment ago.
    if found.st_nlink > 1 {
        return Err(OpenError::NotOurs(Foreign::Linked));
    }
    Ok(Some(file))
}

/// A file that is made under a first name and then linked to its own has two names for a moment, or for good if its maker
/// was killed in that moment. The first one is of no use any more, whoever removes it.
fn remove_first_names(path: &Path, found: &Stat) {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else { return };
    let mut first = name.to_owned();
    first.push(UNFINISHED.to_string());
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_name().as_bytes().starts_with(first.as_bytes())
            && lstat(entry.path()).is_ok_and(|other| (other.st_dev, other.st_ino) == (found.st_dev, found.st_ino))
        {
            let _ = unlink(entry.path());
        }
    }
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

/// Removes a file that its maker did not finish, unless somebody is still at work on it or has any other lock on it. Its magic
/// is written last: before that it begins with zeros, or is empty.
pub(crate) fn remove_unfinished(path: &Path, maker_byte: u64, magic: [u8; 8]) -> bool {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let Ok(file) = open_guarded(path, flags, Mode::empty()) else { return false };
    let mut head = [0; 8];
    let ours = fstat(&file).is_ok_and(|stat| foreign(&stat).is_none())
        && read_at(file.as_fd(), &mut head, 0).is_ok()
        && (head == magic || head == [0; 8]);
    ours && !is_locked_by_others(&file) && try_lock_byte(file.as_fd(), maker_byte) == Ok(true) && unlink(path).is_ok()
}

/// Whether anybody else has a lock of any kind on this file.
pub(crate) fn is_locked_by_others(file: &ClosedInChild) -> bool {
    FileLock::exclusive(file, Instant::now()).is_err() || is_locked_anywhere(file.as_fd()) != Ok(false)
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
