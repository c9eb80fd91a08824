//! CRC-32C of what is copied, in one pass over memory.
//!
//! ```text
//!   source    | 8 KiB | 8 KiB | 8 KiB |        each piece is summed, which brings it into the nearest cache,
//!                 └ sum, then copy ─┘          and then copied from there
//! ```
//!
//! Somebody who writes to the source meanwhile, against the rules, gets a sum that does not fit the copy: the sum is a
//! witness of what the source was, and a reader of the copy will notice.

use super::Method;

/// Half of the smallest first-level cache that we expect to meet, so that source and destination fit.
const PIECE: usize = 8 << 10;

/// Copies, and answers the CRC-32C of the bytes.
///
/// # Safety
///
/// That of [`Method::copy_unchecked`].
pub(super) unsafe fn copy(method: Method, destination: *mut u8, source: *const u8, len: usize) -> u32 {
    let mut sum = 0;
    let mut done = 0;
    while done < len {
        let piece = PIECE.min(len - done);
        let (to, from) = (destination.wrapping_add(done), source.wrapping_add(done));
        // SAFETY: a piece of the source, which nobody writes to for the time of the call.
        let bytes = unsafe { std::slice::from_raw_parts(from, piece) };
        sum = crc32c::crc32c_append(sum, bytes);
        // SAFETY: a piece of the two ranges.
        unsafe { method.copy_unchecked(to, from, piece) };
        done += piece;
    }
    sum
}

/// The sum of parts that stand one behind the other, each given by its sum and its length.
pub(super) fn of_parts(parts: impl Iterator<Item = (u32, usize)>) -> u32 {
    parts.fold(0, |whole, (sum, len)| crc32c::crc32c_combine(whole, sum, len))
}

/// The CRC-32C of `bytes`, as [`Copier::copy_crc32c`](super::Copier::copy_crc32c) answers it.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}
