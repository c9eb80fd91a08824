//! Any sequence of what an engine, a background thread and a careless caller may do to a block allocator. After every
//! step its own invariants hold, and so does what the outside knows: no block has two holders, no page is unmapped
//! under a lease or before its fence, no refused call changes anything, and at the end everything can be given back.

#![no_main]

use std::collections::BTreeMap;

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use tidekv_core::blocks::{AllocPlan, BlockAllocator, BlockLease};
use tidekv_core::pages::{Fence, PageClaim, PageState, SyncTicket};
use tidekv_core::units::{BlockIndex, PageId, Step};

const BLOCKS_PER_PAGE: [u32; 5] = [1, 2, 7, 64, 65];

#[derive(Arbitrary, Debug)]
enum Op {
    Alloc(u8),
    Plan { count: u8, set_aside: bool },
    Commit(u8),
    Abort(u8),
    Meddle { plan: u8, claim: u8, mapped: bool },
    Refill(u8),
    Mapped { which: u8, refused: bool },
    Free { first: u8, count: u8, fence: Option<u8>, by_index: bool },
    FreeTwice(u8),
    FreeDead(u8),
    FreeForeign(u32),
    Retire(u8),
    BeginUnmap { completed: u8, max_pages: u8 },
    Synchronised,
    Unmapped { which: u8, failed: bool },
    RetryUnmap,
    LateReport(u8),
    SetLimit(u8),
    Reserve(u8),
    AllocReserved(u8),
    FreeReserved,
}

/// What the outside knows of one page's frees since it last had no memory.
#[derive(Clone, Copy, Default)]
struct Freed {
    step: u64,
    /// When it was last freed without a step.
    unknown_at: Option<u64>,
}

struct World {
    pool: BlockAllocator,
    leases: BTreeMap<u32, BlockLease>,
    dead_leases: Vec<BlockLease>,
    plans: Vec<AllocPlan>,
    mapping: Vec<PageClaim>,
    unmapping: Vec<PageClaim>,
    dead_claims: Vec<PageClaim>,
    tickets: Vec<(SyncTicket, u64)>,
    freed: Vec<Freed>,
    /// Frees before this moment are covered by a synchronise.
    synchronised: u64,
    now: u64,
    null_blocks: u32,
}

fuzz_target!(|data: &[u8]| {
    let mut input = Unstructured::new(data);
    let _ = run(&mut input);
});

fn run(input: &mut Unstructured<'_>) -> arbitrary::Result<()> {
    let mut world = World::new(input.int_in_range(1..=8)?, *input.choose(&BLOCKS_PER_PAGE)?, input.arbitrary()?);
    while !input.is_empty() {
        let op = input.arbitrary()?;
        world.now += 1;
        world.step(&op);
        world.check();
    }
    world.give_everything_back();
    Ok(())
}

impl World {
    fn new(page_count: u32, blocks_per_page: u32, null_block: bool) -> Self {
        let mut pool = BlockAllocator::new(page_count, blocks_per_page).expect("a small pool");
        if null_block {
            let plan = pool.reserve_null_block().expect("the pool is fresh");
            pool.commit(plan, &mut Vec::new()).expect("nobody touched the plan");
        }
        Self {
            pool,
            leases: BTreeMap::new(),
            dead_leases: Vec::new(),
            plans: Vec::new(),
            mapping: Vec::new(),
            unmapping: Vec::new(),
            dead_claims: Vec::new(),
            tickets: Vec::new(),
            freed: vec![Freed::default(); page_count as usize],
            synchronised: 0,
            now: 0,
            null_blocks: u32::from(null_block),
        }
    }

