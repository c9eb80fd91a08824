//! From shares to deeds: what a pool may take now, and what it should give back.
//!
//! Both rest on who is *short*: a pool that waits and holds less than its share. Shares are whole pages, so what is
//! given moves: taking it makes nobody the next to owe it.

use std::cmp::Reverse;

use super::{PoolClaim, fair_shares};
use crate::units::Bytes;

/// The most that `me` may reserve on top of what it holds. Zero where the index is out of range.
///
/// Three bounds, the lowest counts:
///
/// - its ceiling;
/// - the budget less what it holds and, of every other pool, the larger of held and floor: floors are hard, and the
///   sum of all that was granted never passes the budget;
/// - beyond its own fair share only what others below theirs do not wait for. So memory given back for a pool is
///   not taken by the quickest instead. The share is that of a `me` that wants all it may have: ask before posting
///   a demand or after it, the answer is the same.
pub fn grantable(budget: Bytes, pools: &[PoolClaim], me: usize) -> Bytes {
    let Some(mine) = pools.get(me) else {
        return Bytes::ZERO;
    };
    let others = || pools.iter().enumerate().filter(|&(index, _)| index != me);
    let hard = left_of(budget, mine.held, others().map(|(_, pool)| pool.held.max(pool.kept_floor())));
    let most = hard.min(mine.ceiling.saturating_sub(mine.held));
    if most == Bytes::ZERO || others().all(|(_, pool)| pool.demand == Bytes::ZERO) {
        return most;
    }

    let mut eager = pools.to_vec();
    eager[me].demand = mine.ceiling.saturating_sub(mine.held);
    let shares = fair_shares(budget, &eager);
    let own = shares[me].saturating_sub(mine.held);
    let unclaimed = left_of(budget, mine.held, others().map(|(index, pool)| expected(pool, shares[index])));
    most.min(own.max(unclaimed))
}

/// What `me` should give back now, in its whole pages. Zero where the index is out of range.
///
/// Something is owed when pools are short and the free budget does not cover it. Idle memory that its pool does not
/// want goes first, wherever it lies; only then what pools use above their shares. Each part is split in proportion
/// to what the pools can give of it, so that they give at the same time; what rounding leaves goes to the largest.
/// Together they give what is missing, or all they have above their shares, and at most a page more of each part.
///
/// Where more is held than the budget allows although nobody is short (something that is no pool took memory), the
/// idle part alone is owed: a budget that moves a little evicts nothing. See [`owed_to_given`] for one that was set lower.
pub fn owed(budget: Bytes, pools: &[PoolClaim], me: usize) -> Bytes {
    owes(budget, pools, me, false)
}

/// The same for a budget that somebody gave: what pools hold above it is owed also where it is in use and nobody is short, as above
/// a limit.
pub fn owed_to_given(budget: Bytes, pools: &[PoolClaim], me: usize) -> Bytes {
    owes(budget, pools, me, true)
}

fn owes(budget: Bytes, pools: &[PoolClaim], me: usize, is_given: bool) -> Bytes {
    if me >= pools.len() {
        return Bytes::ZERO;
    }
    let shares = fair_shares(budget, pools);
    let anyone_short = pools.iter().zip(&shares).any(|(pool, &share)| shortage(pool, share) > 0);
    let expected_total: u128 = if anyone_short {
        pools.iter().zip(&shares).map(|(pool, &share)| u128::from(expected(pool, share).0)).sum()
    } else {
        pools.iter().map(|pool| u128::from(pool.held.0)).sum()
    };
    let missing = expected_total.saturating_sub(u128::from(budget.0));
    if missing == 0 {
        return Bytes::ZERO;
    }

    let givers = pools.iter().zip(&shares).map(|(pool, &share)| Giver::new(pool, share));
    let (idle, used): (Vec<_>, Vec<_>) = givers.map(|giver| (giver.idle, giver.used)).unzip();
    let idle_total: u128 = idle.iter().copied().map(u128::from).sum();
    let from_use = if anyone_short || is_given { missing.saturating_sub(idle_total) } else { 0 };
    Bytes(split(missing, pools, &idle, me) + split(from_use, pools, &used, me))
}

