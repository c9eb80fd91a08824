//! Pools whose ledger is another file than the one of this folder: they share no memory with the pools that are here.
//!
//! A container with a `/dev/shm` of its own, another user, another `KVCACHED_RUNTIME_DIR`: in each case both sides believe
//! that the device is theirs alone. A pool keeps its ledger open for life, so the open files of all processes that this
//! user may look at show them. From inside a container, processes outside of it are not seen.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::geteuid;
use tidekv_shm::{DeviceName, Ledger, RuntimeDir};

/// A process that has another ledger of a device open.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) struct Elsewhere {
    pub(in super::super) pid: u32,
    /// The program's name, as the kernel shortens it.
    pub(in super::super) program: String,
    /// Where the ledger is, as that process sees it.
    pub(in super::super) ledger: PathBuf,
}

/// All of them, in the order of their process numbers. `root` is where `proc` is.
pub(super) fn look(root: &Path, dir: &RuntimeDir) -> Vec<Elsewhere> {
    let devices = Ledger::list(dir).unwrap_or_default();
    let ours: BTreeSet<_> = devices.iter().filter_map(|device| identity(&dir.ledger_path(device))).collect();
    let numbered = |entry: fs::DirEntry| Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path()));
    let processes = fs::read_dir(root.join("proc")).into_iter().flatten().flatten().filter_map(numbered);
    let mut found = BTreeSet::new();
    for (pid, process) in processes {
        // Processes of others, and those that end meanwhile, are not looked into.
        for file in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
            let Ok(ledger) = fs::read_link(file.path()) else { continue };
            let is_ledger = ledger.file_name().and_then(|name| name.to_str()).is_some_and(is_ledger_name);
            if is_ledger && identity(&file.path()).is_some_and(|file| !ours.contains(&file)) {
                let program = fs::read_to_string(process.join("comm")).unwrap_or_default();
                found.insert(Elsewhere { pid, program: program.trim_end().to_owned(), ledger });
            }
        }
    }
    found.into_iter().collect()
}

/// Which file it is, if it still has a name.
fn identity(path: &Path) -> Option<(u64, u64)> {
    fs::metadata(path).ok().filter(|file| file.is_file() && file.nlink() > 0).map(|file| (file.dev(), file.ino()))
}

/// Whether a ledger of any user is called so. Other users have another number in the place of this one's.
fn is_ledger_name(name: &str) -> bool {
    let mine = RuntimeDir::at("").ledger_path(&DeviceName::host());
    let mine = mine.to_string_lossy();
    let (prefix, _) = mine.split_once(&geteuid().as_raw().to_string()).unwrap_or((&mine, ""));
    let rest = name.strip_prefix(prefix).and_then(|rest| rest.split_once('-'));
    rest.is_some_and(|(uid, device)| uid.parse::<u32>().is_ok() && !device.contains(['.', ' ']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ledgers() {
        for name in ["kvcached-ledger-0-host", "kvcached-ledger-1000-GPU-1-2"] {
            assert!(is_ledger_name(name), "{name}");
        }
        for name in [
            "kvcached-ledger-host",
            "kvcached-ledger-0-host.12",
            "kvcached-events-0-host",
            "kvcached-ledger-0-host (deleted)",
        ] {
            assert!(!is_ledger_name(name), "{name}");
        }
    }
}
