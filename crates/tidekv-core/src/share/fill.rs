//! Weighted water filling in whole pages: pools of one class rise together until the water or their caps run out.
//!
//! ```text
//!   share/weight
//!        |          ____
//!        |    ____ |    |   cap of b           A pool's column is as wide as its weight. Water rises to one level
//!   level|~~~|~~~~~|~~~~|~~~~~~~~~             for all; `a` started above it (its floor) and keeps that, `c` is
//!        | a |  b  |    |  ____                full below it.
//!        |   |     |    | | c  |  cap of c
//! ```
//!
//! The result is that of handing out single pages, each to the pool that stands lowest (`share / weight`); of equals
//! to one that holds the page already, else to the first; past those whose page no longer fits. `model.rs` does
//! just that. Here the level is found by bisection: water at `x / 2^32` covers `weight * x >> 32` bytes of a pool,
//! rounded up to pages. One step of `x` gives no pool more than one page, so what the last step would give is
//! dealt page by page.

use std::cmp::Ordering;

use super::PoolClaim;
use crate::units::Bytes;

/// How much each pool should hold, in its whole pages and in the order of `pools`.
///
/// Floors first, then wants by class and weight; see the [module](super) for the rule. The sum is never above
/// `budget`, no share is above its ceiling, and every kept floor is in its share when all of them fit the budget.
pub fn fair_shares(budget: Bytes, pools: &[PoolClaim]) -> Vec<Bytes> {
    let mut shares = vec![0; pools.len()];
    let mut room = budget.0;
    deal(&mut shares, &mut room, pools, |pool| pool.kept_floor().0);
    deal(&mut shares, &mut room, pools, |pool| pool.wants().0);
    shares.into_iter().map(Bytes).collect()
}

/// Raises shares towards `cap`, the highest class first, as far as `room` goes.
fn deal(shares: &mut [u64], room: &mut u64, pools: &[PoolClaim], cap: impl Fn(&PoolClaim) -> u64) {
    let columns = pools.iter().enumerate().map(|(index, pool)| Column {
        index,
        priority: pool.priority,
        weight: pool.weight.max(1),
        page: pool.page.0.max(1),
        held: pool.held.0,
        share: shares[index],
        cap: cap(pool),
    });
    let mut columns: Vec<Column> = columns.filter(|column| column.share < column.cap).collect();
    columns.sort_by_key(|column| (std::cmp::Reverse(column.priority), column.index));
    for class in columns.chunk_by_mut(|a, b| a.priority == b.priority) {
        raise(class, room);
        for column in class {
            shares[column.index] = column.share;
        }
    }
}

/// One pool of a class while the water rises. `share` and `cap` are whole pages, `share <= cap`.
struct Column {
    index: usize,
    priority: i32,
    weight: u32,
    page: u64,
    held: u64,
    share: u64,
    cap: u64,
}

impl Column {
    /// The share once the water stands at `level / 2^32`: every page that began below it.
    fn at(&self, level: u128) -> u64 {
        let water = (u128::from(self.weight) * level).div_ceil(1 << FRACTION_BITS);
        let water = u64::try_from(water).unwrap_or(u64::MAX);
        if water >= self.cap { self.cap } else { water.next_multiple_of(self.page).max(self.share) }
    }

    /// Whether the next page of this class belongs here (`Less`) or to `other`.
    fn turn(&self, other: &Self) -> Ordering {
        let stands = u128::from(self.share) * u128::from(other.weight);
        let other_stands = u128::from(other.share) * u128::from(self.weight);
        let lacks = |column: &Self| column.held <= column.share;
        stands.cmp(&other_stands).then(lacks(self).cmp(&lacks(other))).then(self.index.cmp(&other.index))
    }
}

/// As many as a weight has, so that one step of the level is at most one byte for a pool.
const FRACTION_BITS: u32 = u32::BITS;

/// Above every cap, for every weight; times the largest weight it is still below 2^128.
const HIGHEST_LEVEL: u128 = 1 << (u64::BITS + FRACTION_BITS);

/// Raises all columns of a class and takes what they got from `room`.
///
/// Every round fills all columns or leaves one whose page does not fit any more, so there are at most as many rounds
/// as columns. Where pages are of one size there is one.
fn raise(class: &mut [Column], room: &mut u64) {
    loop {
        let mut open: Vec<&mut Column> =
            class.iter_mut().filter(|column| column.share < column.cap && column.page <= *room).collect();
        if open.is_empty() {
            return;
        }
        let level = highest_level(&open, *room);
        for column in &mut open {
            let risen = column.at(level);
            *room -= risen - column.share;
            column.share = risen;
        }
        open.retain(|column| column.at(level + 1) > column.share);
        open.sort_by(|a, b| a.turn(b));
        for column in open {
            if column.page <= *room {
                column.share += column.page;
                *room -= column.page;
            }
        }
    }
}

/// The highest level whose water is there, up to the one that fills every column.
fn highest_level(open: &[&mut Column], room: u64) -> u128 {
    let suffices = |level: u128| {
        let used: u128 = open.iter().map(|column| u128::from(column.at(level) - column.share)).sum();
        used <= u128::from(room)
    };
    if suffices(HIGHEST_LEVEL) {
        return HIGHEST_LEVEL;
    }
    // Invariant: `low` suffices, `high` does not.
    let (mut low, mut high) = (0, HIGHEST_LEVEL);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if suffices(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}