    fn step(&mut self, op: &Op) {
        match *op {
            Op::Alloc(count) => {
                let (free, count, mut out) = (self.pool.leasable_blocks(), u32::from(count), Vec::new());
                let leased = self.pool.alloc_mapped(count, &mut out).is_ok();
                assert_eq!((leased, out.len()), (count <= free, if leased { count as usize } else { 0 }));
                self.hold(out);
            }
            Op::Plan { count, set_aside } => self.plan(u32::from(count), set_aside),
            Op::Commit(which) => self.commit(which),
            Op::Abort(which) => {
                if let Some(plan) = take(&mut self.plans, which) {
                    self.abort(plan);
                }
            }
            Op::Meddle { plan, claim, mapped } => self.meddle(plan, claim, mapped),
            Op::Free { first, count, fence, by_index } => {
                let leases = self.leases.values().copied().skip(first.into()).take(count.into()).collect();
                let fence = fence.map_or(Fence::Unknown, |step| Fence::Step(Step(step.into())));
                self.free(leases, fence, by_index);
            }
            Op::FreeTwice(which) => {
                if let Some(lease) = self.leases.values().nth(which.into()).copied() {
                    self.refused(&[lease, lease]);
                }
            }
            Op::FreeDead(which) => {
                if let Some(&lease) = self.dead_leases.get(usize::from(which)) {
                    let mut batch: Vec<_> = self.leases.values().copied().take(3).collect();
                    batch.push(lease);
                    self.refused(&batch);
                }
            }
            Op::FreeForeign(block) => {
                let block = BlockIndex(block | self.pool.total_blocks());
                self.refused(&[BlockLease { block, generation: 1 }]);
            }
            Op::Reserve(count) => {
                let (before, leasable, count) = (self.pool.counts(), self.pool.leasable_blocks(), u32::from(count));
                let enough = self.pool.reserve(count).is_ok();
                assert_eq!(enough, count <= leasable);
                let more = if enough { count } else { 0 };
                assert_eq!(self.pool.reserved_blocks(), before.reserved + more);
            }
            Op::AllocReserved(count) => {
                let (count, mut out) = (u32::from(count), Vec::new());
                let enough = count <= self.pool.reserved_blocks();
                assert_eq!(self.pool.alloc_reserved(count, &mut out).is_ok(), enough);
                self.hold(out);
            }
            Op::FreeReserved => {
                self.pool.free_reserved();
                assert_eq!(self.pool.reserved_blocks(), 0);
            }
            _ => self.step_pages(op),
        }
    }

    fn step_pages(&mut self, op: &Op) {
        match *op {
            Op::Refill(count) => {
                let (count, claimable) = (u32::from(count % 12), self.pool.pages().claimable());
                let claims = self.pool.claim_pages(count);
                assert_eq!(claims.is_ok(), count <= claimable);
                self.mapping.extend(claims.unwrap_or_default());
            }
            Op::Mapped { which, refused } => {
                let Some(claim) = take(&mut self.mapping, which) else {
                    return;
                };
                if refused {
                    self.pool.pages_refused(&[claim]).expect("the claim is ours");
                    self.dead_claims.push(claim);
                } else {
                    self.pool.pages_mapped(&[claim]).expect("the claim is ours");
                }
            }
            Op::LateReport(which) => {
                let Some(&claim) = self.dead_claims.get(usize::from(which)) else {
                    return;
                };
                assert!(self.pool.pages_mapped(&[claim]).is_err() && self.pool.pages_refused(&[claim]).is_err());
                assert!(self.pool.unmapped(&[claim]).is_err() && self.pool.unmap_failed(claim).is_err());
            }
            Op::Retire(count) => {
                let (count, idle) = (u32::from(count % 12), self.pool.pages().counts().idle);
                assert_eq!(self.pool.retire(count), count.min(idle));
            }
            Op::BeginUnmap { completed, max_pages } => self.begin_unmap(completed.into(), u32::from(max_pages % 12)),
            Op::Synchronised => {
                if let Some((ticket, issued)) = self.tickets.pop() {
                    self.pool.synchronised(ticket);
                    self.synchronised = self.synchronised.max(issued);
                }
            }
            Op::Unmapped { which, failed } => {
                let Some(claim) = take(&mut self.unmapping, which) else {
                    return;
                };
                if failed {
                    self.pool.unmap_failed(claim).expect("the page is ours to unmap");
                } else {
                    self.unmapped(claim);
                }
            }
            Op::RetryUnmap => {
                let failed = self.pool.pages().counts().unmap_failed;
                let claims = self.pool.retry_unmap();
                assert_eq!(claims.len(), failed as usize);
                self.unmapping.extend(claims);
            }
            Op::SetLimit(pages) => self.pool.set_limit(u32::from(pages % 12)),
            _ => unreachable!("{op:?} is about blocks"),
        }
    }

