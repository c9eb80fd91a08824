//! The rules of the allocator, one test each. Sequences of everything at once are in `model`.

use std::collections::BTreeSet;

use super::*;
use crate::pages::{Fence, PageState};
use crate::units::{BlockIndex, PageId, Step};

const NOW: Fence = Fence::Step(Step(0));

/// An allocator with its first `mapped` pages idle; page 0 is the warmest.
fn pool(page_count: u32, blocks_per_page: u32, mapped: u32) -> BlockAllocator {
    let mut pool = BlockAllocator::new(page_count, blocks_per_page).unwrap();
    let mut claims = pool.claim_pages(mapped).unwrap();
    claims.reverse();
    pool.pages_mapped(&claims).unwrap();
    pool
}

fn alloc(pool: &mut BlockAllocator, count: u32) -> Vec<BlockLease> {
    let mut leases = Vec::new();
    pool.alloc_mapped(count, &mut leases).unwrap();
    pool.check_invariants();
    leases
}

fn commit(pool: &mut BlockAllocator, plan: AllocPlan) -> Vec<BlockLease> {
    let mut leases = Vec::new();
    pool.commit(plan, &mut leases).unwrap();
    pool.check_invariants();
    leases
}

fn free(pool: &mut BlockAllocator, leases: &[BlockLease]) -> u32 {
    let report = pool.free(leases, NOW).unwrap();
    pool.check_invariants();
    report.pages_emptied
}

/// Retires and unmaps every idle page.
fn unmap_idle(pool: &mut BlockAllocator) {
    pool.retire(u32::MAX);
    let plan = pool.begin_unmap(Step(u64::MAX), u32::MAX);
    pool.unmapped(&plan.pages).unwrap();
    pool.check_invariants();
}

fn indices(leases: &[BlockLease]) -> Vec<u32> {
    leases.iter().map(|lease| lease.block.0).collect()
}

#[test]
fn shapes_that_kernel_ids_cannot_name_are_refused() {
    for (page_count, blocks_per_page) in [(0, 1), (1, 0), (1 << 16, 1 << 15), (u32::MAX, 2)] {
        let error = BlockAllocator::new(page_count, blocks_per_page).unwrap_err();
        assert_eq!(error, ShapeError { page_count, blocks_per_page });
    }
}

#[test]
fn a_fresh_page_hands_out_ascending_neighbours() {
    let mut pool = pool(2, 4, 2);
    let leases = alloc(&mut pool, 4);
    assert_eq!(indices(&leases), [0, 1, 2, 3]);
    // In any order of frees: an empty page is as good as new.
    assert_eq!(free(&mut pool, &[leases[2], leases[0], leases[3], leases[1]]), 1);
    assert_eq!(indices(&alloc(&mut pool, 3)), [0, 1, 2]);
}

#[test]
fn freed_places_are_reused_before_untouched_ones() {
    let mut pool = pool(1, 8, 1);
    let leases = alloc(&mut pool, 5);
    free(&mut pool, &[leases[1], leases[3]]);
    assert_eq!(indices(&alloc(&mut pool, 4)), [3, 1, 5, 6]);
}

#[test]
fn best_fit_then_the_emptiest_then_an_idle_page() {
    let mut pool = pool(4, 8, 4);
    let leases = alloc(&mut pool, 24);
    // Free blocks: page 0 has two, page 1 five, page 2 three; page 3 is idle.
    let page = |page: usize, count: usize| &leases[page * 8..page * 8 + count];
    free(&mut pool, &[page(0, 2), page(1, 5), page(2, 3)].concat());

    let pages = |leases: &[BlockLease]| -> Vec<u32> { leases.iter().map(|lease| lease.block.0 / 8).collect() };
    assert_eq!(pages(&alloc(&mut pool, 3)), [2, 2, 2], "three fit page 2 exactly");
    assert_eq!(pages(&alloc(&mut pool, 6)), [1, 1, 1, 1, 1, 0], "none holds six: the emptiest, then the rest");
    assert_eq!(pages(&alloc(&mut pool, 2)), [0, 3], "an idle page only when the others are full");
}

