//! Whether the models of a fleet ever held more than their budget: their ledger, read all the time they serve.
//!
//! ```text
//!   ledger   [model-1: reserved][model-2: reserved][model-3: reserved]   budget
//!            └─────────────── one look sees all of them as they were at one moment ───────────────┘
//! ```
//!
//! A pool reserves in the ledger before it maps and releases after it has unmapped, so what is reserved is at least what the
//! device gives. Looks are taken under the ledger's lock: without it, or by asking one server after the other, memory that changes
//! hands meanwhile could be counted twice.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::Serialize;
use tidekv_shm::{Ledger, RuntimeDir};

const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long a look waits for the lock; then it is one look less.
const LOCK_PATIENCE: Duration = Duration::from_millis(100);

/// What all looks saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct LedgerLooks {
    /// How many there were.
    pub(super) looks: u64,
    /// How many saw more reserved than the budget has.
    pub(super) over_budget: u64,
    /// The most that was reserved.
    pub(super) peak_reserved_bytes: u64,
    /// What all pools may hold.
    pub(super) budget_bytes: u64,
}

impl LedgerLooks {
    fn add(&mut self, reserved_bytes: u64, budget_bytes: u64) {
        self.looks += 1;
        self.over_budget += u64::from(reserved_bytes > budget_bytes);
        self.peak_reserved_bytes = self.peak_reserved_bytes.max(reserved_bytes);
        self.budget_bytes = budget_bytes;
    }
}

/// A thread that looks until it is asked what it saw.
#[derive(Debug)]
pub(super) struct LedgerWatch {
    stop: Sender<()>,
    looks: JoinHandle<LedgerLooks>,
}

impl LedgerWatch {
    /// Begins to look at the one ledger of a folder.
    pub(super) fn begin(dir: &RuntimeDir) -> anyhow::Result<Self> {
        let devices = Ledger::list(dir)?;
        ensure!(devices.len() == 1, "{} has {} ledgers, and one was expected", dir.path().display(), devices.len());
        let ledger = Ledger::open_existing(dir, &devices[0])?.context("the ledger has gone")?;
        let (stop, stopped) = channel();
        let looks = thread::Builder::new().name("watch-ledger".to_owned()).spawn(move || look(&ledger, &stopped))?;
        Ok(Self { stop, looks })
    }

    pub(super) fn end(self) -> LedgerLooks {
        drop(self.stop);
        self.looks.join().unwrap_or_default()
    }
}

fn look(ledger: &Ledger, stopped: &Receiver<()>) -> LedgerLooks {
    let mut looks = LedgerLooks::default();
    loop {
        let seen = ledger.update(Instant::now() + LOCK_PATIENCE, |view| (view.reserved().0, view.header.budget.0));
        if let Ok((reserved_bytes, budget_bytes)) = seen {
            looks.add(reserved_bytes, budget_bytes);
        }
        if stopped.recv_timeout(LOOK_EVERY) != Err(RecvTimeoutError::Timeout) {
            return looks;
        }
    }
}

#[cfg(test)]
mod tests {
    use tidekv_core::units::{Bytes, GroupId};
    use tidekv_shm::{DeviceName, EntrySpec, PoolName};

    use super::*;
    use crate::lab::Lab;

    #[test]
    fn more_than_the_budget_is_counted() {
        let mut looks = LedgerLooks::default();
        [3, 8, 9, 2].into_iter().for_each(|reserved| looks.add(reserved, 8));
        assert_eq!(looks, LedgerLooks { looks: 4, over_budget: 1, peak_reserved_bytes: 9, budget_bytes: 8 });
    }

    #[test]
    fn what_pools_reserve_is_seen() {
        let lab = Lab::new().unwrap();
        assert!(LedgerWatch::begin(&lab.runtime_dir()).is_err(), "there is none");
        let ledger = Ledger::open(&lab.runtime_dir(), &DeviceName::host()).unwrap();
        let deadline = || Instant::now() + Duration::from_secs(60);
        let spec = |name| EntrySpec::new(PoolName::new(name).unwrap(), GroupId(0), Bytes(1));
        let pools = ["a", "b"].map(|name| ledger.register(deadline(), spec(name)).unwrap());
        for pool in &pools {
            pool.update(deadline(), |view, me| {
                view.header.budget = Bytes(10);
                view.entries[me].reserved = Bytes(4);
            })
            .unwrap();
        }
        // One look at least, however soon it is asked for.
        let looks = LedgerWatch::begin(&lab.runtime_dir()).unwrap().end();
        assert!(looks.looks >= 1);
        assert_eq!((looks.over_budget, looks.peak_reserved_bytes, looks.budget_bytes), (0, 8, 10));
    }
}
