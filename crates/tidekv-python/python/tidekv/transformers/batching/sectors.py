"""Continuous batching with sectors: one uint8 tensor, shared out by a `CachePool` (transformers 5.22).

    tensor    [ sector | sector | -- | sector | ... ]     a sector is one block of the pool; `--` has no memory
    sector    [ block | block | ... ]                     of one kind of attention, all its layers side by side
    trash     two sectors of the pool, leased for the cache's life

A sector goes back to the pool when all its blocks are free, before the next batch: transformers frees the blocks of a
request that it is about to copy away, so nothing may be returned between the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_allocators import CachePool

from tidekv import Layout

from ..memory import Blocks, open_pool, tensor_of
from .shared import Settings, WithoutMemory, lease_trash, refuse_tensor_parallelism

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import RequestState

    from tidekv import Pool

__all__ = ["ElasticSectorCache", "VirtualMemoryHandler"]

TRASH_SECTORS = 2


class VirtualMemoryHandler(PagedAttentionMemoryHandler):
    """Checks everything but the cache against free memory: the cache is address space until tokens come."""

    def compute_memory_footprint(self, max_batch_tokens: int, num_sectors: int) -> int:
        footprint = super().compute_memory_footprint(max_batch_tokens, num_sectors)
        return int(footprint - num_sectors * self.bytes_per_sector)


class ElasticCachePool(CachePool):
    """A `CachePool` whose free sectors are the pool's."""

    def __init__(self, blocks: Blocks, num_sectors: int, num_allocators: int) -> None:
        self.blocks = blocks
        self.ready: list[int] = []
        """Sectors that are leased and not allocated yet: a promise that no other process can take."""
        self.allocated: set[int] = set()
        self.only_ready = False
        super().__init__(num_sectors, num_allocators)

    @property
    def free_sectors(self) -> range:
        """As many as could be allocated. Which ones is the pool's choice."""
        return range(len(self.ready) + (0 if self.only_ready else self.blocks.available()))

    @free_sectors.setter
    def free_sectors(self, _: list[int]) -> None:
        """The parent's list of all sectors is not kept."""

    def reset(self) -> None:
        self.blocks.give_back([*self.allocated, *self.ready])
        self.allocated.clear()
        self.ready.clear()
        super().reset()

    def prepare(self, count: int) -> bool:
        """Leases what is missing for `count` allocations; all or nothing."""
        short = count - len(self.ready)
        if short > 0:
            ids = self.blocks.lease(short)
            if ids is None:
                return False
            self.ready += ids
        return True

    def allocate_sector(self, index: int) -> None:
        if not self.prepare(1):
            raise self.blocks.refusal or IndexError("every sector is allocated")
        sector = self.ready.pop()
        self.allocated.add(sector)
        self._free_blocks[index].add_tree(sector)

    def try_to_free_sectors(self) -> None:
        empty = [sector for blocks in self._free_blocks for sector in blocks.delete_full_trees()]
        self.allocated.difference_update(empty)
        self.blocks.give_back(empty)

    def give_back(self) -> None:
        """Everything that no request uses, promises included."""
        self.try_to_free_sectors()
        self.blocks.give_back(self.ready)
        self.ready.clear()


class ElasticSectorCache(PagedAttentionCache):
    """A `PagedAttentionCache` over a pool."""

    settings: ClassVar[Settings]
    pool: ElasticCachePool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_tensor_parallelism(kwargs["distributed_helper"].tp_size)
        with WithoutMemory():
            super().__init__(*args, **kwargs)
        layout = Layout.raw(1, self.bytes_per_sector, layout="slab")
        pool = open_pool(layout, torch.device(self.device), self.num_sectors + TRASH_SECTORS, self.settings.options)
        self.settings.note(self, pool)
        self.blocks = Blocks(pool, self.num_sectors + TRASH_SECTORS)
        self.pool = ElasticCachePool(self.blocks, self.num_sectors, len(self.cache_allocators))
        self._give_memory(pool)

    def _give_memory(self, pool: Pool) -> None:
        """Replaces the tensor without memory, and says where padding reads and writes."""
        by_sector = tensor_of(pool, 0)
        read_trash, write_trash = lease_trash(self.blocks, TRASH_SECTORS)
        by_sector[read_trash].zero_()
        self.cache_tensor = by_sector.flatten()
        for allocator in self.cache_allocators.values():
            counts = allocator.num_pages, allocator.num_blocks
            # Ids are sparse, so the views reach further than there are sectors.
            reach = self.cache_tensor.numel() - TRASH_SECTORS * self.bytes_per_sector
            allocator.register_cache_tensor(self.bytes_per_sector, reach, self.cache_tensor, self.pool)
            allocator.num_pages, allocator.num_blocks = counts
            rows = allocator.block_physical_stride * allocator.blocks_per_sector
            allocator.read_trash_index = read_trash * rows
            allocator.sentinel_index = allocator.read_trash_index + 1
            allocator.write_trash_index = write_trash * rows

    def can_store_request_tokens(self, state: RequestState, request_len: int, dry_run: bool = False) -> bool:
        if not dry_run:
            # All that the request needs, or nothing: another process may take what is free in between.
            needed = (
                allocator.needs_new_sectors(state.request_id, state.current_len(), request_len)
                for allocator in self.cache_allocators.values()
            )
            if not self.pool.prepare(sum(needed)):
                return False
        return bool(super().can_store_request_tokens(state, request_len, dry_run))

    def prepare_fork_request(self, src_state: RequestState, dst_req_ids: list[str], *args: Any) -> list[str]:
        # As above, for as many children as there is memory for.
        length = src_state.current_len()
        per_child = sum(
            -(-allocator.count_non_shareable_blocks(src_state.request_id, length) // allocator.blocks_per_sector)
            for allocator in self.cache_allocators.values()
        )
        wanted = per_child * len(dst_req_ids)
        if not self.pool.prepare(wanted):
            self.pool.prepare(min(wanted, self.pool.num_free_sectors))
        self.pool.only_ready = True
        try:
            return list(super().prepare_fork_request(src_state, dst_req_ids, *args))
        finally:
            self.pool.only_ready = False

    def free_all_requests(self, *args: Any, **kwargs: Any) -> None:
        super().free_all_requests(*args, **kwargs)
        self.pool.give_back()

    def settle(self) -> None:
        if self.blocks.reclaim_wanted():
            self.evict_cached_blocks()
        self.pool.give_back()

    def keep(self, ids: list[int]) -> None:
        self.pool.ready += ids
