//! The benchmarks of kvcached's guide as people run them: real servers, real processes, short loads.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

#[path = "../support/mod.rs"]
mod support;

mod commands;
mod compare;
mod config;
mod gsm8k;
mod links;
mod overhead;
mod stopping;
