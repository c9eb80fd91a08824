//! Being woken when something changed, without a system call where nobody sleeps.
//!
//! ```text
//!   sleeper                                      whoever changes something
//!   seen = count                                 changes it
//!   asleep = 1                                   fence
//!   fence                                        asleep? then asleep = 0, count + 1, wake all
//!   looks again; sleeps while count is seen
//! ```
//!
//! Two fences, so one of the two sees the other: either the sleeper sees the change, or it is seen asleep. Whoever is killed
//! between clearing the flag and waking leaves a sleeper that nobody wakes; it wakes by itself after a [`SLICE`], which is
//! also how often a sleeper looks whether somebody died.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Timespec};

/// The longest sleep at a time.
pub(super) const SLICE: Duration = Duration::from_millis(50);

#[cfg(all(test, loom))]
pub(super) use loom::sync::atomic::fence;
#[cfg(not(all(test, loom)))]
pub(super) use std::sync::atomic::fence;

/// A 32-bit atomic: std's, or loom's where the protocol is checked.
pub(super) trait Atomic32 {
    fn load(&self, order: Ordering) -> u32;
    fn store(&self, value: u32, order: Ordering);
    fn add(&self, value: u32, order: Ordering);
}

macro_rules! atomic32 {
    ($type:ty) => {
        impl Atomic32 for $type {
            fn load(&self, order: Ordering) -> u32 {
                <$type>::load(self, order)
            }
            fn store(&self, value: u32, order: Ordering) {
                <$type>::store(self, value, order);
            }
            fn add(&self, value: u32, order: Ordering) {
                self.fetch_add(value, order);
            }
        }
    };
}

atomic32!(AtomicU32);
#[cfg(all(test, loom))]
atomic32!(loom::sync::atomic::AtomicU32);

/// The words, on a cache line of their own.
#[repr(C, align(64))]
#[derive(Debug)]
pub(super) struct Bell {
    count: AtomicU32,
    asleep: AtomicU32,
    unused: [AtomicU64; 7],
}

impl Bell {
    /// Something changed.
    pub(super) fn ring(&self) {
        if must_wake(&self.count, &self.asleep) {
            // It cannot fail on memory that is mapped; if it did, slices would end all the same.
            let _ = futex::wake(&self.count, Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Sleeps until somebody rings, `deadline`, or the end of a slice, unless `done` says that there is no need.
    pub(super) fn wait(&self, deadline: Instant, done: impl FnOnce() -> bool) -> Result<(), Errno> {
        let seen = announce(&self.count, &self.asleep);
        if done() {
            return Ok(());
        }
        let left = deadline.saturating_duration_since(Instant::now()).min(SLICE);
        let timeout = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match futex::wait(&self.count, Flags::empty(), seen, Some(&timeout)) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// After a change: whether somebody sleeps who has not seen it.
pub(super) fn must_wake<A: Atomic32>(count: &A, asleep: &A) -> bool {
    fence(Ordering::SeqCst);
    if asleep.load(Ordering::Relaxed) == 0 {
        return false;
    }
    asleep.store(0, Ordering::Relaxed);
    count.add(1, Ordering::Release);
    true
}

/// Before looking for the last time: what the count must be for sleep to be right.
pub(super) fn announce<A: Atomic32>(count: &A, asleep: &A) -> u32 {
    let seen = count.load(Ordering::Acquire);
    asleep.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    seen
}
