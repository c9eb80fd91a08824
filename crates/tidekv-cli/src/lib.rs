//! kvctl: what pools there are, what they hold, and how an operator changes it; kvserve, which has one of its own.
//!
//! ```text
//!   argv ──> cli ──> request ──> command ──> exit
//!            raw     checked     acts        0 done, 1 no, 2 error, 3 accepted and still draining
//!                                  │
//!                    scene <───────┴──────> console ──> stdout, stderr
//!                      │
//!            segments (24 bytes, kvcached's) + ledgers (ours), read with pread
//!
//!   change    what changed between two looks
//!   screen    the terminal as a whole: taken, and put back whatever happens
//!   interrupt Ctrl-C as something to wait for
//!   launch    many models from one command: configuration, instances, what they leave
//!   gpu       what the driver says of its GPUs, where there is one
//!   text      sizes as kvcached prints them, durations, percentages, the nearest name, names made safe to show
//!   generate  completions and man pages of any of our binaries
//!   logging   where the logs of our binaries go; kvbench uses it too
//!   program   how it is started once more
//! ```
//!
//! It needs neither CUDA nor torch and never waits for a pool: reads take no lock of ours, the few writes try for a
//! lock until a deadline, and whether an owner lives is asked of the kernel, so that a pool that is stopped or was
//! killed is listed like any other. kvcached's spellings and outputs keep working; pools of kvcached's own, which
//! have a segment and no ledger entry, are listed and limited too.

#![forbid(unsafe_code)]

pub mod change;
pub mod cli;
pub mod command;
pub mod console;
pub mod exit;
pub mod generate;
pub mod gpu;
mod interrupt;
mod launch;
pub mod logging;
pub mod program;
pub mod request;
pub mod scene;
pub mod screen;
pub mod text;

use cli::{Cli, TopCli};
use console::Console;
use exit::Outcome;
use request::{Action, Request, TopRequest};
use tidekv_shm::RuntimeDir;

/// Does what was asked.
pub fn run(cli: &Cli, console: &mut Console) -> anyhow::Result<Outcome> {
    let request = Request::new(cli)?;
    command::run(&request, console)
}

/// Does what was asked of `kvtop`.
pub fn run_top(cli: &TopCli, console: &mut Console) -> anyhow::Result<Outcome> {
    let dir = cli.dir.as_ref().map_or_else(RuntimeDir::from_env, RuntimeDir::at);
    command::run(&Request { dir, action: Action::Top(TopRequest::new(&cli.top)?) }, console)
}

/// Does what was asked of `kvserve`.
#[cfg(feature = "serve")]
pub fn run_serve(cli: &cli::ServeCli, console: &mut Console) -> anyhow::Result<Outcome> {
    command::serve::run(cli, console)
}
