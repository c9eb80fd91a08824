//! tidekv-fork: what happens to our memory and our locks when the engine forks.
//!
//! A forked child inherits descriptors and mappings. Without care it would keep the parent's memory file (and with it
//! every page) alive for its whole life, hold the locks by which neighbours know the parent to be alive, and its
//! destructors would unmap addresses that are not its own. So:
//!
//! ```text
//!   parent                                   child, before fork() returns there
//!   ------                                   ----------------------------------
//!   Birth::here()      registers a handler   generation += 1     every older Birth is now foreign
//!   ClosedInChild(fd)  registers the fd      close(fd)           file and lock have one owner again
//!   madvise(DONTFORK)  on every mapping      (no mapping)        the pages have one owner again
//! ```
//!
//! A fork between opening a descriptor and registering it would escape all that, so both happen behind a gate
//! ([`ClosedInChild::open`]): a fork waits a moment for those inside it, and they wait for a fork.
//!
//! The child's handler runs in the child alone, where there is one thread. It only loads and stores atomics and closes
//! descriptors, which is all that is allowed between `fork` and `exec` of a threaded process. Children that are started
//! without handlers (`posix_spawn`, `vfork`) exec at once: every descriptor here is close-on-exec too.
//!
//! The other way round, [`end_with_parent`] makes a child end when the one that started it does.
//!
//! A crate of its own because two that must not know each other need the same table: `tidekv-mem` for memory files,
//! `tidekv-shm` for locks. This crate is one of the few that may use `unsafe`.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

static GENERATION: AtomicU64 = AtomicU64::new(0);
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
static REGISTER: Once = Once::new();

/// Threads inside the gate, and threads in the middle of `fork`. One side announces itself, then looks at the other.
static INSIDE: AtomicU32 = AtomicU32::new(0);
static FORKING: AtomicU32 = AtomicU32::new(0);

const FREE: RawFd = -1;
/// How long a fork waits for those inside the gate, who need microseconds. A fork must not hang because an open does.
const GATE_WAIT: Duration = Duration::from_millis(100);

/// A descriptor to close in children. Slots are never deallocated, so the handler can walk them at any moment.
#[derive(Debug)]
struct Slot {
    fd: AtomicI32,
    /// Written once, before the slot is published.
    next: AtomicPtr<Slot>,
}

/// Which process something was made in.
#[derive(Clone, Copy, Debug)]
pub struct Birth(u64);

impl Birth {
    /// Made here and now.
    pub fn here() -> Self {
        REGISTER.call_once(|| {
            // SAFETY: the handlers are plain functions that live for ever, and the child's keeps to async-signal-safe
            // calls. Failure (no memory) leaves forked children as they would be without us.
            unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
        });
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Whether this process is a fork of the one it was made in.
    #[inline]
    pub fn is_foreign(self) -> bool {
        self.0 != GENERATION.load(Ordering::Relaxed)
    }
}

extern "C" fn before_fork() {
    FORKING.fetch_add(1, Ordering::SeqCst);
    if INSIDE.load(Ordering::SeqCst) == 0 {
        return;
    }
    let deadline = Instant::now() + GATE_WAIT;
    while INSIDE.load(Ordering::SeqCst) > 0 && Instant::now() < deadline {
        std::thread::yield_now();
    }
}

extern "C" fn in_parent() {
    FORKING.fetch_sub(1, Ordering::SeqCst);
}

extern "C" fn in_child() {
    // The other threads of the parent are not here.
    FORKING.store(0, Ordering::SeqCst);
    INSIDE.store(0, Ordering::SeqCst);
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

/// While it lives, no fork happens in this process (for at most [`GATE_WAIT`]).
#[derive(Debug)]
struct Gate(Birth);

impl Gate {
    fn enter() -> Self {
        loop {
            INSIDE.fetch_add(1, Ordering::SeqCst);
            if FORKING.load(Ordering::SeqCst) == 0 {
                return Self(Birth::here());
            }
            INSIDE.fetch_sub(1, Ordering::SeqCst);
            std::thread::yield_now();
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // A child that was forked inside the gate after all counts from zero.
        if !self.0.is_foreign() {
            INSIDE.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// A descriptor that forked children close at once and never use.
#[derive(Debug)]
pub struct ClosedInChild {
    fd: Option<OwnedFd>,
    slot: &'static Slot,
    birth: Birth,
}

impl ClosedInChild {
    /// Opens a descriptor and takes it over, with no fork in between. It should be close-on-exec as well, for children
    /// that are started without `fork`. The closure should only open: forks of other threads wait for it.
    pub fn open<E>(open: impl FnOnce() -> Result<OwnedFd, E>) -> Result<Self, E> {
        // The handlers are there before the gate is used.
        Birth::here();
        let _gate = Gate::enter();
        open().map(Self::new)
    }

    /// Takes over a descriptor whose copy in a child that was forked just now would do no harm.
    pub fn new(fd: OwnedFd) -> Self {
        let birth = Birth::here();
        let slot = take_slot(fd.as_raw_fd());
        Self { fd: Some(fd), slot, birth }
    }

    /// Whether this process is a fork of the one that opened it, so that the descriptor is closed here.
    pub fn is_foreign(&self) -> bool {
        self.birth.is_foreign()
    }
}

impl AsFd for ClosedInChild {
    /// In a forked child the number may be closed or someone else's by now: ask [`Self::is_foreign`] first.
    fn as_fd(&self) -> BorrowedFd<'_> {
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
            let _gate = Gate::enter();
            self.slot.fd.store(FREE, Ordering::Relaxed);
            drop(fd);
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

/// Has the child that this command starts be told to end (SIGTERM) when the *thread* that started it is gone, whatever that
/// one died of. Start it from a thread that lives as long as the child may.
pub fn end_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let in_child = move || {
        // SAFETY: the call takes a number and touches no memory.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) } == -1 {
            return Err(std::io::Error::last_os_error());
        }
        // It may have died before the call above. Had it, somebody else is the parent now.
        // SAFETY: it cannot fail and touches nothing.
        if u32::try_from(unsafe { libc::getppid() }) != Ok(parent) {
            return Err(std::io::Error::from_raw_os_error(libc::ECANCELED));
        }
        Ok(())
    };
    // SAFETY: between `fork` and `exec` it makes two system calls that are async-signal-safe, allocates nothing (errors are
    // numbers) and takes no lock.
    unsafe { command.pre_exec(in_child) };
}
