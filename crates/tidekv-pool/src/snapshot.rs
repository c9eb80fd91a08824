//! Everything there is to know about a pool at one moment, as plain numbers: for exporters, tests and people.
//!
//! The names are those of kvcached's `KVCachePoolSnapshot` (schema `kvcached.observability.v1`) where it has them.
//! Pages are pages of all layers; *physical* means mapped.

use tidekv_core::share::MemoryUse;
use tidekv_core::units::Bytes;
use tidekv_shm::Counters;

use crate::inner::Inner;
use crate::reclaim::ReclaimRequest;

/// A pool at one moment. All zero in a forked child, where there is no pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolSnapshot {
    /// Name in segment and ledger.
    pub pool_name: String,
    /// Group of layers.
    pub group_id: u32,
    /// Tokens of one block.
    pub block_tokens: u32,
    /// Blocks of one page.
    pub blocks_per_page: u32,
    /// What one page costs.
    pub page_bytes: Bytes,

    /// All blocks of the reservation.
    pub total_blocks: u32,
    /// Blocks that an allocation may hope for.
    pub available_blocks: u32,
    /// Blocks leased to callers.
    pub allocated_blocks: u32,
    /// Blocks set aside.
    pub reserved_blocks: u32,
    /// Free blocks of mapped pages.
    pub free_mapped_blocks: u32,

    /// Address space of one layer.
    pub virtual_bytes_per_layer: Bytes,
    /// Address space of the reservation.
    pub virtual_bytes_total: Bytes,
    /// Memory held.
    pub mapped_bytes: Bytes,
    /// The parts of it: what requests need, what the engine only keeps, what holds nothing.
    pub usage: MemoryUse,
    /// Memory of pages with blocks in use: kvcached's used, cached prefixes included.
    pub used_bytes: Bytes,
    /// Memory held and not used: kvcached's prealloc.
    pub prealloc_bytes: Bytes,
    /// What the ledger says we hold.
    pub ledger_bytes: Bytes,
    /// What an independent witness counts behind the reservation, where there is one. A fleet's workers have their own.
    pub witness_bytes: Option<Bytes>,

    /// All pages of the reservation.
    pub total_pages: u32,
    /// Pages without memory.
    pub free_pages: u32,
    /// Pages with blocks in use.
    pub inuse_pages: u32,
    /// Mapped pages without blocks in use: the reserve.
    pub reserved_pages: u32,
    /// Pages being mapped, including those that a failed map left behind.
    pub mapping_pages: u32,
    /// Pages on their way out.
    pub leaving_pages: u32,
    /// Pages that the driver would not take back.
    pub refused_pages: u32,
    /// Pages that limit and shared budget still allow.
    pub available_physical_pages: u32,

    /// Limit in force.
    pub limit_bytes: Bytes,
    /// Its revision.
    pub limit_revision: u64,
    /// Limit in whole pages.
    pub limit_pages: u32,
    /// Whether more is held than the limit allows.
    pub in_shrink: bool,
    /// Blocks that the limit allows.
    pub shrink_target_blocks: u32,

    /// What the pool wants from its neighbours.
    pub demand_bytes: Bytes,
    /// What the engine was asked to free.
    pub reclaim: ReclaimRequest,
    /// Events so far.
    pub counters: Counters,
}

impl PoolSnapshot {
    pub(crate) fn of(inner: &Inner) -> Self {
        if inner.check_birth().is_err() {
            return Self { pool_name: inner.name.as_str().to_owned(), ..Self::default() };
        }
        let limits = *inner.limits();
        let (pages, cached, blocks, limit_pages, stranded) = {
            let table = inner.table.lock();
            let stranded = u32::try_from(table.stranded.len()).unwrap_or(u32::MAX);
            let (pages, cached) = inner.page_counts_of(&table);
            (pages, cached, table.blocks.counts(), table.blocks.pages().limit(), stranded)
        };
        let geometry = &inner.geometry;
        let bytes = |pages: u32| inner.bytes_of(pages as usize);
        let per_page = geometry.blocks_per_page();
        let available_blocks = inner.table.available();
        Self {
            pool_name: inner.name.as_str().to_owned(),
            group_id: inner.group.0,
            block_tokens: geometry.shape().block_tokens,
            blocks_per_page: per_page,
            page_bytes: inner.page_bytes(),
            total_blocks: blocks.total,
            available_blocks,
            allocated_blocks: blocks.leased,
            reserved_blocks: blocks.reserved,
            free_mapped_blocks: blocks.free_mapped,
            virtual_bytes_per_layer: Bytes(geometry.reservation_bytes().0 / u64::from(geometry.shape().layers.max(1))),
            virtual_bytes_total: geometry.reservation_bytes(),
            mapped_bytes: bytes(pages.held()),
            usage: MemoryUse::of(
                bytes(pages.held()),
                bytes(cached),
                bytes(pages.idle + pages.draining + pages.unmapping),
            ),
            used_bytes: bytes(pages.in_use),
            prealloc_bytes: bytes(pages.held() - pages.in_use),
            ledger_bytes: inner.account.granted(),
            witness_bytes: inner.memory.reservation().and_then(|reservation| reservation.witness()),
            total_pages: inner.page_count,
            free_pages: pages.reserved,
            inuse_pages: pages.in_use,
            reserved_pages: pages.idle,
            mapping_pages: pages.mapping,
            leaving_pages: pages.draining + pages.unmapping,
            refused_pages: pages.unmap_failed + stranded,
            available_physical_pages: available_blocks.saturating_sub(blocks.free_mapped) / per_page,
            limit_bytes: limits.bytes(),
            limit_revision: limits.revision(),
            limit_pages,
            in_shrink: pages.held() > limit_pages,
            shrink_target_blocks: limit_pages.saturating_mul(per_page),
            demand_bytes: inner.account.demand(),
            reclaim: inner.mailbox.peek(),
            counters: inner.account.tally.counters(),
        }
    }
}
