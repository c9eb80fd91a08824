//! Reading events without a lock, from where one stopped the last time.
//!
//! ```text
//!   we expect n            the record there has number    it means
//!   ... n-2  n-1 [ n ]     n                              new: read, and n+1 is looked at
//!                          more than n                    the ring was faster: all is read, the lost are counted
//!                          less, none                     nothing new, unless n+1 or a later one is there:
//!                                                         then n is damaged, and skipped
//! ```

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::fstat;
use tidekv_fork::ClosedInChild;

use super::error::EventsError;
use super::event::Event;
use super::format::{self, FormatError, RECORD_BYTES, Record};
use super::log::{PAGE_BYTES, look, read_all};
use crate::private_file::{open_private, read_at};
use crate::{DeviceName, RuntimeDir};

/// How often a file that is just being made is looked at again.
const LOOKS: u32 = 16;

/// One events file, and how far it was read.
#[derive(Debug)]
pub struct EventReader {
    path: PathBuf,
    file: ClosedInChild,
    /// The next number that we expect; 0 before the first look.
    next: u64,
}

/// What one look gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// New events, the oldest first.
    pub events: Vec<Event>,
    /// How many were overwritten before they could be read.
    pub overwritten: u64,
    /// How many are damaged, or of a kind that this release does not know.
    pub skipped: u64,
}

impl Batch {
    fn add(&mut self, record: &Record) {
        match format::decode(record) {
            Some(event) => self.events.push(event),
            None => self.skipped += 1,
        }
    }
}

impl EventReader {
    /// Opens a device's events, to be read from the oldest on; `None` if there are none.
    pub fn open(dir: &RuntimeDir, device: &DeviceName) -> Result<Option<Self>, EventsError> {
        let path = dir.events_path(device);
        let file = open_private(&path).map_err(|error| EventsError::open(error, &path))?;
        Ok(file.map(|file| Self { path, file, next: 0 }))
    }

    /// Where they lie.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether this file still has its name. If not, nothing is added to it any more, and another may have the name.
    pub fn is_linked(&self) -> bool {
        !self.file.is_foreign() && fstat(&self.file).is_ok_and(|stat| stat.st_nlink > 0)
    }

    /// What was added since the last look; at the first look, everything that is there.
    pub fn read(&mut self) -> Result<Batch, EventsError> {
        if self.file.is_foreign() {
            return Err(EventsError::Forked);
        }
        self.check()?;
        let mut batch = Batch::default();
        if self.next == 0 || !self.read_on(&mut batch)? {
            self.read_from_the_oldest(&mut batch)?;
        }
        Ok(batch)
    }

    fn check(&self) -> Result<(), EventsError> {
        let mut looks = 0;
        loop {
            looks += 1;
            match look(self.file.as_fd(), &self.path)?.health {
                Ok(()) => return Ok(()),
                Err(FormatError::HalfBuilt) if looks < LOOKS => std::thread::yield_now(),
                Err(error) => return Err(EventsError::format(error, &self.path)),
            }
        }
    }

    /// Reads from the next number on, a page at a time, as far as there are new ones. Says no if the ring was faster.
    fn read_on(&mut self, batch: &mut Batch) -> Result<bool, EventsError> {
        let mut page = [0; PAGE_BYTES];
        loop {
            let offset = format::offset_of(self.next);
            let wanted = PAGE_BYTES - offset % PAGE_BYTES;
            let length = read_at(self.file.as_fd(), &mut page[..wanted], offset);
            let length = length.map_err(EventsError::os("pread", &self.path))?;
            let records: Vec<&Record> =
                page[..length].chunks_exact(RECORD_BYTES).filter_map(|bytes| bytes.first_chunk()).collect();
            let numbers: Vec<_> = (self.next..).zip(records.iter().map(|record| format::sequence(record))).collect();
            if numbers.iter().any(|(expected, found)| found.is_some_and(|found| found > *expected)) {
                return Ok(false);
            }
            let last = numbers.iter().rposition(|(expected, found)| *found == Some(*expected));
            let new = last.map_or(0, |last| last + 1);
            for (record, (expected, found)) in records.iter().zip(&numbers).take(new) {
                if *found == Some(*expected) { batch.add(record) } else { batch.skipped += 1 }
            }
            self.next += new as u64;
            if new * RECORD_BYTES < wanted {
                return Ok(true);
            }
        }
    }

    fn read_from_the_oldest(&mut self, batch: &mut Batch) -> Result<(), EventsError> {
        let bytes = read_all(self.file.as_fd(), &self.path)?;
        let records = format::records(&bytes);
        let fresh = records.iter().filter(|(sequence, _)| *sequence >= self.next);
        let oldest = fresh.clone().map(|(sequence, _)| *sequence).next();
        // What was there before the first look was not missed.
        if let Some(oldest) = oldest.filter(|_| self.next > 0) {
            batch.overwritten += oldest - self.next;
        }
        fresh.for_each(|(_, record)| batch.add(record));
        self.next = records.last().map_or(1, |(sequence, _)| sequence + 1).max(self.next);
        Ok(())
    }
}
