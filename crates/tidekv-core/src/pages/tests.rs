//! The rules of the page table, one test each. Sequences of everything at once are in `blocks::model`.

use super::*;
use crate::units::{PageId, Step};

fn ids(claims: &[PageClaim]) -> Vec<u32> {
    claims.iter().map(|claim| claim.page.0).collect()
}

/// A table of `page_count` pages, all of them idle; the last page is the warmest.
fn idle_table(page_count: u32) -> PageTable {
    let mut table = PageTable::new(page_count);
    let claims = table.claim(page_count).unwrap();
    table.mapped(&claims).unwrap();
    table
}

/// Leases the warmest page and gives it back behind `fence`.
fn use_once(table: &mut PageTable, fence: Fence) -> PageId {
    let page = table.lease_idle().unwrap();
    table.note_fence(page, fence);
    table.returned(page).unwrap();
    page
}

fn unmap_all(table: &mut PageTable) -> Vec<PageClaim> {
    let count = table.count(PageState::Idle);
    table.retire(count);
    let plan = table.begin_unmap(Step(u64::MAX), u32::MAX);
    table.unmapped(&plan.pages).unwrap();
    table.check_invariants();
    plan.pages
}

#[test]
fn new_ids_ascend_and_returned_ids_come_back_last_in_first_out() {
    let mut table = PageTable::new(5);
    let first = table.claim(3).unwrap();
    assert_eq!(ids(&first), [0, 1, 2]);
    table.mapped(&first).unwrap();
    assert_eq!(ids(&unmap_all(&mut table)), [0, 1, 2]);
    assert_eq!(ids(&table.claim(5).unwrap()), [2, 1, 0, 3, 4]);
    table.check_invariants();
}

#[test]
fn refused_pages_are_claimed_again_in_the_same_order() {
    let mut table = PageTable::new(5);
    let claims = table.claim(3).unwrap();
    table.refused(&claims).unwrap();
    assert_eq!(table.counts(), PageTable::new(5).counts());
    assert_eq!(ids(&table.claim(4).unwrap()), [0, 1, 2, 3]);
}

#[test]
fn a_claim_is_all_or_nothing() {
    let mut table = PageTable::new(4);
    table.set_limit(3);
    let _held = table.claim(2).unwrap();
    let error = table.claim(2).unwrap_err();
    assert_eq!(error, ClaimError { wanted: 2, reserved_free: 2, limit: 3, held: 2 });
    assert!(error.is_transient());
    assert!(!table.claim(5).unwrap_err().is_transient());
    assert_eq!(table.held(), 2);
    assert_eq!(ids(&table.claim(1).unwrap()), [2]);
}

#[test]
fn the_limit_never_reaches_past_the_reservation() {
    let mut table = PageTable::new(4);
    table.set_limit(100);
    assert_eq!((table.limit(), table.claimable()), (4, 4));
    assert!(table.claim(5).is_err());
}

#[test]
fn a_limit_below_what_is_held_is_an_overage() {
    let mut table = idle_table(6);
    table.set_limit(2);
    assert_eq!((table.overage(), table.claimable()), (4, 0));
    assert_eq!(table.retire(4), 4);
    // Pages that drain still cost memory.
    assert_eq!(table.overage(), 4);
    let plan = table.begin_unmap(Step(0), u32::MAX);
    assert_eq!(table.overage(), 4);
    table.unmapped(&plan.pages).unwrap();
    assert_eq!((table.overage(), table.claimable()), (0, 0));
    table.check_invariants();
}

#[test]
fn a_late_report_of_an_aborted_claim_is_stale() {
    let mut table = PageTable::new(1);
    let old = table.claim(1).unwrap();
    table.refused(&old).unwrap();
    let new = table.claim(1).unwrap();
    assert_eq!(old[0].page, new[0].page);

    let stale = StaleClaim { claim: old[0], current_generation: 2, state: PageState::Mapping };
    assert_eq!(table.mapped(&old), Err(stale));
    assert_eq!(table.refused(&old), Err(stale));
    assert_eq!(table.mapped(&new), Ok(()));
    // Nor is a report good twice.
    assert_eq!(table.mapped(&new).unwrap_err().state, PageState::Idle);
}

#[test]
fn a_claim_of_another_table_is_stale() {
    let mut table = PageTable::new(1);
    let claims = PageTable::new(4).claim(4).unwrap();
    assert_eq!(table.mapped(&claims[3..]).unwrap_err().current_generation, 0);
    assert!(table.unmap_failed(claims[3]).is_err());
}

#[test]
fn good_claims_take_effect_beside_a_stale_one() {
    let mut table = PageTable::new(3);
    let claims = table.claim(3).unwrap();
    table.refused(&claims[1..2]).unwrap();
    assert_eq!(table.mapped(&claims).unwrap_err().claim, claims[1]);
    assert_eq!(
        [0, 1, 2].map(|page| table.state(PageId(page))),
        [PageState::Idle, PageState::Reserved, PageState::Idle]
    );
    table.check_invariants();
}

