//! `kvctl doctor`: what on this machine will cause trouble, and how to mend it. Changes nothing.
//!
//! ```text
//!   Sources ──gather──> Facts ──judge──> [Check] ──report──> text or JSON
//!   where to look       plain data,      pure functions      exit 0: no finding
//!                       or why not                           exit 1: at least one
//! ```
//!
//! Facts are read by threads of their own, each with a deadline: a folder on a dead server, a GPU that does not answer or
//! an interpreter that hangs costs its checks (they are *skipped*, with the reason), never the whole. Judgements see
//! facts alone, so that each of them is tested with machines that nobody has.
//!
//! | status  | meaning                                                        | exit |
//! |---------|----------------------------------------------------------------|------|
//! | ok      | as it should be                                                | 0    |
//! | note    | worth knowing; nothing must be done                            | 0    |
//! | finding | causes trouble, or will; there is one fix, in words to type    | 1    |
//! | skipped | could not be looked at, or there is no such thing here         | 0    |

mod check;
mod facts;
mod judge;
mod memory;
mod report;

#[cfg(test)]
mod tests;

use std::path::Path;

use tidekv_shm::RuntimeDir;

use crate::console::Console;
use crate::exit::Outcome;
use check::Status;
use facts::{Facts, Sources};
pub use judge::known_variables;
pub(crate) use memory::DeviceMemory;

pub(super) fn run(
    dir: &RuntimeDir,
    python: Option<&Path>,
    json: bool,
    console: &mut Console,
) -> anyhow::Result<Outcome> {
    examine(&Sources::of_this_machine(dir, python), json, console)
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    format!("'{}'", path.display().to_string().replace('\'', "'\\''"))
}

fn examine(sources: &Sources, json: bool, console: &mut Console) -> anyhow::Result<Outcome> {
    let facts = Facts::gather(sources);
    let checks = judge::all(&facts);
    if json {
        report::json(&facts, &checks, console)?;
    } else {
        report::text(&checks, console)?;
    }
    let found = checks.iter().any(|check| check.status == Status::Finding);
    Ok(if found { Outcome::Negative } else { Outcome::Done })
}
