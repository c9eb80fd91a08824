//! Tests of sharing: the cases people ask about, then any case against the model.

use proptest::prelude::*;

use super::model::{self, any_device, any_pools};
use super::{PoolClaim, fair_shares, grantable, is_short, owed, owed_to_given};
use crate::units::Bytes;

fn pool(held: u64, in_use: u64, demand: u64) -> PoolClaim {
    PoolClaim { held: Bytes(held), in_use: Bytes(in_use), demand: Bytes(demand), ..PoolClaim::default() }
}

fn shares(budget: u64, pools: &[PoolClaim]) -> Vec<u64> {
    fair_shares(Bytes(budget), pools).into_iter().map(|share| share.0).collect()
}

fn owed_by_each(budget: u64, pools: &[PoolClaim]) -> Vec<u64> {
    (0..pools.len()).map(|me| owed(Bytes(budget), pools, me).0).collect()
}

#[test]
fn weights_divide_what_all_want() {
    let pools = [1, 1, 2, 4].map(|weight| PoolClaim { weight, ..pool(0, 0, 1000) });
    assert_eq!(shares(400, &pools), [50, 50, 100, 200]);
}

#[test]
fn what_one_does_not_want_goes_to_the_others() {
    assert_eq!(shares(90, &[pool(0, 0, 10), pool(0, 0, 100), pool(0, 0, 100)]), [10, 40, 40]);
}

#[test]
fn bytes_that_do_not_divide_go_to_the_first() {
    assert_eq!(shares(11, &[pool(0, 0, 100), pool(0, 0, 100), pool(0, 0, 100)]), [4, 4, 3]);
}

#[test]
fn a_floor_is_kept_for_an_idle_pool_and_counts_towards_its_share() {
    let floor = PoolClaim { floor: Bytes(30), ..pool(0, 0, 0) };
    assert_eq!(shares(100, &[floor, pool(0, 0, 100)]), [30, 70]);
    let floor = PoolClaim { floor: Bytes(30), ..pool(0, 0, 100) };
    assert_eq!(shares(100, &[floor, pool(0, 0, 100)]), [50, 50]);
}

#[test]
fn floors_that_do_not_fit_are_dealt_by_class_and_weight() {
    let floor = |floor, weight, priority| PoolClaim { floor: Bytes(floor), weight, priority, ..pool(0, 0, 0) };
    assert_eq!(shares(90, &[floor(60, 1, 0), floor(60, 2, 0), floor(30, 1, 1)]), [20, 40, 30]);
}

#[test]
fn a_ceiling_wins_over_a_floor() {
    let capped = PoolClaim { floor: Bytes(50), ceiling: Bytes(10), ..pool(0, 0, 100) };
    assert_eq!(shares(100, &[capped, pool(0, 0, 100)]), [10, 90]);
    assert_eq!(grantable(Bytes(100), &[capped, pool(0, 0, 0)], 1), Bytes(90));
}

#[test]
fn a_higher_class_is_served_first() {
    let pools = [pool(0, 0, 100), PoolClaim { priority: 1, ..pool(0, 0, 80) }];
    assert_eq!(shares(100, &pools), [20, 80]);
}

#[test]
fn weight_zero_is_weight_one() {
    let pools = [PoolClaim { weight: 0, ..pool(0, 0, 100) }, pool(0, 0, 100)];
    assert_eq!(shares(100, &pools), [50, 50]);
}

#[test]
fn nothing_is_owed_while_nobody_waits_or_the_free_budget_suffices() {
    assert_eq!(owed_by_each(100, &[pool(90, 90, 0), pool(10, 10, 0)]), [0, 0]);
    assert_eq!(owed_by_each(100, &[pool(90, 90, 0), pool(5, 5, 5)]), [0, 0]);
}

#[test]
fn idle_memory_goes_before_any_eviction() {
    // The second uses less than its share and still owes: what it does not want.
    assert_eq!(owed_by_each(100, &[pool(60, 60, 0), pool(40, 5, 0), pool(0, 0, 30)]), [0, 30, 0]);
}

#[test]
fn shares_are_whole_pages_and_nobody_waits_for_a_first_page() {
    let page = Bytes(8);
    let holder = PoolClaim { page, ..pool(32, 32, 32) };
    let newcomer = PoolClaim { page, ..pool(0, 0, 8) };
    let pools = [holder, holder, holder, holder, newcomer];
    assert_eq!(shares(128, &pools), [32, 32, 32, 24, 8]);
    assert_eq!(owed_by_each(128, &pools), [0, 0, 0, 8, 0]);
}

