//! Random sequences of everything at once, against the dullest model of a pool.
//!
//! The model is sets and vectors: it knows which blocks of a page are taken, in which order pages became idle,
//! when each page was last freed, and nothing of buckets, stacks or generations. It predicts every page that is
//! claimed, leased, retired and unmapped, and checks each block handed out against the best-fit rule.

mod dull;
mod ops;

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::Index;

use self::dull::Model;
use self::ops::{Bad, Count, Op, Subset};
use super::plan::Purpose;
use super::*;
use crate::pages::PageState::{Draining, Idle, InUse, Reserved, Unmapping};
use crate::pages::{Fence, PageClaim, SyncTicket};
use crate::units::{BlockIndex, PageId, Step};

/// The allocator, the model, and all that callers hold.
struct World {
    pool: BlockAllocator,
    model: Model,
    leases: Vec<BlockLease>,
    dead_leases: Vec<BlockLease>,
    set_aside: Vec<BlockIndex>,
    plans: Vec<AllocPlan>,
    mapping: Vec<PageClaim>,
    unmapping: Vec<PageClaim>,
    failed: Vec<PageClaim>,
    dead_claims: Vec<PageClaim>,
    ticket: Option<(SyncTicket, u64)>,
    has_null: bool,
    now: u64,
}

impl World {
    fn new(page_count: u32, blocks_per_page: u32, null_block: bool) -> Self {
        let mut world = Self {
            pool: BlockAllocator::new(page_count, blocks_per_page).unwrap(),
            model: Model::new(page_count, blocks_per_page),
            leases: vec![],
            dead_leases: vec![],
            set_aside: vec![],
            plans: vec![],
            mapping: vec![],
            unmapping: vec![],
            failed: vec![],
            dead_claims: vec![],
            ticket: None,
            has_null: false,
            now: 0,
        };
        if null_block {
            let plan = world.pool.reserve_null_block().unwrap();
            world.model.claim(plan.claims());
            world.commit(plan);
            world.has_null = true;
        }
        world
    }

    /// Up to a little more than three pages of blocks, small counts as likely as large ones.
    fn some_count(&self, count: Count) -> u32 {
        let blocks_per_page = self.model.blocks_per_page;
        let most = *count.scale.get(&[3, blocks_per_page, blocks_per_page * 3 + 2]);
        u32::try_from(count.value.index(most as usize + 1)).unwrap()
    }

    fn some_pages(&self, index: Index, extra: u32) -> u32 {
        u32::try_from(index.index((self.model.page_count() + extra) as usize + 1)).unwrap()
    }

    fn step(&mut self, op: &Op) {
        self.now += 1;
        match *op {
            Op::Alloc(count) => self.alloc(self.some_count(count)),
            Op::Plan(count, aside) => {
                let purpose = if aside { Purpose::SetAside } else { Purpose::Lease };
                let plan = self.plan(self.some_count(count), purpose);
                self.plans.extend(plan);
            }
            Op::PlanAndAbort(count) => {
                let before = self.model.clone();
                if let Some(plan) = self.plan(self.some_count(count), Purpose::Lease) {
                    self.abort(plan);
                    assert_eq!(self.model, before, "an aborted plan left a trace");
                }
            }
            Op::Commit(which) => {
                if let Some(plan) = take_any(&mut self.plans, which) {
                    self.commit(plan);
                }
            }
            Op::Abort(which) => {
                if let Some(plan) = take_any(&mut self.plans, which) {
                    self.abort(plan);
                }
            }
            Op::Free { subset, fence, by_index } => {
                let fence = fence.map_or(Fence::Unknown, |step| Fence::Step(Step(step)));
                self.free(subset, fence, by_index);
            }
            Op::BadFree { subset, bad } => self.bad_free(subset, bad),
            Op::Reserve(count) => {
                let count = self.some_count(count);
                let before = self.pool.set_aside_blocks().len();
                assert_eq!(self.pool.reserve(count).is_ok(), count <= self.model.leasable());
                let blocks = self.pool.set_aside_blocks().split_off(before);
                self.model.take(&blocks);
                self.set_aside.extend(blocks);
            }
            Op::AllocReserved(count) => {
                let count = self.some_count(count);
                let before = self.leases.len();
                let enough = count as usize <= self.set_aside.len();
                assert_eq!(self.pool.alloc_reserved(count, &mut self.leases).is_ok(), enough);
                let leased: Vec<_> = self.leases[before..].iter().map(|lease| lease.block).collect();
                let expected: Vec<_> = self.set_aside.drain(..leased.len()).collect();
                assert_eq!(leased, expected);
            }
            Op::FreeReserved => {
                let blocks = std::mem::take(&mut self.set_aside);
                let emptied = self.model.give_back(&blocks, None, self.now);
                assert_eq!(self.pool.free_reserved(), FreeReport { pages_emptied: emptied });
            }
            _ => self.step_pages(op),
        }
    }