/// What `me` should give back now, with what it only keeps: what it has cached is not needed, and it is given for what
/// others will want soon as well as for what they wait for. At least what is [`owed`], or [`owed_to_given`] where the budget
/// `is_given`; no running request makes room for the rest.
pub fn owed_with_cached(budget: Bytes, pools: &[PoolClaim], me: usize, is_given: bool) -> Bytes {
    let mut claims = pools.to_vec();
    for (index, claim) in claims.iter_mut().enumerate() {
        if index == me {
            claim.in_use = claim.in_use.saturating_sub(claim.cached);
        } else {
            claim.demand = Bytes(claim.demand.0.saturating_add(claim.wish.0));
        }
    }
    owes(budget, pools, me, is_given).max(owes(budget, &claims, me, is_given))
}

/// Whether `me` waits for memory that it may count on: it holds less than its fair share, so others owe it, or it is free. Who waits and is
/// not short waits for what others might leave. `false` where the index is out of range.
pub fn is_short(budget: Bytes, pools: &[PoolClaim], me: usize) -> bool {
    pools.get(me).is_some_and(|mine| shortage(mine, fair_shares(budget, pools)[me]) > 0)
}

/// What `pool` waits for below its share.
fn shortage(pool: &PoolClaim, share: Bytes) -> u64 {
    if pool.demand == Bytes::ZERO {
        return 0;
    }
    share.min(pool.wants()).saturating_sub(pool.held).0
}

/// What the budget must keep for `pool`: what it holds and is short of, or its floor.
fn expected(pool: &PoolClaim, share: Bytes) -> Bytes {
    // No sum above the share or `held`: the shortage is part of the gap between them.
    Bytes(pool.held.0 + shortage(pool, share)).max(pool.kept_floor())
}

/// The budget less `mine` and all of `others`, or zero.
fn left_of(budget: Bytes, mine: Bytes, others: impl Iterator<Item = Bytes>) -> Bytes {
    others.fold(budget.saturating_sub(mine), Bytes::saturating_sub)
}

/// What a pool holds above its share, in whole pages.
struct Giver {
    /// Held for nothing: neither used, nor waited for, nor set aside as a floor.
    idle: u64,
    /// The rest: to give it, something must be evicted.
    used: u64,
}

impl Giver {
    fn new(pool: &PoolClaim, share: Bytes) -> Self {
        let above = |keep: Bytes| pool.whole_pages(pool.held.saturating_sub(keep).0);
        let idle = above(share.max(pool.in_use).max(pool.wants()).max(pool.kept_floor()));
        Self { idle, used: above(share) - idle }
    }
}

/// The part of `missing` that falls to `me` when every pool can give `surplus`, a whole number of its pages.
fn split(missing: u128, pools: &[PoolClaim], surplus: &[u64], me: usize) -> u64 {
    let total: u128 = surplus.iter().copied().map(u128::from).sum();
    if missing >= total {
        return surplus[me];
    }
    // Below `total`, which is at most the sum of what pools hold: the products stay far below 2^128 for any number
    // of pools that a ledger has.
    let pro_rata = |index: usize| {
        let part = missing.saturating_mul(u128::from(surplus[index])) / total;
        pools[index].whole_pages(u64::try_from(part).unwrap_or(u64::MAX))
    };
    let mut parts: Vec<u64> = (0..pools.len()).map(pro_rata).collect();
    let mut rest = missing - parts.iter().copied().map(u128::from).sum::<u128>();
    let mut by_size: Vec<usize> = (0..pools.len()).filter(|&index| surplus[index] > parts[index]).collect();
    by_size.sort_by_key(|&index| Reverse(surplus[index] - parts[index]));
    for index in by_size {
        let more =
            pools[index].pages_covering(u64::try_from(rest).unwrap_or(u64::MAX)).min(surplus[index] - parts[index]);
        parts[index] += more;
        rest = rest.saturating_sub(u128::from(more));
        if rest == 0 {
            break;
        }
    }
    parts[me]
}
