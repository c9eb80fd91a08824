//! The page table: one record per slot, and the order in which slots are handed out and given back.
//!
//! ```text
//!   list          order                                       in it are exactly
//!   ------------  ------------------------------------------  ------------------------------------------
//!   idle          front = most recently idle (warm): leased;  the Idle pages
//!                 back = longest idle (cold): retired
//!   draining      first retired, first unmapped               the Draining pages
//!   returned      last returned, first claimed                the Reserved pages that were claimed before
//!   unmap failed  order of failure                            the Unmapping pages nobody works on
//! ```
//!
//! Claims take returned ids before ids that were never used, so a pool that breathes stays in the low end of its
//! reservation. Never used ids are a watermark, not list entries: a new table is zeroed memory.

use super::fence::{PageFence, SyncClock, Wait};
use super::{ClaimError, Fence, IllegalTransition, PageClaim, PageEvent, PageState, StaleClaim, SyncTicket};
use crate::list::{Links, ListId};
use crate::units::{PageId, Step};

const IDLE: ListId = ListId(0);
const DRAINING: ListId = ListId(1);
const RETURNED: ListId = ListId(2);
const UNMAP_FAILED: ListId = ListId(3);
const LISTS: u32 = 4;

/// Pages that may be unmapped now, and what the others wait for.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "its pages are Unmapping: report each as `unmapped` or `unmap_failed`"]
pub struct UnmapPlan {
    /// Unmap these, then report each with `unmapped` or `unmap_failed`.
    pub pages: Vec<PageClaim>,
    /// Some draining pages wait for nothing but a synchronise: synchronise the device, hand the ticket to
    /// `synchronised`, ask again.
    pub synchronise: Option<SyncTicket>,
    /// The earliest step that some draining page waits for.
    pub next_step: Option<Step>,
}

/// Pages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCounts {
    /// Without memory; may be claimed.
    pub reserved: u32,
    /// Being mapped.
    pub mapping: u32,
    /// Mapped, no block in use.
    pub idle: u32,
    /// Mapped, blocks in use.
    pub in_use: u32,
    /// Waiting for the device before they are unmapped.
    pub draining: u32,
    /// Being unmapped, including those whose unmap failed.
    pub unmapping: u32,
    /// Of the unmapping: those that the driver refused to unmap and nobody retries yet.
    pub unmap_failed: u32,
}

impl PageCounts {
    /// Pages that cost memory or are about to: everything but the reserved ones.
    pub const fn held(self) -> u32 {
        self.mapping + self.idle + self.in_use + self.draining + self.unmapping
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct PageRecord {
    fence: PageFence,
    generation: u32,
    /// Written by [`PageTable::apply`] alone.
    state: PageState,
}

/// Which pages of one reservation have memory behind them. See the [module](super) for the promises it keeps.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct PageTable {
    records: Vec<PageRecord>,
    links: Links,
    pages_in_state: [u32; PageState::ALL.len()],
    unmap_failed: u32,
    /// Pages from this one on were never claimed.
    never_claimed: u32,
    limit: u32,
    clock: SyncClock,
}

impl PageTable {
    /// A table whose pages are all reserved, without a limit but its own size.
    ///
    /// # Panics
    ///
    /// Above 2^31 - 1 pages, which no kernel id could name.
    pub fn new(page_count: u32) -> Self {
        assert!(i32::try_from(page_count).is_ok(), "{page_count} pages: kernel ids end at 2^31");
        let mut pages_in_state = [0; PageState::ALL.len()];
        pages_in_state[PageState::Reserved as usize] = page_count;
        Self {
            records: vec![PageRecord::default(); page_count as usize],
            links: Links::new(LISTS, page_count),
            pages_in_state,
            unmap_failed: 0,
            never_claimed: 0,
            limit: page_count,
            clock: SyncClock::new(),
        }
    }

    /// Slots of the reservation.
    pub fn page_count(&self) -> u32 {
        self.pages_in_state.iter().sum()
    }

