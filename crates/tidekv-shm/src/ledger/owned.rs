//! A pool's own entry: a slot, and the lock by which everybody knows that the pool lives.
//!
//! ```text
//!   slot lock    a byte behind the end of the file, held by a descriptor that is used for nothing else:
//!                exit, SIGKILL and exec drop it; a forked child closes its copy before fork() returns there
//! ```
//!
//! If the ledger is deleted or damaged under living pools, each of them takes a seat in the new file with its next
//! update and writes there what it last knew of itself. Until all have done so the new file counts too little, for as
//! long as their watches need to wake them.

use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tidekv_fork::ClosedInChild;

use super::changes::Author;
use super::format::{SLOTS, owner_byte};
use super::view::{EntrySpec, EntryState, LedgerEntry, LedgerView};
use super::{Ledger, LedgerError, Session};
use crate::events::{Journal, Note};
use crate::lock::{try_lock_byte, unlock_byte};

/// How long leaving waits for the table's lock. A pool that cannot leave in time is reaped by its neighbours.
const LEAVE_WAIT: Duration = Duration::from_millis(250);

/// The entry of a pool in this process. Dropping it frees the slot; the last pool to go unlinks the ledger.
#[derive(Debug)]
pub struct OwnedEntry {
    ledger: Ledger,
    seat: Mutex<Seat>,
    /// What the events have not been told yet.
    journal: Mutex<Journal>,
}

/// Where the entry is.
#[derive(Debug)]
struct Seat {
    /// Holds the slot's lock.
    owner: ClosedInChild,
    /// In which of the ledger's files.
    generation: u64,
    /// What stood in the slot after our last update; `slot` is where.
    last: LedgerEntry,
}

impl Seat {
    fn index_in(&self, view: &LedgerView) -> Option<usize> {
        if view.generation == self.generation { view.index_of(self.last.slot) } else { None }
    }
}

impl OwnedEntry {
    pub(super) fn register(ledger: Ledger, deadline: Instant, spec: &EntrySpec) -> Result<Self, LedgerError> {
        let seat = ledger.locked(deadline, |session| {
            session.view.reap(crate::now_ms());
            let (slot, owner) = session.take_slot()?;
            let last = LedgerEntry::new(slot, spec);
            session.view.seat(last.clone());
            session.write(Author::Joining(slot))?;
            Ok(Seat { owner, generation: session.current.generation, last })
        })?;
        Ok(Self { ledger, seat: Mutex::new(seat), journal: Mutex::default() })
    }

    /// Changes the ledger as [`Ledger::update`] does, after reaping. The closure also gets the index of this pool's
    /// entry in `entries`.
    pub fn update<T>(
        &self,
        deadline: Instant,
        change: impl FnOnce(&mut LedgerView, usize) -> T,
    ) -> Result<T, LedgerError> {
        self.ledger.locked(deadline, |session| {
            let mut seat = self.seat.lock().unwrap_or_else(PoisonError::into_inner);
            session.view.reap(crate::now_ms());
            let me = session.find(&mut seat)?;
            let result = change(&mut session.view, me);
            let mut journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
            session.write(Author::Owner { slot: seat.last.slot, journal: &mut journal })?;
            if let Some(entry) = session.view.by_slot(seat.last.slot) {
                seat.last.clone_from(entry);
            }
            Ok(result)
        })
    }

    /// This pool's entry as it stands in the ledger, without the lock; as it last was, where that cannot be read.
    pub fn read(&self) -> Result<LedgerEntry, LedgerError> {
        let view = self.ledger.read()?;
        let seat = self.seat.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(seat.index_in(&view).map_or(&seat.last, |at| &view.entries[at]).clone())
    }

    /// Where in a view of this entry's own [`ledger`](Self::ledger) the entry is. `None` if it is not there: somebody
    /// replaced the file, and this pool has no seat in the new one before its next update. What has its slot there may
    /// be a neighbour's.
    pub fn index_in(&self, view: &LedgerView) -> Option<usize> {
        self.seat.lock().unwrap_or_else(PoisonError::into_inner).index_in(view)
    }

    /// Something happened to this pool, outside of an update: it is written down by the next one.
    pub fn note(&self, note: Note) {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner).add(note, crate::now_ms());
    }

    /// Its place in the table. It changes only when the ledger was replaced.
    pub fn slot(&self) -> u32 {
        self.seat.lock().unwrap_or_else(PoisonError::into_inner).last.slot
    }

    /// The ledger it is in.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

impl Drop for OwnedEntry {
    fn drop(&mut self) {
        let seat = self.seat.get_mut().unwrap_or_else(PoisonError::into_inner);
        if seat.owner.is_foreign() {
            return;
        }
        // A failure leaves an entry without owner, which the next neighbour reaps.
        let _ = self.ledger.locked(Instant::now() + LEAVE_WAIT, |session| {
            if session.current.generation == seat.generation {
                session.view.entries.retain(|entry| entry.slot != seat.last.slot);
                session.view.torn.retain(|&slot| slot != seat.last.slot);
            }
            session.view.reap(crate::now_ms());
            let journal = self.journal.get_mut().unwrap_or_else(PoisonError::into_inner);
            session.write(Author::Leaving { entry: &seat.last, journal })?;
            session.unlink_if_empty()
        });
        // Said aloud, because closing gives a lock back only if no other process has a copy of the descriptor.
        let _ = unlock_byte(seat.owner.as_fd(), owner_byte(seat.last.slot));
    }
}

impl Session<'_> {
    /// A slot that is free, and a descriptor that holds its lock.
    fn take_slot(&self) -> Result<(u32, ClosedInChild), LedgerError> {
        let owner = self.place.open_again(self.current.file.as_fd())?;
        for slot in 0..SLOTS {
            let taken = self.view.by_slot(slot).is_some() || self.view.torn.contains(&slot);
            // A slot that is free and locked belongs to somebody who is just leaving, or whose entry was lost.
            if !taken && try_lock_byte(owner.as_fd(), owner_byte(slot)).map_err(self.place.os("fcntl"))? {
                return Ok((slot, owner));
            }
        }
        Err(LedgerError::Full { path: self.place.path().to_owned(), slots: SLOTS })
    }

    /// The index of our entry, put back first if somebody lost it.
    fn find(&mut self, seat: &mut Seat) -> Result<usize, LedgerError> {
        if seat.generation != self.current.generation {
            let (slot, owner) = self.take_slot()?;
            seat.owner = owner;
            seat.generation = self.current.generation;
            seat.last.slot = slot;
        }
        let slot = seat.last.slot;
        let ours = |entry: &&LedgerEntry| entry.state == EntryState::Live && entry.started == seat.last.started;
        if self.view.by_slot(slot).filter(ours).is_none() {
            self.view.seat(seat.last.clone());
        }
        Ok(self.view.index_of(slot).expect("it was just put there"))
    }
}

impl LedgerView {
    /// Puts an entry in its slot, whatever was there.
    fn seat(&mut self, entry: LedgerEntry) {
        self.entries.retain(|other| other.slot != entry.slot);
        self.torn.retain(|&slot| slot != entry.slot);
        let at = self.entries.partition_point(|other| other.slot < entry.slot);
        self.entries.insert(at, entry);
    }
}
