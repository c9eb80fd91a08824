//! The ledger of a device: who holds how much of its memory, in one file that every pool of a user opens.
//!
//! ```text
//!   read      no lock, pread: tools                         every entry whole, or named as torn
//!   update    table lock -> pread -> change -> pwrite       pools and operators, one at a time
//!   register  a slot and its owner lock, for life           pools
//!   watch     inotify: wakes when anybody changed anything, or died
//!
//!   turn of this process  ->  table lock (byte 0)  ->  seat of the entry       the order in which these are taken
//! ```
//!
//! What an update writes, in this order, each by one `pwrite` that is whole even if its writer is killed in it:
//!
//! 1. the head, if a slot is used for the first time: slots beyond those it names are not even read;
//! 2. entries whose `reserved` grew, so that memory is counted before anybody can use it;
//! 3. the other entries that changed, and slots that became free;
//! 4. who decided the budget, if that changed;
//! 5. the head, with `changes` one higher.
//!
//! So at any moment the sum of all `reserved` words is at least what was promised: a writer killed between two of
//! these steps leaves too much counted, never too little, and what is too much belongs to an entry whose owner is dead.
//!
//! After these, and still under the lock, it writes what happened into the device's [events](crate::events).

mod budget;
mod changes;
mod error;
mod file;
mod format;
mod owned;
pub(crate) mod turn;
mod view;
pub(crate) mod watch;

#[cfg(test)]
mod tests;

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rustix::process::geteuid;
use tidekv_fork::{Birth, ClosedInChild};

pub use budget::{AuthorName, BudgetAuthor, BudgetRight, BudgetSetting, DEFAULT_UTILIZATION};
pub use error::{Foreign, LedgerError};
pub use format::FormatError;
pub use owned::OwnedEntry;
pub use view::{Counters, EntrySpec, EntryState, LedgerEntry, LedgerHeader, LedgerView, Reaped, UNLIMITED};
pub use watch::Watch;

use crate::events::EventLog;
use crate::{DeviceName, PoolName, RuntimeDir, segment};
use changes::Author;
use file::{Place, TRIES};
use format::FILE_BYTES;
use turn::Turn;

/// How often a reader without the lock looks again at a record that is being written.
const LOOKS: u32 = 16;

/// One open ledger. Clones share it.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    place: Place,
    birth: Birth,
    /// The file in use. Held only to look or to replace, never across a call that waits.
    current: Mutex<Current>,
    turn: Turn<Scratch>,
}

/// A ledger's file and how many there were before it.
#[derive(Clone, Debug)]
struct Current {
    file: Arc<ClosedInChild>,
    generation: u64,
}

impl LedgerView {
    /// Says which file it was read from.
    fn of(self, current: &Current) -> Self {
        Self { file: Some(Arc::clone(&current.file)), generation: current.generation, ..self }
    }
}

/// What the thread that has the turn works with.
#[derive(Debug)]
struct Scratch {
    bytes: Vec<u8>,
    /// The head when it was last seen whole, for a file that must be made anew.
    header: LedgerHeader,
    log: EventLog,
}

impl Ledger {
    /// Opens this user's ledger of a device, and makes it if there is none.
    pub fn open(dir: &RuntimeDir, device: &DeviceName) -> Result<Self, LedgerError> {
        let place = Place::new(dir, dir.ledger_path(device));
        let file = place.open_or_make(&LedgerHeader::default())?;
        Ok(Self::of(place, file, EventLog::new(dir.events_path(device))))
    }

    /// Opens this user's ledger of a device if there is one.
    pub fn open_existing(dir: &RuntimeDir, device: &DeviceName) -> Result<Option<Self>, LedgerError> {
        let place = Place::new(dir, dir.ledger_path(device));
        let file = place.open_existing()?;
        Ok(file.map(|file| Self::of(place, file, EventLog::new(dir.events_path(device)))))
    }

