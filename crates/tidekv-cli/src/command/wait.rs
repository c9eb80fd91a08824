//! Waiting for a pool to do what it was asked for, woken by its changes of the ledger and bounded by a deadline.

use std::time::{Duration, Instant};

use tidekv_shm::{LedgerEntry, LedgerError};

use crate::scene::{Place, is_alive};

/// How waiting ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    /// It is done; the entry as it was then.
    Done(LedgerEntry),
    /// Not yet; the entry as it is now.
    NotYet(LedgerEntry),
    /// The pool is gone.
    Ended,
}

/// Waits until `done` holds for the pool's entry, the pool ends or the time is over. Looks at least once.
pub(super) fn until(
    place: &Place,
    timeout: Duration,
    done: impl Fn(&LedgerEntry) -> bool,
) -> Result<Waited, LedgerError> {
    let deadline = Instant::now() + timeout;
    // Before the first look, so that no change falls between a look and the wait after it.
    let watch = place.ledger.watch()?;
    loop {
        let view = place.ledger.read()?;
        let identity = |entry: &LedgerEntry| (entry.pid, entry.started, entry.group, entry.name.clone());
        let same = |entry: &&LedgerEntry| identity(entry) == identity(&place.entry);
        let entry = view.by_slot(place.entry.slot).filter(same);
        let torn = view.torn.contains(&place.entry.slot);
        match entry {
            Some(entry) if done(entry) => return Ok(Waited::Done(entry.clone())),
            Some(entry) if !is_alive(&view, entry) => return Ok(Waited::Ended),
            None if !torn => return Ok(Waited::Ended),
            _ => {}
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Waited::NotYet(entry.cloned().unwrap_or_else(|| place.entry.clone())));
        }
        watch.wait(left)?;
    }
}
