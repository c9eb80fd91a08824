//! A ledger's contents as values: what a reader sees, and what an update changes.
//!
//! ```text
//!   LedgerView
//!     header    of the device: total, used by others than pools, budget
//!     entries   one per pool, in the order of their slots
//!                 Live        its owner holds the slot's lock
//!                 Returning   the owner is gone, the device may not have its bytes back yet: they stay counted
//!     torn      slots whose bytes make no sense: caught in the middle of a write, or damaged
//! ```
//!
//! The only truth about memory is each entry's own `reserved`; totals are summed from it when they are needed.

use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::io::Errno;
use tidekv_core::share::{MemoryUse, PoolClaim};
use tidekv_core::units::{Bytes, GroupId};
use tidekv_fork::ClosedInChild;

use super::budget::BudgetSetting;
use super::format::owner_byte;
use crate::events::Note;
use crate::lock::is_locked;

/// No limit, no ceiling.
pub const UNLIMITED: Bytes = Bytes(u64::MAX);

/// A ledger at one moment.
#[derive(Clone, Debug)]
pub struct LedgerView {
    /// What concerns the whole device.
    pub header: LedgerHeader,
    /// Pools, in the order of their slots. An update that removes one frees its slot.
    pub entries: Vec<LedgerEntry>,
    /// Slots that cannot be read now. In an update, which nobody else can disturb, these are damaged.
    pub torn: Vec<u32>,
    /// What happened to the pools in these slots, to be told when the update is written.
    pub(super) notes: Vec<(u32, Note)>,
    /// Where the locks of owners can be looked at; nowhere if this was parsed from bytes.
    pub(super) file: Option<Arc<ClosedInChild>>,
    /// Which of the ledger's files it was read from: a slot number means something in that one alone.
    pub(super) generation: u64,
}

/// What concerns the whole device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LedgerHeader {
    /// All memory of the device.
    pub total: Bytes,
    /// What others than pools use of it.
    pub non_pool: Bytes,
    /// What all pools together may hold.
    pub budget: Bytes,
    /// Whether somebody gave the budget, so that nobody derives it.
    pub explicit_budget: bool,
    /// Who decided about the budget.
    pub setting: BudgetSetting,
    /// When `total` and `non_pool` were last looked at, as [`now_ms`](crate::now_ms).
    pub refreshed_ms: u64,
    /// How often anything in this ledger has changed.
    pub changes: u64,
}

/// Whether a pool's owner lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryState {
    /// Its owner holds the slot's lock, or died so recently that nobody looked yet.
    Live,
    /// Its owner is gone and its memory is on the way back to the device.
    Returning,
}

/// One pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerEntry {
    /// Its place in the table, for as long as the pool lives.
    pub slot: u32,
    /// Whether its owner lives.
    pub state: EntryState,
    /// The pool's name, without its group.
    pub name: String,
    /// The pool's group.
    pub group: GroupId,
    /// The owner's process number, in the owner's own namespace: for people, never to find out whether it lives.
    pub pid: u32,
    /// When that process started, in clock ticks.
    pub started: u64,
    /// What one page costs.
    pub page_bytes: Bytes,
    /// What the pool can always have.
    pub floor: Bytes,
    /// What it never takes more than, by its own configuration; [`UNLIMITED`] if nothing.
    pub ceiling: Bytes,
    /// Its part of what is shared, against the other pools' weights.
    pub weight: u32,
    /// Higher ones are served first.
    pub priority: i32,
    /// The operator's limit; [`UNLIMITED`] if none was given.
    pub limit: Bytes,
    /// Which limit that is: grows with each new one.
    pub limit_revision: u64,
    /// The last limit that the pool has carried out.
    pub applied_revision: u64,
    /// What the pool holds or is about to map: THE truth about its memory.
    pub reserved: Bytes,
    /// What it cannot give back without losing something: needed and cached together. [`usage`](Self::usage) has the parts.
    pub in_use: Bytes,
    /// What it holds with nothing in it.
    pub idle: Bytes,
    /// What it wants beyond `reserved` and did not get.
    pub demand: Bytes,
    /// What it is giving back now because others need it.
    pub reclaim: Bytes,
    /// How often things happened to it.
    pub counters: Counters,
    /// When its owner was found dead, as [`now_ms`](crate::now_ms).
    pub returning_since_ms: u64,
    /// How often an operator asked it to give memory back.
    pub trim_request: u64,
    /// The last of these requests that it has carried out.
    pub trim_done: u64,
    /// What it will want soon beyond `reserved` and `demand`: worth what others only keep, and no request of theirs.
    pub wish: Bytes,
    /// The part of `in_use` that its engine only keeps in case. Pools of older programs do not say.
    pub cached: Bytes,
    /// The last `trim_request` that asks for what is cached as well.
    pub trim_cached: u64,
}

