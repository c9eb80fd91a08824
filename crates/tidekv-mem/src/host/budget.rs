//! How much host memory may still be committed.
//!
//! A memory file's `fallocate` that runs into the machine's end does not fail: the kernel kills someone. So each commit
//! is checked against what is left, with headroom. Reading that costs tens of microseconds, so one reading is good for
//! a credit: commits draw on it until it is used up or [`CREDIT_AGE_NS`] old. What everyone else can take in that time at
//! memory speed is well below the headroom.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use tidekv_core::units::Bytes;

use super::system_memory;
use crate::{MemError, MemoryInfo};

const CREDIT_AGE_NS: u64 = 10_000_000;
const CREDIT_MAX: u64 = 1 << 30;

const HEADROOM_MIN: u64 = 64 << 20;
const HEADROOM_MAX: u64 = 1 << 30;

#[derive(Debug)]
pub(super) struct HostBudget {
    /// What the user allows, if less than the machine.
    limit: u64,
    pub(super) held: AtomicU64,
    started: Instant,
    credit: AtomicU64,
    /// When the credit expires, in nanoseconds after `started`.
    credit_until: AtomicU64,
}

impl HostBudget {
    pub(super) fn new(limit: Option<Bytes>) -> Self {
        Self {
            limit: limit.map_or(u64::MAX, |limit| limit.0),
            held: AtomicU64::new(0),
            started: Instant::now(),
            credit: AtomicU64::new(0),
            credit_until: AtomicU64::new(0),
        }
    }

    /// Free and total, as far as the user's limit, the control group and the machine allow.
    pub(super) fn memory(&self) -> Result<MemoryInfo, MemError> {
        let system = system_memory::read()?;
        let left = self.limit.saturating_sub(self.held.load(Relaxed));
        Ok(MemoryInfo {
            total: system.total.min(Bytes(self.limit)),
            free: system.free.saturating_sub(headroom(system.total)).min(Bytes(left)),
        })
    }

    /// Takes `wanted` before it is committed, or says that it is not there.
    pub(super) fn take(&self, wanted: Bytes) -> Result<(), MemError> {
        let add = |held: u64| held.checked_add(wanted.0).filter(|&held| held <= self.limit);
        if let Err(held) = self.held.fetch_update(Relaxed, Relaxed, add) {
            return Err(MemError::OutOfMemory { wanted, free: Some(Bytes(self.limit.saturating_sub(held))) });
        }
        self.draw(wanted).inspect_err(|_| self.give(wanted))
    }

    /// Returns what was taken.
    pub(super) fn give(&self, bytes: Bytes) {
        self.held.fetch_sub(bytes.0, Relaxed);
    }

    fn draw(&self, wanted: Bytes) -> Result<(), MemError> {
        let now = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let fresh = now < self.credit_until.load(Relaxed);
        if fresh && self.credit.fetch_update(Relaxed, Relaxed, |credit| credit.checked_sub(wanted.0)).is_ok() {
            return Ok(());
        }
        let system = system_memory::read()?;
        let usable = system.free.saturating_sub(headroom(system.total));
        if usable < wanted {
            return Err(MemError::OutOfMemory { wanted, free: Some(usable) });
        }
        self.credit.store((usable.0 - wanted.0).min(CREDIT_MAX), Relaxed);
        self.credit_until.store(now.saturating_add(CREDIT_AGE_NS), Relaxed);
        Ok(())
    }
}

/// What is left to the rest of the machine: 2 % of it, within reason.
pub(super) fn headroom(total: Bytes) -> Bytes {
    Bytes((total.0 / 50).clamp(HEADROOM_MIN, HEADROOM_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_exact_and_refusals_take_nothing() {
        let budget = HostBudget::new(Some(Bytes(100)));
        budget.take(Bytes(60)).unwrap();
        let refused = budget.take(Bytes(41)).unwrap_err();
        assert!(matches!(refused, MemError::OutOfMemory { wanted: Bytes(41), free: Some(Bytes(40)) }), "{refused}");
        budget.take(Bytes(40)).unwrap();
        assert_eq!(budget.held.load(Relaxed), 100);
        budget.give(Bytes(100));
        assert_eq!(budget.held.load(Relaxed), 0);
    }

    #[test]
    fn more_than_the_machine_has_is_refused_without_a_limit() {
        let budget = HostBudget::new(None);
        let too_much = Bytes(budget.memory().unwrap().total.0 + 1);
        assert!(budget.take(too_much).unwrap_err().is_out_of_memory());
        assert_eq!(budget.held.load(Relaxed), 0);
    }
}