    /// The devices of which this user has a ledger.
    pub fn list(dir: &RuntimeDir) -> Result<Vec<DeviceName>, LedgerError> {
        let prefix = crate::names::ledger_prefix();
        let device = |name: &String| name.strip_prefix(&prefix).and_then(|device| DeviceName::new(device).ok());
        let names = file_names(dir)?;
        let mut devices: Vec<_> = names.iter().filter(|name| !file::is_leftover(name)).filter_map(device).collect();
        devices.sort();
        Ok(devices)
    }

    /// Removes what processes left behind that were killed while they made a ledger, and says what.
    pub fn remove_leftovers(dir: &RuntimeDir) -> Result<Vec<PathBuf>, LedgerError> {
        let names = file_names(dir)?;
        let paths = names.iter().filter(|name| file::is_leftover(name)).map(|name| dir.path().join(name));
        Ok(paths.filter(|path| file::remove_leftover(path)).collect())
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        self.0.place.path()
    }

    /// The contents, without the lock: for tools, which must not wait for a pool that is stopped.
    pub fn read(&self) -> Result<LedgerView, LedgerError> {
        let place = &self.0.place;
        let mut current = self.current()?;
        if !place.is_named(current.file.as_fd())?
            && let Some(file) = place.open_existing()?
        {
            current = self.replace(&current, file);
        }
        let mut bytes = vec![0; FILE_BYTES];
        let mut looks = 0;
        loop {
            let loaded = place.load(current.file.as_fd(), &mut bytes)?;
            looks += 1;
            match loaded.and_then(|()| format::decode(&bytes)) {
                Ok(view) if view.torn.is_empty() || looks == LOOKS => {
                    return Ok(view.of(&current));
                }
                Ok(_) => {}
                Err(FormatError::HalfBuilt) if looks < LOOKS => {}
                Err(error) => return Err(place.format_error(error)),
            }
            std::thread::yield_now();
        }
    }

    /// Changes the contents under the table's lock. What the closure changed is written back when it returns; entries
    /// that it removed are freed. It should be short, and must not use this ledger in any other way.
    pub fn update<T>(&self, deadline: Instant, change: impl FnOnce(&mut LedgerView) -> T) -> Result<T, LedgerError> {
        self.locked(deadline, |session| {
            let result = change(&mut session.view);
            session.write(Author::Stranger)?;
            Ok(result)
        })
    }

    /// Takes a free slot, and its owner lock for as long as the [`OwnedEntry`] lives. Owners that are dead are reaped
    /// first.
    pub fn register(&self, deadline: Instant, spec: EntrySpec) -> Result<OwnedEntry, LedgerError> {
        OwnedEntry::register(self.clone(), deadline, &spec)
    }

    /// How many events this handle could not write down.
    pub fn dropped_events(&self, deadline: Instant) -> Result<u64, LedgerError> {
        self.locked(deadline, |session| Ok(session.scratch.log.dropped()))
    }

    /// Unlinks the ledger, and its events with it, if, after reaping, nobody has an entry in it. Says whether it is gone.
    pub fn remove_if_empty(&self, deadline: Instant) -> Result<bool, LedgerError> {
        self.locked(deadline, |session| {
            session.view.reap(crate::now_ms());
            session.write(Author::Stranger)?;
            session.unlink_if_empty()
        })
    }

    /// Wakes when anybody changes the ledger or dies.
    pub fn watch(&self) -> Result<Watch, LedgerError> {
        Watch::new(self.clone())
    }

    fn of(place: Place, file: ClosedInChild, log: EventLog) -> Self {
        let current = Current { file: Arc::new(file), generation: 0 };
        let scratch = Scratch { bytes: vec![0; FILE_BYTES], header: LedgerHeader::default(), log };
        Self(Arc::new(Shared { place, birth: Birth::here(), current: Mutex::new(current), turn: Turn::new(scratch) }))
    }

