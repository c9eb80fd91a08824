//! What processes hold, as the kernel counts it: the blocks of their memory files.
//!
//! A pool on host memory keeps its pages in one memory file, and a page takes blocks of that file exactly while
//! it has memory. `stat` of `/proc/<pid>/fd/<n>` tells how many: neither the ledger nor the worker is asked.
//!
//! Several files cannot be read in one instant, and memory moves between them: counted in A before A gives it
//! back and in B after B took it, it would look like too much. So all files are read twice, and only a reading
//! that came out the same both times counts as one moment.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use tidekv_core::units::Bytes;

/// How the kernel shows a memory file of ours in `/proc/<pid>/fd`.
const LINK: &str = "/memfd:tidekv";

/// `st_blocks` counts these, whatever the file system's own block is.
const STAT_BLOCK: u64 = 512;

/// Pairs of readings before a moment is given up.
const ATTEMPTS: u32 = 20;

/// The memory files of some processes.
#[derive(Debug, Default)]
pub struct MemoryFiles {
    paths: Vec<PathBuf>,
}

impl MemoryFiles {
    /// Finds the memory files that `pids` have open now.
    pub fn of(pids: impl IntoIterator<Item = u32>) -> io::Result<Self> {
        let mut paths = Vec::new();
        for pid in pids {
            for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
                let path = entry?.path();
                // A descriptor closed meanwhile is none of a pool's: those stay open.
                if fs::read_link(&path).is_ok_and(|link| link.to_string_lossy().starts_with(LINK)) {
                    paths.push(path);
                }
            }
        }
        Ok(Self { paths })
    }

    /// How many were found.
    pub fn len(&self) -> usize {
        self.paths.len()
    }

    /// Whether there are none, as with fake memory.
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// What all of them hold together at one moment; `None` where memory kept moving, or a process ended.
    pub fn total(&self) -> Option<Bytes> {
        let mut before = self.read()?;
        for _ in 0..ATTEMPTS {
            let after = self.read()?;
            if before == after {
                return Some(Bytes(after.iter().sum()));
            }
            before = after;
        }
        None
    }

    fn read(&self) -> Option<Vec<u64>> {
        self.paths.iter().map(|path| fs::metadata(path).ok().map(|file| file.blocks() * STAT_BLOCK)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidekv_core::geometry::Placement;
    use tidekv_core::units::PageId;
    use tidekv_mem::{BackendName, RegionOptions, Reservation};

    #[test]
    fn pages_are_counted_while_they_have_memory() {
        let backend = tidekv_mem::open(BackendName::Host, 0).unwrap();
        let placement = Placement::uniform(Bytes::kib(64), 4).unwrap();
        let reservation = Reservation::new(backend, placement, RegionOptions::default()).unwrap();
        let own_files = || MemoryFiles::of([std::process::id()]).unwrap();
        assert!(!own_files().is_empty());
        // Other tests of this process may hold files of their own; only ours changes by exactly one page.
        reservation.map_pages(&[PageId(0), PageId(2)]).unwrap();
        assert!(own_files().total().unwrap() >= Bytes::kib(128));
        assert_eq!(reservation.witness(), Some(Bytes::kib(128)));
    }

    #[test]
    fn a_process_that_is_gone_has_no_total() {
        assert!(MemoryFiles::of([u32::MAX]).is_err());
        let files = MemoryFiles { paths: vec![PathBuf::from("/proc/4294967295/fd/3")] };
        assert_eq!(files.total(), None);
    }
}
