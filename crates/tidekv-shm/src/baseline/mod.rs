//! What the arena is measured against: one shared-memory object for each block, by three system calls.
//!
//! ```text
//!   shm_open -> ftruncate -> mmap -> touch        what a block costs without an arena
//!   munmap -> close -> shm_unlink                 and to be rid of it
//! ```
//!
//! Each call is a function of its own, so that a benchmark can time it alone; none does anything beside it. The loops
//! that touch memory are here too, one for both sides, because they need `unsafe` and must be equal.
//!
//! Objects are called `kvcached-bench-<user>-<process>-<number>` and belong to this user alone. Nothing but benchmarks
//! makes them; [`left_behind`] finds those that a benchmark was asked to leave.

mod memory;
mod names;

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags};

use crate::arena::{AllocError, Arena, HandleError, LocalArena};

pub use memory::{PageKind, SharedMemory};
pub use names::{LeftSegment, SegmentName, foreign_benchmarks, left_behind};

const PAGE: usize = 4096;

/// A call of the baseline that failed.
#[derive(Debug, thiserror::Error)]
#[error("{call} of {bytes} bytes failed")]
pub struct CallError {
    /// Its name.
    pub call: &'static str,
    /// Bytes it was about; 0 where it is about none.
    pub bytes: usize,
    /// What the operating system says.
    #[source]
    pub source: io::Error,
}

fn failed(call: &'static str, bytes: usize) -> impl FnOnce(io::Error) -> CallError {
    move |source| CallError { call, bytes, source }
}

/// How much of a block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// Nothing.
    Nothing,
    /// Its first byte.
    First,
    /// A byte of every page.
    Pages,
    /// Every byte.
    Bytes,
}

impl Touch {
    /// # Safety
    ///
    /// `bytes` bytes from `base` on are mapped and nobody else accesses them for the time of the call.
    unsafe fn write(self, base: NonNull<u8>, bytes: usize) {
        let step = match self {
            Self::Nothing => return,
            Self::First => bytes.max(1),
            Self::Pages => PAGE,
            Self::Bytes => {
                // SAFETY: the caller's promise.
                unsafe { ptr::write_bytes(base.as_ptr(), 0xA5, bytes) };
                return;
            }
        };
        for offset in (0..bytes).step_by(step) {
            // SAFETY: inside the range. Volatile, so that the compiler cannot do without it.
            unsafe { base.as_ptr().wrapping_add(offset).write_volatile(0xA5) };
        }
    }
}

/// `shm_open`: a new object under this name.
pub fn shm_open(name: &SegmentName) -> Result<OwnedFd, CallError> {
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_RDWR;
    // SAFETY: the name is a C string.
    let fd = unsafe { libc::shm_open(name.as_c_str().as_ptr(), flags, 0o600) };
    if fd < 0 {
        return Err(failed("shm_open", 0)(io::Error::last_os_error()));
    }
    // SAFETY: the call has just made it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// `ftruncate`: the object has this many bytes.
pub fn ftruncate(fd: &OwnedFd, bytes: usize) -> Result<(), CallError> {
    rustix::fs::ftruncate(fd, bytes as u64).map_err(|error| failed("ftruncate", bytes)(error.into()))
}

/// `mmap`: the object is memory of this process.
pub fn mmap(fd: &OwnedFd, bytes: usize) -> Result<Mapping, CallError> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping wherever the kernel likes disturbs nobody.
    let mapped = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, fd, 0) };
    let base = mapped.map_err(|error| failed("mmap", bytes)(error.into()))?;
    let base = NonNull::new(base.cast()).ok_or_else(|| failed("mmap", bytes)(io::ErrorKind::InvalidData.into()))?;
    Ok(Mapping { base, bytes })
}

/// `shm_unlink`: the name is free again.
pub fn shm_unlink(name: &SegmentName) -> Result<(), CallError> {
    // SAFETY: the name is a C string.
    if unsafe { libc::shm_unlink(name.as_c_str().as_ptr()) } == 0 {
        return Ok(());
    }
    Err(failed("shm_unlink", 0)(io::Error::last_os_error()))
}

/// Memory of a shared object, until it is unmapped or dropped.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address and a length; what is there belongs to this value.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Writes some of it. There must be memory for it in the file system: where there is none, the process ends.
    pub fn touch(&mut self, touch: Touch) {
        // SAFETY: mapped by this value, which is borrowed exclusively; the object's name is ours alone.
        unsafe { touch.write(self.base, self.bytes) };
    }

    /// `munmap`.
    pub fn munmap(self) -> Result<(), CallError> {
        let (base, bytes) = (self.base, self.bytes);
        std::mem::forget(self);
        // SAFETY: the mapping that `mmap` made, whole, which nobody uses any more.
        unsafe { rustix::mm::munmap(base.as_ptr().cast(), bytes) }
            .map_err(|error| failed("munmap", bytes)(error.into()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: as in `munmap`. Failure leaves a mapping behind, which a benchmark's end removes.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// Why a pair of the arena failed.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// Allocating did.
    #[error("allocating failed")]
    Alloc(#[from] AllocError),
    /// Finding or freeing the block did.
    #[error("the block that was just allocated is refused")]
    Handle(#[from] HandleError),
}

/// Allocates from the arena, touches and frees, once for each of `sizes`, in order.
pub fn arena_pairs(arena: &Arena, local: &mut LocalArena, sizes: &[usize], touch: Touch) -> Result<(), PairError> {
    for &bytes in sizes {
        let handle = local.alloc(bytes)?;
        if touch != Touch::Nothing {
            let base = arena.address(handle)?;
            // SAFETY: a block of at least this many bytes that was allocated just now; nobody else knows its handle.
            unsafe { touch.write(base, bytes) };
        }
        local.free(std::hint::black_box(handle))?;
    }
    Ok(())
}

/// Bytes that the file system of shared-memory objects has left.
pub fn free_bytes() -> io::Result<u64> {
    let found = rustix::fs::statvfs(names::FOLDER)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_by_system_calls_from_open_to_unlink() {
        let name = SegmentName::new();
        let fd = shm_open(&name).unwrap();
        assert!(name.path().exists());
        let again = shm_open(&name).unwrap_err();
        assert_eq!((again.call, again.source.kind()), ("shm_open", io::ErrorKind::AlreadyExists));
        ftruncate(&fd, 3 * PAGE).unwrap();
        let mut mapping = mmap(&fd, 3 * PAGE).unwrap();
        for touch in [Touch::Nothing, Touch::First, Touch::Pages, Touch::Bytes] {
            mapping.touch(touch);
        }
        mapping.munmap().unwrap();
        drop(fd);
        assert!(
            left_behind(names::FOLDER.as_ref()).unwrap().iter().any(|left| left.path == name.path() && left.running)
        );
        shm_unlink(&name).unwrap();
        assert!(!name.path().exists());
        assert_eq!(shm_unlink(&name).unwrap_err().call, "shm_unlink");
    }

    #[test]
    fn mapping_nothing_is_an_error() {
        let name = SegmentName::new();
        let fd = shm_open(&name).unwrap();
        shm_unlink(&name).unwrap();
        assert_eq!(mmap(&fd, 0).unwrap_err().call, "mmap");
        assert!(free_bytes().unwrap() > 0);
    }
}