    fn current(&self) -> Result<Current, LedgerError> {
        if self.0.birth.is_foreign() {
            return Err(LedgerError::Forked);
        }
        Ok(self.0.current.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Takes another file into use instead of `old`, unless another thread did so already.
    fn replace(&self, old: &Current, file: ClosedInChild) -> Current {
        let mut current = self.0.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.generation == old.generation {
            *current = Current { file: Arc::new(file), generation: old.generation + 1 };
        }
        current.clone()
    }

    /// Runs `work` on the contents, alone among all threads and processes. A file that lost its name or its contents
    /// is replaced first.
    fn locked<T>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&mut Session<'_>) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        let place = &self.0.place;
        self.current()?;
        let turn = self.0.turn.take(deadline);
        let mut scratch = turn.map_err(|waited| LedgerError::LockTimeout { path: place.path().to_owned(), waited })?;
        for _ in 0..TRIES {
            let current = self.current()?;
            let fd = current.file.as_fd();
            let table = place.lock_table(fd, deadline)?;
            if place.is_named(fd)? {
                match place.load(fd, &mut scratch.bytes)? {
                    Ok(()) => return work(&mut Session::load(place, &current, &mut scratch)),
                    Err(FormatError::HalfBuilt | FormatError::NotALedger) => place.unlink_if_same(fd)?,
                    Err(error) => return Err(place.format_error(error)),
                }
            }
            drop(table);
            let file = place.open_or_make(&scratch.header)?;
            self.replace(&current, file);
        }
        Err(LedgerError::Unsettled { path: place.path().to_owned(), tries: TRIES })
    }
}

/// A ledger's contents while its lock is held.
struct Session<'a> {
    place: &'a Place,
    current: &'a Current,
    scratch: &'a mut Scratch,
    view: LedgerView,
}

impl<'a> Session<'a> {
    /// `scratch` has the file's bytes.
    fn load(place: &'a Place, current: &'a Current, scratch: &'a mut Scratch) -> Self {
        // A head that is damaged under the lock is written anew from what it last was.
        let header = format::decode_device(&scratch.bytes).unwrap_or(scratch.header);
        let view = format::decode_slots(&scratch.bytes, header).of(current);
        Self { place, current, scratch, view }
    }

    /// Writes what differs from the file's bytes, in the order of the module's header, and then what happened.
    fn write(&mut self, author: Author<'_>) -> Result<(), LedgerError> {
        let writes = format::plan_writes(&self.scratch.bytes, &mut self.view, geteuid().as_raw());
        self.remove_segments_of_the_dead(&writes, &author);
        for (offset, record) in &writes {
            self.place.write(self.current.file.as_fd(), record, *offset)?;
        }
        self.scratch.header = self.view.header;
        let mut events = changes::events(&self.scratch.bytes, &writes, &mut self.view, author);
        if !events.is_empty() {
            self.scratch.log.append(&mut events, self.current.generation);
        }
        Ok(())
    }

    /// The entry is the only proof that a segment is a pool's and that the pool is dead, so whoever removes the entry removes
    /// the segment first. Killed between the two, the entry is left, and the next one finds it.
    fn remove_segments_of_the_dead(&self, writes: &[format::Write], author: &Author<'_>) {
        for old in changes::removed(&self.scratch.bytes, writes, author) {
            // What another release wrote may be no name.
            let Ok(name) = PoolName::new(&old.name) else { continue };
            let path = self.place.dir().segment_path(&name.with_group(old.group));
            if let Err(error) = segment::remove_abandoned(&path) {
                tracing::debug!(%error, "the segment of a dead pool stays");
            }
        }
    }

    /// Unlinks the file if it has no entry; whoever opened it already will start over.
    fn unlink_if_empty(&mut self) -> Result<bool, LedgerError> {
        let empty = self.view.entries.is_empty() && self.view.torn.is_empty();
        if empty {
            // The events first: once the ledger has no name, the next one's may be there.
            if let Err(error) = self.scratch.log.remove() {
                tracing::debug!(%error, "the events stay behind");
            }
            self.place.unlink_if_same(self.current.file.as_fd())?;
        }
        Ok(empty)
    }
}

/// The names in the folder that can be ours. A folder that is not there is an empty one.
fn file_names(dir: &RuntimeDir) -> Result<Vec<String>, LedgerError> {
    let os = |source| LedgerError::Os { call: "readdir", path: dir.path().to_owned(), source };
    let entries = match std::fs::read_dir(dir.path()) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(os(error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(os)?.file_name().into_string());
    }
    Ok(names)
}