/// How often things happened to a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Pages mapped.
    pub maps: u64,
    /// Pages unmapped.
    pub unmaps: u64,
    /// Allocations that had to wait for others.
    pub waits: u64,
    /// Times it gave memory back because others needed it.
    pub reclaims: u64,
    /// Allocations refused, and calls that the system below refused.
    pub failures: u64,
}

/// What a new pool says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntrySpec {
    /// Its name, without its group.
    pub name: crate::PoolName,
    /// Its group.
    pub group: GroupId,
    /// What one page costs.
    pub page_bytes: Bytes,
    /// What it can always have.
    pub floor: Bytes,
    /// What it never takes more than; [`UNLIMITED`] if nothing.
    pub ceiling: Bytes,
    /// Its part of what is shared.
    pub weight: u32,
    /// Higher ones are served first.
    pub priority: i32,
    /// The limit that it starts with; [`UNLIMITED`] if none.
    pub limit: Bytes,
}

impl EntrySpec {
    /// A pool of this name that shares alike: weight 1, priority 0, no floor, ceiling or limit.
    pub fn new(name: crate::PoolName, group: GroupId, page_bytes: Bytes) -> Self {
        Self {
            name,
            group,
            page_bytes,
            floor: Bytes::ZERO,
            ceiling: UNLIMITED,
            weight: 1,
            priority: 0,
            limit: UNLIMITED,
        }
    }
}

/// What [`LedgerView::reap`] did, as slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reaped {
    /// Owners found dead: these entries are [`EntryState::Returning`] now, and their bytes still counted.
    pub died: Vec<u32>,
    /// Entries removed because nothing is left of them.
    pub freed: Vec<u32>,
}

impl LedgerView {
    /// In an update: something happened to the pool in this slot, which is written among the [events](crate::events) if
    /// the update succeeds. In a view that was merely read it has no effect.
    pub fn note(&mut self, slot: u32, note: Note) {
        self.notes.push((slot, note));
    }

    /// Finds out which owners are gone. Their entries become [`EntryState::Returning`] and keep their bytes; entries
    /// that are returning and hold no bytes any more are removed, and so are damaged slots without an owner.
    ///
    /// This shortens `entries`: indices taken before do not hold after it.
    pub fn reap(&mut self, now_ms: u64) -> Reaped {
        let mut reaped = Reaped::default();
        let Some(file) = self.file.clone() else { return reaped };
        self.entries.retain_mut(|entry| {
            if entry.state == EntryState::Live && has_owner(&file, entry.slot) == Ok(false) {
                entry.state = EntryState::Returning;
                entry.returning_since_ms = now_ms;
                (entry.in_use, entry.cached, entry.idle) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
                (entry.demand, entry.reclaim) = (Bytes::ZERO, Bytes::ZERO);
                reaped.died.push(entry.slot);
            }
            let nothing_left = entry.state == EntryState::Returning && entry.reserved == Bytes::ZERO;
            if nothing_left {
                reaped.freed.push(entry.slot);
            }
            !nothing_left
        });
        self.torn.retain(|&slot| {
            let kept = has_owner(&file, slot) != Ok(false);
            if !kept {
                reaped.freed.push(slot);
            }
            kept
        });
        reaped
    }

    /// Whether the owner of a slot lives, now and not when the view was taken. A view that was parsed from bytes
    /// cannot know and says yes.
    pub fn is_owner_alive(&self, slot: u32) -> bool {
        self.file.as_deref().is_none_or(|file| has_owner(file, slot) != Ok(false))
    }

