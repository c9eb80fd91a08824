//! Waiting until an idle pool has given back what it will.

use std::time::{Duration, Instant};

use anyhow::bail;
use tidekv_core::units::Bytes;
use tidekv_pool::KvPool;
use tidekv_shm::{DeviceName, Ledger};

use crate::lab::Lab;

/// Pages that a pool may keep ahead of demand when it is idle.
const RESERVE_PAGES: u32 = 1;

/// Slack beyond the decay time itself.
const SLACK: Duration = Duration::from_secs(30);

/// How often the pool is looked at while its ledger says nothing.
const LOOK_PERIOD: Duration = Duration::from_millis(200);

/// An idle pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settled {
    /// What it still holds.
    pub(super) held: Bytes,
    /// How long that took.
    pub(super) after: Duration,
}

/// Waits until no page is idle but for the reserve. Every page that a pool gives back changes its ledger entry, so the
/// ledger tells when to look.
pub(super) fn wait(pool: &KvPool, lab: &Lab, decay: Duration) -> anyhow::Result<Settled> {
    let device = DeviceName::new(&pool.reservation().expect("memory of its own").backend().capabilities().id)?;
    let ledger = Ledger::open(&lab.runtime_dir(), &device)?;
    let watch = ledger.watch()?;
    let started = Instant::now();
    let deadline = started + decay * 3 + SLACK;
    loop {
        let pages = pool.snapshot();
        let idle = pages.reserved_pages + pages.leaving_pages;
        if idle <= RESERVE_PAGES {
            let held = pool.reservation().expect("memory of its own").mapped_bytes();
            return Ok(Settled { held, after: started.elapsed() });
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("{idle} pages are still idle {:?} after the last request: decay is {decay:?}", started.elapsed());
        }
        watch.wait(left.min(LOOK_PERIOD))?;
    }
}
