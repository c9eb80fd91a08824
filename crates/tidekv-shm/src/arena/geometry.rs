//! Where everything lies in an arena's file, computed from three numbers.
//!
//! ```text
//!   0        4 KiB     8 KiB     16 KiB                                          data (a multiple of 2 MiB)
//!   | head   | members | caches  | slot words | bitmaps | block words | -------- | segment 0 | segment 1 | ...
//!
//!   for each slot (64 grains)    one slot word and one bitmap of freed blocks
//!   for each grain               one block word
//! ```
//!
//! The file has its final size from the start, with holes; memory is behind the tables and the data of the segments that
//! exist. All segments have the same size, a power of two, so a grain's number among all grains is also its place in the
//! table of words and, shifted, its distance from the start of the window.

use tidekv_core::units::Bytes;

use super::class::{CLASSES, SLOT_GRAINS, Shape};
use super::config::ArenaConfig;
use super::error::ArenaError;
use super::handle::{BLOCK_BITS, MAX_SEGMENTS};

/// Processes that can be attached at the same time: one bit each in the word of a shared block.
pub(super) const MEMBERS: u32 = 32;
/// Thread caches that there can be at the same time.
pub(super) const CACHES: u32 = 1024;
pub(super) const MEMBERS_AT: usize = 4096;
pub(super) const MEMBER_BYTES: usize = 128;
pub(super) const CACHES_AT: usize = 8192;
const TABLES_AT: u64 = 16_384;
const PAGE: u64 = 4096;
/// Huge pages need both the file's and the window's data to begin at one.
pub(super) const HUGE: u64 = 2 << 20;
const SLOT_SHIFT: u32 = SLOT_GRAINS.trailing_zeros();

const _: () = assert!(MEMBERS_AT + MEMBERS as usize * MEMBER_BYTES <= CACHES_AT);
const _: () = assert!(CACHES_AT as u64 + CACHES as u64 * 8 <= TABLES_AT);

/// The sizes of an arena. Its fields fit together; [`Self::new`] sees to that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) grain_shift: u32,
    pub(super) segment_shift: u32,
    pub(super) max_segments: u32,
}

impl Geometry {
    pub(super) fn from_config(config: &ArenaConfig) -> Result<Self, ArenaError> {
        let power = |what, value: Bytes| match value.0.is_power_of_two() {
            true => Ok(value.0.trailing_zeros()),
            false => Err(ArenaError::Config { what, value: value.0, rule: "it must be a power of two" }),
        };
        let (grain_shift, segment_shift) = (power("grain", config.grain)?, power("segment", config.segment)?);
        let max_segments = u32::try_from(config.limit.0.div_ceil(config.segment.0)).unwrap_or(u32::MAX);
        Self::new(grain_shift, segment_shift, max_segments)
    }

    pub(super) fn new(grain_shift: u32, segment_shift: u32, max_segments: u32) -> Result<Self, ArenaError> {
        let refuse = |what, value: u64, rule| Err(ArenaError::Config { what, value, rule });
        if !(12..=20).contains(&grain_shift) {
            return refuse("grain", 1_u64.checked_shl(grain_shift).unwrap_or(0), "it must be 4 KiB to 1 MiB");
        }
        if !(grain_shift + SLOT_SHIFT..=grain_shift + BLOCK_BITS).contains(&segment_shift) {
            let segment = 1_u64.checked_shl(segment_shift).unwrap_or(0);
            return refuse("segment", segment, "it must have 64 to 1,048,576 grains");
        }
        if !(1..=MAX_SEGMENTS).contains(&max_segments) {
            return refuse("limit", u64::from(max_segments), "it must be 1 to 16,384 segments");
        }
        // The window must fit into 47 bits of address space, with room for others.
        if u64::from(max_segments) << segment_shift > 1 << 46 {
            return refuse("limit", u64::from(max_segments) << segment_shift, "it must be at most 64 TiB");
        }
        Ok(Self { grain_shift, segment_shift, max_segments })
    }

    /// log2 of the grains of a segment.
    #[inline]
    pub(super) fn grain_bits(&self) -> u32 {
        self.segment_shift - self.grain_shift
    }