    fn step_pages(&mut self, op: &Op) {
        match *op {
            Op::Refill(count) => {
                let count = self.some_pages(count, 1);
                let claims = self.pool.claim_pages(count);
                assert_eq!(claims.is_ok(), count <= self.model.claimable());
                let claims = claims.unwrap_or_default();
                self.model.claim(&claims);
                self.mapping.extend(claims);
            }
            Op::Mapped(which, good) => {
                let Some(claim) = take_any(&mut self.mapping, which) else {
                    return;
                };
                if good {
                    self.pool.pages_mapped(&[claim]).unwrap();
                    self.model.become_idle(claim.page.0);
                } else {
                    self.pool.pages_refused(&[claim]).unwrap();
                    self.model.reserve_again(claim.page.0);
                    self.dead_claims.push(claim);
                }
            }
            Op::LateReport(which) => {
                if !self.dead_claims.is_empty() {
                    let claim = *which.get(&self.dead_claims);
                    assert!(self.pool.pages_mapped(&[claim]).is_err());
                    assert!(self.pool.pages_refused(&[claim]).is_err());
                    assert!(self.pool.unmapped(&[claim]).is_err());
                    assert!(self.pool.unmap_failed(claim).is_err());
                }
            }
            Op::Retire(count) => {
                let count = self.some_pages(count, 0).min(u32::try_from(self.model.idle.len()).unwrap());
                assert_eq!(self.pool.retire(count), count);
                for page in self.model.idle.drain(..count as usize) {
                    self.model.pages[page as usize].state = Draining;
                    self.model.draining.push(page);
                }
            }
            Op::BeginUnmap { completed, max_pages } => self.begin_unmap(completed, max_pages),
            Op::Synchronised => {
                if let Some((ticket, issued_at)) = self.ticket.take() {
                    self.pool.synchronised(ticket);
                    self.model.synchronised_at = self.model.synchronised_at.max(issued_at);
                }
            }
            Op::Unmapped(which, good) => {
                let Some(claim) = take_any(&mut self.unmapping, which) else {
                    return;
                };
                if good {
                    self.pool.unmapped(&[claim]).unwrap();
                    self.model.reserve_again(claim.page.0);
                    self.dead_claims.push(claim);
                } else {
                    self.pool.unmap_failed(claim).unwrap();
                    self.failed.push(claim);
                }
            }
            Op::RetryUnmap => {
                assert_eq!(self.pool.retry_unmap(), self.failed);
                self.unmapping.append(&mut self.failed);
            }
            Op::SetLimit(pages) => {
                let pages = self.some_pages(pages, 3);
                self.pool.set_limit(pages);
                self.model.limit = pages.min(self.model.page_count());
            }
            _ => unreachable!("{op:?} is about blocks"),
        }
    }

    fn alloc(&mut self, count: u32) {
        let before = self.leases.len();
        let result = self.pool.alloc_mapped(count, &mut self.leases);
        let missing = count.saturating_sub(self.model.leasable());
        let pages = missing.div_ceil(self.model.blocks_per_page);
        assert_eq!(result, if missing == 0 { Ok(()) } else { Err(NeedsPages { pages }) });
        let blocks: Vec<_> = self.leases[before..].iter().map(|lease| lease.block).collect();
        assert_eq!(blocks.len(), if missing == 0 { count as usize } else { 0 });
        self.model.take(&blocks);
    }