#[test]
fn short_of_memory_says_how_many_pages_and_changes_nothing() {
    let mut pool = pool(8, 4, 1);
    let mut leases = alloc(&mut pool, 1);
    let held = leases.clone();
    assert_eq!(pool.alloc_mapped(4, &mut leases), Err(NeedsPages { pages: 1 }));
    assert_eq!(pool.alloc_mapped(8, &mut leases), Err(NeedsPages { pages: 2 }));
    assert_eq!(pool.reserve(4), Err(NeedsPages { pages: 1 }));
    assert_eq!((leases, pool.free_mapped_blocks()), (held, 3));
    assert_eq!(pool.alloc_mapped(0, &mut Vec::new()), Ok(()));
    pool.check_invariants();
}

#[test]
fn a_plan_takes_what_is_mapped_and_claims_the_rest() {
    let mut pool = pool(4, 4, 1);
    let plan = pool.plan_alloc(10).unwrap();
    assert_eq!((plan.claims().len(), plan.block_count()), (2, 10));
    assert_eq!(pool.counts(), BlockCounts { total: 16, planned: 4, available: 4, ..BlockCounts::default() });
    pool.check_invariants();

    // Nobody can take what the plan holds.
    assert_eq!(pool.alloc_mapped(1, &mut Vec::new()), Err(NeedsPages { pages: 1 }));
    assert_eq!(pool.free_blocks(&[BlockIndex(0)], NOW), Err(FreeError::NotLeased { block: BlockIndex(0) }));

    let leases = commit(&mut pool, plan);
    assert_eq!(indices(&leases), (0..10).collect::<Vec<_>>());
    assert_eq!((pool.free_mapped_blocks(), pool.available_blocks(), pool.counts().leased), (2, 6, 10));
}

#[test]
fn an_aborted_plan_leaves_no_trace() {
    let mut pool = pool(6, 4, 3);
    let leases = alloc(&mut pool, 6);
    free(&mut pool, &leases[1..3]);
    let mut undisturbed = pool.clone();

    let plan = pool.plan_alloc(14).unwrap();
    assert_eq!(plan.claims().len(), 2);
    pool.abort(plan);
    pool.check_invariants();

    assert_eq!((pool.counts(), pool.pages().counts()), (undisturbed.counts(), undisturbed.pages().counts()));
    // Not the counts alone: both give the same blocks, in the same order, from here on.
    let plans = [&mut pool, &mut undisturbed].map(|pool| {
        let plan = pool.plan_alloc(14).unwrap();
        commit(pool, plan)
    });
    assert_eq!(plans[0], plans[1]);
}

#[test]
fn two_plans_in_flight_end_in_any_order() {
    let mut pool = pool(4, 2, 1);
    let first = pool.plan_alloc(3).unwrap();
    let second = pool.plan_alloc(3).unwrap();
    let third = pool.plan_alloc(1).unwrap_err();
    assert!(third.is_transient());
    let late = commit(&mut pool, second);
    pool.abort(first);
    pool.check_invariants();
    assert_eq!(pool.counts().leased, 3);
    assert_eq!(free(&mut pool, &late), 2);
}

#[test]
fn a_plan_whose_claims_were_refused_comes_back() {
    let mut pool = pool(4, 2, 1);
    let plan = pool.plan_alloc(5).unwrap();
    pool.pages_refused(&plan.claims()[1..]).unwrap();
    let mut leases = Vec::new();
    let CommitError { plan, why } = pool.commit(plan, &mut leases).unwrap_err();
    assert!(matches!(why, CommitRefusal::Stale(stale) if stale.claim == plan.claims()[1]) && leases.is_empty());
    pool.check_invariants();
    pool.abort(plan);
    pool.check_invariants();
    assert_eq!((pool.free_mapped_blocks(), pool.pages().held()), (2, 1));
}

#[test]
fn what_can_never_fit_is_told_from_what_does_not_fit_now() {
    let mut pool = pool(4, 4, 0);
    pool.set_limit(2);
    let error = pool.plan_alloc(9).unwrap_err();
    let exhausted = AllocError::Exhausted { wanted_blocks: 9, available_blocks: 8, held_pages: 0, limit_pages: 2 };
    assert_eq!(error, exhausted);
    assert!(error.is_transient());
    let error = pool.plan_alloc(17).unwrap_err();
    assert_eq!(error, AllocError::NeverFits { wanted_blocks: 17, pool_blocks: 16 });
    assert!(!error.is_transient());
    pool.check_invariants();
}

