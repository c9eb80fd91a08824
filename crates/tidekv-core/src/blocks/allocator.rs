//! The allocator that engines and pools talk to.

use std::collections::VecDeque;

use super::generations::{Generations, NamesBlock};
use super::places::Places;
use super::plan::Purpose;
use super::{
    AllocError, AllocPlan, BlockLease, CommitError, CommitRefusal, FreeError, NeedsPages, NotReserved, ShapeError,
    ShrinkPlan,
};
use crate::pages::{ClaimError, Fence, PageClaim, PageState, PageTable, StaleClaim, SyncTicket, UnmapPlan};
use crate::units::{BlockIndex, PageId, Step};

/// Where the blocks of a pool are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounts {
    /// All blocks of the reservation.
    pub total: u32,
    /// Held by callers.
    pub leased: u32,
    /// Set aside by [`BlockAllocator::reserve`].
    pub reserved: u32,
    /// Held by plans that are neither committed nor aborted, in pages that are mapped.
    pub planned: u32,
    /// Free, in pages that are mapped.
    pub free_mapped: u32,
    /// Free, or in pages that may still be claimed under the limit.
    pub available: u32,
}

/// What a free changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeReport {
    /// Pages that lost their last block: idle now, and free to be leased again or retired.
    pub pages_emptied: u32,
}

/// Hands out blocks of one pool. See the [module](super) for how it is built and used.
///
/// It is a value without locks: its owner serialises the calls, and makes no driver call while holding them up.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct BlockAllocator {
    places: Places,
    generations: Generations,
    /// Blocks taken for a later `alloc_reserved`, oldest first.
    pub(super) set_aside: VecDeque<BlockIndex>,
    /// Blocks of mapped pages that plans in flight hold.
    planned: u32,
    has_null_block: bool,
}

/// Building and reading.
impl BlockAllocator {
    /// An allocator whose pages are all reserved, without a limit but its own size.
    ///
    /// # Errors
    ///
    /// [`ShapeError`] for no blocks at all, or for more than kernel ids can name.
    pub fn new(page_count: u32, blocks_per_page: u32) -> Result<Self, ShapeError> {
        let total = page_count.checked_mul(blocks_per_page).filter(|&total| 0 < total && total <= i32::MAX as u32);
        let total = total.ok_or(ShapeError { page_count, blocks_per_page })?;
        Ok(Self {
            places: Places::new(page_count, blocks_per_page),
            generations: Generations::new(total),
            set_aside: VecDeque::new(),
            planned: 0,
            has_null_block: false,
        })
    }

    /// The pages under the blocks: counts, states, limit.
    pub fn pages(&self) -> &PageTable {
        &self.places.table
    }

    /// Blocks of one page.
    pub fn blocks_per_page(&self) -> u32 {
        self.places.blocks_per_page()
    }

    /// All blocks of the reservation: valid indices are below.
    pub fn total_blocks(&self) -> u32 {
        self.pages().page_count() * self.blocks_per_page()
    }

    /// Free blocks of mapped pages.
    pub fn free_mapped_blocks(&self) -> u32 {
        self.places.free_mapped()
    }

    /// Those of them that the limit leaves: what [`alloc_mapped`](Self::alloc_mapped) can give.
    pub fn leasable_blocks(&self) -> u32 {
        self.places.leasable()
    }

    /// What [`plan_alloc`](Self::plan_alloc) can give: free blocks of mapped pages, and all blocks of pages that
    /// may still be claimed, both as far as the limit leaves them.
    pub fn available_blocks(&self) -> u32 {
        self.leasable_blocks() + self.pages().claimable() * self.blocks_per_page()
    }

