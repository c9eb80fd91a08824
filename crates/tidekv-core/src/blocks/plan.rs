//! Decisions that someone else carries out: an allocation that needs memory mapped, a pool that must shrink.

use crate::pages::PageClaim;
use crate::units::BlockIndex;

/// An allocation that is decided but not yet backed by memory.
///
/// It holds its blocks of mapped pages and the claims of pages to map. Map every page of
/// [`claims`](Self::claims), then [`commit`](super::BlockAllocator::commit); if one cannot be mapped, unmap the
/// others and [`abort`](super::BlockAllocator::abort). Both take the plan, so it ends exactly once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a plan holds blocks and pages: commit or abort it"]
pub struct AllocPlan {
    /// Places taken in pages that are mapped.
    pub(super) taken: Vec<BlockIndex>,
    /// Pages to map. They serve this plan alone: nobody else can take a page that is Mapping.
    pub(super) claims: Vec<PageClaim>,
    /// Blocks that the claimed pages will give; the rest of the last page becomes free.
    pub(super) from_claims: u32,
    pub(super) purpose: Purpose,
}

/// Whose the blocks are once the plan is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The caller's, as leases.
    Lease,
    /// The allocator's, set aside for a later call.
    SetAside,
    /// Nobody's: block 0 as padding.
    NullBlock,
}

impl AllocPlan {
    /// The pages to map before the commit, in ascending order of use. Empty where mapped memory sufficed.
    pub fn claims(&self) -> &[PageClaim] {
        &self.claims
    }

    /// Blocks that the commit will give.
    pub fn block_count(&self) -> usize {
        self.taken.len() + self.from_claims as usize
    }
}

/// How to get back under the limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use = "nothing shrinks by itself: retire pages, then evict"]
pub struct ShrinkPlan {
    /// Idle pages to [`retire`](super::BlockAllocator::retire) now.
    pub retire: u32,
    /// Pages that must be emptied besides, by evicting their blocks.
    pub evict: u32,
}