#[test]
fn a_bad_lease_in_the_batch_frees_nothing() {
    let mut pool = pool(2, 4, 2);
    let leases = alloc(&mut pool, 5);
    let dead = alloc(&mut pool, 1)[0];
    free(&mut pool, &[dead]);
    let foreign = BlockLease { block: BlockIndex(8), generation: 1 };
    for (bad, expected) in [
        (dead, FreeError::NotLeased { block: dead.block }),
        (foreign, FreeError::Foreign { block: BlockIndex(8), pool_blocks: 8 }),
        (leases[0], FreeError::Repeated { block: leases[0].block, first: 0, second: 5 }),
    ] {
        let batch = [&leases[..], &[bad]].concat();
        let error = pool.free(&batch, NOW).unwrap_err();
        assert_eq!((error, error.block(), error.is_transient()), (expected, bad.block, false));
        pool.check_invariants();
        assert!(leases.iter().all(|&lease| pool.is_current(lease)));
    }
    assert_eq!(free(&mut pool, &leases), 2);
}

#[test]
fn a_lease_stays_stale_when_its_page_was_unmapped_and_mapped_again() {
    let mut pool = pool(1, 2, 1);
    let old = alloc(&mut pool, 2);
    free(&mut pool, &old);
    unmap_idle(&mut pool);
    let plan = pool.plan_alloc(2).unwrap();
    let new = commit(&mut pool, plan);
    assert_eq!(indices(&old), indices(&new));
    assert!(matches!(pool.free(&old, NOW), Err(FreeError::Stale { .. })));
    assert!(pool.is_current(new[0]) && !pool.is_current(old[0]));
}

#[test]
fn callers_that_keep_indices_are_guarded_too() {
    let mut pool = pool(1, 4, 1);
    let leases = alloc(&mut pool, 2);
    let [first, second] = [leases[0].block, leases[1].block];
    assert!(matches!(pool.free_blocks(&[first, second, first], NOW), Err(FreeError::Repeated { .. })));
    assert!(matches!(pool.free_blocks(&[first, BlockIndex(4)], NOW), Err(FreeError::Foreign { .. })));
    assert_eq!(pool.free_blocks(&[first], NOW), Ok(FreeReport { pages_emptied: 0 }));
    assert_eq!(pool.free_blocks(&[first], NOW), Err(FreeError::NotLeased { block: first }));
    assert_eq!(pool.free_blocks(&[second], NOW), Ok(FreeReport { pages_emptied: 1 }));
    pool.check_invariants();
}

#[test]
fn a_page_waits_for_the_fences_of_all_its_frees() {
    let mut pool = pool(1, 2, 1);
    let leases = alloc(&mut pool, 2);
    pool.free(&leases[..1], Fence::Step(Step(9))).unwrap();
    pool.free(&leases[1..], Fence::Step(Step(4))).unwrap();
    pool.retire(1);
    assert_eq!(pool.begin_unmap(Step(8), 1).next_step, Some(Step(9)));
    assert_eq!(pool.begin_unmap(Step(9), 1).pages.len(), 1);
}

#[test]
fn the_null_block_is_block_0_for_ever() {
    let mut pool = pool(2, 4, 0);
    let plan = pool.reserve_null_block().unwrap();
    assert_eq!(plan.claims()[0].page, PageId(0));
    assert!(matches!(pool.reserve_null_block(), Err(AllocError::NotFresh { held_pages: 1 })));
    assert_eq!(commit(&mut pool, plan), []);

    let leases = alloc(&mut pool, 3);
    assert_eq!(indices(&leases), [1, 2, 3]);
    assert_eq!(pool.free_blocks(&[BlockIndex(1), BlockIndex(0)], NOW), Err(FreeError::NullBlock));
    let forged = BlockLease { block: BlockIndex(0), generation: 1 };
    assert_eq!(pool.free(&[forged], NOW), Err(FreeError::NullBlock));
    assert_eq!(free(&mut pool, &leases), 0, "its page is never empty");
    unmap_idle(&mut pool);
    assert_eq!(pool.pages().state(PageId(0)), PageState::InUse);
    assert_eq!((pool.counts().leased, pool.available_blocks()), (0, 7));
    assert_eq!(pool.plan_alloc(8), Err(AllocError::NeverFits { wanted_blocks: 8, pool_blocks: 7 }));
}

