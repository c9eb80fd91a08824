//! Counts every call to the system below and can make the n-th one of a kind fail.
//!
//! All back-ends, the real ones too, pass each call through their meter, so that fault injection exercises the real
//! rollback against the real driver, and a benchmark can say how many driver calls a page costs. A call costs one
//! relaxed increment and one load.
//!
//! | call       | host                                     | cuda                |
//! |------------|------------------------------------------|---------------------|
//! | Reserve    | mmap PROT_NONE, memfd_create             | cuMemAddressReserve |
//! | Create     | fallocate                                | cuMemCreate         |
//! | Map        | mmap MAP_FIXED                           | cuMemMap            |
//! | SetAccess  | madvise DONTFORK                         | cuMemSetAccess      |
//! | Unmap      | mmap MAP_FIXED PROT_NONE, madvise        | cuMemUnmap          |
//! | Release    | fallocate PUNCH_HOLE                     | cuMemRelease        |

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::MemError;

/// Kinds of calls that a back-end makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Take address space.
    Reserve,
    /// Take physical memory.
    Create,
    /// Put it behind addresses.
    Map,
    /// Make the addresses usable.
    SetAccess,
    /// Take the memory away from its addresses.
    Unmap,
    /// Give the memory back.
    Release,
}

impl Call {
    /// Every kind, in the order of a page's life.
    pub const ALL: [Self; 6] = [Self::Reserve, Self::Create, Self::Map, Self::SetAccess, Self::Unmap, Self::Release];

    /// The name in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Create => "create",
            Self::Map => "map",
            Self::SetAccess => "set_access",
            Self::Unmap => "unmap",
            Self::Release => "release",
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Calls made by one back-end, and the failures planned for them.
#[derive(Debug, Default)]
pub struct CallMeter {
    made: [AtomicU64; Call::ALL.len()],
    /// The call number (counted like `made`, from 1) that fails; 0 for none.
    fail_at: [AtomicU64; Call::ALL.len()],
}

impl CallMeter {
    /// Calls of one kind so far, failed ones included.
    pub fn made(&self, call: Call) -> u64 {
        self.made[call as usize].load(Relaxed)
    }

    /// Calls of every kind so far.
    pub fn total(&self) -> u64 {
        Call::ALL.iter().map(|&call| self.made(call)).sum()
    }

    /// Makes the `nth` call of this kind from now fail, once: 1 is the next one.
    pub fn fail_nth(&self, call: Call, nth: u64) {
        self.fail_at[call as usize].store(self.made(call) + nth, Relaxed);
    }

    /// Forgets all planned failures.
    pub fn heal(&self) {
        for fail_at in &self.fail_at {
            fail_at.store(0, Relaxed);
        }
    }

    /// Announces a call that is about to be made.
    pub(crate) fn announce(&self, call: Call) -> Result<(), MemError> {
        let number = self.made[call as usize].fetch_add(1, Relaxed) + 1;
        if self.fail_at[call as usize].load(Relaxed) == number {
            return Err(MemError::Injected { call });
        }
        Ok(())
    }
}
