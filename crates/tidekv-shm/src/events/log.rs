//! Writing events: whoever holds the ledger's lock, and nobody else, so there is no lock here.
//!
//! ```text
//!   an append      pread of the records from ours on: is the number still free?   one page, most often one look
//!                  pwrite of the new ones                                         each whole, or not there at all
//!
//!   file           then
//!   not there      made in its place, the magic last; half of one is made anew by the next writer
//!   unlinked       the one that has the name now is used, or a new one made        noticed within a second
//!   damaged        unlinked and made anew: the past is lost, the events go on      the same
//!   other format   left alone; events are dropped
//!   not ours       left alone; events are dropped
//! ```

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{fstat, ftruncate, stat, unlink};
use rustix::io::Errno;
use rustix::process::geteuid;
use tidekv_fork::ClosedInChild;

use super::error::EventsError;
use super::event::Event;
use super::format::{self, CAPACITY, FILE_BYTES, FormatError, HEAD_BYTES, RECORD_BYTES};
use crate::now_ms;
use crate::private_file::{make_private, open_private, read_at, write_at};

/// How often we start over when the file is replaced under us.
const TRIES: u32 = 3;
/// How long a file is trusted to be whole and to have its name.
const TRUSTED_MS: u64 = 1000;
/// What is read at once: the records of a page.
pub(super) const PAGE_BYTES: usize = 4096;

/// The end of the ring where events are added.
#[derive(Debug)]
pub(crate) struct EventLog {
    path: PathBuf,
    ring: Option<Ring>,
    dropped: u64,
}

#[derive(Debug)]
struct Ring {
    file: ClosedInChild,
    /// The number after the last one that we know of.
    next: u64,
    checked_ms: u64,
    /// Which of the ledger's files it goes with.
    generation: u64,
}

impl EventLog {
    /// Opens nothing yet.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, ring: None, dropped: 0 }
    }

    /// Numbers the events and adds them. The caller holds the lock of the ledger, which is the `generation`th that it
    /// uses. Never fails: what cannot be written is dropped and counted.
    pub(crate) fn append(&mut self, events: &mut [Event], generation: u64) {
        // More at once than the ring holds would overwrite themselves.
        let surplus = events.len().saturating_sub(CAPACITY as usize);
        if let Err(error) = self.try_append(&mut events[surplus..], generation) {
            self.ring = None;
            self.dropped = self.dropped.saturating_add(events.len() as u64);
            tracing::debug!(%error, dropped = self.dropped, "events are not written down");
        }
    }

    /// How many events this process could not write.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Takes the file's name away. The caller holds the lock of the ledger that goes with it.
    pub(crate) fn remove(&mut self) -> Result<(), EventsError> {
        self.ring = None;
        let Some(file) = open_private(&self.path).map_err(|error| EventsError::open(error, &self.path))? else {
            return Ok(());
        };
        match look(file.as_fd(), &self.path)?.health {
            Ok(()) | Err(FormatError::HalfBuilt) => unlink_if_same(file.as_fd(), &self.path),
            Err(error) => Err(EventsError::format(error, &self.path)),
        }
    }

    fn try_append(&mut self, events: &mut [Event], generation: u64) -> Result<(), EventsError> {
        for _ in 0..TRIES {
            let Some(mut ring) = self.ready(generation)? else { continue };
            let Some(next) = find_next(ring.file.as_fd(), &self.path, ring.next)? else {
                // It was cut short: look at it from the start.
                ring.checked_ms = 0;
                self.ring = Some(ring);
                continue;
            };
            self.write(ring.file.as_fd(), next, events)?;
            ring.next = next + events.len() as u64;
            self.ring = Some(ring);
            return Ok(());
        }
        Err(EventsError::HalfBuilt { path: self.path.clone() })
    }

    /// The ring, if it can be trusted; a file that cannot is taken away, and the next call makes another.
    fn ready(&mut self, generation: u64) -> Result<Option<Ring>, EventsError> {
        let now = now_ms();
        let known = self.ring.take().filter(|ring| ring.generation == generation);
        if let Some(ring) = &known
            && now < ring.checked_ms.saturating_add(TRUSTED_MS)
        {
            return Ok(known);
        }
        let mut ring = match known {
            Some(ring) => ring,
            None => {
                let file = open_or_make(&self.path)?;
                Ring { file, next: 0, checked_ms: 0, generation }
            }
        };
        ring.checked_ms = now;
        match look(ring.file.as_fd(), &self.path)? {
            Look { is_linked: false, .. } => Ok(None),
            Look { health: Ok(()), .. } => Ok(Some(ring)),
            Look { health: Err(FormatError::HalfBuilt), .. } => {
                unlink_if_same(ring.file.as_fd(), &self.path).map(|()| None)
            }
            Look { health: Err(error), .. } => Err(EventsError::format(error, &self.path)),
        }
    }

    fn write(&self, file: BorrowedFd<'_>, next: u64, events: &mut [Event]) -> Result<(), EventsError> {
        let mut bytes = Vec::with_capacity(events.len() * RECORD_BYTES);
        for (sequence, event) in (next..).zip(events.iter_mut()) {
            event.sequence = sequence;
            bytes.extend_from_slice(&format::encode(event));
        }
        for part in parts(next, events.len()).into_iter().filter(|part| !part.is_empty()) {
            let offset = format::offset_of(next + part.start as u64);
            let records = &bytes[part.start * RECORD_BYTES..part.end * RECORD_BYTES];
            write_at(file, records, offset).map_err(EventsError::os("pwrite", &self.path))?;
        }
        Ok(())
    }
}

