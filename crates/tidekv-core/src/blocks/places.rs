//! Which places of which pages are free, and the choice among them.
//!
//! ```text
//!   page p      place  0   1   2   3   4   5   6   7         8 blocks per page
//!                     [a] [ ] [b] [ ] [c] [ ] [ ] [ ]        a, b, c live; 1 and 3 were freed
//!                                         ^ touched = 5      5, 6, 7 untouched since the page was last empty
//!   freed rows        [3] [1]  .   .   .   .   .   .         touched - live = 2 freed places, last freed on top
//! ```
//!
//! Freed places are taken before untouched ones: they are the warmest memory. A page that becomes empty forgets
//! its stack, so that it next hands out ascending neighbours. The stack's length follows from the two counters,
//! which leaves nothing to keep in step.
//!
//! A page is chosen by best fit: the in-use page with the fewest free blocks that still holds the whole rest of
//! the run; if none does, the emptiest in-use page, and again; an idle page only when the in-use pages are full.
//! Full pages stay full and nearly empty ones get the chance to become empty, which is what gives memory back.

use std::ops::Range;

use super::buckets::Buckets;
use super::generations::NamesBlock;
use crate::pages::{Fence, PageClaim, PageState, PageTable};
use crate::units::{BlockIndex, PageId};

/// The places of all pages.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Places {
    pub(super) table: PageTable,
    blocks_per_page: u32,
    usage: Vec<PageUsage>,
    /// One row per block. The rows of a page hold its stack of freed blocks, from the bottom.
    freed: Vec<u32>,
    buckets: Buckets,
    /// Free blocks of all in-use pages.
    free_in_use: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PageUsage {
    /// Places taken and not given back.
    live: u32,
    /// Places handed out at least once since the page was last empty: `0..touched`.
    touched: u32,
}

impl PageUsage {
    const fn freed(self) -> u32 {
        self.touched - self.live
    }
}

impl Places {
    /// The product must fit an `i32`: see `BlockAllocator::new`.
    pub(super) fn new(page_count: u32, blocks_per_page: u32) -> Self {
        Self {
            table: PageTable::new(page_count),
            blocks_per_page,
            usage: vec![PageUsage::default(); page_count as usize],
            freed: vec![0; page_count as usize * blocks_per_page as usize],
            buckets: Buckets::new(page_count, blocks_per_page),
            free_in_use: 0,
        }
    }

    pub(super) fn blocks_per_page(&self) -> u32 {
        self.blocks_per_page
    }

    /// Free blocks of mapped pages.
    pub(super) fn free_mapped(&self) -> u32 {
        self.free_in_use + self.table.count(PageState::Idle) * self.blocks_per_page
    }

    /// Those of them that the limit leaves. Idle pages above the limit are nobody's; where pages in use are above it, so
    /// are as many of their free places. So what is taken never exceeds the limit, unless it did before it was lowered.
    pub(super) fn leasable(&self) -> u32 {
        let [in_use, idle, mapping] =
            [PageState::InUse, PageState::Idle, PageState::Mapping].map(|state| self.table.count(state));
        let limit = self.table.limit();
        if in_use + mapping + idle <= limit {
            return self.free_mapped();
        }
        let idle = limit.saturating_sub(in_use + mapping).min(idle);
        let above = in_use.saturating_sub(limit);
        self.free_in_use.saturating_sub(above * self.blocks_per_page) + idle * self.blocks_per_page
    }

    /// Places taken, whoever holds them.
    pub(super) fn live(&self) -> u32 {
        self.table.count(PageState::InUse) * self.blocks_per_page - self.free_in_use
    }

    /// Places taken in one page.
    pub(super) fn live_in(&self, page: PageId) -> u32 {
        self.usage[page.index()].live
    }

    pub(super) fn page_of(&self, block: BlockIndex) -> PageId {
        PageId(block.0 / self.blocks_per_page)
    }

    fn blocks_of(&self, page: PageId) -> Range<u32> {
        let first = page.0 * self.blocks_per_page;
        first..first + self.blocks_per_page
    }

    /// Takes `count` places by best fit. The caller has checked that as many are free.
    pub(super) fn take(&mut self, count: u32, mut sink: impl FnMut(BlockIndex)) {
        debug_assert!(count <= self.free_mapped());
        let mut missing = count;
        while missing > 0 {
            let page = self.choose_page(missing);
            missing -= self.take_in(page, missing, &mut sink);
        }
    }

    /// An in-use page with at least one free block.
    fn choose_page(&mut self, run: u32) -> PageId {
        if let Some(page) = self.buckets.best_fit(run).or_else(|| self.buckets.emptiest()) {
            return page;
        }
        self.free_in_use += self.blocks_per_page;
        self.table.lease_idle().expect("blocks are free and no in-use page has them, so a page is idle")
    }

