//! Taking a socket's place, and leaving it.
//!
//! A worker lives as long as somebody listens on its socket: the kernel ends that with the process, however it ends, and
//! forked children close their copy. So there is no file to hold a lock and no number to misread: under the folder's
//! lock, whoever wants a place tries to connect to what is there.
//!
//! | connecting says | then |
//! | --- | --- |
//! | no such file | the place is free |
//! | refused | nobody listens: what a dead worker left, removed |
//! | connected, or the queue is full | a living worker's: [`IpcError::Taken`] |
//!
//! Of two workers that race for one place the lock lets one go first, and the other finds it living.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{lstat, rmdir, unlink};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};
use tidekv_fork::ClosedInChild;

use super::SocketDir;
use super::folder::{FolderLock, LOCK_WAIT, make_private, open_private, os};
use crate::error::IpcError;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// A socket that we listen on; its file goes when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    dir: SocketDir,
    stage: u32,
    path: PathBuf,
    /// The file is ours as long as it has this number.
    inode: (u64, u64),
    listener: Arc<ClosedInChild>,
}

impl Place {
    pub(crate) fn take(dir: &SocketDir, stage: u32, rank: u32) -> Result<Self, IpcError> {
        let path = dir.socket_path(stage, rank)?;
        let _lock = FolderLock::make(dir.path())?;
        if stage > 0 {
            let folder = dir.stage_path(stage);
            make_private(&folder)?;
            open_private(&folder)?;
        }
        match look(&path)? {
            Listener::None => {}
            Listener::Dead => unlink(&path).map_err(os("unlink", &path))?,
            Listener::Living => return Err(IpcError::Taken { path }),
        }
        let listener = Arc::new(stream_socket().map_err(os("socket", &path))?);
        let address = SocketAddrUnix::new(&path).map_err(os("bind", &path))?;
        bind(&*listener, &address).map_err(os("bind", &path))?;
        listen(&*listener, BACKLOG).map_err(os("listen", &path))?;
        let file = lstat(&path).map_err(os("stat", &path))?;
        Ok(Self { dir: dir.clone(), stage, path, inode: (file.st_dev, file.st_ino), listener })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn listener(&self) -> &Arc<ClosedInChild> {
        &self.listener
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.listener.is_foreign() {
            return;
        }
        // Without the lock only our own file goes, and whoever comes next makes sure of its folder.
        let lock = FolderLock::take(self.dir.path(), LOCK_WAIT).ok().flatten();
        let is_ours = lstat(&self.path).is_ok_and(|file| (file.st_dev, file.st_ino) == self.inode);
        if is_ours {
            let _ = unlink(&self.path);
        }
        if lock.is_some() {
            // Folders with something in them stay.
            if self.stage > 0 {
                let _ = rmdir(self.dir.stage_path(self.stage));
            }
            let _ = rmdir(self.dir.path());
        }
    }
}

/// Who listens on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listener {
    /// There is no file.
    None,
    /// There is one, and nobody listens.
    Dead,
    /// Somebody does.
    Living,
}

pub(super) fn look(path: &Path) -> Result<Listener, IpcError> {
    let probe = stream_socket().map_err(os("socket", path))?;
    let address = SocketAddrUnix::new(path).map_err(os("connect", path))?;
    match connect(&probe, &address) {
        Ok(()) | Err(Errno::AGAIN) => Ok(Listener::Living),
        Err(Errno::NOENT) => Ok(Listener::None),
        Err(Errno::CONNREFUSED) => Ok(Listener::Dead),
        Err(error) => Err(os("connect", path)(error)),
    }
}

/// A socket that nobody inherits and that no call blocks on.
pub(crate) fn stream_socket() -> Result<ClosedInChild, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    ClosedInChild::open(|| socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None))
}

/// Connects without waiting.
pub(crate) fn connect_stream(path: &Path) -> Result<ClosedInChild, Errno> {
    let socket = stream_socket()?;
    connect(socket.as_fd(), &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