    /// New leases: nobody may hold their blocks, and their pages have memory.
    fn hold(&mut self, leases: Vec<BlockLease>) {
        for lease in leases {
            assert!(self.pool.is_current(lease));
            assert!(lease.block.0 >= self.null_blocks, "the null block was leased");
            assert!(self.leases.insert(lease.block.0, lease).is_none(), "block {} has two holders", lease.block);
            assert!(!self.dead_leases.contains(&lease), "a lease came back to life");
        }
    }

    fn plan(&mut self, count: u32, set_aside: bool) {
        let available = self.pool.available_blocks();
        let plan = if set_aside { self.pool.plan_reserve(count) } else { self.pool.plan_alloc(count) };
        assert_eq!(plan.is_ok(), count <= available, "{count} of {available} available blocks: {plan:?}");
        if let Ok(plan) = plan {
            assert_eq!(plan.block_count(), count as usize);
            assert!(plan.claims().is_empty() || self.pool.pages().overage() == 0, "a plan passed the limit");
            self.plans.push(plan);
        }
    }

    fn commit(&mut self, which: u8) {
        let Some(plan) = take(&mut self.plans, which) else {
            return;
        };
        let (before, count) = (self.pool.counts(), plan.block_count());
        let mut out = Vec::new();
        match self.pool.commit(plan, &mut out) {
            Ok(()) => {
                let aside = self.pool.counts().reserved - before.reserved;
                assert_eq!(out.len() + aside as usize, count, "the plan's blocks");
                self.hold(out);
            }
            Err(error) => {
                assert!(out.is_empty() && self.pool.counts() == before, "a refused commit changed something");
                self.abort(error.plan);
            }
        }
    }

    fn abort(&mut self, plan: AllocPlan) {
        let claims = plan.claims().to_vec();
        self.pool.abort(plan);
        // A page that somebody else reported as mapped lives on without the plan.
        let is_dead = |claim: &PageClaim| self.pool.pages().state(claim.page) == PageState::Reserved;
        self.dead_claims.extend(claims.into_iter().filter(is_dead));
    }

    /// Somebody reports a plan's page on their own.
    fn meddle(&mut self, plan: u8, claim: u8, mapped: bool) {
        let Some(plan) = self.plans.get(usize::from(plan) % self.plans.len().max(1)) else {
            return;
        };
        let Some(&claim) = plan.claims().get(usize::from(claim) % plan.claims().len().max(1)) else {
            return;
        };
        // Either answer is fine: the second report of a page is stale.
        let _ = if mapped { self.pool.pages_mapped(&[claim]) } else { self.pool.pages_refused(&[claim]) };
    }

    fn page_of(&self, block: BlockIndex) -> usize {
        (block.0 / self.pool.blocks_per_page()) as usize
    }

    fn free(&mut self, leases: Vec<BlockLease>, fence: Fence, by_index: bool) {
        let result = if by_index {
            let blocks: Vec<_> = leases.iter().map(|lease| lease.block).collect();
            self.pool.free_blocks(&blocks, fence)
        } else {
            self.pool.free(&leases, fence)
        };
        result.expect("all of these leases are in force");
        for lease in leases {
            assert!(!self.pool.is_leased(lease.block));
            let page = self.page_of(lease.block);
            match fence {
                Fence::Step(Step(step)) => self.freed[page].step = self.freed[page].step.max(step),
                Fence::Unknown => self.freed[page].unknown_at = Some(self.now),
            }
            self.leases.remove(&lease.block.0);
            self.dead_leases.push(lease);
        }
    }

