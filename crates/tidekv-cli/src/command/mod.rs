//! The deeds, one module each. They get a checked [`Request`] and say how it ended; only they change anything.

mod delete;
mod gc;
mod limit;
mod list;
mod share;
mod trim;
mod wait;

use std::time::{Duration, Instant};

use crate::console::Console;
use crate::exit::Outcome;
use crate::request::{Action, Request};

/// Carries out a request.
pub fn run(request: &Request, console: &mut Console) -> anyhow::Result<Outcome> {
    let dir = &request.dir;
    match &request.action {
        Action::List { names, json } => list::run(dir, names, *json, console),
        Action::Limit { name, limit, wait } => limit::run(dir, name, *limit, *wait, console),
        Action::Share { name, change } => share::run(dir, name, *change, console),
        Action::Delete { name, force } => delete::run(dir, name, *force, console),
        Action::Gc { dry_run } => gc::run(dir, *dry_run, console),
        Action::Trim { name, wait } => trim::run(dir, name, *wait, console),
    }
}

/// Until when to try for a ledger's lock. Its holders need microseconds; one that is stopped must not stop us.
fn lock_deadline() -> Instant {
    Instant::now() + Duration::from_secs(1)
}
