//! Waking up when a ledger or a segment changes, without looking at it all the time.
//!
//! | event of the file | because |
//! | --- | --- |
//! | modified | somebody wrote with `pwrite` |
//! | closed after writing | kvcached's tools write through a mapping, which only shows here; and a process ended |
//! | attributes changed | the file was unlinked (its link count is an attribute) |
//!
//! The kernel announces that a descriptor closes *before* it drops the descriptor's locks. Whoever looks at once may
//! still find the lock of a dead process held, and no second event comes. So a close is followed by a second look a
//! moment later, which [`Watch::wait`] makes by itself.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use tidekv_fork::ClosedInChild;

use super::{Ledger, LedgerError};

/// How long after a close the locks of the closed descriptor are gone for certain.
const SECOND_LOOK: Duration = Duration::from_millis(5);

/// A longer wait than this ends early, which is not worse than waking for nothing.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// Wakes when the ledger changes, or one of the files added to it. Its own process's changes wake it too.
#[derive(Debug)]
pub struct Watch {
    ledger: Ledger,
    queue: ClosedInChild,
    seen: Mutex<Seen>,
}

#[derive(Debug)]
struct Seen {
    /// Which of the ledger's files is watched.
    generation: u64,
    second_look: Option<Instant>,
}

impl Watch {
    pub(super) fn new(ledger: Ledger) -> Result<Self, LedgerError> {
        let place = &ledger.0.place;
        let os = |source| LedgerError::Os { call: "inotify_init1", path: place.path().to_owned(), source };
        let queue = ClosedInChild::open(inotify_queue).map_err(os)?;
        let watch = Self {
            queue,
            seen: Mutex::new(Seen { generation: ledger.current()?.generation, second_look: None }),
            ledger,
        };
        watch.watch_ledger()?;
        Ok(watch)
    }

    /// Watches another file too, usually a segment. One that was deleted and made again must be added again.
    pub fn add(&self, path: &Path) -> Result<(), LedgerError> {
        self.check_birth()?;
        add(&self.queue, path).map_err(|source| LedgerError::Os {
            call: "inotify_add_watch",
            path: path.to_owned(),
            source: source.into(),
        })
    }

    /// Waits until something changed or the time is over; says which. Something may have changed without any effect:
    /// look, and wait again.
    pub fn wait(&self, timeout: Duration) -> Result<bool, LedgerError> {
        self.check_birth()?;
        if self.follow_ledger()? {
            return Ok(true);
        }
        let deadline = Instant::now() + timeout.min(LONGEST_WAIT);
        loop {
            let look_at = self.second_look().map_or(deadline, |at| at.min(deadline));
            let left = look_at.saturating_duration_since(Instant::now());
            let mut fds = [PollFd::new(&self.queue, PollFlags::IN)];
            let left = Timespec::try_from(left).expect("at most LONGEST_WAIT");
            match poll(&mut fds, Some(&left)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(self.ledger.0.place.os("poll")(error)),
            }
            if self.drain()? || self.take_second_look() {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
        }
    }

    /// When to call [`wait`](Self::wait) even if the descriptor is silent: for those who poll it among others.
    pub fn second_look(&self) -> Option<Instant> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).second_look
    }

    fn take_second_look(&self) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.second_look.take_if(|at| *at <= Instant::now()).is_some()
    }

    /// Moves to the ledger's new file after it was replaced; says whether it did.
    fn follow_ledger(&self) -> Result<bool, LedgerError> {
        let generation = self.ledger.current()?.generation;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.generation == generation {
            return Ok(false);
        }
        seen.generation = generation;
        drop(seen);
        self.watch_ledger()?;
        Ok(true)
    }

    fn watch_ledger(&self) -> Result<(), LedgerError> {
        match add(&self.queue, self.ledger.path()) {
            // It was just unlinked. The next update of this process finds a new file, and the next wait follows it.
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.ledger.0.place.os("inotify_add_watch")(error)),
        }
    }

    /// Takes all events away; says whether there were any.
    fn drain(&self) -> Result<bool, LedgerError> {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(&self.queue, &mut buffer);
        let (mut any, mut closed) = (false, false);
        loop {
            match events.next() {
                Ok(event) => {
                    any = true;
                    closed |= event.events().intersects(ReadFlags::CLOSE_WRITE | ReadFlags::QUEUE_OVERFLOW);
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.ledger.0.place.os("read")(error)),
            }
        }
        if closed {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.second_look = Some(Instant::now() + SECOND_LOOK);
        }
        Ok(any)
    }

    fn check_birth(&self) -> Result<(), LedgerError> {
        if self.queue.is_foreign() { Err(LedgerError::Forked) } else { Ok(()) }
    }
}

impl AsFd for Watch {
    /// Readable when something changed; [`Watch::wait`] with no time takes the events away.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

/// An inotify instance. Where the user has none left, the error names the setting that bounds them.
pub(crate) fn inotify_queue() -> io::Result<OwnedFd> {
    match inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK) {
        // The same number says that this process has no descriptor left.
        Err(Errno::MFILE) if File::open("/dev/null").is_ok() => Err(io::Error::other(
            "this user has no inotify instance left: raise fs.inotify.max_user_instances with sysctl, or end programs that hold many",
        )),
        result => Ok(result?),
    }
}

fn add(queue: &ClosedInChild, path: &Path) -> Result<(), Errno> {
    let events = WatchFlags::MODIFY | WatchFlags::CLOSE_WRITE | WatchFlags::ATTRIB | WatchFlags::MOVE_SELF;
    inotify::add_watch(queue, path, events | WatchFlags::DELETE_SELF).map(drop)
}
