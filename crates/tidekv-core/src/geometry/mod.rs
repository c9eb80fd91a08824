//! Where every block's bytes are: dense index <-> kernel id <-> byte offset, for three layouts.
//!
//! ```text
//!   slab          page 0: [ L0.K chunk | L0.V chunk | L1.K chunk | ... | slack ]  page 1: [ ...
//!                 chunk : [ block 0 | block 1 | ... | block m-1 | slack ]
//!                 one handle per page id; ids are sparse (they step over the other layers' chunks)
//!
//!   per-layer     L0.K: [ page 0 | page 1 | ... ]  L0.V: [ page 0 | page 1 | ... ]  L1.K: ...
//!                 one handle per page id, layer and buffer; ids are dense
//!
//!   interleaved   page 0: [ block 0: L0.K L0.V L1.K ... | block 1: L0.K L0.V ... | ... ]
//!                 one handle per page id; ids are dense, neighbours of a layer lie a whole row apart
//! ```
//!
//! All three are the same arithmetic. A layer's view starts at `buffer_offset(layer, K|V)` and steps by one
//! `id_stride` per kernel id; page `p` owns the ids whose bytes lie wholly inside `[p * id_span, (p+1) * id_span)`:
//!
//! ```text
//!   first_id(p)  = ceil(p * id_span / id_stride)
//!   kernel_id(d) = first_id(d / m) + d % m                  m = blocks per page, the same for every page
//!   offset       = buffer_offset(layer, K|V) + kernel_id * id_stride
//! ```
//!
//! In slab `id_span` is the page pitch, which is a multiple of `id_stride`, so `first_id` is a plain product. In
//! the other two a block may straddle two pages; such ids are never handed out, as in kvcached.
//!
//! Pure functions of numbers: nothing here allocates memory or address space.

mod chunk;
mod error;
mod model;
mod placement;
mod plan;
#[cfg(test)]
mod tests;

pub use chunk::{ChunkChoice, DEFAULT_CHUNK};
pub use error::GeometryError;
pub use model::{Attention, KvShape, ModelGeometry};
pub use placement::{Extent, Place, Placement};

use crate::units::{BlockIndex, Buffer, ByteOffset, Bytes, KernelId, LayerIndex, PageId};

/// How a page's bytes are shared out between layers and buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// One handle per page for all layers; blocks of a layer are neighbours inside a chunk. Sparse ids.
    Slab,
    /// One handle per page, layer and buffer (kvcached's non-contiguous layout). Dense ids.
    PerLayer,
    /// One handle per page; all layers of a block side by side (kvcached's contiguous layout). Dense ids.
    Interleaved,
}

impl Layout {
    /// Every layout, in the order of the documentation.
    pub const ALL: [Self; 3] = [Self::Slab, Self::PerLayer, Self::Interleaved];

    /// The name on command lines and in results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Slab => "slab",
            Self::PerLayer => "per-layer",
            Self::Interleaved => "interleaved",
        }
    }
}

/// How many pages a reservation has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// As many pages as this much memory can back.
    Budget(Bytes),
    /// Exactly this many.
    Pages(u32),
}

/// Everything a [`Geometry`] is computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeometryConfig {
    /// The layers that share block ids.
    pub shape: KvShape,
    /// Their arrangement in memory.
    pub layout: Layout,
    /// What a handle's size must be a multiple of: 2 MiB on CUDA, the system's page on host memory.
    pub granularity: Bytes,
    /// Bytes per layer and buffer in one page.
    pub chunk: ChunkChoice,
    /// Size of the reservation.
    pub capacity: Capacity,
}

/// One layer's K or V as an engine builds a tensor from it.
///
/// In slab and interleaved the views of different layers interleave: filling or copying a whole view touches
/// other layers' bytes and unmapped pages. Only ids that were handed out may be touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerView {
    /// Start of id 0.
    pub offset: ByteOffset,
    /// Distance between neighbouring ids.
    pub id_stride: Bytes,
    /// Bytes of one block that belong to this view.
    pub block_bytes: Bytes,
    /// Ids the view spans: one more would leave the reservation.
    pub id_count: u32,
}

/// The address arithmetic of one reservation. Built once, copied freely, never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    shape: KvShape,
    layout: Layout,
    placement: Placement,
    /// Bytes per layer and buffer in one page, without the slack of the page.
    chunk: Bytes,
    blocks_per_page: u32,
    /// Bytes between neighbouring kernel ids.
    id_stride: u64,
    /// Bytes between the first ids' windows of neighbouring pages, as one buffer sees them.
    id_span: u64,
    /// Bytes between neighbouring buffers' starts (K of a layer to its V, V to the next layer's K).
    buffer_pitch: BufferPitch,
}

/// Where buffer `b` starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BufferPitch {
    /// `b * pitch`: slab and per-layer.
    Uniform(u64),
    /// Side by side without gaps: interleaved, where K and V may differ in size.
    Packed { key: u64, value: u64 },
}

