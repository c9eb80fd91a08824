//! What dead workers left behind. A worker that ends removes its socket; one that is killed cannot.
//!
//! Safe beside living workers: nothing is touched without the folder's lock, under which workers take their places, and
//! a folder in which anybody listens stays as it is. Only folders that are ours, private, and named as we name them are
//! looked at, and in them only sockets named `w<rank>.sock` are removed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{rmdir, unlink};
use rustix::io::Errno;

use super::folder::{FolderLock, open_private, os};
use super::place::{Listener, look};
use super::pool_of_folder;
use crate::error::IpcError;

/// A folder whose workers are all gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StaleDir {
    /// The folder.
    pub path: PathBuf,
    /// The pool whose workers they were.
    pub pool: String,
    /// How many sockets they left.
    pub sockets: usize,
}

/// The folders under `root` whose workers are all gone, sorted. What cannot be looked at is left out.
pub fn stale_dirs(root: &Path) -> Result<Vec<StaleDir>, IpcError> {
    let mut found = Vec::new();
    for path in entries(root)? {
        let Some(pool) = pool_named_by(&path) else { continue };
        // Not ours, or somebody is at work there.
        let Ok(Some(lock)) = FolderLock::take(&path, Duration::ZERO) else { continue };
        if let Ok(Some(sockets)) = dead_sockets(&lock) {
            found.push(StaleDir { pool, sockets: sockets.len(), path });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Removes such a folder; `false` if it is not stale any more, or holds something that no worker put there.
pub fn remove_stale_dir(path: &Path) -> Result<bool, IpcError> {
    if pool_named_by(path).is_none() {
        return Ok(false);
    }
    let Some(lock) = FolderLock::take(path, Duration::ZERO)? else { return Ok(false) };
    let Some(sockets) = dead_sockets(&lock)? else { return Ok(false) };
    for socket in sockets {
        gone(unlink(&socket)).map_err(os("unlink", &socket))?;
    }
    for folder in stage_folders(path)?.iter().map(PathBuf::as_path).chain([path]) {
        match gone(rmdir(folder)) {
            Err(Errno::NOTEMPTY | Errno::EXIST) => return Ok(false),
            result => result.map_err(os("rmdir", folder))?,
        }
    }
    Ok(true)
}

/// Every socket of the folder and of its stages, or `None` if anybody listens on one of them.
fn dead_sockets(lock: &FolderLock) -> Result<Option<Vec<PathBuf>>, IpcError> {
    let mut dead = Vec::new();
    let mut folders = stage_folders(lock.path())?;
    folders.push(lock.path().to_owned());
    for folder in folders {
        for path in entries(&folder)?.into_iter().filter(|path| is_numbered(path, "w", ".sock")) {
            match look(&path)? {
                Listener::Living => return Ok(None),
                Listener::Dead => dead.push(path),
                Listener::None => {}
            }
        }
    }
    Ok(Some(dead))
}

fn stage_folders(folder: &Path) -> Result<Vec<PathBuf>, IpcError> {
    let mut stages: Vec<PathBuf> = entries(folder)?.into_iter().filter(|path| is_numbered(path, "pp", "")).collect();
    stages.retain(|path| matches!(open_private(path), Ok(Some(_))));
    Ok(stages)
}

fn is_numbered(path: &Path, before: &str, after: &str) -> bool {
    let number = path.file_name().and_then(|name| name.to_str()?.strip_prefix(before)?.strip_suffix(after));
    number.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn pool_named_by(path: &Path) -> Option<String> {
    pool_of_folder(path.file_name()?.to_str()?).map(str::to_owned)
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, IpcError> {
    let refused = |error: io::Error| os("readdir", folder)(Errno::from_io_error(&error).unwrap_or(Errno::IO));
    let listing = match fs::read_dir(folder) {
        Ok(listing) => listing,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(refused(error)),
    };
    listing.map(|entry| entry.map(|entry| entry.path())).collect::<io::Result<_>>().map_err(refused)
}

/// Somebody else's removal is as good as ours.
fn gone(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::NOENT) => Ok(()),
        result => result,
    }
}
