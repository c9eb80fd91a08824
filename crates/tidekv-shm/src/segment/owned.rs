//! The segment of a pool in this process.
//!
//! | what may happen to the file | what [`PoolSegment::heal`] does |
//! | --- | --- |
//! | deleted (`kvctl delete`, `rm`) | makes it again with the last limit and use: the pool is visible again |
//! | cut short or grown | writes its three numbers again |
//! | replaced by another file | takes it over, unless a living pool owns it |
//!
//! The limit is the operator's word: the pool writes it when it begins and when it heals, and otherwise only reads it.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, fchmod, fstat, ftruncate, unlink};
use rustix::io::Errno;
use tidekv_core::units::Bytes;
use tidekv_fork::ClosedInChild;

use super::{OWNER_BYTE, SEGMENT_BYTES, SegmentError, SegmentView};
use super::{is_named, lock_exclusive, number, read_whole, refuse_foreign, refuse_owned, write_bytes};
use crate::lock::{FileLock, try_lock_byte};
use crate::private_file::open_guarded;
use crate::{PoolName, RuntimeDir};

/// How long the pool waits for tools that hold the file's lock. What could not be published now is published next time.
const PUBLISH_WAIT: Duration = Duration::from_millis(5);
/// How long making the file waits for them.
const CREATE_WAIT: Duration = Duration::from_millis(250);
/// How often another file may appear while we take one.
const TRIES: u32 = 8;

/// Segments that this process has, and those it is making.
static OWN: AtomicU32 = AtomicU32::new(0);
/// Whether this process makes no segment any more.
static NO_MORE: AtomicBool = AtomicBool::new(false);

/// From now on this process makes no segment. Says whether it has none, so that it can end at once and leave none behind.
pub fn make_no_more() -> bool {
    NO_MORE.store(true, Ordering::SeqCst);
    OWN.load(Ordering::SeqCst) == 0
}

/// Counts a segment for as long as it lives.
#[derive(Debug)]
struct Counted;

