//! A whole engine over real memory, as the API uses it.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod lifecycle;
mod memory;
mod refusals;
mod same_tokens;
mod support;
