//! The configuration of `kvctl up`: read, checked whole, and only then acted upon.
//!
//! ```text
//!   FILE.yaml ── yaml ──> as written ── plan ──> Plan: programs, arguments, variables, ports
//!                         kvcached's keys         all that is wrong is said here, with its line and key
//! ```

mod error;
mod plan;
#[cfg(test)]
mod tests;
mod yaml;

use std::path::Path;

pub(crate) use error::ConfigError;
pub(crate) use plan::{IPC_NAME, InstancePlan, Plan, PoolPlan, Program};

use error::Problem;

/// Reads and checks a file.
pub(crate) fn read(path: &Path) -> Result<Plan, ConfigError> {
    let about = |problem: Problem| ConfigError {
        path: path.to_owned(),
        place: problem.place,
        key: problem.key,
        problem: problem.text,
    };
    let text = std::fs::read_to_string(path)
        .map_err(|error| about(Problem { place: None, key: None, text: format!("cannot be read: {error}") }))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    parse(&text, folder).map_err(about)
}

/// What `kvctl up` does without a file: two synthetic models on host memory.
pub(crate) fn without_file() -> Plan {
    parse(WITHOUT_FILE, Path::new(".")).unwrap_or_else(|problem| panic!("our own configuration: {problem:?}"))
}

const WITHOUT_FILE: &str = "
instances:
  - {name: tiny, model: 'synthetic:tiny', engine: kvserve}
  - {name: tiny-2, model: 'synthetic:tiny:2', engine: kvserve}
";

fn parse(text: &str, folder: &Path) -> Result<Plan, Problem> {
    let file: yaml::File = serde_saphyr::from_str(text).map_err(|error| Problem::of_parser(&error, text))?;
    plan::check(file, folder)
}
