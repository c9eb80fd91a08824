//! How this program is started once more: `kvctl shell` starts kvctl, and benchmarks start kvbench as their workers.
//!
//! A binary starts its own file. Where the same code runs inside another program (Python, say) that file is something else,
//! so whoever runs it there says what to start instead.

use std::io;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock};

/// This program, whatever has become of its file since it was started.
const OWN_FILE: &str = "/proc/self/exe";

static STARTED_BY: RwLock<Option<PathBuf>> = RwLock::new(None);

/// From now on this file is what is started.
pub fn start_with(file: impl Into<PathBuf>) {
    *STARTED_BY.write().unwrap_or_else(PoisonError::into_inner) = Some(file.into());
}

/// What to start.
pub fn path() -> PathBuf {
    given().unwrap_or_else(|| OWN_FILE.into())
}

/// The same under a name that tells people who look at processes what it is.
pub fn named_path() -> io::Result<PathBuf> {
    given().map_or_else(std::env::current_exe, Ok)
}

fn given() -> Option<PathBuf> {
    STARTED_BY.read().unwrap_or_else(PoisonError::into_inner).clone()
}
