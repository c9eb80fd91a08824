//! `kvserve` as people run it: a process, a port, signals, and what is left behind.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod bodies;
mod budget;
mod figures;
mod hostile;
mod load;
#[allow(dead_code, reason = "the tests of neighbours use the rest")]
mod process;
mod refusals;
mod serving;