    /// The pool of this name: a living one where there is one.
    pub fn by_name(&self, name: &str, group: GroupId) -> Option<&LedgerEntry> {
        self.position(name, group).map(|at| &self.entries[at])
    }

    /// The same, to change it.
    pub fn by_name_mut(&mut self, name: &str, group: GroupId) -> Option<&mut LedgerEntry> {
        self.position(name, group).map(|at| &mut self.entries[at])
    }

    /// The entry in a slot.
    pub fn by_slot(&self, slot: u32) -> Option<&LedgerEntry> {
        self.index_of(slot).map(|at| &self.entries[at])
    }

    /// Where in `entries` a slot's entry is.
    pub fn index_of(&self, slot: u32) -> Option<usize> {
        self.entries.iter().position(|entry| entry.slot == slot)
    }

    /// What all pools hold together, those that are returning included.
    pub fn reserved(&self) -> Bytes {
        Bytes(self.entries.iter().fold(0, |sum: u64, entry| sum.saturating_add(entry.reserved.0)))
    }

    /// The pools as the arithmetic of sharing wants them, in the order of `entries`.
    pub fn pool_claims(&self) -> Vec<PoolClaim> {
        self.entries.iter().map(LedgerEntry::claim).collect()
    }

    fn position(&self, name: &str, group: GroupId) -> Option<usize> {
        let same = |entry: &LedgerEntry| entry.name == name && entry.group == group;
        let live = self.entries.iter().position(|entry| same(entry) && entry.state == EntryState::Live);
        live.or_else(|| self.entries.iter().position(same))
    }
}

impl LedgerEntry {
    /// The entry of a pool that has just begun.
    pub fn new(slot: u32, spec: &EntrySpec) -> Self {
        Self {
            slot,
            state: EntryState::Live,
            name: spec.name.as_str().to_owned(),
            group: spec.group,
            pid: std::process::id(),
            started: crate::process::started(),
            page_bytes: spec.page_bytes,
            floor: spec.floor,
            ceiling: spec.ceiling,
            weight: spec.weight,
            priority: spec.priority,
            limit: spec.limit,
            limit_revision: 0,
            applied_revision: 0,
            reserved: Bytes::ZERO,
            in_use: Bytes::ZERO,
            idle: Bytes::ZERO,
            demand: Bytes::ZERO,
            reclaim: Bytes::ZERO,
            counters: Counters::default(),
            returning_since_ms: 0,
            trim_request: 0,
            trim_done: 0,
            wish: Bytes::ZERO,
            cached: Bytes::ZERO,
            trim_cached: 0,
        }
    }

    /// What it holds and what that is good for. What dead owners held is needed until it is back: nobody can have it.
    pub fn usage(&self) -> MemoryUse {
        match self.state {
            EntryState::Live => MemoryUse::of(self.reserved, self.cached, self.idle),
            EntryState::Returning => MemoryUse::all_needed(self.reserved),
        }
    }

    /// For how many milliseconds its owner has been known to be dead, by [`now_ms`](crate::now_ms). For ever, where that
    /// lies ahead: the clock begins anew when the machine starts, and no memory is on its way since before that.
    pub fn returning_for_ms(&self, now_ms: u64) -> u64 {
        now_ms.checked_sub(self.returning_since_ms).unwrap_or(u64::MAX)
    }

    /// What this pool claims. One that is returning holds its bytes, wants nothing and cannot give.
    pub fn claim(&self) -> PoolClaim {
        match self.state {
            EntryState::Live => PoolClaim {
                held: self.reserved,
                in_use: self.in_use,
                cached: self.cached,
                wish: self.wish,
                demand: self.demand,
                floor: self.floor,
                ceiling: self.ceiling.min(self.limit),
                weight: self.weight,
                priority: self.priority,
                page: self.page_bytes,
            },
            EntryState::Returning => PoolClaim { page: self.page_bytes, ..PoolClaim::returning(self.reserved) },
        }
    }
}

fn has_owner(file: &ClosedInChild, slot: u32) -> Result<bool, Errno> {
    is_locked(file.as_fd(), owner_byte(slot))
}