    /// Takes up to `wanted` places of one in-use page. Returns how many.
    fn take_in(&mut self, page: PageId, wanted: u32, sink: &mut impl FnMut(BlockIndex)) -> u32 {
        let rows = self.blocks_of(page);
        let stack = &self.freed[rows.start as usize..rows.end as usize];
        let usage = &mut self.usage[page.index()];
        let free = self.blocks_per_page - usage.live;
        let taken = wanted.min(free);

        let (top, reused) = (usage.freed(), taken.min(usage.freed()));
        for &block in stack[(top - reused) as usize..top as usize].iter().rev() {
            sink(BlockIndex(block));
        }
        let first_untouched = rows.start + usage.touched;
        let untouched = taken - reused;
        for block in first_untouched..first_untouched + untouched {
            sink(BlockIndex(block));
        }
        usage.touched += untouched;
        usage.live += taken;

        self.free_in_use -= taken;
        self.buckets.refile(page, free, free - taken);
        taken
    }

    /// A claimed page was mapped: takes its first `count` places (at least one), the others become free blocks.
    ///
    /// It goes from Mapping through Idle to InUse in one call, so nobody can lease it in between.
    pub(super) fn open(&mut self, claim: PageClaim, count: u32, mut sink: impl FnMut(BlockIndex)) {
        self.table.mapped(&[claim]).expect("the caller checked that the claim is in force");
        self.table.lease(claim.page).expect("a page that was just mapped is idle");
        self.free_in_use += self.blocks_per_page;
        self.take_in(claim.page, count, &mut sink);
    }

    /// Gives back places that are taken. Returns how many pages became idle.
    ///
    /// The price is paid per run of names in one page, not per name: sequences free neighbours together.
    pub(super) fn give_back<T: NamesBlock>(&mut self, names: &[T], fence: Option<Fence>) -> u32 {
        let mut pages_emptied = 0;
        let mut rest = names;
        while let Some(first) = rest.first() {
            let page = self.page_of(first.block());
            let blocks = self.blocks_of(page);
            let run = rest.iter().position(|name| !blocks.contains(&name.block().0)).unwrap_or(rest.len());
            let (names, others) = rest.split_at(run);
            if let Some(fence) = fence {
                self.table.note_fence(page, fence);
            }
            pages_emptied += u32::from(self.give_back_in(page, names));
            rest = others;
        }
        pages_emptied
    }

    /// Gives back places of one page. Returns whether that was the last of them.
    fn give_back_in<T: NamesBlock>(&mut self, page: PageId, names: &[T]) -> bool {
        let usage = &mut self.usage[page.index()];
        let free = self.blocks_per_page - usage.live;
        let top = page.index() * self.blocks_per_page as usize + usage.freed() as usize;
        for (row, name) in self.freed[top..top + names.len()].iter_mut().zip(names) {
            *row = name.block().0;
        }
        let count = u32::try_from(names.len()).expect("a run has no more blocks than its page");
        usage.live -= count;
        self.free_in_use += count;
        self.buckets.refile(page, free, free + count);

        let emptied = usage.live == 0;
        if emptied {
            *usage = PageUsage::default();
            self.free_in_use -= self.blocks_per_page;
            self.table.returned(page).expect("a page with live blocks is in use");
        }
        emptied
    }

    /// The places of a page that are free, though the page is in use.
    fn free_places(&self, page: PageId) -> impl Iterator<Item = BlockIndex> + '_ {
        let usage = self.usage[page.index()];
        let rows = self.blocks_of(page);
        let stack = &self.freed[rows.start as usize..][..usage.freed() as usize];
        let untouched = rows.start + usage.touched..rows.end;
        stack.iter().copied().chain(untouched).map(BlockIndex)
    }

    /// Asserts that counters, stacks, buckets and page states agree, and returns for each block whether its
    /// place is taken. For tests.
    pub(super) fn check_invariants(&self) -> Vec<bool> {
        self.table.check_invariants();
        let mut taken = vec![false; self.freed.len()];
        let mut partly_used = Vec::new();
        let mut free_in_use = 0;
        for (page, &usage) in (0..).map(PageId).zip(&self.usage) {
            let in_use = self.table.state(page) == PageState::InUse;
            assert_eq!(usage.live > 0, in_use, "page {page} has {} live blocks", usage.live);
            assert!(usage.live <= usage.touched && usage.touched <= self.blocks_per_page, "page {page}: {usage:?}");
            if !in_use {
                assert_eq!(usage, PageUsage::default(), "page {page} is empty and must have forgotten its stack");
                continue;
            }
            let rows = self.blocks_of(page);
            taken[rows.start as usize..rows.end as usize].fill(true);
            for block in self.free_places(page) {
                assert!(rows.contains(&block.0), "block {block} is on the stack of page {page}");
                assert!(taken[block.index()], "block {block} is free twice");
                taken[block.index()] = false;
            }
            let free = self.blocks_per_page - usage.live;
            free_in_use += free;
            if free > 0 {
                partly_used.push((page, free));
            }
        }
        assert_eq!(free_in_use, self.free_in_use, "free blocks of in-use pages");
        self.buckets.check_invariants(partly_used.into_iter());
        taken
    }
}