    fn plan(&mut self, count: u32, purpose: Purpose) -> Option<AllocPlan> {
        let plan = match purpose {
            Purpose::SetAside => self.pool.plan_reserve(count),
            _ => self.pool.plan_alloc(count),
        };
        let fits_ever = count <= self.pool.total_blocks() - u32::from(self.has_null);
        match plan {
            Ok(plan) => {
                assert!(fits_ever && count <= self.model.available());
                assert_eq!(plan.block_count(), count as usize);
                let missing = count.saturating_sub(self.model.leasable());
                assert_eq!(plan.claims().len(), missing.div_ceil(self.model.blocks_per_page) as usize);
                self.model.claim(plan.claims());
                self.model.take(&plan.taken);
                Some(plan)
            }
            Err(error) => {
                assert!(count > self.model.available());
                assert_eq!(error.is_transient(), fits_ever);
                None
            }
        }
    }

    fn commit(&mut self, plan: AllocPlan) {
        let (taken, claims, from_claims) = (plan.taken.clone(), plan.claims.clone(), plan.from_claims);
        let purpose = plan.purpose;
        let (leased_before, aside_before) = (self.leases.len(), self.pool.set_aside_blocks().len());
        let in_use = self.model.in_state(InUse) + u32::try_from(claims.len()).unwrap();
        let fits = (claims.is_empty() || in_use <= self.model.limit)
            && self.model.taken() + from_claims <= self.model.limit * self.model.blocks_per_page;
        if let Err(CommitError { plan, why }) = self.pool.commit(plan, &mut self.leases) {
            assert!(!fits && matches!(why, CommitRefusal::Limit(_)), "{why}");
            return self.abort(plan);
        }
        assert!(fits || purpose == Purpose::NullBlock, "pages above the limit came into use");
        let blocks: Vec<_> = match purpose {
            Purpose::Lease => self.leases[leased_before..].iter().map(|lease| lease.block).collect(),
            Purpose::SetAside => self.pool.set_aside_blocks().split_off(aside_before),
            Purpose::NullBlock => vec![BlockIndex(0)],
        };
        let (from_mapped, from_new) = blocks.split_at(taken.len());
        assert_eq!((from_mapped, from_new.len()), (&taken[..], from_claims as usize));
        for (claim, blocks) in claims.iter().zip(from_new.chunks(self.model.blocks_per_page as usize)) {
            self.model.pages[claim.page.index()].state = InUse;
            self.model.check_ascending(claim.page.0, blocks);
            self.model.occupy(claim.page.0, blocks);
        }
        if purpose == Purpose::SetAside {
            self.set_aside.extend(blocks);
        }
    }

    fn abort(&mut self, plan: AllocPlan) {
        let blocks: Vec<_> = plan.taken.iter().rev().copied().collect();
        self.model.give_back(&blocks, None, self.now);
        for claim in plan.claims().iter().rev() {
            self.model.reserve_again(claim.page.0);
            self.dead_claims.push(*claim);
        }
        self.pool.abort(plan);
    }

    fn some_leases(&self, subset: Subset) -> Vec<BlockLease> {
        let first = subset.first.index(self.leases.len());
        let count = 1 + subset.count.index(self.leases.len() - first);
        self.leases[first..].iter().step_by(subset.stride).take(count).copied().collect()
    }

    fn free(&mut self, subset: Subset, fence: Fence, by_index: bool) {
        if self.leases.is_empty() {
            return;
        }
        let batch = self.some_leases(subset);
        let blocks: Vec<_> = batch.iter().map(|lease| lease.block).collect();
        let report = if by_index { self.pool.free_blocks(&blocks, fence) } else { self.pool.free(&batch, fence) };
        let pages_emptied = self.model.give_back(&blocks, Some(fence), self.now);
        assert_eq!(report, Ok(FreeReport { pages_emptied }));
        let freed: BTreeSet<_> = blocks.into_iter().collect();
        self.leases.retain(|lease| !freed.contains(&lease.block));
        self.dead_leases.extend(batch);
    }

