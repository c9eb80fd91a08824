//! The right to map or unmap a page, and the two ways to be without it.

use super::PageState;
use crate::units::PageId;

/// The right to act on one life of a page: to map it, and later to unmap it.
///
/// The generation grows with each claim, so a report about an earlier life cannot be taken for one about this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageClaim {
    /// The slot.
    pub page: PageId,
    /// Which of the slot's lives: the first claim is 1.
    pub generation: u32,
}

/// Not enough pages to claim. Nothing was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot claim {wanted} pages: {held} of at most {limit} are held and {reserved_free} are reserved; \
     give pages back or raise the limit"
)]
pub struct ClaimError {
    /// Pages asked for.
    pub wanted: u32,
    /// Pages without memory, claimable as far as the limit allows.
    pub reserved_free: u32,
    /// The limit at that moment.
    pub limit: u32,
    /// Pages held at that moment.
    pub held: u32,
}

impl ClaimError {
    /// Whether freed pages or a raised limit can help. Not so for more pages than the reservation has.
    pub const fn is_transient(&self) -> bool {
        self.wanted <= self.reserved_free + self.held
    }
}

/// A report about a page that this claim no longer speaks for. The page is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "claim {} of page {} is stale: the page is {state} in claim {current_generation}; drop the report",
    claim.generation, claim.page
)]
pub struct StaleClaim {
    /// The claim that was used.
    pub claim: PageClaim,
    /// The page's latest claim; 0 where the page was never claimed or is not of this table.
    pub current_generation: u32,
    /// The page's state.
    pub state: PageState,
}