#[test]
fn the_null_block_may_be_tried_again_after_an_abort_but_not_after_use() {
    let mut pool = pool(2, 1, 0);
    let plan = pool.reserve_null_block().unwrap();
    pool.abort(plan);
    let plan = pool.reserve_null_block().unwrap();
    commit(&mut pool, plan);
    assert_eq!((pool.live_blocks(PageId(0)), pool.available_blocks()), (1, 1));

    let mut used = self::pool(2, 1, 1);
    assert_eq!(used.reserve_null_block(), Err(AllocError::NotFresh { held_pages: 1 }));
}

#[test]
fn set_aside_blocks_cannot_be_lost() {
    let mut pool = pool(3, 4, 1);
    pool.reserve(3).unwrap();
    assert_eq!((pool.reserved_blocks(), pool.free_mapped_blocks()), (3, 1));
    assert_eq!(pool.free_blocks(&[BlockIndex(0)], NOW), Err(FreeError::NotLeased { block: BlockIndex(0) }));
    let _others = alloc(&mut pool, 1);

    let plan = pool.plan_reserve(2).unwrap();
    assert_eq!(commit(&mut pool, plan), []);
    let mut leases = Vec::new();
    pool.alloc_reserved(4, &mut leases).unwrap();
    assert_eq!(indices(&leases), [0, 1, 2, 4], "first those that were set aside first");
    let short = NotReserved { wanted_blocks: 2, reserved_blocks: 1 };
    assert_eq!(pool.alloc_reserved(2, &mut leases), Err(short));
    assert_eq!(pool.free_reserved(), FreeReport { pages_emptied: 0 });
    pool.check_invariants();
    assert_eq!((pool.reserved_blocks(), pool.counts().leased), (0, 5));
    assert_eq!(free(&mut pool, &leases), 1);
}

#[test]
fn a_shrink_retires_idle_pages_and_asks_for_evictions_besides() {
    let mut pool = pool(8, 2, 8);
    let leases = alloc(&mut pool, 12);
    pool.set_limit(3);
    assert_eq!(pool.shrink_plan(), ShrinkPlan { retire: 2, evict: 3 });
    pool.retire(2);
    assert_eq!(pool.shrink_plan(), ShrinkPlan { retire: 0, evict: 3 }, "what drains is not asked for again");
    free(&mut pool, &leases[..8]);
    assert_eq!(pool.shrink_plan(), ShrinkPlan { retire: 3, evict: 0 });
    pool.retire(3);
    unmap_idle(&mut pool);
    assert_eq!((pool.pages().held(), pool.pages().overage()), (2, 0));
    assert_eq!(pool.shrink_plan(), ShrinkPlan::default());
}

/// They were leased again: until somebody retired them, what became free above a limit was as good as any other.
#[test]
fn what_is_free_above_the_limit_is_leased_to_nobody() {
    let mut pool = pool(8, 4, 4);
    let leases = alloc(&mut pool, 13);
    // Three pages full, one with a single block, and two that are being mapped.
    let (plan, claims) = (pool.plan_alloc(5).unwrap(), pool.claim_pages(1).unwrap());
    assert_eq!((plan.claims().len(), pool.leasable_blocks()), (1, 0));
    pool.set_limit(2);
    pool.pages_mapped(&claims).unwrap();
    assert_eq!((pool.free_mapped_blocks(), pool.available_blocks()), (4, 0), "an idle page above the limit");
    let CommitError { plan, why } = pool.commit(plan, &mut Vec::new()).unwrap_err();
    assert!(matches!(why, CommitRefusal::Limit(AllocError::Exhausted { limit_pages: 2, .. })));
    pool.abort(plan);
    free(&mut pool, &leases[..6]);
    assert_eq!((pool.free_mapped_blocks(), pool.available_blocks()), (13, 1), "7 are leased, the limit is 8");
    assert_eq!(pool.alloc_mapped(2, &mut Vec::new()), Err(NeedsPages { pages: 1 }));
    alloc(&mut pool, 1);
    assert_eq!(pool.plan_alloc(1).unwrap_err(), pool.plan_reserve(1).unwrap_err());
    pool.set_limit(4);
    assert_eq!(pool.available_blocks(), 8);
}