impl Counted {
    /// Counts first and then asks, as [`make_no_more`] forbids first and then counts: one of the two sees the other.
    fn new(path: &Path) -> Result<Self, SegmentError> {
        OWN.fetch_add(1, Ordering::SeqCst);
        let counted = Self;
        if NO_MORE.load(Ordering::SeqCst) { Err(SegmentError::Ending { path: path.to_owned() }) } else { Ok(counted) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        OWN.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A pool's own segment. Dropping it unlinks the file, unless the name is someone else's file by then.
#[derive(Debug)]
pub struct PoolSegment {
    path: PathBuf,
    state: Mutex<State>,
    /// Dropped last: by then the file is gone.
    _counted: Counted,
}

#[derive(Debug)]
struct State {
    /// Holds the owner's lock.
    file: ClosedInChild,
    /// What stands in the file, as far as we know.
    last: SegmentView,
}

impl PoolSegment {
    /// Makes the pool's segment with mode 0600 and this limit, nothing used. A file that is there is taken over, unless
    /// it is a living pool's or has the shape of something else. For group g > 0 the name is `pool.with_group(g)`.
    pub fn create(dir: &RuntimeDir, name: &PoolName, total: Bytes) -> Result<Self, SegmentError> {
        let path = dir.segment_path(name);
        let counted = Counted::new(&path)?;
        dir.ensure()?;
        let last = SegmentView { limit: number(total)?, used: 0, prealloc: 0 };
        let file = take(&path, last)?;
        Ok(Self { path, state: Mutex::new(State { file, last }), _counted: counted })
    }

    /// Whether a pool of this name could have its segment now, as far as the file that is there tells. Makes nothing.
    pub fn check(dir: &RuntimeDir, name: &PoolName) -> Result<(), SegmentError> {
        let path = dir.segment_path(name);
        match open_guarded(&path, OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty()) {
            Ok(file) => {
                refuse_owned(file.as_fd(), &path)?;
                refuse_foreign(file.as_fd(), &path)
            }
            // Whatever else is wrong with it, making it says so.
            Err(_) => Ok(()),
        }
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes what the pool uses, and what it holds beyond that. One system call when nothing changed.
    pub fn publish(&self, used: Bytes, prealloc: Bytes) -> Result<(), SegmentError> {
        let mut state = self.state()?;
        let next = SegmentView { used: number(used)?, prealloc: number(prealloc)?, ..state.last };
        if next == state.last
            && read_whole(state.file.as_fd()).is_some_and(|now| (now.used, now.prealloc) == (next.used, next.prealloc))
        {
            return Ok(());
        }
        self.write(&mut state, 8, next)
    }

    /// The limit that stands in the file now; `None` if the file is damaged or the number is no size.
    pub fn limit(&self) -> Option<Bytes> {
        let mut state = self.state().ok()?;
        let now = read_whole(state.file.as_fd())?;
        let limit = u64::try_from(now.limit).ok()?;
        state.last.limit = now.limit;
        Some(Bytes(limit))
    }

    /// Writes the limit, as an operator would.
    pub fn set_limit(&self, limit: Bytes) -> Result<(), SegmentError> {
        let mut state = self.state()?;
        let next = SegmentView { limit: number(limit)?, ..state.last };
        self.write(&mut state, 0, next)
    }

    /// Makes the file what it should be; says whether there was anything to do.
    pub fn heal(&self) -> Result<bool, SegmentError> {
        let mut state = self.state()?;
        if is_named(&self.path, state.file.as_fd()) {
            let stat = fstat(&state.file).map_err(SegmentError::os("fstat", &self.path))?;
            if u64::try_from(stat.st_size) == Ok(SEGMENT_BYTES as u64) {
                return Ok(false);
            }
            fill(state.file.as_fd(), &self.path, state.last)?;
            return Ok(true);
        }
        state.file = take(&self.path, state.last)?;
        Ok(true)
    }

    /// Writes the three numbers from byte `from` on: 0 with the limit, 8 without.
    fn write(&self, state: &mut State, from: usize, next: SegmentView) -> Result<(), SegmentError> {
        let bytes = next.to_bytes();
        let to = if from == 0 { 8 } else { SEGMENT_BYTES };
        {
            let _lock = lock_exclusive(&state.file, &self.path, Instant::now() + PUBLISH_WAIT)?;
            let written = write_bytes(state.file.as_fd(), &bytes[from..to], from as u64);
            written.map_err(SegmentError::os("pwrite", &self.path))?;
        }
        state.last = next;
        Ok(())
    }

    fn state(&self) -> Result<MutexGuard<'_, State>, SegmentError> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.file.is_foreign() { Err(SegmentError::Forked) } else { Ok(state) }
    }
}

impl Drop for PoolSegment {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Our owner's lock is still held, so no other pool takes the file between the look and the unlink.
        if !state.file.is_foreign() && is_named(&self.path, state.file.as_fd()) {
            let _ = unlink(&self.path);
        }
    }
}

/// Opens or makes the file, takes the owner's lock on it and writes all three numbers.
fn take(path: &Path, contents: SegmentView) -> Result<ClosedInChild, SegmentError> {
    for _ in 0..TRIES {
        let file = open_ours(path)?;
        if !try_lock_byte(file.as_fd(), OWNER_BYTE).map_err(SegmentError::os("fcntl", path))? {
            return Err(SegmentError::InUse { path: path.to_owned() });
        }
        if let Err(error) = fill(file.as_fd(), path, contents) {
            // One that was just made, and could not be written, would be left behind.
            if fstat(&file).is_ok_and(|stat| stat.st_size == 0) && is_named(path, file.as_fd()) {
                let _ = unlink(path);
            }
            return Err(error);
        }
        // Its owner, or whoever found that owner dead, may have unlinked it just before.
        if is_named(path, file.as_fd()) {
            return Ok(file);
        }
    }
    Err(SegmentError::InUse { path: path.to_owned() })
}

fn open_ours(path: &Path) -> Result<ClosedInChild, SegmentError> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = match open_guarded(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => file,
        Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO | Errno::ACCESS | Errno::PERM) => {
            return Err(SegmentError::NotOurs { path: path.to_owned() });
        }
        Err(error) => return Err(SegmentError::os("open", path)(error)),
    };
    refuse_foreign(file.as_fd(), path)?;
    Ok(file)
}

fn fill(file: BorrowedFd<'_>, path: &Path, contents: SegmentView) -> Result<(), SegmentError> {
    let _lock: FileLock<'_> = lock_exclusive(&file, path, Instant::now() + CREATE_WAIT)?;
    // kvcached makes its files for everybody; one that we take over becomes ours alone.
    fchmod(file, Mode::RUSR | Mode::WUSR).map_err(SegmentError::os("fchmod", path))?;
    write_bytes(file, &contents.to_bytes(), 0).map_err(SegmentError::os("pwrite", path))?;
    ftruncate(file, SEGMENT_BYTES as u64).map_err(SegmentError::os("ftruncate", path))
}
