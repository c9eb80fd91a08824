//! Which sizes blocks have, and how many of them make a span.
//!
//! Sizes are counted in grains. Up to eight every number of grains is a class; above, four classes to a doubling: 10, 12,
//! 14, 16, 20, ... 224, 256. So a block is at most a quarter larger than what was asked for (and at least one grain).
//! Above 256 grains (1 MiB) a block is a run of whole slots of its own.
//!
//! ```text
//!   slot    64 grains (256 KiB): what segments are made of and what has an owner
//!   span    as many slots in a row as 64 blocks of a class need, at most 16 (4 MiB)
//!
//!   4 KiB x 64 = 1 slot     64 KiB x 64 = 16 slots     896 KiB x 4 = 14 slots     1 MiB x 4 = 16 slots
//! ```

/// Grains in a slot.
pub(super) const SLOT_GRAINS: u32 = 64;
/// Grains of the largest class.
pub(super) const LARGEST: u32 = 256;
/// How many classes there are.
pub(super) const CLASSES: usize = 28;
/// Stands for blocks that are a run of their own.
pub(super) const BIG: u8 = 31;
/// No span has more slots.
const SPAN_SLOTS_MAX: u32 = 16;
/// No span has more blocks: a bitmap is one word.
const SPAN_BLOCKS_MAX: u32 = 64;

/// The grains of each class.
pub(super) const SIZES: [u32; CLASSES] = sizes();
/// The class of each number of grains up to [`LARGEST`]; index 0 is the smallest class too.
pub(super) const CLASS_OF: [u8; LARGEST as usize + 1] = class_of();

const _: () = assert!(SIZES[CLASSES - 1] == LARGEST && CLASSES < BIG as usize);

const fn sizes() -> [u32; CLASSES] {
    let mut sizes = [0; CLASSES];
    let mut at = 0;
    while at < CLASSES {
        // The first eight count up; then four steps to each doubling.
        let n = at as u32;
        sizes[at] = if n < 8 { n + 1 } else { (5 + (n - 8) % 4) << ((n - 8) / 4 + 1) };
        at += 1;
    }
    sizes
}

const fn class_of() -> [u8; LARGEST as usize + 1] {
    let mut table = [0; LARGEST as usize + 1];
    let (mut grains, mut class) = (1, 0);
    while grains < table.len() {
        if grains as u32 > SIZES[class] {
            class += 1;
        }
        table[grains] = class as u8;
        grains += 1;
    }
    table
}

/// What a span of a class looks like in segments of a given size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    /// Grains of a block.
    pub(super) grains: u32,
    /// Blocks of a span; 0 where segments are too small for the class, whose blocks are then runs of their own.
    pub(super) blocks: u32,
    /// Slots of a span.
    pub(super) slots: u32,
    /// `offset * reciprocal >> 20` is `offset / grains` for every offset inside a span.
    pub(super) reciprocal: u32,
}

impl Shape {
    /// The shapes of all classes, given how many slots a segment has.
    pub(super) fn table(segment_slots: u32) -> [Self; CLASSES] {
        // A segment should hold spans of several classes.
        let most_slots = (segment_slots / 4).clamp(1, SPAN_SLOTS_MAX);
        SIZES.map(|grains| {
            let blocks = (most_slots * SLOT_GRAINS / grains).min(SPAN_BLOCKS_MAX);
            let slots = (blocks * grains).div_ceil(SLOT_GRAINS);
            Self { grains, blocks, slots, reciprocal: (1_u32 << 20).div_ceil(grains) }
        })
    }

    /// A bit for each block.
    pub(super) fn all(&self) -> u64 {
        u64::MAX >> (64 - self.blocks.clamp(1, 64))
    }

    /// Which block begins at this offset, in grains from the span's start.
    #[inline]
    pub(super) fn block_at(&self, offset: u32) -> u32 {
        (offset * self.reciprocal) >> 20
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_at_most_a_quarter_larger_than_asked() {
        for grains in 1..=LARGEST {
            let class = usize::from(CLASS_OF[grains as usize]);
            assert!(SIZES[class] >= grains && (class == 0 || SIZES[class - 1] < grains), "{grains}");
            assert!(SIZES[class] * 4 <= grains.next_multiple_of(1) * 5 || SIZES[class] == grains, "{grains}");
        }
        assert_eq!(SIZES[..12], [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]);
    }

    #[test]
    fn spans_waste_at_most_one_part_in_sixteen() {
        for shape in Shape::table(256) {
            let used = shape.blocks * shape.grains;
            let has = shape.slots * SLOT_GRAINS;
            assert!(shape.blocks >= 4 && shape.slots <= SPAN_SLOTS_MAX, "{shape:?}");
            assert!(used <= has && (has - used) * 16 <= has, "{shape:?}");
        }
    }

    #[test]
    fn a_block_is_found_by_its_offset() {
        for segment_slots in [1, 4, 16, 64, 16_384] {
            for shape in Shape::table(segment_slots) {
                assert!(shape.slots <= segment_slots, "{shape:?}");
                for block in 0..shape.blocks {
                    let start = block * shape.grains;
                    assert_eq!(shape.block_at(start), block);
                    assert_eq!(shape.block_at(start + shape.grains - 1), block);
                }
            }
        }
    }
}
