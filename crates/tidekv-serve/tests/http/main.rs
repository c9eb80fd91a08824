//! The API over real HTTP: a server on a free port, an engine that echoes, and a client that can let go at any moment.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail the test")]

mod answers;
mod broken_input;
mod client;
mod echo;
mod lifecycle;
mod load;
mod operate;
mod running;
mod sites;
mod slow_clients;
#[path = "../support/sites.rs"]
mod support;
