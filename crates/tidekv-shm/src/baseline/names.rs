//! What the objects of benchmarks are called, and which of them are still there.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Pid, geteuid, test_kill_process};

/// Where `shm_open` puts them, on Linux.
pub(super) const FOLDER: &str = "/dev/shm";

/// What the benchmark that this one is compatible with calls its own.
const FOREIGN_PREFIX: &str = "mooncake_bench_";

/// A name that no other object has.
#[derive(Debug)]
pub struct SegmentName(CString);

impl SegmentName {
    /// The next name of this process.
    #[expect(clippy::new_without_default, reason = "every one is different")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("/{}{}-{number}", prefix(), std::process::id());
        Self(CString::new(name).expect("digits, letters and dashes"))
    }

    /// As `shm_open` takes it, with the leading slash.
    pub fn as_c_str(&self) -> &CStr {
        &self.0
    }

    /// Where the object can be seen.
    pub fn path(&self) -> PathBuf {
        let name = self.0.to_str().unwrap_or_default();
        PathBuf::from(FOLDER).join(name.trim_start_matches('/'))
    }
}

fn prefix() -> String {
    format!("kvcached-bench-{}-", geteuid().as_raw())
}

/// An object of a benchmark of this user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftSegment {
    /// Where it is.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// Whether a process of the number in its name runs, which may be the benchmark itself.
    pub running: bool,
}

/// The objects of this user's benchmarks, in the order of their names.
pub fn left_behind() -> io::Result<Vec<LeftSegment>> {
    let prefix = prefix();
    let mut found = Vec::new();
    for (name, path, bytes) in entries()? {
        if let Some(rest) = name.strip_prefix(&prefix) {
            let pid = rest.split('-').next().and_then(|digits| digits.parse().ok()).and_then(Pid::from_raw);
            // A process of somebody else answers too, with a refusal.
            let running = pid.is_some_and(|pid| test_kill_process(pid) != Err(rustix::io::Errno::SRCH));
            found.push(LeftSegment { path, bytes, running });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

/// Objects that other benchmarks left. They are somebody else's: to be reported, never removed.
pub fn foreign_benchmarks() -> io::Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> =
        entries()?.filter(|(name, ..)| name.starts_with(FOREIGN_PREFIX)).map(|(_, path, _)| path).collect();
    paths.sort();
    Ok(paths)
}

fn entries() -> io::Result<impl Iterator<Item = (String, PathBuf, u64)>> {
    Ok(fs::read_dir(FOLDER)?.filter_map(|entry| {
        let entry = entry.ok()?;
        let bytes = entry.metadata().ok()?.len();
        Some((entry.file_name().into_string().ok()?, entry.path(), bytes))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_new_and_says_whose_it_is() {
        let (a, b) = (SegmentName::new(), SegmentName::new());
        assert_ne!(a.path(), b.path());
        let name = a.as_c_str().to_str().unwrap();
        assert!(name.starts_with(&format!("/kvcached-bench-{}-{}-", geteuid().as_raw(), std::process::id())), "{name}");
    }
}
