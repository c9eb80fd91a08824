//! Where the logs of our binaries go: standard error, and a file where one is asked for.
//!
//! | variable             | flag         | meaning                                                              |
//! |----------------------|--------------|----------------------------------------------------------------------|
//! | `KVCACHED_LOG_LEVEL` |              | DEBUG, INFO, WARNING, ERROR or CRITICAL in any case; unset: WARNING  |
//! | `KVCACHED_LOG_FILE`  | `--log-file` | lines are also appended there; the flag wins                         |
//! | `NO_COLOR`           |              | no colour on standard error                                          |
//!
//! Libraries only emit events (`tracing`); whoever owns `main` calls [`start`] once. A file that cannot be written is one
//! warning and no reason not to run; a pipe that nobody reads is an error, because whoever made it wants the lines. A file that
//! is not there is made with mode 0600.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use rustix::fs::OFlags;
use rustix::io::Errno;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

const LEVEL: &str = "KVCACHED_LOG_LEVEL";
const FILE: &str = "KVCACHED_LOG_FILE";

/// Sends this process's logs where the flag and the environment say. The first call counts; later ones do nothing.
///
/// Returns the warnings there are about the settings themselves, for the caller to show as it shows warnings.
pub fn start(log_file: Option<&Path>) -> anyhow::Result<Vec<String>> {
    let mut warnings = Vec::new();
    let level = level(std::env::var(LEVEL).ok().as_deref()).unwrap_or_else(|warning| {
        warnings.push(warning);
        LevelFilter::WARN
    });
    let path = log_file.map(Path::to_owned).or_else(|| std::env::var_os(FILE).map(PathBuf::from));
    let file = match path.map(|path| (append_to(&path), path)) {
        None => None,
        Some((Ok(file), _)) => Some(Arc::new(file)),
        Some((Err(error), path)) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => {
            bail!("the log file {} is a pipe that nobody reads: start its reader first", path.display());
        }
        Some((Err(error), path)) => {
            warnings.push(format!("logs go to standard error alone: {} cannot be written: {error}", path.display()));
            None
        }
    };
    let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let to_stderr = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(colour);
    let to_file = file.map(|file| tracing_subscriber::fmt::layer().with_writer(file).with_ansi(false));
    // An engine that embeds us may have its own subscriber: then its choice stands.
    let _ = tracing_subscriber::registry().with(level).with(to_stderr).with(to_file).try_init();
    Ok(warnings)
}

/// Without waiting: neither for a reader of a pipe now, nor for one that reads slowly later.
fn append_to(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(flags).open(path)
}

/// Whether [`start`] would take this for a level.
pub(crate) fn is_level(text: &str) -> bool {
    level(Some(text)).is_ok()
}

/// kvcached looks at the first letter alone; so do we, in either case.
fn level(text: Option<&str>) -> Result<LevelFilter, String> {
    let Some(text) = text.map(str::trim).filter(|text| !text.is_empty()) else {
        return Ok(LevelFilter::WARN);
    };
    match text.as_bytes()[0].to_ascii_uppercase() {
        b'V' | b'T' => Ok(LevelFilter::TRACE),
        b'D' => Ok(LevelFilter::DEBUG),
        b'I' => Ok(LevelFilter::INFO),
        b'W' => Ok(LevelFilter::WARN),
        b'E' | b'C' | b'F' => Ok(LevelFilter::ERROR),
        _ => Err(format!("{LEVEL}={text:?} is not a level: use DEBUG, INFO, WARNING, ERROR or CRITICAL")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_as_kvcached_spells_them() {
        for (text, expected) in [
            (None, LevelFilter::WARN),
            (Some(""), LevelFilter::WARN),
            (Some("DEBUG"), LevelFilter::DEBUG),
            (Some("info"), LevelFilter::INFO),
            (Some("Warning"), LevelFilter::WARN),
            (Some("ERROR"), LevelFilter::ERROR),
            (Some("CRITICAL"), LevelFilter::ERROR),
            (Some("VERBOSE"), LevelFilter::TRACE),
        ] {
            assert_eq!(level(text), Ok(expected), "{text:?}");
        }
        assert!(level(Some("7")).is_err_and(|warning| warning.contains("use DEBUG")));
    }

    /// One process, one subscriber: everything about the file is one test.
    #[test]
    fn lines_are_appended_with_their_level_and_a_bad_path_is_one_warning() {
        let folder = tempfile::tempdir().unwrap();
        let unwritable = folder.path().join("missing/kvcached.log");
        let path = folder.path().join("kvcached.log");
        std::fs::write(&path, "kept\n").unwrap();

        assert_eq!(start(Some(&path)).unwrap(), Vec::<String>::new());
        tracing::warn!("a limit was lowered");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("kept\n"), "{text}");
        let line = text.lines().last().unwrap();
        assert!(line.contains("WARN") && line.contains("a limit was lowered"), "{line}");

        let warnings = start(Some(&unwritable)).unwrap();
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("missing/kvcached.log"), "{warnings:?}");
    }
}