#[test]
fn of_equals_the_holder_keeps_the_odd_page() {
    let page = Bytes(10);
    let (less, more) = (PoolClaim { page, ..pool(50, 50, 50) }, PoolClaim { page, ..pool(60, 60, 40) });
    assert_eq!(shares(110, &[less, more]), [50, 60]);
    assert_eq!(shares(110, &[more, less]), [60, 50]);
    assert_eq!(owed_by_each(110, &[less, more]), [0, 0]);
}

#[test]
fn a_split_finer_than_a_page_still_moves_a_page() {
    let page = Bytes(8);
    let holder = PoolClaim { page, ..pool(32, 0, 0) };
    let waiting = PoolClaim { page, ..pool(0, 0, 16) };
    assert_eq!(owed_by_each(128, &[holder, holder, holder, holder, waiting]), [16, 0, 0, 0, 0]);
}

#[test]
fn pages_of_different_size_do_not_block_each_other() {
    // Above its share by 30, but in a page of 64: the small pages go.
    let big = PoolClaim { page: Bytes(64), ..pool(64, 64, 0) };
    let small = PoolClaim { page: Bytes(2), ..pool(40, 40, 0) };
    let waiting = PoolClaim { page: Bytes(2), ..pool(0, 0, 30) };
    assert_eq!(shares(104, &[big, small, waiting]), [64, 20, 20]);
    assert_eq!(owed_by_each(104, &[big, small, waiting]), [0, 20, 0]);
}

#[test]
fn odd_sizes_are_rounded_to_pages() {
    let odd = PoolClaim { page: Bytes(10), floor: Bytes(11), ceiling: Bytes(39), ..pool(0, 0, 0) };
    assert_eq!(odd.kept_floor(), Bytes(20));
    assert_eq!(PoolClaim { in_use: Bytes(1), ..odd }.wants(), Bytes(10), "a page that is used a little is used");
    assert_eq!(PoolClaim { demand: Bytes(100), ..odd }.wants(), Bytes(30), "a page above the ceiling is none");
}

#[test]
fn memory_given_back_waits_for_the_pool_that_is_short() {
    let pools = [pool(60, 60, 40), pool(20, 20, 40)];
    assert_eq!(grantable(Bytes(100), &pools, 1), Bytes(20));
    assert_eq!(grantable(Bytes(100), &pools, 0), Bytes(0));
    // It may still take what is free beyond that.
    let pools = [pool(60, 60, 40), pool(20, 20, 10)];
    assert_eq!(grantable(Bytes(100), &pools, 0), Bytes(10));
}

#[test]
fn a_demand_that_was_never_withdrawn_costs_others_no_more_than_a_share() {
    let stopped = pool(0, 0, 1000);
    assert_eq!(grantable(Bytes(100), &[stopped, pool(0, 0, 0)], 1), Bytes(50));
}

#[test]
fn a_floor_is_grantable_at_once_while_others_want_all() {
    let sleeper = PoolClaim { floor: Bytes(20), ..pool(0, 0, 0) };
    assert_eq!(grantable(Bytes(100), &[sleeper, pool(80, 80, 100)], 0), Bytes(20));
    assert_eq!(grantable(Bytes(100), &[sleeper, pool(70, 70, 100)], 1), Bytes(10));
}

#[test]
fn memory_of_the_dead_counts_and_cannot_be_given() {
    let pools = [PoolClaim::returning(Bytes(60)), pool(40, 40, 0), pool(0, 0, 20)];
    assert_eq!(shares(100, &pools), [60, 20, 20]);
    assert_eq!(owed_by_each(100, &pools), [0, 20, 0]);
    assert_eq!(grantable(Bytes(100), &pools, 0), Bytes(0));
}

#[test]
fn short_is_who_waits_below_its_share() {
    let short =
        |pools: &[PoolClaim]| -> Vec<bool> { (0..pools.len()).map(|me| is_short(Bytes(48), pools, me)).collect() };
    assert_eq!(
        short(&[pool(24, 24, 23), pool(24, 24, 23)]),
        [false; 2],
        "each has its share, and waits for the other's"
    );
    assert_eq!(short(&[pool(47, 47, 1), pool(1, 1, 46)]), [false, true], "23 are owed to the second");
    assert_eq!(short(&[pool(47, 47, 0), pool(1, 1, 0)]), [false; 2], "nobody waits");
    assert!(!is_short(Bytes(48), &[], 0));
}

