//! What the device says about the ledger: memory of dead owners coming back, memory that no pool holds.
//!
//! A dead owner's bytes stay counted until the device has them. Two kinds of devices differ in how one knows:
//!
//! ```text
//!   host   the kernel frees the memory file while it closes the dead process's descriptors, the lock among them:
//!          counted for a moment more, in proportion to the bytes
//!   GPU    the driver takes 65-300 ms after the lock is free: counted until the device reports so much less in use,
//!          at most 5 s
//! ```
//!
//! Being wrong is not fatal either way: the driver then refuses a map, which is transient and tried again.

use tidekv_core::units::Bytes;
use tidekv_mem::MemoryInfo;
use tidekv_shm::{EntryState, LedgerEntry, LedgerView};

/// No owner's memory stays counted for longer.
const PATIENCE_MS: u64 = 5_000;
/// The kernel frees at least so many bytes per millisecond (8 GiB/s), after a start.
const HOST_BYTES_PER_MS: u64 = 8 << 20;
const HOST_START_MS: u64 = 20;
/// Between two looks at least.
const LOOK_MS: u64 = 10;

/// Changes of non-pool use below this are noise: the budget stays as it is.
const NOISE: Bytes = Bytes::mib(16);

/// Strikes out the bytes of dead owners that the device has back. Says whether it did.
///
/// `used` tells what is in use on the device now, where the device says.
pub(crate) fn settle_returning(view: &mut LedgerView, now_ms: u64, asynchronous: bool, used: Option<Bytes>) -> bool {
    let is_waiting = |entry: &LedgerEntry| entry.state == EntryState::Returning && entry.reserved > Bytes::ZERO;
    if !view.entries.iter().any(is_waiting) {
        return false;
    }
    let counted = view.reserved().0.saturating_add(view.header.non_pool.0);
    let mut gone = match used {
        Some(used) if asynchronous && view.header.refreshed_ms > 0 => counted.saturating_sub(used.0),
        _ => 0,
    };
    let mut settled = false;
    for entry in view.entries.iter_mut().filter(|entry| is_waiting(entry)) {
        let age = entry.returning_for_ms(now_ms);
        let over = age >= if asynchronous { PATIENCE_MS } else { host_delay_ms(entry.reserved) };
        // An eighth for what else moves on a device meanwhile.
        let seen = gone >= entry.reserved.0 - entry.reserved.0 / 8;
        if over || seen {
            gone = gone.saturating_sub(entry.reserved.0);
            entry.reserved = Bytes::ZERO;
            settled = true;
        }
    }
    settled
}

fn host_delay_ms(bytes: Bytes) -> u64 {
    (HOST_START_MS + bytes.0 / HOST_BYTES_PER_MS).min(PATIENCE_MS)
}

/// When to look again at what dead owners left; `None` where nothing is returning. A device gives memory back when it likes to, so it is
/// asked again and again; the kernel's time is known.
pub(crate) fn next_look_ms(view: &LedgerView, now_ms: u64, asynchronous: bool) -> Option<u64> {
    let look = |entry: &LedgerEntry| {
        let age = entry.returning_for_ms(now_ms);
        if asynchronous { LOOK_MS } else { host_delay_ms(entry.reserved).saturating_sub(age).max(LOOK_MS) }
    };
    view.entries.iter().filter(|entry| entry.state == EntryState::Returning).map(look).min()
}

/// A look at the device, and at which state of the ledger it was taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DeviceLook {
    pub(crate) memory: MemoryInfo,
    /// The ledger's count of changes, read before the device was asked.
    pub(crate) changes: u64,
}

impl DeviceLook {
    /// Whether it may be compared with this ledger. What pools took or gave back since would be taken for memory of others:
    /// a pool's page that went is in use for the device, and no pool's any more.
    pub(crate) fn is_of(&self, view: &LedgerView) -> bool {
        self.changes == view.header.changes
    }
}

/// Whether others than pools use less of the device than the ledger says. That is believed at the second look: bytes
/// are counted before they are mapped, and a device may have a process's memory back before its death can be seen.
pub(crate) fn non_pool_falls(view: &LedgerView, memory: MemoryInfo) -> bool {
    non_pool(view, memory).0 + NOISE.0 <= view.header.non_pool.0
}

fn non_pool(view: &LedgerView, memory: MemoryInfo) -> Bytes {
    memory.total.saturating_sub(memory.free).saturating_sub(view.reserved())
}

