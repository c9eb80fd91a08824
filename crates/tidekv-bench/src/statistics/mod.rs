//! What may be concluded from a handful of runs. Pure: numbers in, numbers out, the same ones every time.
//!
//! ```text
//!   question                                               answer
//!   by how much does B differ from A, several runs each    Bootstrap::ratio, Bootstrap::difference
//!   the same where each run of B has its run of A          paired_ratio
//!   ... and each request of a run its request              Changes::median
//!   could chance alone have put the two sides so           mann_whitney; for pairs signed_rank, Changes::test
//!   are there runs enough to answer at all                 enough_runs, enough_pairs
//!   how noisy are the runs, what could they have shown     coefficient_of_variation, detectable_change, runs_for
//!   k of n answers were right                              wilson
//!   the same questions, with and without us                mcnemar
//!   are runs of two sides less alike than runs of one      relabel
//! ```
//!
//! The unit is the **run**, never the request. Requests of one run share a warm cache, a queue and a noisy neighbour,
//! so ten thousand of them say how that run went and little about the next one. An interval over requests shrinks
//! with their number and will sooner or later exclude whatever is true; one over runs does not.
//!
//! A run is one number here, such as its p50 or its p99, and a side is the median of its runs: one run in which the
//! machine hiccuped moves it little. The percentile bootstrap of a median keeps its promise from about five runs on;
//! with fewer it is too narrow. So a difference counts only when a rank test agrees, whose level is exact for any
//! number of runs, and with so few runs that no rank test could ever agree nothing is concluded:
//! see [`enough_runs`]. Pairs need no such help: their interval comes from counting ([`hodges_lehmann`]) and is exact
//! itself. The simulations in `tests.rs` hold both kinds of error.

mod bootstrap;
mod grouped;
mod normal;
mod power;
mod proportion;
mod rank;
mod relabel;
mod signed_rank;
mod spread;

pub use bootstrap::{Bootstrap, Confidence, ConfidenceError, Estimate, Statistic};
pub use grouped::Changes;
pub use power::{detectable_change, runs_for};
pub use proportion::{Mcnemar, Proportion, mcnemar, sign_test, wilson};
pub use rank::{enough_pairs, enough_runs, mann_whitney};
pub use relabel::{MOST_RUNS, Relabelled, relabel};
pub use signed_rank::{hodges_lehmann, paired_ratio, signed_rank};
pub use spread::{coefficient_of_variation, mean, median, quantile};

#[cfg(test)]
pub(crate) mod simulation;
#[cfg(test)]
mod tests;
