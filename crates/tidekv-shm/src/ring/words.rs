//! A handful of words that processes can wake each other with, and nothing else: the least that shared memory can do.
//! It is what the ring is measured against.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::thread::futex::{self, Flags};

use super::memory::{AllAtomic, Memory};
use super::{RingError, futex_wait};

/// How many there are.
pub const FUTEX_WORDS: usize = 64;

#[repr(C, align(64))]
#[derive(Debug)]
struct Line {
    word: AtomicU32,
    unused: [AtomicU32; 15],
}

// SAFETY: sixteen words of four bytes on a line of 64; nothing else, no padding.
unsafe impl AllAtomic for [Line; FUTEX_WORDS] {}

/// Words in shared memory, each on a cache line of its own.
#[derive(Debug)]
pub struct FutexWords(Memory<[Line; FUTEX_WORDS]>);

impl FutexWords {
    /// New words, all 0, and the descriptor to pass on.
    pub fn create() -> Result<(Self, OwnedFd), RingError> {
        let (memory, file) = Memory::create("tidekv-words")?;
        Ok((Self(memory), file))
    }

    /// Words that somebody else made.
    pub fn attach(file: &OwnedFd) -> Result<Self, RingError> {
        Memory::attach(file).map(Self)
    }

    /// The value of word `at`.
    pub fn load(&self, at: usize) -> Result<u32, RingError> {
        Ok(self.word(at)?.load(Ordering::SeqCst))
    }

    /// Sets word `at` and wakes whoever waits for it.
    pub fn store_and_wake(&self, at: usize, value: u32) -> Result<(), RingError> {
        let word = self.word(at)?;
        word.store(value, Ordering::SeqCst);
        futex::wake(word, Flags::empty(), 1).map_err(|source| RingError::Os { call: "futex", source })?;
        Ok(())
    }

    /// Waits until word `at` is not `seen`, or the time is over, or something woke us for nothing.
    pub fn wait(&self, at: usize, seen: u32, timeout: Duration) -> Result<(), RingError> {
        futex_wait(self.word(at)?, seen, timeout)
    }

    fn word(&self, at: usize) -> Result<&AtomicU32, RingError> {
        Ok(&self.0.get()?[at].word)
    }
}
