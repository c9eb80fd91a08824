//! Why a geometry cannot be, each in one sentence that says what to change.

use crate::units::{BlockIndex, Bytes, GroupId, LayerIndex, PageId};

/// A refused geometry, or an index outside one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GeometryError {
    /// A part of the model's shape is zero.
    #[error("{field} is 0: give at least 1")]
    Zero {
        /// Which number.
        field: &'static str,
    },
    /// The back-end reported no usable granularity.
    #[error("a granularity of {granularity} is not usable: it is a power of two of at least 256 bytes")]
    BadGranularity {
        /// As reported.
        granularity: Bytes,
    },
    /// A page must hold at least one block of every layer.
    #[error(
        "a block of {block} does not fit into {chunk} per layer and buffer: \
         raise the page size (KVCACHED_PAGE_SIZE_MB) or use smaller blocks"
    )]
    BlockLargerThanChunk {
        /// One block of one layer and buffer.
        block: Bytes,
        /// The chunk as asked for.
        chunk: Bytes,
    },
    /// Handles come in multiples of the granularity.
    #[error("a page size of {chunk} is not usable here: give a positive multiple of {granularity}")]
    ChunkNotGranular {
        /// The chunk as asked for.
        chunk: Bytes,
        /// What it must be a multiple of.
        granularity: Bytes,
    },
    /// `KVCACHED_PAGE_SIZE_MB` or `page_size_mb` is not a number of MiB.
    #[error(
        "a page size of {text:?} MiB is not usable: give a positive whole number of MiB, or none for an automatic choice"
    )]
    BadPageSizeMb {
        /// As written.
        text: String,
    },
    /// Not even one page fits.
    #[error("a budget of {budget} is below one page of {page_bytes}: raise the budget or lower the page size")]
    BudgetBelowOnePage {
        /// As given.
        budget: Bytes,
        /// What one page id costs.
        page_bytes: Bytes,
    },
    /// Kernels compute slots in signed 32 bits.
    #[error(
        "{id_count} ids of {block_tokens} tokens pass 2^31 slots, which attention kernels cannot index: \
         use a smaller budget, a larger block, or the interleaved layout"
    )]
    TooManyIds {
        /// Ids a layer's view would span.
        id_count: u64,
        /// Tokens per block.
        block_tokens: u32,
    },
    /// More address space than a process has.
    #[error(
        "the reservation would take {needed} of address space, more than {limit}: use a smaller budget or fewer pages"
    )]
    AddressSpace {
        /// What it would take.
        needed: Bytes,
        /// What we allow.
        limit: Bytes,
    },
    /// The numbers multiply past 64 bits.
    #[error("{what} is past 64 bits: these numbers cannot describe a real model")]
    Overflow {
        /// What was being computed.
        what: &'static str,
    },
    /// A page id from outside the reservation.
    #[error("page {page} is outside this reservation: valid page ids are 0..={last}")]
    PageOutOfRange {
        /// The id.
        page: PageId,
        /// The largest valid one.
        last: PageId,
    },
    /// A block index from outside the reservation.
    #[error("block {block} is outside this reservation: valid blocks are 0..={last}")]
    BlockOutOfRange {
        /// The index.
        block: BlockIndex,
        /// The largest valid one.
        last: BlockIndex,
    },
    /// A layer the model does not have.
    #[error("layer {} does not exist: this group has {layers} layers, numbered from 0", layer.0)]
    LayerOutOfRange {
        /// The layer.
        layer: LayerIndex,
        /// How many there are.
        layers: u32,
    },
    /// MLA keeps one buffer per layer.
    #[error("this model keeps one latent buffer per layer: there is no V buffer, use K")]
    NoValueBuffer,
    /// A model without layers to cache.
    #[error("the model has no group of layers: give at least one")]
    NoGroups,
    /// Two groups with one id.
    #[error("group {group} is given twice: every group needs its own id")]
    DuplicateGroup {
        /// The id.
        group: GroupId,
    },
    /// A group the model does not have.
    #[error("group {group} does not exist in this model")]
    UnknownGroup {
        /// The id.
        group: GroupId,
    },
}
