//! Who may hold how much of a device: the arithmetic of fair sharing, and nothing else.
//!
//! Every pool of a device sees the same ledger. From one snapshot of it, and with the same functions, each
//! pool derives what it may take and what it should give; nobody sends requests, so no request can be stale.
//!
//! | function        | question                                         | asked by                                 |
//! |-----------------|--------------------------------------------------|------------------------------------------|
//! | [`fair_shares`] | how much should each pool hold?                  | operators, the three below               |
//! | [`grantable`]   | how much may I reserve now?                      | a pool that needs a page, before mapping |
//! | [`owed`]        | how much should I give back now?                 | a pool's background thread               |
//! | [`owed_to_given`] | the same, of a budget that somebody gave       | the same                                 |
//! | [`owed_with_cached`] | the same, and what I only keep besides      | the same, and operators                  |
//! | [`is_short`]    | is what I wait for mine?                         | a pool that would let others past        |
//!
//! A pool *wants* what it uses plus its posted demand, up to its ceiling. Shares are dealt in this order:
//!
//! 1. Floors. They are set aside whether wanted or not, so that a pool back from idle has its floor at once.
//! 2. Wants, one priority class after another, the highest first. Inside a class by weighted max-min: all pools
//!    rise together in proportion to their weights, and one that has what it wants stops rising.
//!
//! A floor counts towards the weighted share, it does not come on top. Ceilings win over floors. Where floors
//! alone exceed the budget, they are dealt by the same rule as wants.
//!
//! # Example
//!
//! A budget of 100, three pools of one class, a page of 1:
//!
//! | pool | weight | held | in use | demand | wants | share | owed | why                                        |
//! |------|--------|------|--------|--------|-------|-------|------|--------------------------------------------|
//! | a    | 1      | 60   | 60     | 0      | 60    | 30    | 30   | holds twice its share: evicts the rest     |
//! | b    | 1      | 30   | 10     | 0      | 10    | 10    | 20   | idle memory that nobody wants goes first   |
//! | c    | 2      | 10   | 10     | 60     | 70    | 60    | 0    | 50 short of its share, and nothing is free |
//!
//! `b` has all it wants; the remaining 90 go to `a` and `c` as 1 : 2. `c` lacks 50: 20 are idle at `b`, 30 come
//! from `a`. Until `c` has taken them nobody above its share may: `a` frees memory for `c`, not for itself.
//!
//! ```
//! use tidekv_core::share::{PoolClaim, fair_shares, grantable, owed};
//! use tidekv_core::units::Bytes;
//!
//! let pool = |weight, held, in_use, demand| PoolClaim {
//!     held: Bytes(held),
//!     in_use: Bytes(in_use),
//!     demand: Bytes(demand),
//!     weight,
//!     page: Bytes(1),
//!     ..PoolClaim::default()
//! };
//! let budget = Bytes(100);
//! let mut pools = [pool(1, 60, 60, 0), pool(1, 30, 10, 0), pool(2, 10, 10, 60)];
//! assert_eq!(fair_shares(budget, &pools), [Bytes(30), Bytes(10), Bytes(60)]);
//! assert_eq!([0, 1, 2].map(|me| owed(budget, &pools, me)), [Bytes(30), Bytes(20), Bytes(0)]);
//!
//! // `b` has paid: 20 are free. They wait for `c`.
//! pools[1].held = Bytes(10);
//! assert_eq!([0, 2].map(|me| grantable(budget, &pools, me)), [Bytes(0), Bytes(20)]);
//! ```
//!
//! # Pages
//!
//! Memory moves in whole pages, so shares are dealt in whole pages, each to the pool that stands lowest: no pool of a
//! class waits for its first page while another takes its second. Of pools that stand equally low, one that holds
//! the page already keeps it. So pools come to rest at their shares and never pass a page back and forth, and what
//! one owes is never a fraction that it cannot give.
//!
//! All arithmetic is exact, in integers: every process gets the same answer.

mod claim;
mod fill;
mod settle;
mod standing;
mod usage;

pub use claim::PoolClaim;
pub use fill::fair_shares;
pub use settle::{grantable, is_short, owed, owed_to_given, owed_with_cached};
pub use standing::{Standing, standing};
pub use usage::MemoryUse;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