    /// The blocks set aside for [`alloc_reserved`](Self::alloc_reserved), in the order in which it takes them.
    pub fn set_aside(&self) -> impl Iterator<Item = BlockIndex> + '_ {
        self.set_aside.iter().copied()
    }

    /// How many blocks are set aside.
    pub fn reserved_blocks(&self) -> u32 {
        u32::try_from(self.set_aside.len()).expect("a pool has fewer than 2^31 blocks")
    }

    /// Blocks that are not free: leased, set aside, planned, or the null block. Constant time.
    pub fn live(&self) -> u32 {
        self.places.live()
    }

    /// Where the blocks are. Constant time.
    pub fn counts(&self) -> BlockCounts {
        let reserved = self.reserved_blocks();
        BlockCounts {
            total: self.total_blocks(),
            leased: self.places.live() - reserved - self.planned - u32::from(self.has_null_block),
            reserved,
            planned: self.planned,
            free_mapped: self.free_mapped_blocks(),
            available: self.available_blocks(),
        }
    }

    /// Blocks of the page that are not free. To shrink, evict where few are.
    ///
    /// # Panics
    ///
    /// If the page is not of this pool.
    pub fn live_blocks(&self, page: PageId) -> u32 {
        self.places.live_in(page)
    }

    /// Whether this very lease is in force.
    pub fn is_current(&self, lease: BlockLease) -> bool {
        self.generations.is_current(lease)
    }

    /// Whether somebody holds a lease of the block.
    pub fn is_leased(&self, block: BlockIndex) -> bool {
        self.generations.is_leased(block)
    }
}

/// Allocating.
impl BlockAllocator {
    /// Leases `count` blocks of mapped pages and appends them to `out`, all or none.
    ///
    /// The hot path: no driver, no heap beyond `out`, and a time per block that does not depend on the pool.
    ///
    /// # Errors
    ///
    /// [`NeedsPages`] where mapped memory or the limit is short: continue with [`plan_alloc`](Self::plan_alloc).
    pub fn alloc_mapped(&mut self, count: u32, out: &mut Vec<BlockLease>) -> Result<(), NeedsPages> {
        self.check_mapped(count)?;
        out.reserve(count as usize);
        let generations = &mut self.generations;
        self.places.take(count, |block| out.push(generations.lease(block)));
        Ok(())
    }

    fn check_mapped(&self, count: u32) -> Result<(), NeedsPages> {
        match count.checked_sub(self.leasable_blocks()) {
            None | Some(0) => Ok(()),
            Some(missing) => Err(NeedsPages { pages: missing.div_ceil(self.blocks_per_page()) }),
        }
    }

    /// Decides an allocation of `count` blocks: takes what is mapped and claims the pages that are missing.
    ///
    /// # Errors
    ///
    /// [`AllocError::Exhausted`] where the limit leaves too little now, [`AllocError::NeverFits`] where it always
    /// will.
    pub fn plan_alloc(&mut self, count: u32) -> Result<AllocPlan, AllocError> {
        self.plan(count, Purpose::Lease)
    }

    /// Decides to make block 0 the null block, which engines use as padding: taken for the life of the pool.
    ///
    /// Its commit adds nothing to the caller's leases, since nobody may free it.
    ///
    /// # Errors
    ///
    /// [`AllocError::NotFresh`] unless this is the first thing to happen to the pool;
    /// [`AllocError::Exhausted`] under a limit of no pages.
    pub fn reserve_null_block(&mut self) -> Result<AllocPlan, AllocError> {
        let held_pages = self.pages().held();
        if held_pages > 0 || self.pages().next_claimed() != Some(PageId(0)) {
            return Err(AllocError::NotFresh { held_pages });
        }
        self.plan(1, Purpose::NullBlock)
    }

    fn plan(&mut self, count: u32, purpose: Purpose) -> Result<AllocPlan, AllocError> {
        let pool_blocks = self.total_blocks() - u32::from(self.has_null_block);
        if count > pool_blocks {
            return Err(AllocError::NeverFits { wanted_blocks: count, pool_blocks });
        }
        let from_mapped = count.min(self.leasable_blocks());
        let from_claims = count - from_mapped;
        let exhausted = self.exhausted(count);
        // The step that can fail comes first: there is nothing to undo.
        let pages = from_claims.div_ceil(self.blocks_per_page());
        let claims = self.places.table.claim(pages).map_err(|_| exhausted)?;
        let mut taken = Vec::with_capacity(count as usize);
        self.places.take(from_mapped, |block| taken.push(block));
        self.planned += from_mapped;
        Ok(AllocPlan { taken, claims, from_claims, purpose })
    }