/// Notes what others than pools use, and derives the budget from it unless somebody gave one.
///
/// On an asynchronous device that is noted beside a given budget too: [`settle_returning`] must know it to see that memory is back.
pub(crate) fn refresh_budget(view: &mut LedgerView, memory: MemoryInfo, asynchronous: bool, now_ms: u64) {
    let non_pool = non_pool(view, memory);
    let header = &mut view.header;
    let moved = non_pool.0.abs_diff(header.non_pool.0) >= NOISE.0 || header.total != memory.total;
    let is_needed = asynchronous || !header.explicit_budget;
    if is_needed && (moved || header.refreshed_ms == 0) {
        (header.total, header.non_pool, header.refreshed_ms) = (memory.total, non_pool, now_ms);
    }
    // Also where nothing moved: an older release derives it from a part of its own.
    header.derive_budget();
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tidekv_core::units::GroupId;
    use tidekv_shm::{BudgetAuthor, BudgetRight, DeviceName, EntrySpec, Ledger, PoolName, RuntimeDir};

    use super::*;

    /// Runs `test` on a ledger with one living pool of 100 MiB and a dead one of 64 MiB, dead since `since_ms`.
    fn with_dead(since_ms: u64, test: impl FnOnce(&mut LedgerView)) {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledger::open(&RuntimeDir::at(dir.path()), &DeviceName::host()).unwrap();
        let entry = |slot, name: &str, reserved| {
            let spec = EntrySpec::new(PoolName::new(name).unwrap(), GroupId(0), Bytes::mib(2));
            LedgerEntry { reserved, ..LedgerEntry::new(slot, &spec) }
        };
        let fill = |view: &mut LedgerView| {
            view.entries.push(entry(0, "alive", Bytes::mib(100)));
            let dead = entry(1, "dead", Bytes::mib(64));
            view.entries.push(LedgerEntry { state: EntryState::Returning, returning_since_ms: since_ms, ..dead });
            view.header.non_pool = Bytes::mib(50);
            view.header.refreshed_ms = 1;
            test(view);
        };
        ledger.update(Instant::now() + std::time::Duration::from_secs(5), fill).unwrap();
    }

    #[test]
    fn host_memory_is_back_after_a_moment_in_proportion_to_it() {
        with_dead(1000, |view| {
            assert!(!settle_returning(view, 1000 + 27, false, None), "64 MiB take 8 ms after the first 20");
            assert_eq!(next_look_ms(view, 1000, false), Some(28));
            assert_eq!(next_look_ms(view, 1000, true), Some(10), "a device says when, and is asked");
            assert!(settle_returning(view, 1000 + 28, false, None));
            assert_eq!(view.reserved(), Bytes::mib(100));
            assert!(!settle_returning(view, 1000 + 29, false, None), "once");
        });
    }

    #[test]
    fn device_memory_is_back_when_the_device_says_so_or_after_five_seconds() {
        let counted = Bytes::mib(100 + 64 + 50);
        with_dead(1000, |view| {
            assert!(!settle_returning(view, 1100, true, Some(counted)));
            assert!(!settle_returning(view, 1100, true, None), "a device that does not say");
            assert!(settle_returning(view, 1200, true, Some(counted.saturating_sub(Bytes::mib(60)))));
        });
        with_dead(1000, |view| {
            assert!(!settle_returning(view, 5_999, true, Some(counted)));
            assert!(settle_returning(view, 6_000, true, Some(counted)));
        });
    }

    /// The clock begins anew with the machine, while a folder on a disk keeps the ledger: such bytes stayed counted for as
    /// long as the machine had run before.
    #[test]
    fn memory_that_was_on_its_way_before_a_reboot_is_back() {
        with_dead(1_000_000, |view| {
            assert_eq!(next_look_ms(view, 300, false), Some(10));
            assert!(settle_returning(view, 300, false, None));
        });
        with_dead(1_000_000, |view| {
            assert!(settle_returning(view, 300, true, None));
            assert_eq!(view.reserved(), Bytes::mib(100));
        });
    }

    #[test]
    fn the_budget_follows_other_users_and_ignores_noise() {
        with_dead(1000, |view| {
            let memory = |used| MemoryInfo { total: Bytes::gib(1), free: Bytes::gib(1).saturating_sub(used) };
            let pools = view.reserved();
            view.header.decide_utilization(0.5, BudgetAuthor::here(BudgetRight::Pool, "alive"));
            let mut budget_with = |others: Bytes, asynchronous| {
                refresh_budget(view, memory(Bytes(pools.0 + others.0)), asynchronous, 7);
                view.header.budget
            };
            assert_eq!(budget_with(Bytes::mib(24), false), Bytes::mib(512 - 24));
            assert_eq!(budget_with(Bytes::mib(30), false), Bytes::mib(512 - 24), "6 MiB are noise");
            assert_eq!(budget_with(Bytes::mib(600), true), Bytes::ZERO, "others hold more than our part");
            (view.header.budget, view.header.explicit_budget) = (Bytes::mib(3), true);
            refresh_budget(view, memory(pools), false, 10);
            assert_eq!(view.header.budget, Bytes::mib(3), "somebody gave a budget");
            // What an older release derives with a part of its own is put right, though nothing moved.
            view.header.explicit_budget = false;
            refresh_budget(view, memory(pools), false, 11);
            view.header.budget = Bytes::mib(900);
            refresh_budget(view, memory(pools), false, 12);
            assert_eq!(view.header.budget, Bytes::mib(512));
        });
    }

    /// Seen on an H200: servers that were given a budget never noted what else is on the card, so nobody could tell that a dead one's
    /// memory was back (before its death was even noticed), and all waited for five seconds.
    #[test]
    fn memory_is_seen_to_be_back_beside_a_given_budget() {
        with_dead(1000, |view| {
            let header = &mut view.header;
            (header.explicit_budget, header.budget, header.refreshed_ms) = (true, Bytes::mib(200), 0);
            (header.non_pool, header.total) = (Bytes::ZERO, Bytes::gib(1));
            let weights = Bytes::mib(300);
            let used = Bytes(view.reserved().0 + weights.0);
            let memory = MemoryInfo { total: Bytes::gib(1), free: Bytes::gib(1).saturating_sub(used) };
            refresh_budget(view, memory, true, 900);
            assert_eq!((view.header.budget, view.header.non_pool), (Bytes::mib(200), weights), "as it was given");
            assert!(!non_pool_falls(view, memory));
            let early = MemoryInfo { free: Bytes(memory.free.0 + Bytes::mib(64).0), ..memory };
            assert!(non_pool_falls(view, early), "memory that is back before anybody died");
            assert!(!settle_returning(view, 1001, true, Some(used)), "the device has it still");
            // The weights of the dead one went with it.
            let left = used.saturating_sub(Bytes::mib(64 + 100));
            assert!(settle_returning(view, 1001, true, Some(left)), "at the first look");
            assert_eq!(view.reserved(), Bytes::mib(100));
        });
    }
}
