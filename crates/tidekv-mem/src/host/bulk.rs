//! Much ordinary memory of the machine at once, for bytes that leave a device for a while.
//!
//! ```text
//!   take    [ ........ addresses ........ ]     one mmap; refused where the machine has no room for it
//!   fill    [ bytes | bytes | ... | bytes ]     whoever writes a page first brings it in: split it up, and threads do that side by side
//!   drop    gone, all of it
//! ```
//!
//! A first touch costs the kernel more than copying the bytes does, so a filler with one thread waits for the kernel most of the time.
//! Huge pages are asked for: a five-hundredth of the touches. As with [pages](super), room is looked for beforehand, because
//! a kernel that runs out of memory later does not fail the write, it kills someone.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use tidekv_core::units::Bytes;

use super::{budget, system_memory};
use crate::{MemError, MemoryInfo};

/// Host memory for much at once, zero at first.
#[derive(Debug)]
pub struct BulkMemory {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory with one owner; the pointer is not tied to a thread.
unsafe impl Send for BulkMemory {}
// SAFETY: shared references only read.
unsafe impl Sync for BulkMemory {}

impl BulkMemory {
    /// Takes `bytes` (at least one).
    ///
    /// # Errors
    /// [`MemError::OutOfMemory`] when the machine or the control group has no room for them.
    pub fn take(bytes: Bytes) -> Result<Self, MemError> {
        Self::take_of(bytes, system_memory::read()?)
    }

    fn take_of(wanted: Bytes, machine: MemoryInfo) -> Result<Self, MemError> {
        let wanted = wanted.max(Bytes(1));
        let free = machine.free.saturating_sub(budget::headroom(machine.total));
        let refused = || MemError::OutOfMemory { wanted, free: Some(free) };
        let bytes = usize::try_from(wanted.0).map_err(|_| refused())?;
        if free < wanted {
            return Err(refused());
        }
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base =
            unsafe { mmap_anonymous(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }
                .map_err(|error| match error {
                    Errno::NOMEM => MemError::OutOfMemory { wanted, free: None },
                    error => MemError::system("mmap", "taking memory of the host", error),
                })?;
        let memory = Self { base: NonNull::new(base.cast()).expect("a mapping has an address"), bytes };
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontFork] {
            // SAFETY: a mapping of our own. Wishes: without huge pages it is slower, and a child that shares it is only wasteful.
            let _ = unsafe { madvise(memory.base.as_ptr().cast::<c_void>(), bytes, advice) };
        }
        Ok(memory)
    }

    /// All of it.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `bytes` bytes of a mapping that lives as long as `self`, zero or written through `as_mut_slice`, which needs `&mut`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }

    /// All of it, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }
}

impl Drop for BulkMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `take_of`, of this length, and unmapped once; borrows of it have ended. It cannot fail for a whole mapping.
        let _ = unsafe { munmap(self.base.as_ptr().cast::<c_void>(), self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: MemoryInfo = MemoryInfo { total: Bytes::gib(8), free: Bytes::gib(1) };

    #[test]
    fn it_is_zero_then_what_was_written() {
        let mut memory = BulkMemory::take_of(Bytes(10_000_001), MACHINE).unwrap();
        assert!(memory.as_slice().len() == 10_000_001 && memory.as_slice().iter().all(|&byte| byte == 0));
        std::thread::scope(|scope| {
            for (number, piece) in (1u8..).zip(memory.as_mut_slice().chunks_mut(4_000_000)) {
                scope.spawn(move || piece.fill(number));
            }
        });
        assert_eq!([0, 3_999_999, 4_000_000, 10_000_000].map(|at| memory.as_slice()[at]), [1, 1, 2, 3]);
    }

    /// The kernel would promise it, and kill somebody when it is touched.
    #[test]
    fn what_the_machine_has_no_room_for_is_refused() {
        let headroom = budget::headroom(MACHINE.total);
        let refused = BulkMemory::take_of(MACHINE.free, MACHINE).unwrap_err();
        let left = MACHINE.free.saturating_sub(headroom);
        assert!(
            matches!(refused, MemError::OutOfMemory { wanted, free } if (wanted, free) == (MACHINE.free, Some(left))),
            "{refused}"
        );
        drop(BulkMemory::take_of(left, MACHINE).unwrap());
        let total = system_memory::read().unwrap().total;
        assert!(BulkMemory::take(Bytes(total.0 + 1)).unwrap_err().is_out_of_memory());
    }
}
