//! The bytes of a block.
//!
//! Other threads and other processes can reach them at any time, so no reference to them is handed out safely. What is
//! safe is copying in and out, done with relaxed atomics: a copy that races with another gives a mixture of bytes, never
//! undefined behaviour. Whoever knows that a block is his alone, or that nobody writes it, may take a slice and says so
//! with `unsafe`. The memory stays mapped as long as the attachment does, whatever becomes of the block.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::attachment::Attachment;
use super::error::HandleError;

/// A block that was held when it was looked up.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    start: NonNull<u8>,
    bytes: usize,
    attachment: PhantomData<&'a Attachment>,
}

// SAFETY: it is an address and a length; the methods that access memory do so with atomics or are unsafe.
unsafe impl Send for Block<'_> {}
// SAFETY: as above.
unsafe impl Sync for Block<'_> {}

impl<'a> Block<'a> {
    pub(super) fn new(start: NonNull<u8>, bytes: usize) -> Self {
        Self { start, bytes, attachment: PhantomData }
    }

    /// How many bytes there are: at least what was asked for.
    #[expect(clippy::len_without_is_empty, reason = "no block is empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Where they are in this process. Valid until the arena is dropped; whether the bytes are still this block's is the
    /// caller's to know.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Copies bytes into the block.
    pub fn copy_in(&self, offset: usize, from: &[u8]) -> Result<(), HandleError> {
        self.check(offset, from.len())?;
        let (bytes, words, rest) = self.atomics(offset, from.len());
        let (first, from) = from.split_at(bytes.len());
        let (middle, last) = from.split_at(words.len() * 8);
        bytes.iter().zip(first).chain(rest.iter().zip(last)).for_each(|(to, byte)| to.store(*byte, Ordering::Relaxed));
        for (to, chunk) in words.iter().zip(middle.chunks_exact(8)) {
            let word = chunk.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
            to.store(word.to_le(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies bytes out of the block.
    pub fn copy_out(&self, offset: usize, to: &mut [u8]) -> Result<(), HandleError> {
        self.check(offset, to.len())?;
        let (bytes, words, rest) = self.atomics(offset, to.len());
        let (first, to) = to.split_at_mut(bytes.len());
        let (middle, last) = to.split_at_mut(words.len() * 8);
        bytes
            .iter()
            .zip(first)
            .chain(rest.iter().zip(last))
            .for_each(|(from, byte)| *byte = from.load(Ordering::Relaxed));
        for (from, chunk) in words.iter().zip(middle.chunks_exact_mut(8)) {
            chunk.copy_from_slice(&u64::from_le(from.load(Ordering::Relaxed)).to_le_bytes());
        }
        Ok(())
    }

    /// The bytes, for reading in place.
    ///
    /// # Safety
    ///
    /// For as long as the slice lives, nobody in any process writes to the block, and it is not freed.
    pub unsafe fn as_slice(&self) -> &'a [u8] {
        // SAFETY: mapped, and unchanged by the caller's promise.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }

    /// The bytes, for writing in place.
    ///
    /// # Safety
    ///
    /// For as long as the slice lives, nobody else in any process accesses the block, and it is not freed.
    pub unsafe fn as_mut_slice(&self) -> &'a mut [u8] {
        // SAFETY: mapped, and nobody else's by the caller's promise.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }

    fn check(&self, offset: usize, bytes: usize) -> Result<(), HandleError> {
        let end = offset.checked_add(bytes).ok_or(HandleError::BeyondEnd)?;
        if end <= self.bytes { Ok(()) } else { Err(HandleError::BeyondEnd) }
    }

    /// A part of the block as atomics: bytes up to a multiple of 8, words, the bytes that are left.
    fn atomics(&self, offset: usize, bytes: usize) -> (&[AtomicU8], &[AtomicU64], &[AtomicU8]) {
        // SAFETY: every caller has checked that the part lies inside the block.
        let first = unsafe { self.start.add(offset) };
        // SAFETY: the block is mapped, and atomics may be shared with anybody.
        let all = unsafe { slice::from_raw_parts(first.as_ptr().cast::<AtomicU8>(), bytes) };
        // SAFETY: eight atomic bytes that are aligned are an atomic word: same memory, same permission to change it.
        unsafe { all.align_to::<AtomicU64>() }
    }
}

/// Copies the beginning of one block to another.
pub(super) fn copy_between(from: Block<'_>, to: Block<'_>, bytes: usize) {
    let bytes = bytes.min(from.bytes).min(to.bytes);
    // Blocks begin at a grain, so there are no bytes before the first word.
    let (_, from, _) = from.atomics(0, bytes.next_multiple_of(8).min(from.bytes));
    let (_, to, _) = to.atomics(0, bytes.next_multiple_of(8).min(to.bytes));
    for (from, to) in from.iter().zip(to) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}
