//! The dullest sharing there is, to test the real one against: one page at a time, every pool looked at for each.

use proptest::prelude::*;

use super::PoolClaim;
use crate::units::Bytes;

/// [`fair_shares`](super::fair_shares), page by page.
pub(super) fn fair_shares(budget: Bytes, pools: &[PoolClaim]) -> Vec<Bytes> {
    let mut shares = vec![0u64; pools.len()];
    let mut left = budget.0;
    for cap in [PoolClaim::kept_floor, PoolClaim::wants] {
        loop {
            let open = (0..pools.len()).filter(|&i| shares[i] < cap(&pools[i]).0 && pools[i].page.0 <= left);
            let next =
                open.min_by_key(|&i| (-pools[i].priority, height(&pools[i], shares[i]), pools[i].held.0 <= shares[i]));
            let Some(next) = next else { break };
            shares[next] += pools[next].page.0;
            left -= pools[next].page.0;
        }
    }
    shares.into_iter().map(Bytes).collect()
}

/// Where a pool stands: share by weight, over a number that every weight of the tests divides.
fn height(pool: &PoolClaim, share: u64) -> u64 {
    const COMMON: u64 = 2520;
    share * (COMMON / u64::from(pool.weight.max(1)))
}

/// The bound of floors and ceilings alone, as the design states it.
pub(super) fn hard_bound(budget: Bytes, pools: &[PoolClaim], me: usize) -> u64 {
    let mut left = i128::from(budget.0) - i128::from(pools[me].held.0);
    for (index, pool) in pools.iter().enumerate() {
        if index != me {
            left -= i128::from(pool.held.max(pool.kept_floor()).0);
        }
    }
    let below_ceiling = i128::from(pools[me].ceiling.0) - i128::from(pools[me].held.0);
    u64::try_from(left.min(below_ceiling).max(0)).unwrap()
}

/// A few small pools in any state, also ones that no sound ledger shows: more in use than held, floors above
/// ceilings, budgets that are overdrawn.
pub(super) fn any_pools() -> impl Strategy<Value = (Bytes, Vec<PoolClaim>)> {
    (0..200u64, prop::collection::vec(any_pool(), 0..6)).prop_map(|(budget, pools)| (Bytes(budget), pools))
}

fn any_pool() -> impl Strategy<Value = PoolClaim> {
    let amounts = (0..60u64, 0..60u64, prop_oneof![Just(0), 0..60u64]);
    let terms = (prop_oneof![Just(0), 0..40u64], prop_oneof![Just(u64::MAX), 0..80u64], 0..10u32, 0..3i32, 1..5u64);
    (amounts, terms).prop_map(|((held, in_use, demand), (floor, ceiling, weight, priority, page))| PoolClaim {
        held: Bytes(held),
        in_use: Bytes(in_use),
        demand: Bytes(demand),
        floor: Bytes(floor),
        ceiling: Bytes(ceiling),
        weight,
        priority,
        page: Bytes(page),
        ..PoolClaim::default()
    })
}

/// A device in use: pools within the budget, everything in whole pages of one size, floors that fit.
#[derive(Clone, Debug)]
pub(super) struct Device {
    pub(super) budget: Bytes,
    pub(super) pools: Vec<PoolClaim>,
    /// How much each pool would use if it could.
    pub(super) appetites: Vec<u64>,
}

pub(super) fn any_device() -> impl Strategy<Value = Device> {
    let terms = (0..10u64, prop_oneof![Just(u64::MAX), 10..80u64], 1..10u32, 0..2i32);
    let pool = (0..40u64, 0..40u64, terms, 0..150u64);
    (60..200u64, 1..4u64, prop::collection::vec(pool, 1..6)).prop_map(|(budget_pages, page, drawn)| {
        let mut room = budget_pages;
        let (mut pools, mut appetites) = (Vec::new(), Vec::new());
        for (held, in_use, (floor, ceiling, weight, priority), appetite) in drawn {
            let held = held.min(ceiling).min(room);
            room -= held;
            pools.push(PoolClaim {
                held: Bytes(held * page),
                in_use: Bytes(in_use.min(held) * page),
                demand: Bytes::ZERO,
                floor: Bytes(floor * page),
                ceiling: Bytes(ceiling.saturating_mul(page)),
                weight,
                priority,
                page: Bytes(page),
                ..PoolClaim::default()
            });
            appetites.push(appetite.min(ceiling) * page);
        }
        Device { budget: Bytes(budget_pages * page), pools, appetites }
    })
}

impl Device {
    /// One pool's turn, as a pool takes it: uses what it holds, takes what it may, posts the rest as demand, and gives
    /// back what it owes by evicting. Answers whether anything moved.
    pub(super) fn turn(&mut self, me: usize) -> bool {
        let before = self.pools[me];
        let appetite = self.appetites[me];
        let owed = super::owed(self.budget, &self.pools, me).0;
        let mine = &mut self.pools[me];
        mine.held.0 -= owed;
        mine.in_use = Bytes(appetite).min(mine.held);
        let missing = appetite.saturating_sub(mine.held.0);
        let granted = super::grantable(self.budget, &self.pools, me).0;
        let mine = &mut self.pools[me];
        let taken = missing.min(granted - granted % mine.page.0);
        mine.held.0 += taken;
        mine.in_use.0 += taken;
        mine.demand = Bytes(missing - taken);
        *mine != before
    }

    pub(super) fn held(&self) -> u64 {
        self.pools.iter().map(|pool| pool.held.0).sum()
    }
}