#[test]
fn an_overdrawn_budget_takes_idle_memory_and_evicts_nothing() {
    assert_eq!(owed_by_each(80, &[pool(60, 60, 0), pool(40, 30, 0)]), [0, 10]);
    assert_eq!(owed_by_each(80, &[pool(60, 60, 0), pool(40, 40, 0)]), [0, 0]);
}

#[test]
fn a_budget_that_was_set_lower_takes_what_is_in_use_above_the_shares() {
    let owed = |budget, pools: &[PoolClaim]| -> Vec<u64> {
        (0..pools.len()).map(|me| owed_to_given(Bytes(budget), pools, me).0).collect()
    };
    assert_eq!(owed(80, &[pool(60, 60, 0), pool(40, 30, 0)]), [10, 10], "idle memory first");
    assert_eq!(owed(60, &[pool(60, 60, 0), pool(20, 20, 0)]), [20, 0], "only who is above its share");
    assert_eq!(owed(0, &[pool(60, 60, 0), pool(40, 30, 0)]), [60, 40]);
    assert_eq!(owed(100, &[pool(60, 60, 0), pool(40, 30, 0)]), [0, 0]);
}

#[test]
fn the_largest_numbers_do_not_overflow() {
    let max = Bytes(u64::MAX);
    let huge = PoolClaim { held: max, in_use: max, demand: max, floor: max, weight: u32::MAX, ..PoolClaim::default() };
    let pools =
        [huge, PoolClaim { weight: 1, page: max, ..huge }, PoolClaim { floor: Bytes(0), page: Bytes(0), ..huge }];
    let total: u128 = fair_shares(max, &pools).iter().map(|share| u128::from(share.0)).sum();
    assert_eq!(total, u128::from(u64::MAX));
    for me in 0..pools.len() {
        assert!(owed(max, &pools, me) <= max);
        assert_eq!(grantable(max, &pools, me), Bytes(0));
    }
}

