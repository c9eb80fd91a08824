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

use tidekv_core::share::{PoolClaim, owed, owed_to_given, owed_with_cached};
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
    /// By what the ledger says, as `claims` of all pools. What is held above a budget that somebody gave goes even if it is in use.
    pub(crate) fn on_device(budget: Bytes, is_above_given: bool, claims: &[PoolClaim], me: usize, page: Bytes) -> Self {
        let firm = if is_above_given { owed_to_given } else { owed };
        let pages = pages_of(owed_with_cached(budget, claims, me, is_above_given), page);
        Self { pages, firm: pages_of(firm(budget, claims, me), page) }
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