    /// A free with something wrong in it ends no lease at all.
    fn refused(&mut self, batch: &[BlockLease]) {
        let before = (self.pool.counts(), self.pool.pages().counts());
        let error = self.pool.free(batch, Fence::Unknown).expect_err("this free is a mistake");
        assert!(batch.iter().any(|lease| lease.block == error.block()) && !error.is_transient());
        assert_eq!((self.pool.counts(), self.pool.pages().counts()), before);
    }

    fn begin_unmap(&mut self, completed: u64, max_pages: u32) {
        let plan = self.pool.begin_unmap(Step(completed), max_pages);
        assert!(plan.pages.len() <= max_pages as usize);
        for claim in &plan.pages {
            let freed = self.freed[claim.page.index()];
            assert!(freed.step <= completed, "page {} is unmapped before its step is over", claim.page);
            let is_covered = freed.unknown_at.is_none_or(|at| at < self.synchronised);
            assert!(is_covered, "page {} is unmapped without a synchronise", claim.page);
        }
        assert!(plan.next_step.is_none_or(|step| step.0 > completed));
        // Whatever is freed at this moment already happened: the ticket covers it.
        self.tickets.extend(plan.synchronise.map(|ticket| (ticket, self.now)));
        self.unmapping.extend(plan.pages);
    }

    fn unmapped(&mut self, claim: PageClaim) {
        self.pool.unmapped(&[claim]).expect("the page is ours to unmap");
        self.freed[claim.page.index()] = Freed::default();
        self.dead_claims.push(claim);
    }

    fn check(&self) {
        self.pool.check_invariants();
        let counts = self.pool.counts();
        assert_eq!(counts.leased as usize, self.leases.len());
        let mut live = vec![0; self.freed.len()];
        for lease in self.leases.values() {
            assert!(self.pool.is_current(*lease), "{lease:?} ended by itself");
            live[self.page_of(lease.block)] += 1;
        }
        for (page, live) in (0..).map(PageId).zip(live) {
            let known = self.pool.live_blocks(page);
            assert!(known >= live && known <= self.pool.blocks_per_page());
            assert_eq!(known > 0, self.pool.pages().state(page) == PageState::InUse, "page {page}");
        }
        for &claim in &self.mapping {
            assert_eq!(self.pool.pages().state(claim.page), PageState::Mapping);
        }
        for &claim in &self.unmapping {
            assert_eq!(self.pool.pages().state(claim.page), PageState::Unmapping);
        }
    }

    fn give_everything_back(mut self) {
        for plan in std::mem::take(&mut self.plans) {
            self.abort(plan);
        }
        for claim in std::mem::take(&mut self.mapping) {
            self.pool.pages_refused(&[claim]).expect("the claim is ours");
        }
        self.pool.free_reserved();
        let leases = self.leases.values().copied().collect();
        self.free(leases, Fence::Unknown, false);
        self.pool.retire(u32::MAX);
        // Once to be told to synchronise, once more to unmap.
        for _ in 0..2 {
            self.now += 1;
            self.begin_unmap(u64::MAX, u32::MAX);
            for (ticket, issued) in std::mem::take(&mut self.tickets) {
                self.pool.synchronised(ticket);
                self.synchronised = self.synchronised.max(issued);
            }
        }
        self.unmapping.extend(self.pool.retry_unmap());
        for claim in std::mem::take(&mut self.unmapping) {
            self.unmapped(claim);
        }
        self.check();
        assert_eq!(self.pool.pages().held(), self.null_blocks, "a page was lost");
    }
}

fn take<T>(items: &mut Vec<T>, which: u8) -> Option<T> {
    (!items.is_empty()).then(|| items.swap_remove(usize::from(which) % items.len()))
}
