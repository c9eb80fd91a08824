//! Waking up when events are added, or when the events of another device appear, without looking all the time.
//!
//! The folder is watched for new names alone: to watch it for changes would wake for every update of every ledger in it.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use rustix::fs::inotify::{self, Reader, WatchFlags};
use rustix::io::Errno;
use tidekv_fork::ClosedInChild;

use super::error::EventsError;
use crate::RuntimeDir;
use crate::ledger::watch::inotify_queue;

/// Wakes when a watched file changes or a new one appears in the folder.
#[derive(Debug)]
pub struct EventsWatch {
    queue: ClosedInChild,
    dir: RuntimeDir,
}

impl EventsWatch {
    /// Watches a folder for new files, if it is there.
    pub fn new(dir: &RuntimeDir) -> Result<Self, EventsError> {
        let os = |source| EventsError::Os { call: "inotify_init1", path: dir.path().to_owned(), source };
        let queue = ClosedInChild::open(inotify_queue).map_err(os)?;
        let watch = Self { queue, dir: dir.clone() };
        watch.add_folder()?;
        Ok(watch)
    }

    /// Watches the folder, which may have been made since. Says whether it is there.
    pub fn add_folder(&self) -> Result<bool, EventsError> {
        self.watch(self.dir.path(), WatchFlags::CREATE | WatchFlags::MOVED_TO)
    }

    /// Watches an events file too; again for one that was made anew. Says whether it is there.
    pub fn add(&self, path: &Path) -> Result<bool, EventsError> {
        self.watch(path, WatchFlags::MODIFY | WatchFlags::ATTRIB | WatchFlags::DELETE_SELF)
    }

    /// Takes away what made it readable. Says whether there was anything.
    pub fn drain(&self) -> Result<bool, EventsError> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(&self.queue, &mut buffer);
        let mut any = false;
        loop {
            match events.next() {
                Ok(_) => any = true,
                Err(Errno::AGAIN) => return Ok(any),
                Err(Errno::INTR) => {}
                Err(error) => return Err(EventsError::os("read", self.dir.path())(error)),
            }
        }
    }

    fn watch(&self, path: &Path, events: WatchFlags) -> Result<bool, EventsError> {
        if self.queue.is_foreign() {
            return Err(EventsError::Forked);
        }
        match inotify::add_watch(&self.queue, path, events) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
            Err(error) => Err(EventsError::os("inotify_add_watch", path)(error)),
        }
    }
}

impl AsFd for EventsWatch {
    /// Readable when something changed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}
