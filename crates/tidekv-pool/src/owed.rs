//! What a pool owes its neighbours on a device: what it must give whatever that costs, and what it can well do without.
//!
//! ```text
//!                  taken for its own        taken for theirs
//!   firm           all that is leased       what they wait for
//!   in all         without what the engine  and what they will need soon
//!                  only keeps in case
//! ```
//!
//! Running requests make room for the firm part alone (decision 0019).

use tidekv_core::share::{PoolClaim, owed, owed_to_given};
use tidekv_core::units::Bytes;
use tidekv_shm::{EntryState, LedgerEntry, LedgerView};

/// What neighbours are owed, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Owed {
    pub(crate) pages: u32,
    /// The part that is owed even if running requests must make room; at most all of it.
    pub(crate) firm: u32,
}

impl Owed {
    /// By what the ledger says: `claims` of all pools, of which `me` could evict so much. What is held above a given budget goes even if
    /// it is in use.
    pub(crate) fn on_device(
        view: &LedgerView,
        mut claims: Vec<PoolClaim>,
        me: usize,
        is_above_given_budget: bool,
        evictable: Bytes,
        page: Bytes,
    ) -> Self {
        let owed = if is_above_given_budget { owed_to_given } else { owed };
        let pages = |claims: &[PoolClaim]| pages_of(owed(view.header.budget, claims, me), page);
        let firm = pages(&claims);
        claims[me].in_use = claims[me].in_use.saturating_sub(evictable);
        for (at, entry) in view.entries.iter().enumerate().filter(|(at, _)| *at != me) {
            claims[at].demand = wanted(entry);
        }
        Self { pages: pages(&claims).max(firm), firm }
    }

    /// The larger of each: what one asks for as firm is no less so because another asks for more.
    pub(crate) fn max(self, other: Self) -> Self {
        Self { pages: self.pages.max(other.pages), firm: self.firm.max(other.firm) }
    }
}

/// Bytes in pages, each begun one whole.
pub(crate) fn pages_of(bytes: Bytes, page: Bytes) -> u32 {
    u32::try_from(bytes.0.div_ceil(page.0)).unwrap_or(u32::MAX)
}

/// What a neighbour waits for or will soon.
fn wanted(entry: &LedgerEntry) -> Bytes {
    match entry.state {
        EntryState::Live => Bytes(entry.demand.0.saturating_add(entry.wish.0)),
        EntryState::Returning => Bytes::ZERO,
    }
}

/// The slot of the neighbour that wants most.
pub(crate) fn neediest(view: &LedgerView, me: usize) -> Option<u32> {
    let waiting = (0..).zip(&view.entries).filter(|(at, entry)| *at != me && wanted(entry) > Bytes::ZERO);
    waiting.max_by_key(|(_, entry)| wanted(entry)).map(|(_, entry)| entry.slot)
}
