//! `kvctl up` as people run it: real instances, real signals, and what is left behind.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod ends;
mod pools;
mod refusals;
mod serving;
mod supervisor;
