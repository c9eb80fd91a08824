//! A type for every quantity, so that a page id can never be passed where a block index is meant.
//!
//!   quantity          type           what it counts
//!   ----------------  -------------  -------------------------------------------------------------
//!   memory            [`Bytes`]      a size or a count of bytes
//!   place             [`ByteOffset`] bytes from the start of one reservation
//!   page              [`PageId`]     a slot of the reservation; reused after it was unmapped
//!   block, dense      [`BlockIndex`] 0, 1, 2, ... over all pages; what the allocator deals in
//!   block, kernel     [`KernelId`]   what attention kernels index with; sparse in the slab layout
//!   layer, group      [`LayerIndex`], [`GroupId`]
//!   step              [`Step`]       a position in an engine's stream of device work
//!
//! The types carry no arithmetic between each other: every conversion is a method of
//! [`Geometry`](crate::geometry::Geometry).

use std::fmt;

use crate::size;

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

impl Bytes {
    /// No bytes at all.
    pub const ZERO: Self = Self(0);

    /// `n` KiB.
    pub const fn kib(n: u64) -> Self {
        Self(n << 10)
    }

    /// `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n << 20)
    }

    /// `n` GiB.
    pub const fn gib(n: u64) -> Self {
        Self(n << 30)
    }

    /// Whether this is a whole number of `unit`s. Nothing is a multiple of zero.
    pub const fn is_multiple_of(self, unit: Self) -> bool {
        unit.0 != 0 && self.0.is_multiple_of(unit.0)
    }

    /// The difference, or zero where `other` is larger.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// This part of it (above 0 and at most 1), to the byte below.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "a part of at most 1 of a number: the product is in range, and 2^53 bytes are counted exactly"
    )]
    pub fn part(self, part: f64) -> Self {
        Self((self.0 as f64 * part) as u64).min(self)
    }

    /// The value in GiB, for rates and tables.
    #[expect(clippy::cast_precision_loss, reason = "a figure for people: 53 bits are plenty")]
    pub fn as_gib(self) -> f64 {
        self.0 as f64 / (1u64 << 30) as f64
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&size::format(*self))
    }
}

/// Bytes from the start of a reservation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteOffset(pub u64);

/// Index of a page inside one reservation. Not a byte offset, not a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageId(pub u32);

impl PageId {
    /// For indexing tables that have one row per page.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for PageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Dense index of a block: `page * blocks_per_page + place in the page`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockIndex(pub u32);

impl BlockIndex {
    /// For indexing tables that have one row per block.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BlockIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The id that an attention kernel multiplies with its stride. Fits an `i32` by construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelId(pub u32);

impl fmt::Display for KernelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A layer of the model, counted inside its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayerIndex(pub u32);

/// A set of layers that share block ids. Most models have one, hybrid models several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A position in the engine's stream of device work. A step is *over* once the device has finished it;
/// steps end in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step(pub u64);

/// Which of a layer's two buffers. MLA models keep one buffer, addressed as [`Buffer::Key`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Buffer {
    /// K, or the single latent buffer of MLA.
    Key,
    /// V.
    Value,
}