    /// Pages by state. Constant time.
    pub fn counts(&self) -> PageCounts {
        PageCounts {
            reserved: self.count(PageState::Reserved),
            mapping: self.count(PageState::Mapping),
            idle: self.count(PageState::Idle),
            in_use: self.count(PageState::InUse),
            draining: self.count(PageState::Draining),
            unmapping: self.count(PageState::Unmapping),
            unmap_failed: self.unmap_failed,
        }
    }

    /// Pages in one state. Constant time.
    pub fn count(&self, state: PageState) -> u32 {
        self.pages_in_state[state as usize]
    }

    /// Pages that cost memory or are about to: everything but the reserved ones.
    pub fn held(&self) -> u32 {
        self.page_count() - self.count(PageState::Reserved)
    }

    /// The state of a page.
    ///
    /// # Panics
    ///
    /// If the page is not of this table.
    pub fn state(&self, page: PageId) -> PageState {
        self.records[page.index()].state
    }

    /// The most pages that claims may hold.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Sets the most pages to hold. There is no memory past the reservation, so more than its pages means all.
    pub fn set_limit(&mut self, pages: u32) {
        self.limit = pages.min(self.page_count());
    }

    /// Pages held above the limit: as many must become reserved again.
    pub fn overage(&self) -> u32 {
        self.held().saturating_sub(self.limit)
    }

    /// Pages that could be claimed now.
    pub fn claimable(&self) -> u32 {
        // The limit never exceeds the page count, so what it leaves is reserved.
        self.limit.saturating_sub(self.held())
    }

    /// The page that the next claim takes first.
    pub fn next_claimed(&self) -> Option<PageId> {
        let never_claimed = || (self.never_claimed < self.page_count()).then_some(PageId(self.never_claimed));
        self.links.front(RETURNED).or_else(never_claimed)
    }

    /// Takes `wanted` pages to be mapped, all or none.
    ///
    /// # Errors
    ///
    /// [`ClaimError`] where the limit leaves fewer.
    pub fn claim(&mut self, wanted: u32) -> Result<Vec<PageClaim>, ClaimError> {
        if wanted > self.claimable() {
            return Err(ClaimError {
                wanted,
                reserved_free: self.count(PageState::Reserved),
                limit: self.limit,
                held: self.held(),
            });
        }
        Ok((0..wanted).map(|_| self.claim_next()).collect())
    }

    fn claim_next(&mut self) -> PageClaim {
        let page = self.next_claimed().expect("fewer pages are held than the table has, so one is reserved");
        self.never_claimed = self.never_claimed.max(page.0 + 1);
        self.apply(page, PageEvent::Claimed).expect("the page is reserved");
        let record = &mut self.records[page.index()];
        record.generation = record.generation.wrapping_add(1);
        PageClaim { page, generation: record.generation }
    }

    /// The driver mapped these pages: they are idle now.
    ///
    /// Each claim is a fact of its own: all that are good take effect, also where another is stale.
    ///
    /// # Errors
    ///
    /// The first [`StaleClaim`].
    pub fn mapped(&mut self, claims: &[PageClaim]) -> Result<(), StaleClaim> {
        self.report(claims.iter(), PageState::Mapping, PageEvent::Mapped)
    }

    /// The driver refused these pages, or nobody wants them any more: they are reserved again.
    ///
    /// The next claim gets the same ids in the same order. Each claim is a fact of its own, as in
    /// [`mapped`](Self::mapped).
    ///
    /// # Errors
    ///
    /// The first [`StaleClaim`].
    pub fn refused(&mut self, claims: &[PageClaim]) -> Result<(), StaleClaim> {
        self.report(claims.iter().rev(), PageState::Mapping, PageEvent::Refused)
    }

    /// Whether the claim speaks for a page that is being mapped.
    pub(crate) fn check_mapping(&self, claim: PageClaim) -> Result<(), StaleClaim> {
        self.check_claim(claim, PageState::Mapping)
    }

    /// Takes the warmest idle page into use.
    pub fn lease_idle(&mut self) -> Option<PageId> {
        let page = self.links.front(IDLE)?;
        self.apply(page, PageEvent::Leased).expect("pages of the idle list are idle");
        Some(page)
    }

