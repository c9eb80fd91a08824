//! Sixty-four bits that mean the same block in every process.
//!
//! ```text
//!   63        50 49                              20 19                  0
//!   |  segment  |           generation             |       block         |
//!      14 bits              30 bits                      20 bits
//! ```
//!
//! `block` counts grains (4 KiB by default) from the segment's start to the block's. `generation` changes each time the
//! place is allocated anew, so a handle that outlived its block is noticed; it is never 0, so no handle is 0. A handle
//! says nothing about addresses: every process adds it to the start of its own window.

use std::fmt;
use std::num::NonZeroU64;

pub(super) const BLOCK_BITS: u32 = 20;
const GENERATION_BITS: u32 = 30;
pub(super) const SEGMENT_BITS: u32 = 14;
const SEGMENT_SHIFT: u32 = BLOCK_BITS + GENERATION_BITS;
/// The largest generation; the one after it is 1.
pub(super) const GENERATION_MAX: u64 = (1 << GENERATION_BITS) - 1;
/// No arena has more segments.
pub const MAX_SEGMENTS: u32 = 1 << SEGMENT_BITS;

/// From one generation to the next.
const STEP: u64 = 1 << BLOCK_BITS;

const _: () = assert!(SEGMENT_SHIFT + SEGMENT_BITS == 64);

/// A block of an arena, in a form that can be sent to another process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(transparent)]
pub struct Handle(NonZeroU64);

impl Handle {
    /// From the number that [`Self::to_bits`] gave. Any number is accepted here except those that no handle can have;
    /// whether a block belongs to it, the arena decides.
    pub fn from_bits(bits: u64) -> Option<Self> {
        let generation = (bits >> BLOCK_BITS) & GENERATION_MAX;
        if generation == 0 { None } else { NonZeroU64::new(bits).map(Self) }
    }

    /// The number to send.
    #[inline]
    pub fn to_bits(self) -> u64 {
        self.0.get()
    }

    /// Which segment it lies in.
    #[inline]
    pub fn segment(self) -> u32 {
        // 14 bits.
        (self.to_bits() >> SEGMENT_SHIFT) as u32
    }

    /// Which allocation of its place it is.
    #[inline]
    pub fn generation(self) -> u32 {
        // Masked to 30 bits.
        ((self.to_bits() >> BLOCK_BITS) & GENERATION_MAX) as u32
    }

    /// Where in its segment it begins, in grains.
    #[inline]
    pub fn block(self) -> u32 {
        // Masked to 20 bits.
        (self.to_bits() & ((1 << BLOCK_BITS) - 1)) as u32
    }

    /// `base` is [`Self::base`] of the block's place.
    #[inline]
    pub(super) fn with_generation(base: u64, generation: u64) -> Self {
        debug_assert!((1..=GENERATION_MAX).contains(&generation));
        Self(NonZeroU64::new(base | (generation << BLOCK_BITS)).unwrap_or(NonZeroU64::MIN))
    }

    /// The handle of the next allocation of the same place.
    #[inline]
    pub(super) fn next(self) -> Self {
        let bits = self.to_bits();
        let generation = (bits >> BLOCK_BITS) & GENERATION_MAX;
        // Generation 0 is left out, so that no handle is 0.
        let bits = if generation == GENERATION_MAX { bits - ((GENERATION_MAX - 1) << BLOCK_BITS) } else { bits + STEP };
        Self(NonZeroU64::new(bits).unwrap_or(NonZeroU64::MIN))
    }

    /// The bits of a place, without a generation.
    pub(super) fn base(segment: u64, block: u64) -> u64 {
        debug_assert!(segment < 1 << SEGMENT_BITS && block < 1 << BLOCK_BITS);
        (segment << SEGMENT_SHIFT) | block
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({}:{}.{})", self.segment(), self.block(), self.generation())
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x}", self.to_bits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_come_back() {
        let handle = Handle::with_generation(Handle::base(9_999, 77_777), GENERATION_MAX);
        assert_eq!((handle.segment(), handle.block(), handle.generation()), (9_999, 77_777, (1 << 30) - 1));
        assert_eq!(Handle::from_bits(handle.to_bits()), Some(handle));
    }

    #[test]
    fn generations_go_round_without_zero() {
        let handle = Handle::with_generation(Handle::base(16_383, (1 << 20) - 1), GENERATION_MAX);
        assert_eq!(handle.next(), Handle::with_generation(Handle::base(16_383, (1 << 20) - 1), 1));
        assert_eq!(handle.next().next().generation(), 2);
    }

    #[test]
    fn numbers_without_a_generation_are_no_handles() {
        assert_eq!(Handle::from_bits(0), None);
        assert_eq!(Handle::from_bits(Handle::base(3, 4)), None);
        assert!(Handle::from_bits(u64::MAX).is_some());
        assert_eq!(size_of::<Option<Handle>>(), 8);
    }
}