#[test]
fn the_warmest_page_is_leased_and_the_coldest_retired() {
    let mut table = idle_table(3);
    assert_eq!(table.lease_idle(), Some(PageId(2)));
    assert_eq!(table.lease_idle(), Some(PageId(1)));
    table.returned(PageId(2)).unwrap();
    table.returned(PageId(1)).unwrap();
    assert_eq!(table.retire(1), 1);
    assert_eq!(table.state(PageId(0)), PageState::Draining);
    assert_eq!(table.lease_idle(), Some(PageId(1)));
    assert_eq!(table.retire(9), 1);
    assert_eq!(table.state(PageId(2)), PageState::Draining);
    assert_eq!(table.lease_idle(), None);
}

#[test]
fn a_page_in_use_is_neither_leased_nor_returned_twice() {
    let mut table = idle_table(1);
    table.lease(PageId(0)).unwrap();
    assert_eq!(table.lease(PageId(0)), Err(IllegalTransition { from: PageState::InUse, event: PageEvent::Leased }));
    table.returned(PageId(0)).unwrap();
    assert!(table.returned(PageId(0)).is_err());
    table.check_invariants();
}

#[test]
fn a_page_drains_until_its_latest_step_is_over() {
    let mut table = idle_table(2);
    let page = use_once(&mut table, Fence::Step(Step(7)));
    assert_eq!(use_once(&mut table, Fence::Step(Step(5))), page);
    table.retire(2);

    let plan = table.begin_unmap(Step(6), u32::MAX);
    assert_eq!(ids(&plan.pages), [0], "never used, so nothing to wait for");
    assert_eq!((plan.next_step, plan.synchronise), (Some(Step(7)), None));
    assert_eq!(table.state(page), PageState::Draining);
    let plan = table.begin_unmap(Step(7), u32::MAX);
    assert_eq!((ids(&plan.pages), plan.next_step), (vec![page.0], None));
    table.check_invariants();
}

#[test]
fn an_unknown_fence_asks_for_a_synchronise() {
    let mut table = idle_table(1);
    use_once(&mut table, Fence::Unknown);
    table.retire(1);

    let plan = table.begin_unmap(Step(u64::MAX), u32::MAX);
    assert!(plan.pages.is_empty());
    table.synchronised(plan.synchronise.unwrap());
    let plan = table.begin_unmap(Step(0), u32::MAX);
    assert_eq!((ids(&plan.pages), plan.synchronise), (vec![0], None));
}

#[test]
fn a_page_freed_while_the_device_synchronises_waits_for_the_next_time() {
    let mut table = idle_table(2);
    use_once(&mut table, Fence::Unknown);
    table.retire(2);
    let plan = table.begin_unmap(Step(0), u32::MAX);
    table.unmapped(&plan.pages).unwrap();
    let running = plan.synchronise.unwrap();

    let claims = table.claim(1).unwrap();
    table.mapped(&claims).unwrap();
    use_once(&mut table, Fence::Unknown);
    table.retire(1);
    table.synchronised(running);

    let plan = table.begin_unmap(Step(0), u32::MAX);
    assert_eq!(ids(&plan.pages), [1], "only the page freed before the synchronise began");
    assert!(plan.synchronise.is_some());
}

#[test]
fn an_unmap_ends_the_memory_of_fences() {
    let mut table = idle_table(1);
    use_once(&mut table, Fence::Step(Step(3)));
    unmap_all(&mut table);
    let claims = table.claim(1).unwrap();
    table.mapped(&claims).unwrap();
    table.retire(1);
    assert_eq!(table.begin_unmap(Step(0), u32::MAX).pages.len(), 1);
}

#[test]
fn a_batch_of_unmaps_is_bounded_and_first_in_first_out() {
    let mut table = idle_table(4);
    table.retire(4);
    assert_eq!(ids(&table.begin_unmap(Step(0), 3).pages), [0, 1, 2]);
    assert_eq!(ids(&table.begin_unmap(Step(0), 3).pages), [3]);
    assert_eq!(table.counts().unmapping, 4);
}

#[test]
fn a_failed_unmap_keeps_the_page_out_of_reach_until_a_retry_succeeds() {
    let mut table = idle_table(2);
    table.retire(2);
    let plan = table.begin_unmap(Step(0), u32::MAX);
    let [stuck, gone] = plan.pages[..] else { panic!("two pages were retired") };
    table.unmap_failed(stuck).unwrap();
    table.unmap_failed(stuck).unwrap();
    table.unmapped(&[gone]).unwrap();
    table.check_invariants();
    let counts = table.counts();
    assert_eq!((counts.unmapping, counts.unmap_failed, counts.held()), (1, 1, 1));
    assert_eq!(ids(&table.claim(1).unwrap()), [gone.page.0]);
    assert!(table.claim(1).is_err());

    assert_eq!(table.retry_unmap(), [stuck]);
    assert_eq!(table.retry_unmap(), [], "the page has one holder");
    assert_eq!(table.counts().unmap_failed, 0);
    table.unmapped(&[stuck]).unwrap();
    assert!(table.unmapped(&[stuck]).is_err());
    assert_eq!(ids(&table.claim(1).unwrap()), [stuck.page.0]);
    table.check_invariants();
}