impl Geometry {
    /// Computes the geometry, or says what to change.
    ///
    /// # Errors
    /// [`GeometryError`] for a shape with a zero in it, a block that does not fit its chunk, a chunk that the
    /// granularity does not divide, a budget below one page, and for sizes past the address space or 32-bit ids.
    pub fn new(config: &GeometryConfig) -> Result<Self, GeometryError> {
        plan::plan(config)
    }

    /// The layers this geometry is for.
    pub const fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// The arrangement.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// Where pages and their handles lie: what `tidekv-mem` needs to know.
    pub const fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Page ids are `0..page_count`.
    pub const fn page_count(&self) -> u32 {
        self.placement.page_count()
    }

    /// What one page id costs in memory, all its handles together.
    pub fn page_bytes(&self) -> Bytes {
        self.placement.page_bytes()
    }

    /// Bytes per layer and buffer in one page: kvcached's page size.
    pub const fn chunk_bytes(&self) -> Bytes {
        self.chunk
    }

    /// Blocks in every page.
    pub const fn blocks_per_page(&self) -> u32 {
        self.blocks_per_page
    }

    /// Dense indices are `0..block_count`.
    pub const fn block_count(&self) -> u32 {
        self.page_count() * self.blocks_per_page
    }

    /// Address space of the whole reservation.
    pub const fn reservation_bytes(&self) -> Bytes {
        self.placement.reservation_bytes()
    }

    /// Checks a page id that came from outside.
    ///
    /// # Errors
    /// [`GeometryError::PageOutOfRange`] with the valid range.
    pub fn check_page(&self, page: PageId) -> Result<(), GeometryError> {
        if page.0 < self.page_count() {
            return Ok(());
        }
        Err(GeometryError::PageOutOfRange { page, last: PageId(self.page_count() - 1) })
    }

    /// The page a block lives on.
    ///
    /// # Errors
    /// [`GeometryError::BlockOutOfRange`].
    pub fn page_of(&self, block: BlockIndex) -> Result<PageId, GeometryError> {
        self.check_block(block)?;
        Ok(PageId(block.0 / self.blocks_per_page))
    }

    /// The id that kernels use for a block.
    ///
    /// # Errors
    /// [`GeometryError::BlockOutOfRange`].
    pub fn kernel_id(&self, block: BlockIndex) -> Result<KernelId, GeometryError> {
        let page = self.page_of(block)?;
        Ok(KernelId(self.first_id(page) + block.0 % self.blocks_per_page))
    }

    /// The block behind a kernel id; `None` for an id that belongs to no block (another layer's chunk, slack, a
    /// straddling block) or lies past the reservation.
    pub fn block_of(&self, id: KernelId) -> Option<BlockIndex> {
        let page = u64::from(id.0).checked_mul(self.id_stride)? / self.id_span;
        let page = u32::try_from(page).ok().filter(|&page| page < self.page_count())?;
        let place = id.0.checked_sub(self.first_id(PageId(page)))?;
        (place < self.blocks_per_page).then(|| BlockIndex(page * self.blocks_per_page + place))
    }

    /// Where a block's K or V of one layer starts.
    ///
    /// # Errors
    /// An index out of range, or V of a model that keeps one buffer.
    pub fn byte_offset(
        &self,
        block: BlockIndex,
        layer: LayerIndex,
        buffer: Buffer,
    ) -> Result<ByteOffset, GeometryError> {
        let id = self.kernel_id(block)?;
        let start = self.buffer_offset(layer, buffer)?;
        Ok(ByteOffset(start + u64::from(id.0) * self.id_stride))
    }

    /// One layer's K or V for the engine.
    ///
    /// # Errors
    /// A layer out of range, or V of a model that keeps one buffer.
    pub fn layer_view(&self, layer: LayerIndex, buffer: Buffer) -> Result<LayerView, GeometryError> {
        Ok(LayerView {
            offset: ByteOffset(self.buffer_offset(layer, buffer)?),
            id_stride: Bytes(self.id_stride),
            block_bytes: self.shape.block_bytes(buffer)?,
            id_count: self.id_count(),
        })
    }

    /// Kernel ids are below this.
    pub fn id_count(&self) -> u32 {
        self.first_id(PageId(self.page_count() - 1)) + self.blocks_per_page
    }

    fn check_block(&self, block: BlockIndex) -> Result<(), GeometryError> {
        if block.0 < self.block_count() {
            return Ok(());
        }
        Err(GeometryError::BlockOutOfRange { block, last: BlockIndex(self.block_count() - 1) })
    }

    fn buffer_offset(&self, layer: LayerIndex, buffer: Buffer) -> Result<u64, GeometryError> {
        let index = self.shape.buffer_index(layer, buffer)?;
        Ok(match self.buffer_pitch {
            BufferPitch::Uniform(pitch) => index * pitch,
            BufferPitch::Packed { key, value } => {
                u64::from(layer.0) * (key + value) + if buffer == Buffer::Value { key } else { 0 }
            }
        })
    }

    fn first_id(&self, page: PageId) -> u32 {
        let id = (u64::from(page.0) * self.id_span).div_ceil(self.id_stride);
        u32::try_from(id).expect("plan() refuses geometries whose ids do not fit 31 bits")
    }
}