    fn bad_free(&mut self, subset: Subset, bad: Bad) {
        if self.leases.is_empty() {
            return;
        }
        let mut batch = self.some_leases(subset);
        let pool_blocks = self.pool.total_blocks();
        let (bad, expected) = match bad {
            Bad::Repeated => {
                let again = batch[0];
                let block = again.block;
                (again, FreeError::Repeated { block, first: 0, second: batch.len() })
            }
            Bad::Dead(which) => {
                let Some(&dead) = self.dead_leases.iter().rev().nth(usize::from(which)) else {
                    return;
                };
                let block = dead.block;
                let current = self.leases.iter().find(|lease| lease.block == block);
                let stale = |current: &BlockLease| FreeError::Stale {
                    block,
                    lease_generation: dead.generation,
                    current_generation: current.generation,
                };
                (dead, current.map_or(FreeError::NotLeased { block }, stale))
            }
            Bad::Foreign(beyond) => {
                let block = BlockIndex(pool_blocks.saturating_add(beyond));
                (BlockLease { block, generation: 1 }, FreeError::Foreign { block, pool_blocks })
            }
        };
        batch.push(bad);
        assert_eq!(self.pool.free(&batch, Fence::Unknown), Err(expected));
        assert!(self.leases.iter().all(|&lease| self.pool.is_current(lease)), "a failed free ended a lease");
    }

    fn begin_unmap(&mut self, completed: u64, max_pages: u32) {
        let plan = self.pool.begin_unmap(Step(completed), max_pages);
        let (mut ready, mut next_step, mut needs_synchronise) = (vec![], None, false);
        for &page in &self.model.draining {
            let record = &self.model.pages[page as usize];
            if ready.len() == max_pages as usize {
                break;
            } else if record.step > completed {
                next_step = next_step.into_iter().chain([Step(record.step)]).min();
            } else if record.unknown_at > self.model.synchronised_at {
                needs_synchronise = true;
            } else {
                ready.push(page);
            }
        }
        assert_eq!(plan.pages.iter().map(|claim| claim.page.0).collect::<Vec<_>>(), ready);
        assert_eq!((plan.next_step, plan.synchronise.is_some()), (next_step, needs_synchronise));
        for &page in &ready {
            self.model.pages[page as usize].state = Unmapping;
        }
        self.model.draining.retain(|page| !ready.contains(page));
        self.unmapping.extend(plan.pages);
        self.ticket = plan.synchronise.map(|ticket| (ticket, self.now)).or(self.ticket.take());
    }

    fn check(&self) {
        self.pool.check_invariants();
        for (page, record) in (0..).map(PageId).zip(&self.model.pages) {
            assert_eq!(self.pool.pages().state(page), record.state, "state of page {page}");
            assert_eq!(self.pool.live_blocks(page) as usize, record.taken.len(), "live blocks of page {page}");
        }
        let model = &self.model;
        let planned: usize = self.plans.iter().map(|plan| plan.taken.len()).sum();
        let count = |length: usize| u32::try_from(length).unwrap();
        assert_eq!(
            self.pool.counts(),
            BlockCounts {
                total: model.page_count() * model.blocks_per_page,
                leased: count(self.leases.len()),
                reserved: count(self.set_aside.len()),
                planned: count(planned),
                free_mapped: model.free_mapped(),
                available: model.available(),
            }
        );
        let held = model.page_count() - model.in_state(Reserved);
        let leaving = model.in_state(Draining) + model.in_state(Unmapping);
        let must_go = held.saturating_sub(model.limit).saturating_sub(leaving);
        let shrink = self.pool.shrink_plan();
        assert_eq!((shrink.retire + shrink.evict, shrink.retire), (must_go, must_go.min(model.in_state(Idle))));
        assert_eq!(self.pool.pages().counts().unmap_failed, count(self.failed.len()));
    }
}

fn take_any<T>(items: &mut Vec<T>, which: Index) -> Option<T> {
    (!items.is_empty()).then(|| items.swap_remove(which.index(items.len())))
}

impl BlockAllocator {
    fn set_aside_blocks(&self) -> Vec<BlockIndex> {
        self.set_aside.iter().copied().collect()
    }
}

/// Below, at and above the 64 counts of a word; under the interpreter of Miri only pages it can walk.
const BLOCKS_PER_PAGE: &[u32] = if cfg!(miri) { &[1, 2, 7] } else { &[1, 2, 7, 64, 65, 4097] };
const MOST_OPS: usize = if cfg!(miri) { 12 } else { 120 };

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 1024 }, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn behaves_as_the_dullest_pool(
        blocks_per_page in prop::sample::select(BLOCKS_PER_PAGE),
        page_count in 1..8u32,
        null_block: bool,
        ops in prop::collection::vec(ops::op(), 1..MOST_OPS),
    ) {
        let mut world = World::new(page_count, blocks_per_page, null_block);
        for op in &ops {
            world.step(op);
            world.check();
        }
    }
}
