//! What changed between two looks: differences and rates, for the commands that look again and again.
//!
//! ```text
//!   look 1   maps 100   used 4 GB ─┐
//!                                  ├─> 2 s apart: 25 maps/s, used -1 GB
//!   look 2   maps 150   used 3 GB ─┘
//! ```
//!
//! A pool is itself only while the same process has it in the same slot: one that was started again under its old name
//! begins anew, and never shows the difference between two lives as a rate.

use std::collections::HashMap;
use std::time::Duration;

use tidekv_core::units::Bytes;
use tidekv_shm::DeviceName;

use crate::scene::Pool;

/// A pool on a device, for as long as one process has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolKey {
    /// The name of its segment.
    pub name: String,
    /// Whose it is; nobody says so of a pool of kvcached's own.
    pub owner: Option<Owner>,
}

/// One life of a pool on one device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    /// Of which device.
    pub device: DeviceName,
    /// Which slot of the ledger.
    pub slot: u32,
    /// The process.
    pub pid: u32,
    /// When that process started, since process numbers come again.
    pub started: u64,
}

impl PoolKey {
    /// Which pool this is.
    pub fn of(pool: &Pool) -> Self {
        let owner = pool.place.as_ref().map(|place| Owner {
            device: place.device.clone(),
            slot: place.entry.slot,
            pid: place.entry.pid,
            started: place.entry.started,
        });
        Self { name: pool.name.clone(), owner }
    }
}

/// What of a pool is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// What it uses.
    pub used: Bytes,
    /// What it holds.
    pub held: Bytes,
    /// Pages mapped and unmapped so far; kvcached's own pools do not count them.
    pub pages: Option<PageCounts>,
}

/// Pages mapped and unmapped since a pool began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCounts {
    /// Mapped.
    pub maps: u64,
    /// Unmapped.
    pub unmaps: u64,
}

impl Reading {
    /// What stands in the scene.
    pub fn of(pool: &Pool) -> Self {
        match &pool.place {
            Some(place) => Self {
                used: place.usage().used(),
                held: place.entry.reserved,
                pages: Some(PageCounts { maps: place.entry.counters.maps, unmaps: place.entry.counters.unmaps }),
            },
            None => {
                let [used, prealloc] = [pool.used(), pool.prealloc()].map(|bytes| u64::try_from(bytes).unwrap_or(0));
                Self { used: Bytes(used), held: Bytes(used.saturating_add(prealloc)), pages: None }
            }
        }
    }
}

/// What happened to a pool between two looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// More is used, or less.
    pub used_bytes: i128,
    /// More is held, or less.
    pub held_bytes: i128,
    /// Pages mapped and unmapped per second.
    pub rates: Option<Rates>,
}

/// Pages per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Mapped.
    pub maps: f64,
    /// Unmapped.
    pub unmaps: f64,
}

impl Change {
    fn between(before: Reading, now: Reading, elapsed: Duration) -> Self {
        let difference = |before: Bytes, now: Bytes| i128::from(now.0) - i128::from(before.0);
        Self {
            used_bytes: difference(before.used, now.used),
            held_bytes: difference(before.held, now.held),
            rates: before.pages.zip(now.pages).and_then(|(before, now)| Rates::between(before, now, elapsed)),
        }
    }
}

impl Rates {
    /// None where no time has passed, and where a counter went backwards, which no pool's does.
    fn between(before: PageCounts, now: PageCounts, elapsed: Duration) -> Option<Self> {
        if elapsed.is_zero() {
            return None;
        }
        let maps = now.maps.checked_sub(before.maps)?;
        let unmaps = now.unmaps.checked_sub(before.unmaps)?;
        Some(Self { maps: per_second(maps, elapsed), unmaps: per_second(unmaps, elapsed) })
    }

    /// Both together.
    pub fn sum(self) -> f64 {
        self.maps + self.unmaps
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people: 53 bits are plenty")]
fn per_second(count: u64, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64()
}

/// The latest look, and what changed since the one before it.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    seen: HashMap<PoolKey, Seen>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Duration,
    reading: Reading,
    change: Option<Change>,
}

impl Changes {
    /// Takes a look in. `at` is any clock that only goes forward.
    pub fn observe(&mut self, at: Duration, readings: impl IntoIterator<Item = (PoolKey, Reading)>) {
        let before = std::mem::take(&mut self.seen);
        for (key, reading) in readings {
            let change =
                before.get(&key).map(|seen| Change::between(seen.reading, reading, at.saturating_sub(seen.at)));
            self.seen.insert(key, Seen { at, reading, change });
        }
    }

    /// What happened to a pool since the look before; none if it was not there then.
    pub fn of(&self, key: &PoolKey) -> Option<&Change> {
        self.seen.get(key)?.change.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(pid: u32) -> PoolKey {
        let owner = Owner { device: DeviceName::host(), slot: 3, pid, started: 7 };
        PoolKey { name: "pool".to_owned(), owner: Some(owner) }
    }

    fn reading(used: u64, maps: u64, unmaps: u64) -> Reading {
        Reading { used: Bytes(used), held: Bytes(used + 10), pages: Some(PageCounts { maps, unmaps }) }
    }

    #[test]
    fn differences_and_rates() {
        let mut changes = Changes::default();
        changes.observe(Duration::from_secs(1), [(key(1), reading(100, 100, 7))]);
        assert_eq!(changes.of(&key(1)), None, "there is nothing to compare with");
        changes.observe(Duration::from_secs(3), [(key(1), reading(70, 150, 8))]);
        let rates = Some(Rates { maps: 25.0, unmaps: 0.5 });
        assert_eq!(changes.of(&key(1)), Some(&Change { used_bytes: -30, held_bytes: -30, rates }));
    }

    #[test]
    fn a_pool_that_was_started_again_begins_anew() {
        let mut changes = Changes::default();
        changes.observe(Duration::from_secs(1), [(key(1), reading(100, 1_000_000, 1_000_000))]);
        changes.observe(Duration::from_secs(2), [(key(2), reading(0, 3, 0))]);
        assert_eq!((changes.of(&key(1)), changes.of(&key(2))), (None, None));
    }

    #[test]
    fn neither_time_that_stands_still_nor_a_counter_that_goes_back_gives_a_rate() {
        let mut changes = Changes::default();
        let at = Duration::from_secs(1);
        changes.observe(at, [(key(1), reading(1, 5, 5))]);
        changes.observe(at, [(key(1), reading(2, 6, 6))]);
        assert_eq!(changes.of(&key(1)), Some(&Change { used_bytes: 1, held_bytes: 1, rates: None }));
        changes.observe(Duration::from_secs(2), [(key(1), reading(2, 0, 7))]);
        assert_eq!(changes.of(&key(1)).unwrap().rates, None);
    }
}
