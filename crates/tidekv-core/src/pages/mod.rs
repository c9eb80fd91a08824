//! The life of a page: which slots of a reservation have physical memory behind them, and who may act on it.
//!
//! ```text
//!   page      0        1        2        3        4        5     ...
//!        [ InUse  ][ InUse  ][  Idle  ][Draining][Mapping ][   --   ]     `--` is Reserved: address space only
//!                                                                  ^ first page that was never claimed
//!
//!   Reserved -> Mapping -> Idle <-> InUse          every arrow is one row of the table at `PageState`
//!       ^                   |
//!       |                   v
//!   Unmapping <---------- Draining
//! ```
//!
//! Three promises are kept here and nowhere else:
//!
//! - **One holder.** A page id is a slot; it is handed out again only from Reserved. Whoever maps or unmaps it
//!   holds a [`PageClaim`], whose generation makes a late report about an earlier life a [`StaleClaim`].
//! - **No unmap before the fence.** A page remembers the latest [`Fence`] of all frees since it was last
//!   unmapped, and leaves Draining only when that has passed.
//! - **The limit.** Claims never take the pages held (everything but Reserved) past it. Lowering it below what is
//!   held is allowed; [`PageTable::overage`] says how many pages have to go.
//!
//! Pure bookkeeping: the table decides, someone else calls the driver and reports back.

mod claim;
mod fence;
mod state;
mod table;

pub use claim::{ClaimError, PageClaim, StaleClaim};
pub use fence::{Fence, SyncTicket};
pub use state::{IllegalTransition, PageEvent, PageState};
pub use table::{PageCounts, PageTable, UnmapPlan};

#[cfg(test)]
mod tests;
