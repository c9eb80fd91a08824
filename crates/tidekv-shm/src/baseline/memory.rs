//! Shared memory that no name leads to: what copies are measured with.
//!
//! The object is unlinked as soon as it is made and its memory is reserved before it is mapped, so that nothing is left
//! behind whatever ends the process, nobody else can open it, and touching it cannot fail.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::slice;

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::{CallError, SegmentName, failed, shm_open, shm_unlink};

/// A multiple of every huge page that we ask for.
const HUGE_PAGE: usize = 2 << 20;

/// Pages of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Those of the file system.
    Ordinary,
    /// Transparent huge pages, if the system grants them to shared memory that asks.
    Transparent,
    /// Reserved ones of 2 MiB. An error where none are reserved.
    Reserved,
}

/// Shared memory of this process alone.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address and a length; what is there belongs to this value.
unsafe impl Send for SharedMemory {}
// SAFETY: the same; shared references only read.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// At least `bytes` of it, zeroed and ready to write.
    pub fn new(bytes: usize, pages: PageKind) -> Result<Self, CallError> {
        Self::of_file(&nameless(pages)?, bytes, pages)
    }

    /// The same from a memory file, which the size of `/dev/shm` does not limit: for a few bytes only.
    pub(crate) fn of_memory_file(bytes: usize) -> Result<Self, CallError> {
        Self::of_file(&memory_file(MemfdFlags::CLOEXEC)?, bytes, PageKind::Ordinary)
    }

    fn of_file(fd: &OwnedFd, bytes: usize, pages: PageKind) -> Result<Self, CallError> {
        let bytes = bytes.max(1).next_multiple_of(HUGE_PAGE);
        super::ftruncate(fd, bytes)?;
        rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, bytes as u64)
            .map_err(|error| failed("fallocate", bytes)(error.into()))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping wherever the kernel likes disturbs nobody.
        let mapped = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) };
        let base = mapped.map_err(|error| failed("mmap", bytes)(error.into()))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| failed("mmap", bytes)(io::ErrorKind::InvalidData.into()))?;
        let memory = Self { base, bytes };
        if pages == PageKind::Transparent {
            // SAFETY: advice about a mapping of ours; it changes no byte.
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxHugepage) }
                .map_err(|error| failed("madvise", bytes)(error.into()))?;
        }
        Ok(memory)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped by this value, and reachable through it alone: the object has no name.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }

    /// Its bytes, to change.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the same, and this value is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }
}

fn nameless(pages: PageKind) -> Result<OwnedFd, CallError> {
    if pages == PageKind::Reserved {
        return memory_file(MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
    }
    let name = SegmentName::new();
    let fd = shm_open(&name)?;
    shm_unlink(&name)?;
    Ok(fd)
}

fn memory_file(flags: MemfdFlags) -> Result<OwnedFd, CallError> {
    rustix::fs::memfd_create(c"kvcached-bench", flags).map_err(|error| failed("memfd_create", 0)(error.into()))
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping that `new` made, whole, which nobody uses any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_there_and_zeroed_and_leaves_nothing() {
        let mut memory = SharedMemory::new(100, PageKind::Ordinary).unwrap();
        assert!(memory.bytes().len() >= 100 && memory.bytes().iter().all(|&byte| byte == 0));
        memory.bytes_mut().fill(7);
        assert!(memory.bytes().iter().all(|&byte| byte == 7));
    }

    #[test]
    fn more_than_there_is_fails_before_it_is_touched() {
        let error = SharedMemory::new(1 << 45, PageKind::Ordinary).unwrap_err();
        assert_eq!((error.call, error.source.kind()), ("fallocate", io::ErrorKind::StorageFull));
    }
}
