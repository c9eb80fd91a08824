//! What happens to our memory when the engine forks.
//!
//! A forked child inherits descriptors and mappings. Without care it would keep the parent's memory file (and with it
//! every page) alive for its whole life, and its destructors would unmap addresses that are not its own. So:
//!
//! ```text
//!   parent                                   child, before fork() returns there
//!   ------                                   ----------------------------------
//!   Birth::here()      registers a handler   generation += 1     every older Birth is now foreign
//!   ClosedInChild(fd)  registers the fd      close(fd)           the memory file has one owner again
//!   madvise(DONTFORK)  on every mapping      (no mapping)        the pages have one owner again
//! ```
//!
//! The handler runs in the child alone, where there is one thread. It only loads and stores atomics and closes
//! descriptors, which is all that is allowed between `fork` and `exec` of a threaded process.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
static REGISTER: Once = Once::new();

const FREE: RawFd = -1;

/// A descriptor to close in children. Slots are never deallocated, so the handler can walk them at any moment.
#[derive(Debug)]
struct Slot {
    fd: AtomicI32,
    /// Written once, before the slot is published.
    next: AtomicPtr<Slot>,
}

/// Which process something was made in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Birth(u64);

impl Birth {
    /// Made here and now.
    pub(crate) fn here() -> Self {
        REGISTER.call_once(|| {
            // SAFETY: the handler is a plain function that lives for ever and keeps to async-signal-safe calls.
            // Its failure (no memory) leaves forked children as they would be without us.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        });
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this process is a fork of the one it was made in.
    pub(crate) fn is_foreign(self) -> bool {
        self.0 != GENERATION.load(Ordering::Relaxed)
    }
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let mut slot = SLOTS.load(Ordering::Acquire).cast_const();
    // SAFETY: every slot was leaked from a box before it was published with Release, and is never freed.
    while let Some(this) = unsafe { slot.as_ref() } {
        let fd = this.fd.swap(FREE, Ordering::Relaxed);
        if fd != FREE {
            // SAFETY: the slot held a descriptor that a `ClosedInChild` owns; in this process that owner is foreign
            // and will neither use nor close it.
            unsafe { libc::close(fd) };
        }
        slot = this.next.load(Ordering::Relaxed).cast_const();
    }
}

/// A descriptor that forked children close at once and never use.
#[derive(Debug)]
pub(crate) struct ClosedInChild {
    fd: Option<OwnedFd>,
    slot: &'static Slot,
    birth: Birth,
}

impl ClosedInChild {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        let birth = Birth::here();
        let slot = take_slot(fd.as_raw_fd());
        Self { fd: Some(fd), slot, birth }
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("present until drop").as_fd()
    }
}

impl Drop for ClosedInChild {
    fn drop(&mut self) {
        let fd = self.fd.take();
        if self.birth.is_foreign() {
            // The handler closed it; the number may be someone else's by now.
            std::mem::forget(fd);
        } else {
            self.slot.fd.store(FREE, Ordering::Relaxed);
        }
    }
}

fn take_slot(fd: RawFd) -> &'static Slot {
    let mut slot = SLOTS.load(Ordering::Acquire).cast_const();
    // SAFETY: as in `in_child`.
    while let Some(this) = unsafe { slot.as_ref() } {
        if this.fd.compare_exchange(FREE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            return this;
        }
        slot = this.next.load(Ordering::Relaxed).cast_const();
    }
    let new: &'static Slot =
        Box::leak(Box::new(Slot { fd: AtomicI32::new(fd), next: AtomicPtr::new(ptr::null_mut()) }));
    let publish = |head| {
        new.next.store(head, Ordering::Relaxed);
        Some(ptr::from_ref(new).cast_mut())
    };
    // Cannot fail: the closure always has a new head.
    let _ = SLOTS.fetch_update(Ordering::AcqRel, Ordering::Acquire, publish);
    new
}
