//! The router before engines that do what a test tells them: what passes through, who is let in, when models sleep.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod engine;
mod failures;
mod limits;
mod operating;
mod passing;
mod running;
mod sites;
mod sleeping;
#[path = "../support/sites.rs"]
mod support;