    /// Why so many blocks cannot be had now.
    fn exhausted(&self, wanted_blocks: u32) -> AllocError {
        AllocError::Exhausted {
            wanted_blocks,
            available_blocks: self.available_blocks(),
            held_pages: self.pages().held(),
            limit_pages: self.pages().limit(),
        }
    }

    /// The driver mapped every page of the plan: hands out its blocks.
    ///
    /// # Errors
    ///
    /// [`CommitError`] with the plan, where one of its claims is no longer in force, or where the limit was lowered since
    /// and does not leave its pages or blocks.
    pub fn commit(&mut self, plan: AllocPlan, out: &mut Vec<BlockLease>) -> Result<(), CommitError> {
        let stale = plan.claims.iter().find_map(|&claim| self.pages().check_mapping(claim).err());
        if let Some(stale) = stale {
            return Err(CommitError { plan, why: CommitRefusal::Stale(stale) });
        }
        let limit = self.pages().limit();
        let in_use = self.pages().count(PageState::InUse) + u32::try_from(plan.claims.len()).unwrap_or(u32::MAX);
        let fits = (plan.claims.is_empty() || in_use <= limit)
            && self.places.live() + plan.from_claims <= limit * self.blocks_per_page();
        // The null block is nobody's, and a pool that wants one has it under any limit.
        if !fits && plan.purpose != Purpose::NullBlock {
            let limit = self.exhausted(u32::try_from(plan.block_count()).unwrap_or(u32::MAX));
            return Err(CommitError { plan, why: CommitRefusal::Limit(limit) });
        }
        let AllocPlan { taken: mut blocks, claims, mut from_claims, purpose } = plan;
        self.planned -= count_of(&blocks);
        for claim in claims {
            let count = from_claims.min(self.blocks_per_page());
            self.places.open(claim, count, |block| blocks.push(block));
            from_claims -= count;
        }
        match purpose {
            Purpose::Lease => out.extend(blocks.into_iter().map(|block| self.generations.lease(block))),
            Purpose::SetAside => self.set_aside.extend(blocks),
            Purpose::NullBlock => {
                debug_assert_eq!(blocks, [BlockIndex(0)], "a fresh page 0 gives block 0 first");
                self.has_null_block = true;
            }
        }
        Ok(())
    }

    /// Gives the plan up: its blocks are free and its pages reserved, as if it had never been made.
    ///
    /// The caller has unmapped whatever the driver mapped for it. Claims that are no longer the plan's are left
    /// alone.
    pub fn abort(&mut self, plan: AllocPlan) {
        self.abort_keeping(plan, |_| false);
    }

    /// Gives the plan up, but for pages that still have memory because the driver will not take it back: those stay
    /// claimed, so that nobody is given them, and their claims are the caller's. When their memory is gone, they are
    /// [`pages_refused`](Self::pages_refused).
    pub fn abort_keeping(&mut self, plan: AllocPlan, has_memory: impl Fn(PageId) -> bool) -> Vec<PageClaim> {
        let AllocPlan { taken: mut blocks, claims, .. } = plan;
        self.planned -= count_of(&blocks);
        // Last taken, first back: stacks, buckets and the idle list are in their old order again.
        blocks.reverse();
        self.places.give_back(&blocks, None);
        let (kept, undone): (Vec<_>, Vec<_>) = claims.into_iter().partition(|claim| has_memory(claim.page));
        let _ = self.places.table.refused(&undone);
        kept
    }
}

/// Freeing.
impl BlockAllocator {
    /// Ends all these leases, or none of them.
    ///
    /// Pages that become empty stay mapped. They are not unmapped before `fence` has passed.
    ///
    /// # Errors
    ///
    /// [`FreeError`] names the first block that is not leased by the lease given for it.
    pub fn free(&mut self, leases: &[BlockLease], fence: Fence) -> Result<FreeReport, FreeError> {
        self.free_all(leases, fence)
    }

