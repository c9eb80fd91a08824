//! What a cache knows about its spans: private, and computed from the words when a span is taken over.

use super::class::{SLOT_GRAINS, Shape};
use super::geometry::Geometry;
use super::handle::Handle;
use super::slot::Slot;

/// Where a span is listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum List {
    /// Nowhere: it is being made, or its record is free.
    None,
    /// It has free blocks.
    Partial,
    /// It had none when we last looked; others may have freed some.
    Full,
}

/// One span of a cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    /// A bit for each block that is free and not in the class's `ready` list.
    pub(super) bits: u64,
    /// The first grain, counted over all segments.
    pub(super) first: usize,
    /// The bits of the first block's handle, without a generation.
    pub(super) handle: u64,
    pub(super) shape: Shape,
    pub(super) class: u8,
    pub(super) list: List,
    /// Where in its list.
    pub(super) place: u32,
}

impl Span {
    pub(super) fn new(geometry: &Geometry, head: usize, class: u8, shape: Shape, bits: u64) -> Self {
        let first = head * SLOT_GRAINS as usize;
        let segment = (first >> geometry.grain_bits()) as u64;
        let block = (first & ((1 << geometry.grain_bits()) - 1)) as u64;
        Self { bits, first, handle: Handle::base(segment, block), shape, class, list: List::None, place: 0 }
    }

    /// What its first slot says while the cache `owner` has it as its number `index`.
    pub(super) fn slot(&self, owner: u16, index: usize) -> Slot {
        // A cache has fewer than 2^24 spans, and a span at most 16 slots.
        Slot::head(self.class, owner, index as u32, self.shape.slots as u16)
    }

    pub(super) fn head(&self) -> usize {
        self.first / SLOT_GRAINS as usize
    }

    /// Which block begins at this grain, one of this span.
    pub(super) fn block_at(&self, grain: usize) -> u32 {
        self.shape.block_at((grain.saturating_sub(self.first) as u32).min(1023)) & 63
    }

    /// The grain at which a block begins.
    pub(super) fn grain_of(&self, block: u32) -> usize {
        self.first + (block * self.shape.grains) as usize
    }

    pub(super) fn contains(&self, grain: usize) -> bool {
        (self.first..self.first + (self.shape.slots * SLOT_GRAINS) as usize).contains(&grain)
    }

    /// Whether a block begins at this grain.
    #[inline]
    pub(super) fn has_block_at(&self, grain: usize) -> bool {
        let offset = grain.wrapping_sub(self.first);
        let block = self.shape.block_at(offset as u32 & 1023);
        (block * self.shape.grains) as usize == offset && block < self.shape.blocks
    }

    /// Whether every block is free, and none of them in the class's `ready` list.
    pub(super) fn is_empty(&self) -> bool {
        self.bits == self.shape.all()
    }
}

/// The spans of one class.
#[derive(Debug, Default)]
pub(super) struct Bin {
    /// Free blocks under the handles that they will have: allocating takes the last, freeing puts one there.
    pub(super) ready: Vec<Handle>,
    /// How many there may be in `ready`.
    pub(super) ready_max: usize,
    pub(super) partial: Vec<u32>,
    pub(super) full: Vec<u32>,
    /// How many of `partial` have no held block.
    pub(super) empties: u32,
    /// Where to go on looking through `full`.
    pub(super) look: usize,
}
