//! Completions and man pages of a program, from its clap definitions alone. Text in memory: the commands write it.
//!
//! ```text
//!   clap::Command ──┬─ completions ──> a script for bash, zsh or fish      static, but for the names of pools
//!                   └─ man ──────────> kvctl.1, kvctl-list.1, ...
//! ```
//!
//! kvctl, kvtop and kvbench all come this way, so what is said of a flag is said once.

mod completions;
mod man;

pub use completions::{Pools, completions};
pub use man::{Page, pages, write_pages};