    /// Takes one given idle page into use.
    ///
    /// # Errors
    ///
    /// [`IllegalTransition`] unless the page is idle.
    pub fn lease(&mut self, page: PageId) -> Result<(), IllegalTransition> {
        self.apply(page, PageEvent::Leased)
    }

    /// Some of the page's blocks were freed behind `fence`.
    pub fn note_fence(&mut self, page: PageId, fence: Fence) {
        self.clock.note(&mut self.records[page.index()].fence, fence);
    }

    /// What all frees of the page together wait for: a synchronise if any of them does, else the latest step.
    pub fn fence(&self, page: PageId) -> Fence {
        self.records[page.index()].fence.strictest()
    }

    /// The page's last block came back: the page is idle, and the warmest.
    ///
    /// # Errors
    ///
    /// [`IllegalTransition`] unless the page is in use.
    pub fn returned(&mut self, page: PageId) -> Result<(), IllegalTransition> {
        self.apply(page, PageEvent::Returned)
    }

    /// Sends up to `wanted` of the coldest idle pages on their way out. Returns how many.
    pub fn retire(&mut self, wanted: u32) -> u32 {
        let retired = wanted.min(self.count(PageState::Idle));
        for _ in 0..retired {
            let page = self.links.back(IDLE).expect("as many pages are in the list as are idle");
            self.apply(page, PageEvent::Retired).expect("pages of the idle list are idle");
        }
        retired
    }

    /// Takes up to `max_pages` draining pages that the device is done with, to be unmapped by the caller.
    ///
    /// `completed` is the last step that is over, `Step(0)` before the first.
    pub fn begin_unmap(&mut self, completed: Step, max_pages: u32) -> UnmapPlan {
        let mut plan = UnmapPlan { pages: Vec::new(), synchronise: None, next_step: None };
        let mut needs_synchronise = false;
        for page in self.links.iter(DRAINING) {
            if plan.pages.len() == max_pages as usize {
                break;
            }
            let record = &self.records[page.index()];
            match self.clock.wait_of(record.fence, completed) {
                Wait::Over => plan.pages.push(PageClaim { page, generation: record.generation }),
                Wait::ForStep(step) => plan.next_step = Some(plan.next_step.map_or(step, |next| next.min(step))),
                Wait::ForSynchronise => needs_synchronise = true,
            }
        }
        for claim in &plan.pages {
            self.apply(claim.page, PageEvent::FencePassed).expect("pages of the draining list are draining");
        }
        plan.synchronise = needs_synchronise.then(|| self.clock.begin_synchronise());
        plan
    }

    /// The device was synchronised after the ticket was issued.
    pub fn synchronised(&mut self, ticket: SyncTicket) {
        self.clock.synchronised(ticket);
    }

    /// The driver took the memory of these pages back: they are reserved again, without fences.
    ///
    /// Each claim is a fact of its own, as in [`mapped`](Self::mapped).
    ///
    /// # Errors
    ///
    /// The first [`StaleClaim`].
    pub fn unmapped(&mut self, claims: &[PageClaim]) -> Result<(), StaleClaim> {
        self.report(claims.iter(), PageState::Unmapping, PageEvent::Unmapped)
    }

    /// The driver refused to unmap this page. It stays Unmapping, held and out of reach, until
    /// [`retry_unmap`](Self::retry_unmap) hands it out once more.
    ///
    /// # Errors
    ///
    /// [`StaleClaim`] unless the claim speaks for a page that is being unmapped.
    pub fn unmap_failed(&mut self, claim: PageClaim) -> Result<(), StaleClaim> {
        self.check_claim(claim, PageState::Unmapping)?;
        if !self.links.is_linked(claim.page) {
            self.links.push_back(UNMAP_FAILED, claim.page);
            self.unmap_failed += 1;
        }
        Ok(())
    }

