//! How often this process holds each shared block.
//!
//! A shared block's word has one bit for each process, which is what recovery after a death needs: it can be cleared
//! without knowing how often the dead one had counted. The counts themselves are private and die with their process.
//! A lock for each part of them orders the first and the last hold of a block; other blocks do not meet in it often.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::handle::Handle;

const PARTS: usize = 64;

#[derive(Debug)]
pub(super) struct Holds([Mutex<HashMap<u64, u32>>; PARTS]);

impl Default for Holds {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }
}

impl Holds {
    /// The counts of the part that a handle belongs to, for as long as its bit is looked at or changed.
    pub(super) fn part(&self, handle: Handle) -> MutexGuard<'_, HashMap<u64, u32>> {
        // Any spread will do; neighbours go to different parts.
        let mixed = handle.to_bits().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
        self.0[mixed as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}