    /// [`free`](Self::free) for callers that keep block indices alone.
    ///
    /// It finds double frees and foreign indices, but cannot tell a block that was freed and leased again.
    ///
    /// # Errors
    ///
    /// [`FreeError`] names the first block that is not leased.
    pub fn free_blocks(&mut self, blocks: &[BlockIndex], fence: Fence) -> Result<FreeReport, FreeError> {
        self.free_all(blocks, fence)
    }

    fn free_all<T: NamesBlock>(&mut self, names: &[T], fence: Fence) -> Result<FreeReport, FreeError> {
        self.generations.end_all(names).map_err(|error| {
            // The null block is never leased, so its free is a `NotLeased` with a better name.
            let is_null = self.has_null_block && error == FreeError::NotLeased { block: BlockIndex(0) };
            if is_null { FreeError::NullBlock } else { error }
        })?;
        Ok(FreeReport { pages_emptied: self.places.give_back(names, Some(fence)) })
    }
}

/// Setting blocks aside, so that a later allocation cannot fail.
impl BlockAllocator {
    /// Sets `count` more blocks of mapped pages aside, all or none.
    ///
    /// # Errors
    ///
    /// [`NeedsPages`] where mapped memory is short: continue with [`plan_reserve`](Self::plan_reserve).
    pub fn reserve(&mut self, count: u32) -> Result<(), NeedsPages> {
        self.check_mapped(count)?;
        let set_aside = &mut self.set_aside;
        self.places.take(count, |block| set_aside.push_back(block));
        Ok(())
    }

    /// Decides to set `count` more blocks aside. The commit adds nothing to the caller's leases.
    ///
    /// # Errors
    ///
    /// As [`plan_alloc`](Self::plan_alloc).
    pub fn plan_reserve(&mut self, count: u32) -> Result<AllocPlan, AllocError> {
        self.plan(count, Purpose::SetAside)
    }

    /// Leases `count` of the blocks set aside, first those that were set aside first.
    ///
    /// # Errors
    ///
    /// [`NotReserved`] where fewer are set aside.
    pub fn alloc_reserved(&mut self, count: u32, out: &mut Vec<BlockLease>) -> Result<(), NotReserved> {
        let reserved_blocks = self.reserved_blocks();
        if count > reserved_blocks {
            return Err(NotReserved { wanted_blocks: count, reserved_blocks });
        }
        let blocks = self.set_aside.drain(..count as usize);
        out.extend(blocks.map(|block| self.generations.lease(block)));
        Ok(())
    }

    /// Makes all blocks that are set aside free again. Nobody has used them, so no fence is needed.
    pub fn free_reserved(&mut self) -> FreeReport {
        let blocks = std::mem::take(&mut self.set_aside);
        FreeReport { pages_emptied: self.places.give_back(&Vec::from(blocks), None) }
    }
}

/// Pages: refill, limit and way back. All of these pass through to the [`PageTable`].
impl BlockAllocator {
    /// Takes `count` pages to be mapped ahead of demand, all or none.
    ///
    /// # Errors
    ///
    /// [`ClaimError`] where the limit leaves fewer.
    pub fn claim_pages(&mut self, count: u32) -> Result<Vec<PageClaim>, ClaimError> {
        self.places.table.claim(count)
    }

    /// The driver mapped these pages: their blocks are free. Not for the pages of a plan, which
    /// [`commit`](Self::commit) itself opens.
    ///
    /// # Errors
    ///
    /// The first [`StaleClaim`]; all others took effect.
    pub fn pages_mapped(&mut self, claims: &[PageClaim]) -> Result<(), StaleClaim> {
        self.places.table.mapped(claims)
    }

    /// The driver refused these pages: they are reserved again.
    ///
    /// # Errors
    ///
    /// The first [`StaleClaim`]; all others took effect.
    pub fn pages_refused(&mut self, claims: &[PageClaim]) -> Result<(), StaleClaim> {
        self.places.table.refused(claims)
    }