    /// Takes every page whose unmap failed, to be unmapped by the caller.
    #[must_use = "report each page as `unmapped` or `unmap_failed`"]
    pub fn retry_unmap(&mut self) -> Vec<PageClaim> {
        let claim_of = |page: PageId| PageClaim { page, generation: self.records[page.index()].generation };
        let claims: Vec<_> = self.links.iter(UNMAP_FAILED).map(claim_of).collect();
        for claim in &claims {
            self.links.remove(claim.page);
        }
        self.unmap_failed = 0;
        claims
    }

    fn check_claim(&self, claim: PageClaim, expected: PageState) -> Result<(), StaleClaim> {
        let record = self.records.get(claim.page.index()).copied().unwrap_or_default();
        if record.generation == claim.generation && record.state == expected {
            return Ok(());
        }
        Err(StaleClaim { claim, current_generation: record.generation, state: record.state })
    }

    fn report<'a>(
        &mut self,
        claims: impl Iterator<Item = &'a PageClaim>,
        expected: PageState,
        event: PageEvent,
    ) -> Result<(), StaleClaim> {
        let mut first_stale = Ok(());
        for &claim in claims {
            match self.check_claim(claim, expected) {
                Ok(()) => self.apply(claim.page, event).expect("the claim's state was checked"),
                Err(stale) => first_stale = first_stale.and(Err(stale)),
            }
        }
        first_stale
    }

    /// The one writer of states: counts and lists follow the state, so they cannot disagree with it.
    fn apply(&mut self, page: PageId, event: PageEvent) -> Result<(), IllegalTransition> {
        let record = &mut self.records[page.index()];
        let (from, to) = (record.state, record.state.next(event)?);
        record.state = to;
        self.pages_in_state[from as usize] -= 1;
        self.pages_in_state[to as usize] += 1;
        if self.links.is_linked(page) {
            self.links.remove(page);
            self.unmap_failed -= u32::from(from == PageState::Unmapping);
        }
        match to {
            PageState::Idle => self.links.push_front(IDLE, page),
            PageState::Draining => self.links.push_back(DRAINING, page),
            PageState::Reserved => {
                record.fence = PageFence::NONE;
                self.links.push_front(RETURNED, page);
            }
            PageState::Mapping | PageState::InUse | PageState::Unmapping => {}
        }
        Ok(())
    }

    /// Asserts that records, counts and lists agree. For tests: it walks the whole table.
    ///
    /// # Panics
    ///
    /// If they do not.
    pub fn check_invariants(&self) {
        self.links.check_invariants();
        let mut counted = [0; PageState::ALL.len()];
        for (page, record) in (0..).map(PageId).zip(&self.records) {
            counted[record.state as usize] += 1;
            let was_claimed = page.0 < self.never_claimed;
            assert!(was_claimed || record.state == PageState::Reserved, "page {page} was used before it was claimed");
            assert!(was_claimed || record.generation == 0, "page {page} has a generation before its first claim");
            if matches!(record.state, PageState::Reserved | PageState::Mapping) {
                assert_eq!(record.fence, PageFence::NONE, "page {page} kept a fence across its unmap");
            }
        }
        assert_eq!(counted, self.pages_in_state, "pages per state");
        assert!(self.limit <= self.page_count() && self.held() <= self.page_count());
        assert!(self.never_claimed <= self.page_count());

        let never_claimed = self.page_count() - self.never_claimed;
        self.check_list(IDLE, PageState::Idle, self.count(PageState::Idle));
        self.check_list(DRAINING, PageState::Draining, self.count(PageState::Draining));
        self.check_list(RETURNED, PageState::Reserved, self.count(PageState::Reserved) - never_claimed);
        self.check_list(UNMAP_FAILED, PageState::Unmapping, self.unmap_failed);
    }

    /// A page is in at most one list and a list holds pages of one state, so equal lengths mean equal sets.
    fn check_list(&self, list: ListId, state: PageState, expected: u32) {
        assert_eq!(self.links.iter(list).count(), expected as usize, "length of the list of {state} pages");
        for page in self.links.iter(list) {
            assert_eq!(self.state(page), state, "page {page} is in the wrong list");
        }
    }
}
