"""Continuous batching with blocks: one K and one V tensor per layer, block lists in a `BlockManager` (transformers 5.17).

    layer's K   [ block 0 | block 1 | ... ]        a view of the pool's slab: ids are sparse, blocks of a layer neighbours
    read trash, write trash                        two blocks of the pool, leased for the cache's life

    BlockManager   _uninit_block_ids               free in its words, leased in ours: filled from the pool just before they
                                                   are taken, emptied into it as soon as they are freed
                   _init_block_ids                 finished prefixes kept for later: leased until they are evicted

The manager's own code moves ids between its lists; this file only fills and empties the first one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.cache_manager import BlockManager

from tidekv import Layout

from ..memory import Blocks, dtype_name, open_pool, tensor_of
from .shared import Settings, WithoutMemory, lease_trash, refuse_tensor_parallelism

if TYPE_CHECKING:
    from tidekv import Pool

__all__ = ["ElasticBlockCache", "VirtualMemoryHandler"]

TRASH_BLOCKS = 2


class VirtualMemoryHandler(PagedAttentionMemoryHandler):
    """Checks everything but the cache against free memory: the cache is address space until tokens come."""

    def compute_memory_footprint(self, max_batch_tokens: int, num_blocks: int) -> int:
        token_bytes = 2 * self.group_size * self.page_size * self.cache_dtype.itemsize
        footprint = super().compute_memory_footprint(max_batch_tokens, num_blocks)
        return int(footprint - num_blocks * self.block_size * token_bytes)


class ElasticBlockManager(BlockManager):
    """A `BlockManager` whose free blocks are the pool's."""

    def __init__(self, blocks: Blocks, num_blocks: int, block_size: int) -> None:
        super().__init__(0, block_size, tp_on=False)
        self.num_blocks = num_blocks
        self.blocks = blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._uninit_block_ids) + len(self._init_block_ids) + self.blocks.available()

    def has_enough_free_blocks(self, n_blocks: int) -> bool:
        short = n_blocks - len(self._uninit_block_ids)
        if short > 0:
            ids = self.blocks.lease(short)
            if ids is None and self._init_block_ids and (left := min(short, self.blocks.available())):
                # Some from the pool, the rest by evicting prefixes, which the manager does itself.
                ids = self.blocks.lease(left)
            self._uninit_block_ids.extend(ids or ())
        return bool(super().has_enough_free_blocks(n_blocks))

    def give_back(self) -> None:
        self.blocks.give_back(list(self._uninit_block_ids))
        self._uninit_block_ids.clear()

    def evict(self) -> None:
        """Forgets every prefix that no request uses."""
        super().has_enough_free_blocks(len(self._uninit_block_ids) + len(self._init_block_ids))


class ElasticBlockCache(PagedAttentionCache):
    """A `PagedAttentionCache` over a pool."""

    settings: ClassVar[Settings]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_tensor_parallelism(kwargs["distributed_helper"].tp_size)
        with WithoutMemory():
            super().__init__(*args, **kwargs)
        pool = self._open_pool()
        self.settings.note(self, pool)
        self.blocks = Blocks(pool, self.num_blocks + TRASH_BLOCKS)
        self._block_manager = ElasticBlockManager(self.blocks, self.num_blocks, self.block_size)
        self._give_memory(pool)

    def _open_pool(self) -> Pool:
        layout = Layout.heads(
            len(self.key_cache),
            self.num_key_value_heads,
            self.head_dim,
            dtype=dtype_name(self.dtype),
            block_tokens=self.block_size,
            layout="slab",
        )
        return open_pool(layout, torch.device(self.device), self.num_blocks + TRASH_BLOCKS, self.settings.options)

    def _give_memory(self, pool: Pool) -> None:
        """Replaces the tensors without memory, and says where padding reads and writes."""
        read_trash, write_trash = lease_trash(self.blocks, TRASH_BLOCKS)
        for layer in range(len(self.key_cache)):
            for caches, value in ((self.key_cache, False), (self.value_cache, True)):
                by_block = tensor_of(pool, layer, value)
                by_block[read_trash].zero_()
                caches[layer] = by_block.flatten(0, 1)
                torch._dynamo.mark_static_address(caches[layer])
        self.cache_shape = tuple(self.key_cache[0].shape)
        self.read_trash_index = read_trash * self.block_size
        self.sentinel_index = self.read_trash_index + 1
        self.write_trash_index = write_trash * self.block_size
        for manager in self.group_cache_managers:
            if hasattr(manager, "sentinel_index"):
                manager.sentinel_index = self.sentinel_index
                manager.write_trash_index = self.write_trash_index

    def allocate_blocks(self, n_blocks: int, request_id: str, allocated_blocks: int) -> int | None:
        # Every group's blocks are leased before the first group takes its own, so no request ends up with a part.
        if not self._block_manager.has_enough_free_blocks(self.blocks_needed(n_blocks, allocated_blocks)):
            return None
        return super().allocate_blocks(n_blocks, request_id, allocated_blocks)

    def free_blocks(self, request_id: str) -> None:
        super().free_blocks(request_id)
        self._block_manager.give_back()

    def mark_shareable_blocks_as_complete(self, *args: Any, **kwargs: Any) -> None:
        super().mark_shareable_blocks_as_complete(*args, **kwargs)
        # A block that turned out to be the copy of another was dropped.
        self._block_manager.give_back()

    def settle(self) -> None:
        if self._block_manager._init_block_ids and self.blocks.reclaim_wanted():
            self._block_manager.evict()
        self._block_manager.give_back()

    def keep(self, ids: list[int]) -> None:
        self._block_manager._uninit_block_ids.extend(ids)