/// A plan that needed no page was committed under whatever limit came meanwhile.
#[test]
fn a_plan_of_mapped_blocks_is_not_committed_under_a_lower_limit() {
    let mut pool = pool(8, 4, 4);
    let leases = alloc(&mut pool, 9);
    let plan = pool.plan_alloc(3).unwrap();
    assert!(plan.claims().is_empty());
    pool.set_limit(2);
    let CommitError { plan, why } = pool.commit(plan, &mut Vec::new()).unwrap_err();
    assert!(matches!(why, CommitRefusal::Limit(AllocError::Exhausted { limit_pages: 2, .. })));
    pool.abort(plan);
    free(&mut pool, &leases[..5]);
    let plan = pool.plan_alloc(4).unwrap();
    assert!(plan.claims().is_empty());
    pool.commit(plan, &mut Vec::new()).unwrap();
    pool.check_invariants();
}

#[test]
fn refilled_pages_belong_to_whoever_comes_first() {
    let mut pool = pool(3, 2, 0);
    let claims = pool.claim_pages(2).unwrap();
    assert_eq!(pool.free_mapped_blocks(), 0, "not before the driver mapped them");
    pool.pages_refused(&claims[..1]).unwrap();
    pool.pages_mapped(&claims[1..]).unwrap();
    assert_eq!(indices(&alloc(&mut pool, 2)), [2, 3]);
    assert!(pool.claim_pages(3).unwrap_err().is_transient());
}

/// kvcached's pool, shrunk and grown again, appended ids that it still had and ids past its reservation.
#[test]
fn kvcached_resize_100_80_120_never_hands_out_an_id_twice() {
    for reservation in [100, 120] {
        let mut pool = pool(reservation, 2, 0);
        pool.set_limit(100);
        let plan = pool.plan_alloc(200).unwrap();
        let mut leases = commit(&mut pool, plan);

        pool.set_limit(80);
        assert_eq!(pool.shrink_plan(), ShrinkPlan { retire: 0, evict: 20 });
        free(&mut pool, &leases.split_off(150));
        pool.retire(pool.shrink_plan().retire);
        let plan = pool.begin_unmap(Step(u64::MAX), u32::MAX);
        // One page resists: it must not come back while its memory is still there.
        pool.unmap_failed(plan.pages[0]).unwrap();
        pool.unmapped(&plan.pages[1..]).unwrap();

        pool.set_limit(120);
        let available = pool.available_blocks();
        assert_eq!(available, (reservation - 1) * 2 - 150);
        let plan = pool.plan_alloc(available).unwrap();
        leases.extend(commit(&mut pool, plan));

        let distinct: BTreeSet<u32> = indices(&leases).into_iter().collect();
        assert_eq!(distinct.len(), leases.len(), "an id was handed out twice");
        assert!(distinct.last() < Some(&(reservation * 2)), "an id lies past the reservation");
        assert!(pool.plan_alloc(1).is_err());
    }
}

/// A map failed, and the driver would not take one page's memory back: nobody may be given that page.
#[test]
fn a_plan_given_up_can_keep_pages_that_still_have_memory() {
    let mut pool = pool(6, 4, 1);
    let plan = pool.plan_alloc(12).unwrap();
    let stuck_page = plan.claims()[0].page;
    let kept = pool.abort_keeping(plan, |page| page == stuck_page);
    pool.check_invariants();
    assert_eq!(kept.iter().map(|claim| claim.page).collect::<Vec<_>>(), [stuck_page]);
    assert_eq!(pool.pages().state(stuck_page), PageState::Mapping);
    assert_eq!((pool.free_mapped_blocks(), pool.counts().planned), (4, 0));

    // Everything else can be had, and it is not among it.
    let plan = pool.plan_alloc(20).unwrap();
    assert!(plan.claims().iter().all(|claim| claim.page != stuck_page));
    let leases = commit(&mut pool, plan);
    assert!(pool.plan_alloc(1).is_err(), "the stuck page counts as held");

    // Its memory is gone at last.
    pool.pages_refused(&kept).unwrap();
    pool.check_invariants();
    let plan = pool.plan_alloc(4).unwrap();
    assert_eq!(plan.claims()[0].page, stuck_page);
    commit(&mut pool, plan);
    free(&mut pool, &leases);
}