    /// Sets the most pages to hold; more than the reservation has means all of it.
    ///
    /// What is held above it stays until it is given back: see [`shrink_plan`](Self::shrink_plan).
    pub fn set_limit(&mut self, pages: u32) {
        self.places.table.set_limit(pages);
    }

    /// How to get back under the limit, counting the pages that are on their way out already.
    pub fn shrink_plan(&self) -> ShrinkPlan {
        let counts = self.pages().counts();
        let leaving = counts.draining + counts.unmapping;
        let must_go = self.pages().overage().saturating_sub(leaving);
        let retire = must_go.min(counts.idle);
        ShrinkPlan { retire, evict: must_go - retire }
    }

    /// Sends up to `count` of the longest idle pages on their way out. Returns how many.
    pub fn retire(&mut self, count: u32) -> u32 {
        self.places.table.retire(count)
    }

    /// Takes up to `max_pages` retired pages that the device is done with, to be unmapped by the caller.
    ///
    /// `completed` is the last step that is over, `Step(0)` before the first.
    pub fn begin_unmap(&mut self, completed: Step, max_pages: u32) -> UnmapPlan {
        self.places.table.begin_unmap(completed, max_pages)
    }

    /// The device was synchronised after the ticket was issued.
    pub fn synchronised(&mut self, ticket: SyncTicket) {
        self.places.table.synchronised(ticket);
    }

    /// The driver took the memory of these pages back: they are reserved again.
    ///
    /// # Errors
    ///
    /// The first [`StaleClaim`]; all others took effect.
    pub fn unmapped(&mut self, claims: &[PageClaim]) -> Result<(), StaleClaim> {
        self.places.table.unmapped(claims)
    }

    /// The driver refused to unmap this page: it stays held until a [`retry_unmap`](Self::retry_unmap) succeeds.
    ///
    /// # Errors
    ///
    /// [`StaleClaim`] unless the claim speaks for a page that is being unmapped.
    pub fn unmap_failed(&mut self, claim: PageClaim) -> Result<(), StaleClaim> {
        self.places.table.unmap_failed(claim)
    }

    /// Takes every page whose unmap failed, to be unmapped by the caller.
    #[must_use = "report each page as `unmapped` or `unmap_failed`"]
    pub fn retry_unmap(&mut self) -> Vec<PageClaim> {
        self.places.table.retry_unmap()
    }

    /// Asserts that everything the allocator knows agrees. For tests: it walks the whole pool.
    ///
    /// # Panics
    ///
    /// If something does not.
    pub fn check_invariants(&self) {
        let mut taken = self.places.check_invariants();
        let is_set_aside = |block| !self.generations.is_leased(block);
        assert!(self.set_aside.iter().all(|&block| is_set_aside(block)), "a set-aside block is leased");
        // Strike out every holder we can name; what is left must be the plans'.
        for &block in &self.set_aside {
            assert!(std::mem::take(&mut taken[block.index()]), "set-aside block {block} is free or set aside twice");
        }
        if self.has_null_block {
            assert!(std::mem::take(&mut taken[0]) && !self.generations.is_leased(BlockIndex(0)), "null block");
        }
        let mut leased = 0;
        for block in (0..self.total_blocks()).map(BlockIndex).filter(|&block| self.generations.is_leased(block)) {
            assert!(std::mem::take(&mut taken[block.index()]), "block {block} is leased and free");
            leased += 1;
        }
        let planned = taken.iter().filter(|&&taken| taken).count();
        assert_eq!(planned, self.planned as usize, "blocks that only plans can hold");
        assert_eq!(leased, self.counts().leased, "leased blocks");
        assert!(self.available_blocks() <= self.total_blocks());
    }
}

fn count_of(blocks: &[BlockIndex]) -> u32 {
    u32::try_from(blocks.len()).expect("a pool has fewer than 2^31 blocks")
}
