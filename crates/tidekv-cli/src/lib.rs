//! kvctl: what pools there are, what they hold, and how an operator changes it.
//!
//! ```text
//!   argv ──> cli ──> request ──> command ──> exit
//!            raw     checked     acts        0 done, 1 no, 2 error, 3 accepted and still draining
//!                                  │
//!                    scene <───────┴──────> console ──> stdout, stderr
//!                      │
//!            segments (24 bytes, kvcached's) + ledgers (ours), read with pread
//!
//!   text      sizes as kvcached prints them, durations, percentages, the nearest name
//!   logging   where the logs of our binaries go; kvbench uses it too
//! ```
//!
//! It needs neither CUDA nor torch and never waits for a pool: reads take no lock of ours, the few writes try for a
//! lock until a deadline, and whether an owner lives is asked of the kernel, so that a pool that is stopped or was
//! killed is listed like any other. kvcached's spellings and outputs keep working; pools of kvcached's own, which
//! have a segment and no ledger entry, are listed and limited too.

#![forbid(unsafe_code)]

pub mod cli;
pub mod command;
pub mod console;
pub mod exit;
pub mod logging;
pub mod request;
pub mod scene;
pub mod text;

use cli::Cli;
use console::Console;
use exit::Outcome;
use request::Request;

/// Does what was asked.
pub fn run(cli: &Cli, console: &mut Console) -> anyhow::Result<Outcome> {
    let request = Request::new(cli)?;
    command::run(&request, console)
}