/// The number after the last event, which is `known` or later; `None` for a file that was cut short.
fn find_next(file: BorrowedFd<'_>, path: &Path, known: u64) -> Result<Option<u64>, EventsError> {
    let mut next = known;
    if next > 0 {
        let mut page = [0; PAGE_BYTES];
        loop {
            let offset = format::offset_of(next);
            let wanted = PAGE_BYTES - offset % PAGE_BYTES;
            let length = read_at(file, &mut page[..wanted], offset).map_err(EventsError::os("pread", path))?;
            if length < wanted {
                return Ok(None);
            }
            match follow(&page[..wanted], next) {
                (passed, Follow::Ended) => return Ok(Some(passed)),
                (passed, Follow::GoesOn) => next = passed,
                (_, Follow::Lost) => break,
            }
        }
    }
    // The first look, or others wrote so much that our place was passed.
    let bytes = read_all(file, path)?;
    Ok(Some(format::records(&bytes).last().map_or(1, |(sequence, _)| sequence + 1)))
}

/// How a run of records goes on from a number.
enum Follow {
    /// With a record that is not the next one's: it is still to be written.
    Ended,
    /// All were there.
    GoesOn,
    /// With one that was written after the ring had passed us.
    Lost,
}

fn follow(records: &[u8], mut next: u64) -> (u64, Follow) {
    for record in records.chunks_exact(RECORD_BYTES) {
        match format::record_at(record, 0).and_then(format::sequence) {
            Some(sequence) if sequence == next => next += 1,
            Some(sequence) if sequence > next => return (next, Follow::Lost),
            _ => return (next, Follow::Ended),
        }
    }
    (next, Follow::GoesOn)
}

/// Which of `count` events from `next` on lie side by side in the ring: all, or two parts around its end.
fn parts(next: u64, count: usize) -> [Range<usize>; 2] {
    let to_the_end = usize::try_from(u64::from(CAPACITY) - next % u64::from(CAPACITY)).expect("at most CAPACITY");
    let first = count.min(to_the_end);
    [0..first, first..count]
}

/// What a file is at one moment.
#[derive(Debug)]
pub(super) struct Look {
    /// Whether it still has a name.
    pub(super) is_linked: bool,
    /// Whether it is an events file, as far as its head and its size tell.
    pub(super) health: Result<(), FormatError>,
}

pub(super) fn look(file: BorrowedFd<'_>, path: &Path) -> Result<Look, EventsError> {
    let stat = fstat(file).map_err(EventsError::os("fstat", path))?;
    let mut bytes = [0; HEAD_BYTES];
    let length = read_at(file, &mut bytes, 0).map_err(EventsError::os("pread", path))?;
    let health = format::check(&bytes[..length], u64::try_from(stat.st_size).unwrap_or(0));
    Ok(Look { is_linked: stat.st_nlink > 0, health })
}

/// The whole file.
pub(super) fn read_all(file: BorrowedFd<'_>, path: &Path) -> Result<Vec<u8>, EventsError> {
    let mut bytes = vec![0; FILE_BYTES];
    read_at(file, &mut bytes, 0).map_err(EventsError::os("pread", path))?;
    Ok(bytes)
}

fn open_or_make(path: &Path) -> Result<ClosedInChild, EventsError> {
    match open_private(path).map_err(|error| EventsError::open(error, path))? {
        Some(file) => Ok(file),
        None => make(path),
    }
}

/// Makes an empty file. What is never written of it takes no memory.
fn make(path: &Path) -> Result<ClosedInChild, EventsError> {
    let file = make_private(path).map_err(EventsError::os("open", path))?;
    ftruncate(&file, FILE_BYTES as u64).map_err(EventsError::os("ftruncate", path))?;
    let head = format::encode_head(geteuid().as_raw());
    for (bytes, at) in [(&head[8..], 8), (&head[..8], 0)] {
        write_at(file.as_fd(), bytes, at).map_err(EventsError::os("pwrite", path))?;
    }
    Ok(file)
}

fn unlink_if_same(file: BorrowedFd<'_>, path: &Path) -> Result<(), EventsError> {
    let ours = fstat(file).map_err(EventsError::os("fstat", path))?;
    match stat(path) {
        Ok(named) if (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino) => {}
        _ => return Ok(()),
    }
    match unlink(path) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(EventsError::os("unlink", path)(error)),
    }
}
