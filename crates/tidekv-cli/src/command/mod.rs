//! The deeds, one module each. They get a checked [`Request`] and say how it ended; only they change anything.

#[cfg(feature = "serve")]
mod access;
mod arena;
pub(crate) mod budget;
mod delete;
pub(crate) mod doctor;
mod down;
mod events;
pub(crate) mod gc;
mod generate;
pub(crate) mod limit;
mod list;
mod logs;
mod names;
mod ps;
#[cfg(feature = "serve")]
pub mod serve;
pub(crate) mod share;
mod shell;
mod table;
pub mod top;
mod trim;
#[cfg(feature = "serve")]
mod up;
mod wait;
mod watch;

use std::time::{Duration, Instant};

pub(crate) use doctor::DeviceMemory;
pub use doctor::known_variables;

use crate::console::Console;
use crate::exit::Outcome;
use crate::request::{Action, Request};

/// Carries out a request.
pub fn run(request: &Request, console: &mut Console) -> anyhow::Result<Outcome> {
    let dir = &request.dir;
    // These look at nothing there, or say what is wrong with it.
    let needs_no_folder = matches!(
        request.action,
        Action::Doctor { .. } | Action::Completions { .. } | Action::Man { .. } | Action::Names { .. } | Action::Shell
    );
    if !needs_no_folder {
        dir.check()?;
    }
    match &request.action {
        Action::List { names, json } => list::run(dir, names, *json, console),
        Action::Limit { name, limit, wait } => limit::run(dir, name, *limit, *wait, console),
        Action::Share { name, change } => share::run(dir, name, *change, console),
        Action::Budget(request) => budget::run(dir, request, console),
        Action::Delete { name, force } => delete::run(dir, name, *force, console),
        Action::Gc { dry_run, json } => gc::run(dir, *dry_run, *json, console),
        Action::Arena(action) => arena::run(dir, action, console),
        Action::Trim { name, cached, wait } => trim::run(dir, name, *cached, *wait, console),
        Action::Top(request) => top::run(dir, request, console),
        Action::Watch { names, interval, count } => watch::run(dir, names, *interval, *count, console),
        Action::Shell => shell::run(dir, console),
        Action::Doctor { json, python } => doctor::run(dir, python.as_deref(), *json, console),
        Action::Events { names, follow, last, json } => events::run(dir, names, *follow, *last, *json, console),
        Action::Completions { shell, program } => generate::completions(*shell, *program, console),
        Action::Man { dir } => generate::man(dir, console),
        Action::Names { words } => names::run(dir, words, console),
        #[cfg(feature = "serve")]
        Action::Up(request) => up::run(dir, request, console),
        Action::Ps { json } => ps::run(dir, *json, console),
        Action::Down { wait } => down::run(dir, *wait, console),
        Action::Logs { instance, lines, follow } => logs::run(dir, instance, *lines, *follow, console),
    }
}

/// Until when to try for a ledger's lock. Its holders need microseconds; one that is stopped must not stop us.
fn lock_deadline() -> Instant {
    Instant::now() + Duration::from_secs(1)
}

/// When to look after a look that was due at `due`. Looks that were missed, while the process was stopped or the machine
/// was busy, stay missed.
fn next_look(due: Instant, interval: Duration) -> Instant {
    let now = Instant::now();
    let next = due + interval;
    if next <= now { now + interval } else { next }
}
