//! Memory that two processes share: made and sealed by one, checked and mapped by the other.
//!
//! Why touching it can never raise SIGBUS, whatever the other side does:
//!
//! | danger | why not |
//! | --- | --- |
//! | the file is cut short | `F_SEAL_SHRINK`, looked at before mapping; a seal cannot be broken |
//! | no memory for a page at first touch | `fallocate` committed all of it when the file was made |
//! | too short from the start | its size is compared with the layout |
//!
//! Why references into it are sound although another process writes there: every byte is part of an atomic
//! ([`AllAtomic`]), and atomics are valid for any bit pattern.

use std::marker::PhantomData;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use tidekv_fork::Birth;

use super::RingError;

/// What may lie in memory that other processes write to.
///
/// # Safety
/// Every byte of the type belongs to an atomic, so there is no padding; its alignment is at most a page's.
pub(super) unsafe trait AllAtomic {}

/// A mapping of a `T`, unmapped on drop.
#[derive(Debug)]
pub(super) struct Memory<T> {
    base: NonNull<T>,
    birth: Birth,
    contents: PhantomData<T>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and everything in it is an atomic.
unsafe impl<T: AllAtomic> Send for Memory<T> {}
// SAFETY: as above; all access is through atomics.
unsafe impl<T: AllAtomic> Sync for Memory<T> {}

impl<T: AllAtomic> Memory<T> {
    const BYTES: usize = size_of::<T>();

    /// New memory, all zero.
    pub(super) fn create(name: &str) -> Result<(Self, OwnedFd), RingError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create(name, flags).map_err(os("memfd_create"))?;
        retry(|| fallocate(&file, FallocateFlags::empty(), 0, Self::BYTES as u64)).map_err(os("fallocate"))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(os("fcntl"))?;
        Ok((Self::attach(&file)?, file))
    }

    /// Memory that somebody else made.
    pub(super) fn attach(file: &OwnedFd) -> Result<Self, RingError> {
        // Only memory files have seals at all, so this also refuses pipes, sockets and files that can be truncated.
        let is_sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let has_size = fstat(file).is_ok_and(|stat| u64::try_from(stat.st_size) == Ok(Self::BYTES as u64));
        if !is_sealed || !has_size {
            return Err(RingError::NotARing);
        }
        let birth = Birth::here();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: no address is asked for, so nothing that is mapped is replaced. The file is BYTES long and sealed,
        // both checked above, so every byte of the mapping has a page of the file behind it for good.
        let base = unsafe { mmap(ptr::null_mut(), Self::BYTES, protection, MapFlags::SHARED, file.as_fd(), 0) };
        let base = base.map_err(os("mmap"))?;
        let memory = Self { base: NonNull::new(base.cast()).ok_or(RingError::NotARing)?, birth, contents: PhantomData };
        // SAFETY: this is the mapping that was just made; the advice keeps it out of forked children, where `Memory`
        // is foreign and does not touch it.
        unsafe { madvise(base, Self::BYTES, Advice::LinuxDontFork) }.map_err(os("madvise"))?;
        Ok(memory)
    }

    /// What is there; an error in a forked child, which has no part in it.
    pub(super) fn get(&self) -> Result<&T, RingError> {
        if self.birth.is_foreign() {
            return Err(RingError::Forked);
        }
        // SAFETY: the base is page-aligned, BYTES long, not null, and mapped until drop in this process, which is the
        // one that mapped it. `T` is `AllAtomic`, so any contents are valid and others may write at any moment.
        Ok(unsafe { self.base.as_ref() })
    }
}

impl<T> Drop for Memory<T> {
    fn drop(&mut self) {
        if !self.birth.is_foreign() {
            // SAFETY: the mapping is ours, and every reference into it borrows from `self`. It cannot fail on a
            // whole mapping; if it did, memory would be kept and nothing else.
            let _ = unsafe { munmap(self.base.as_ptr().cast(), size_of::<T>()) };
        }
    }
}

fn os(call: &'static str) -> impl FnOnce(Errno) -> RingError {
    move |source| RingError::Os { call, source }
}

fn retry(mut call: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}
