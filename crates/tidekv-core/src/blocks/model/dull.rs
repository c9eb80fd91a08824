//! The dullest possible pool: sets and vectors, and the rules written out as they are told.

use std::collections::BTreeSet;

use crate::pages::PageState::{self, Idle, InUse, Mapping, Reserved};
use crate::pages::{Fence, PageClaim};
use crate::units::{BlockIndex, Step};

#[derive(Clone, Debug, PartialEq)]
pub(super) struct ModelPage {
    pub(super) state: PageState,
    pub(super) taken: BTreeSet<u32>,
    /// Latest step of its frees.
    pub(super) step: u64,
    /// Time of its latest free without a step.
    pub(super) unknown_at: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Model {
    pub(super) blocks_per_page: u32,
    pub(super) limit: u32,
    pub(super) pages: Vec<ModelPage>,
    /// Ids to claim, next one last.
    pub(super) reserved: Vec<u32>,
    /// Coldest first.
    pub(super) idle: Vec<u32>,
    /// First retired first.
    pub(super) draining: Vec<u32>,
    /// The device has been synchronised since this time.
    pub(super) synchronised_at: u64,
}

impl Model {
    pub(super) fn new(page_count: u32, blocks_per_page: u32) -> Self {
        let page = ModelPage { state: Reserved, taken: BTreeSet::new(), step: 0, unknown_at: 0 };
        Self {
            blocks_per_page,
            limit: page_count,
            pages: vec![page; page_count as usize],
            reserved: (0..page_count).rev().collect(),
            idle: vec![],
            draining: vec![],
            synchronised_at: 0,
        }
    }

    pub(super) fn page_count(&self) -> u32 {
        u32::try_from(self.pages.len()).unwrap()
    }

    pub(super) fn in_state(&self, state: PageState) -> u32 {
        u32::try_from(self.pages.iter().filter(|page| page.state == state).count()).unwrap()
    }

    pub(super) fn free_in(&self, page: u32) -> u32 {
        self.blocks_per_page - u32::try_from(self.pages[page as usize].taken.len()).unwrap()
    }

    pub(super) fn claimable(&self) -> u32 {
        self.limit.saturating_sub(self.page_count() - self.in_state(Reserved))
    }

    pub(super) fn free_mapped(&self) -> u32 {
        let mapped = (0..self.page_count()).filter(|&page| matches!(self.pages[page as usize].state, Idle | InUse));
        mapped.map(|page| self.free_in(page)).sum()
    }

    /// Blocks taken, whoever holds them.
    pub(super) fn taken(&self) -> u32 {
        let in_use = (0..self.page_count()).filter(|&page| self.pages[page as usize].state == InUse);
        in_use.map(|page| self.blocks_per_page - self.free_in(page)).sum()
    }

    /// Page by page: an idle page is given out only while fewer are in use or on their way there than the limit says,
    /// and no block once as many are taken.
    pub(super) fn leasable(&self) -> u32 {
        let (in_use, idle) = (self.in_state(InUse), self.in_state(Idle));
        let usable = (0..idle).filter(|idle| in_use + self.in_state(Mapping) + idle < self.limit).count();
        let below_limit = (self.limit * self.blocks_per_page).saturating_sub(self.taken());
        let free_in_use = in_use * self.blocks_per_page - self.taken();
        (free_in_use + u32::try_from(usable).unwrap() * self.blocks_per_page).min(below_limit)
    }

    pub(super) fn available(&self) -> u32 {
        self.leasable() + self.claimable() * self.blocks_per_page
    }

    pub(super) fn claim(&mut self, claims: &[PageClaim]) {
        for claim in claims {
            assert_eq!(self.reserved.pop(), Some(claim.page.0), "claimed page");
            self.pages[claim.page.index()].state = Mapping;
        }
    }

    pub(super) fn reserve_again(&mut self, page: u32) {
        let record = &mut self.pages[page as usize];
        (record.state, record.step, record.unknown_at) = (Reserved, 0, 0);
        self.reserved.push(page);
    }

    pub(super) fn become_idle(&mut self, page: u32) {
        self.pages[page as usize].state = Idle;
        self.idle.push(page);
    }

    /// Blocks of mapped pages were handed out, in this order: checks each page's choice.
    pub(super) fn take(&mut self, blocks: &[BlockIndex]) {
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let page = first.0 / self.blocks_per_page;
            let run = self.free_in(page).min(u32::try_from(rest.len()).unwrap());
            let open = (0..self.page_count()).filter(|&page| self.pages[page as usize].state == InUse);
            let partly_free: BTreeSet<u32> = open.map(|page| self.free_in(page)).filter(|&free| free > 0).collect();
            let whole_rest = u32::try_from(rest.len()).unwrap();
            let rule = partly_free.range(whole_rest..).next().or_else(|| partly_free.last());
            match rule {
                Some(&free) => {
                    assert_eq!(self.pages[page as usize].state, InUse, "page {page} instead of one partly free");
                    assert_eq!(self.free_in(page), free, "free blocks of page {page}, for a rest of {whole_rest}");
                }
                None => {
                    assert_eq!(self.idle.pop(), Some(page), "the warmest idle page");
                    self.pages[page as usize].state = InUse;
                    self.check_ascending(page, &rest[..run as usize]);
                }
            }
            let (blocks, others) = rest.split_at(run as usize);
            self.occupy(page, blocks);
            rest = others;
        }
    }

    pub(super) fn occupy(&mut self, page: u32, blocks: &[BlockIndex]) {
        for block in blocks {
            assert_eq!(block.0 / self.blocks_per_page, page, "block {block} out of turn");
            assert!(self.pages[page as usize].taken.insert(block.0), "block {block} handed out twice");
        }
    }

    pub(super) fn check_ascending(&self, page: u32, blocks: &[BlockIndex]) {
        let expected = (page * self.blocks_per_page..).map(BlockIndex);
        assert!(blocks.iter().copied().zip(expected).all(|(block, expected)| block == expected), "fresh page {page}");
    }

    pub(super) fn give_back(&mut self, blocks: &[BlockIndex], fence: Option<Fence>, now: u64) -> u32 {
        let mut emptied = 0;
        for block in blocks {
            let page = &mut self.pages[(block.0 / self.blocks_per_page) as usize];
            assert!(page.taken.remove(&block.0));
            match fence {
                Some(Fence::Step(Step(step))) => page.step = page.step.max(step),
                Some(Fence::Unknown) => page.unknown_at = now,
                None => {}
            }
            if page.taken.is_empty() {
                self.become_idle(block.0 / self.blocks_per_page);
                emptied += 1;
            }
        }
        emptied
    }
}