    /// log2 of the slots of a segment.
    pub(super) fn slot_bits(&self) -> u32 {
        self.grain_bits() - SLOT_SHIFT
    }

    pub(super) fn segment_slots(&self) -> u32 {
        1 << self.slot_bits()
    }

    pub(super) fn segment_bytes(&self) -> Bytes {
        Bytes(1 << self.segment_shift)
    }

    pub(super) fn grain_bytes(&self) -> u64 {
        1 << self.grain_shift
    }

    pub(super) fn slot_bytes(&self) -> u64 {
        1 << (self.grain_shift + SLOT_SHIFT)
    }

    pub(super) fn limit(&self) -> Bytes {
        Bytes(u64::from(self.max_segments) << self.segment_shift)
    }

    fn slots(&self) -> u64 {
        u64::from(self.max_segments) << self.slot_bits()
    }

    pub(super) fn slots_at(&self) -> u64 {
        TABLES_AT
    }

    pub(super) fn bitmaps_at(&self) -> u64 {
        (self.slots_at() + self.slots() * 8).next_multiple_of(PAGE)
    }

    pub(super) fn words_at(&self) -> u64 {
        (self.bitmaps_at() + self.slots() * 8).next_multiple_of(PAGE)
    }

    pub(super) fn data_at(&self) -> u64 {
        (self.words_at() + self.slots() * u64::from(SLOT_GRAINS) * 8).next_multiple_of(HUGE)
    }

    pub(super) fn file_bytes(&self) -> u64 {
        self.data_at() + self.limit().0
    }

    /// The parts of the file that need memory before a segment can be used: (offset, bytes).
    pub(super) fn parts_of_segment(&self, segment: u32) -> [(u64, u64); 4] {
        let segment = u64::from(segment);
        let (slot_bytes, word_bytes) = (8 << self.slot_bits(), 8 << self.grain_bits());
        [
            (self.slots_at() + segment * slot_bytes, slot_bytes),
            (self.bitmaps_at() + segment * slot_bytes, slot_bytes),
            (self.words_at() + segment * word_bytes, word_bytes),
            (self.data_at() + (segment << self.segment_shift), self.segment_bytes().0),
        ]
    }

    /// The part of the file before the tables.
    pub(super) fn fixed_part(&self) -> (u64, u64) {
        (0, TABLES_AT)
    }

    pub(super) fn shapes(&self) -> [Shape; CLASSES] {
        Shape::table(self.segment_slots())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap_and_fill_the_file() {
        for (grain, segment, max) in [(12, 18, 1), (12, 18, 10_000), (12, 26, 16_384), (12, 32, 16_384), (16, 36, 100)]
        {
            let geometry = Geometry::new(grain, segment, max).unwrap();
            let last = geometry.parts_of_segment(max - 1).map(|(at, bytes)| at + bytes);
            assert!(geometry.slots_at() >= geometry.fixed_part().1);
            assert!(last[0] <= geometry.bitmaps_at() && last[1] <= geometry.words_at());
            assert!(last[2] <= geometry.data_at() && last[3] == geometry.file_bytes());
            assert_eq!(geometry.data_at() % HUGE, 0);
        }
    }

    #[test]
    fn a_terabyte_and_ten_thousand_segments_are_allowed() {
        assert!(Geometry::new(12, 26, 16_384).unwrap().limit() >= Bytes::gib(1024));
        for (grain, segment, max) in [(11, 26, 1), (21, 30, 1), (12, 17, 1), (12, 33, 1), (12, 26, 0), (12, 26, 16_385)]
        {
            assert!(Geometry::new(grain, segment, max).is_err());
        }
        assert!(Geometry::new(20, 40, 16_384).is_err(), "more than the address space");
    }

    #[test]
    fn tables_cost_at_most_a_quarter_percent() {
        let geometry = Geometry::new(12, 26, 100).unwrap();
        let [(_, slots), (_, bitmaps), (_, words), (_, data)] = geometry.parts_of_segment(7);
        assert!((slots + bitmaps + words) * 400 <= data);
    }
}
