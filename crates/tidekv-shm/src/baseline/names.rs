//! What the objects of benchmarks are called, and which of them are still there.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, geteuid, test_kill_process};

use crate::private_file::{is_locked_by_others, open_guarded};

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

/// The objects of this user's benchmarks in a folder, in the order of their names. `shm_open` puts them into `/dev/shm`.
pub fn left_behind(folder: &Path) -> io::Result<Vec<LeftSegment>> {
    let prefix = prefix();
    let mut found = Vec::new();
    for (name, path) in entries(folder)? {
        let Some(pid) = name.strip_prefix(&prefix).and_then(maker) else { continue };
        // Of a link this is the link's own.
        let Ok(metadata) = path.symlink_metadata() else { continue };
        if metadata.is_file() && metadata.uid() == geteuid().as_raw() {
            // Whoever has a lock on it uses it. A process of somebody else answers too, with a refusal.
            let running = test_kill_process(pid) != Err(Errno::SRCH) || is_locked(&path);
            found.push(LeftSegment { path, bytes: metadata.len(), running });
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn is_locked(path: &Path) -> bool {
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    open_guarded(path, flags, Mode::empty()).is_ok_and(|file| is_locked_by_others(&file))
}

/// The process of `<process>-<number>`. Other names are not ours.
fn maker(rest: &str) -> Option<Pid> {
    let (pid, number) = rest.split_once('-')?;
    number.parse::<u64>().ok()?;
    Pid::from_raw(pid.parse().ok().filter(|pid| *pid > 0)?)
}

/// Objects that other benchmarks left in a folder. They are somebody else's: to be reported, never removed.
pub fn foreign_benchmarks(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths: Vec<PathBuf> =
        entries(folder)?.filter(|(name, _)| name.starts_with(FOREIGN_PREFIX)).map(|(_, path)| path).collect();
    paths.sort();
    Ok(paths)
}

/// What is in a folder. One that is not there is an empty one.
fn entries(folder: &Path) -> io::Result<impl Iterator<Item = (String, PathBuf)> + use<>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => Some(entries),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    Ok(entries.into_iter().flatten().filter_map(|entry| {
        let entry = entry.ok()?;
        Some((entry.file_name().into_string().ok()?, entry.path()))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_right_form_are_ours() {
        assert_eq!(maker("12-0").map(|pid| pid.as_raw_nonzero().get()), Some(12));
        for other in ["", "12", "12-", "-0", "0-1", "-5-1", "12-x", "x-1", "99999999999-1"] {
            assert_eq!(maker(other), None, "{other}");
        }
    }

    #[test]
    fn every_name_is_new_and_says_whose_it_is() {
        let (a, b) = (SegmentName::new(), SegmentName::new());
        assert_ne!(a.path(), b.path());
        let name = a.as_c_str().to_str().unwrap();
        assert!(name.starts_with(&format!("/kvcached-bench-{}-{}-", geteuid().as_raw(), std::process::id())), "{name}");
    }
}
