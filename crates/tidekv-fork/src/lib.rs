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
//! ([`ClosedInChild::open`]): a fork waits for the threads inside it, however long they take, and they wait for a fork. Inside
//! there is one system call, which waits for no other thread of this process, so neither side can wait for the other for ever.
//!
//! The child's handler runs in the child alone, where there is one thread. It only loads and stores atomics and closes
//! descriptors, which is all that is allowed between `fork` and `exec` of a threaded process. Children that are started
//! without handlers (`posix_spawn`, `vfork`) exec at once: every descriptor here is close-on-exec too.
//!
//! The other way round, [`end_with_parent`] makes a child end when the one that started it does.
//!
//! A crate of its own because two that must not know each other need the same table: `tidekv-mem` for memory files,
//! `tidekv-shm` for locks. This crate is one of the few that may use `unsafe`.

use std::cell::Cell;
use std::convert::Infallible;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

static GENERATION: AtomicU64 = AtomicU64::new(0);
static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
static REGISTER: Once = Once::new();

/// Threads inside the gate, and threads in the middle of `fork`. One side announces itself, then looks at the other, and
/// sleeps until the other's number changes.
static INSIDE: AtomicU32 = AtomicU32::new(0);
static FORKING: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// How often this thread is inside the gate.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

const FREE: RawFd = -1;
/// The slot of a descriptor that is being opened.
const OPENING: RawFd = -2;

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
    // A signal's handler that forks in the middle of an opening would wait for its own thread.
    if DEPTH.get() > 0 {
        return;
    }
    loop {
        match INSIDE.load(Ordering::SeqCst) {
            0 => return,
            inside => wait_while(&INSIDE, inside),
        }
    }
}

extern "C" fn in_parent() {
    if FORKING.fetch_sub(1, Ordering::SeqCst) == 1 {
        wake_all(&FORKING);
    }
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
        if fd >= 0 {
            // SAFETY: the slot held a descriptor that a `ClosedInChild` owns; in this process that owner is foreign
            // and will neither use nor close it.
            unsafe { libc::close(fd) };
        }
        slot = this.next.load(Ordering::Relaxed).cast_const();
    }
}

/// While it lives, no fork happens in this process.
#[derive(Debug)]
struct Gate(Birth);

impl Gate {
    fn enter() -> Self {
        // The handlers are there before the gate is used.
        let birth = Birth::here();
        if DEPTH.replace(DEPTH.get() + 1) == 0 {
            loop {
                INSIDE.fetch_add(1, Ordering::SeqCst);
                match FORKING.load(Ordering::SeqCst) {
                    0 => break,
                    forking => {
                        step_out();
                        wait_while(&FORKING, forking);
                    }
                }
            }
        }
        Self(birth)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        DEPTH.set(depth);
        // A child that was forked inside the gate by this very thread counts from zero.
        if depth == 0 && !self.0.is_foreign() {
            step_out();
        }
    }
}

fn step_out() {
    if INSIDE.fetch_sub(1, Ordering::SeqCst) == 1 && FORKING.load(Ordering::SeqCst) > 0 {
        wake_all(&INSIDE);
    }
}

/// Sleeps until somebody wakes those who wait for this word, unless it has another value already. May return early.
fn wait_while(word: &AtomicU32, value: u32) {
    let no_limit = ptr::null::<libc::timespec>();
    // SAFETY: the word is a static, aligned, and read by the kernel only; a time limit that is null is none.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG, value, no_limit)
    };
}

fn wake_all(word: &AtomicU32) {
    // SAFETY: the word's address tells the kernel whom to wake; nothing is read or written there.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG, libc::c_int::MAX)
    };
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
    /// that are started without `fork`.
    ///
    /// The closure makes the system call that opens and nothing else: forks of other threads wait until it returns. What
    /// checks, fills or locks the file does so afterwards.
    pub fn open<E>(open: impl FnOnce() -> Result<OwnedFd, E>) -> Result<Self, E> {
        // A slot may have to be allocated. A fork may hold the allocator's lock, so that happens before the gate.
        let mut held = Self { fd: None, slot: take_slot(), birth: Birth::here() };
        let _gate = Gate::enter();
        let fd = open()?;
        held.slot.fd.store(fd.as_raw_fd(), Ordering::Relaxed);
        held.fd = Some(fd);
        Ok(held)
    }

    /// Takes over a descriptor whose copy in a child that was forked just now would do no harm.
    pub fn new(fd: OwnedFd) -> Self {
        let Ok(held) = Self::open(|| Ok::<_, Infallible>(fd));
        held
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

fn take_slot() -> &'static Slot {
    let mut slot = SLOTS.load(Ordering::Acquire).cast_const();
    // SAFETY: as in `in_child`.
    while let Some(this) = unsafe { slot.as_ref() } {
        if this.fd.compare_exchange(FREE, OPENING, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            return this;
        }
        slot = this.next.load(Ordering::Relaxed).cast_const();
    }
    let new: &'static Slot =
        Box::leak(Box::new(Slot { fd: AtomicI32::new(OPENING), next: AtomicPtr::new(ptr::null_mut()) }));
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