#[test]
fn a_pool_that_is_not_there_has_and_owes_nothing() {
    assert_eq!(fair_shares(Bytes(10), &[]), []);
    assert_eq!((grantable(Bytes(10), &[], 0), owed(Bytes(10), &[], 0)), (Bytes(0), Bytes(0)));
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 5 } else { 1000 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn shares_are_those_of_the_model((budget, pools) in any_pools()) {
        prop_assert_eq!(fair_shares(budget, &pools), model::fair_shares(budget, &pools));
    }

    #[test]
    fn shares_keep_their_bounds((budget, pools) in any_pools()) {
        let shares = fair_shares(budget, &pools);
        let caps: Vec<Bytes> = pools.iter().map(|pool| pool.wants().max(pool.kept_floor())).collect();
        let total: u64 = shares.iter().map(|share| share.0).sum();
        prop_assert!(total <= budget.0);
        for (pool, (&share, &cap)) in pools.iter().zip(shares.iter().zip(&caps)) {
            prop_assert!(share == cap || total + pool.page.0 > budget.0, "all is dealt that somebody wants");
        }
        let floors_fit = pools.iter().map(|pool| pool.kept_floor().0).sum::<u64>() <= budget.0;
        for ((pool, &share), &cap) in pools.iter().zip(&shares).zip(&caps) {
            prop_assert!(share <= cap && share <= pool.ceiling);
            prop_assert!(!floors_fit || share >= pool.kept_floor());
        }
    }

    /// Of pages of one size; a budget that just fits a large page takes it from small ones.
    #[test]
    fn a_larger_budget_takes_from_nobody((budget, mut pools) in any_pools(), more in 0..50u64) {
        pools.iter_mut().for_each(|pool| pool.page = Bytes(3));
        let (before, after) = (fair_shares(budget, &pools), fair_shares(Bytes(budget.0 + more), &pools));
        prop_assert!(before.iter().zip(&after).all(|(before, after)| before <= after), "{:?} {:?}", before, after);
    }

    #[test]
    fn what_is_granted_keeps_floors_and_ceilings((budget, pools) in any_pools()) {
        for me in 0..pools.len() {
            let granted = grantable(budget, &pools, me).0;
            let hard = model::hard_bound(budget, &pools, me);
            prop_assert!(granted <= hard);
            // Whoever asks below its share, as one who wants everything, gets up to the share.
            let mut eager = pools.clone();
            eager[me].demand = Bytes(u64::MAX);
            let entitled = fair_shares(budget, &eager)[me].saturating_sub(pools[me].held).0;
            prop_assert!(granted >= entitled.min(hard));
            if pools.iter().enumerate().all(|(index, pool)| index == me || pool.demand.0 == 0) {
                prop_assert_eq!(granted, hard);
            }
        }
    }

    #[test]
    fn what_is_owed_covers_what_is_missing_and_spares_the_shares((budget, pools) in any_pools()) {
        let shares = fair_shares(budget, &pools);
        let mut given = Vec::new();
        let mut surplus = 0;
        let mut largest_page = 0;
        for (me, pool) in pools.iter().enumerate() {
            let owes = owed(budget, &pools, me).0;
            prop_assert_eq!(owes % pool.page.0, 0, "whole pages");
            let above = pool.held.0.saturating_sub(shares[me].0);
            prop_assert!(owes <= above, "nobody goes below its share");
            surplus += above - above % pool.page.0;
            largest_page = largest_page.max(pool.page.0);
            given.push(owes);
        }
        let short = |me: usize| {
            if pools[me].demand.0 == 0 { 0 } else { shares[me].0.saturating_sub(pools[me].held.0) }
        };
        let total: u64 = given.iter().sum();
        if (0..pools.len()).any(|me| short(me) > 0) {
            let expected = |me: usize| (pools[me].held.0 + short(me)).max(pools[me].kept_floor().0);
            let missing = (0..pools.len()).map(expected).sum::<u64>().saturating_sub(budget.0);
            prop_assert!(total >= missing.min(surplus), "{} of {} missing, {} to give", total, missing, surplus);
            // One page of idle and one of used memory may be more than was missing.
            prop_assert!(total < missing + 2 * largest_page || missing == 0 && total == 0);
            // Nobody evicts while someone holds idle memory that is neither wanted nor given.
            let idle = |me: usize| {
                let keep = pools[me].wants().0.max(pools[me].in_use.0).max(shares[me].0).max(pools[me].kept_floor().0);
                let idle = pools[me].held.0.saturating_sub(keep);
                idle - idle % pools[me].page.0
            };
            let evicts = (0..pools.len()).any(|me| given[me] > idle(me));
            prop_assert!(!evicts || (0..pools.len()).all(|me| given[me] >= idle(me)));
        } else {
            let idle: u64 = pools.iter().map(|pool| pool.held.0.saturating_sub(pool.in_use.0)).sum();
            prop_assert!(total <= idle, "without a pool that is short nothing is evicted");
        }
    }

    /// So nobody needs to let others past for memory that is its own.
    #[test]
    fn who_is_short_finds_memory_free_or_others_who_owe_it(mut device in any_device()) {
        for (pool, &appetite) in device.pools.iter_mut().zip(&device.appetites) {
            pool.demand = Bytes(appetite).saturating_sub(pool.held);
        }
        let (budget, pools) = (device.budget, &device.pools);
        for me in (0..pools.len()).filter(|&me| is_short(budget, pools, me)) {
            let is_owed = owed_by_each(budget.0, pools).iter().any(|&owed| owed > 0);
            prop_assert!(is_owed || grantable(budget, pools, me) > Bytes::ZERO, "{}: {:?}", me, device);
        }
    }

    /// Shares, grants and debts together, each pool acting on its own in any order: within the budget at every moment, at
    /// rest after a few rounds, and at rest nobody is below its share.
    #[test]
    fn pools_that_take_and_give_come_to_rest_at_their_shares(
        mut device in any_device(),
        orders in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
    ) {
        for order in &orders {
            device.turn(order.index(device.pools.len()));
            prop_assert!(device.held() <= device.budget.0);
        }
        let mut rounds = 0;
        loop {
            let moved = (0..device.pools.len()).filter(|&me| device.turn(me)).count();
            prop_assert!(device.held() <= device.budget.0);
            if moved == 0 {
                break;
            }
            rounds += 1;
            prop_assert!(rounds < 20, "no rest: {:?}", device);
        }
        let shares = fair_shares(device.budget, &device.pools);
        for (me, (pool, share)) in device.pools.iter().zip(&shares).enumerate() {
            let fair = share.0.min(device.appetites[me]);
            prop_assert!(pool.held.0 >= fair, "pool {} has {} of {}: {:?}", me, pool.held.0, fair, device);
        }
    }
}
