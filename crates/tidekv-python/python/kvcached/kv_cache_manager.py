"""Blocks of KV cache for a scheduler: kvcached's manager, on the native pool.

    alloc, free          one native call each; from mapped memory no system call and no Python loop
    available_size       one load
    everything else      looks at, or orders, the same pool

The manager keeps no books of its own, so nothing here can disagree with the pool: attributes that kvcached's users
read (``avail_pages``, ``num_avail_blocks``, ``in_shrink`` ...) are computed when they are read.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from tidekv import MapFailed, OutOfMemory, WorkerFailed

from kvcached import _runtime
from kvcached._opening import Plan, PoolSlot
from kvcached._page_allocator import ManagedPages, carry_out
from kvcached.observability import KVCachePoolSnapshot, build_kv_cache_pool_snapshot
from kvcached.utils import CONTIGUOUS_LAYOUT, PAGE_PREALLOC_ENABLED, PAGE_SIZE, get_kvcached_logger

__all__ = ["KVCacheManager", "PageOccupancy", "RankKVCacheManager"]

logger = get_kvcached_logger()

_UNITS = {"bytes": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


class PageOccupancy(NamedTuple):
    """One page with blocks in use."""

    page_id: int
    used: int
    free: int

    def num_free_blocks(self) -> int:
        return self.free

    def full(self) -> bool:
        return self.free == 0


class KVCacheManager:
    """Leases blocks whose memory lies in the tensors of one group, here or with workers."""

    _own_ranks = False

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        cell_size: int,
        num_layers: int,
        world_size: int = 1,
        pp_rank: int = 0,
        async_sched: bool = False,
        reserve_null_block: bool = False,
        num_kv_buffers: int = 2,
        group_id: int = 0,
        pool_name: str | None = None,
    ) -> None:
        """``block_size`` tokens of ``cell_size`` bytes make a block, in each layer and each of its buffers. Tensors may
        be created up to ten seconds later; calls wait for them."""
        started = _runtime.current() if _runtime.is_started() else None
        self.num_blocks = num_blocks
        self.block_mem_size = block_size * cell_size
        self.num_layers = num_layers
        self.num_kv_buffers = num_kv_buffers
        self.world_size = world_size
        self.pp_rank = pp_rank
        self.async_sched = async_sched
        self.reserve_null_block = reserve_null_block
        self.group_id = group_id
        self.pool_name = pool_name
        self.page_size = started.page_size if started else PAGE_SIZE
        self.mem_size = num_blocks * self.block_mem_size
        plan = Plan(
            block_bytes=self.block_mem_size,
            block_count=num_blocks,
            num_layers=num_layers,
            num_kv_buffers=num_kv_buffers,
            page_size=self.page_size,
            contiguous=started.contiguous if started else CONTIGUOUS_LAYOUT,
            world_size=world_size,
            pp_rank=pp_rank,
            group=group_id,
            name=None,
            null_block=reserve_null_block,
            map_ahead=PAGE_PREALLOC_ENABLED,
        )
        # The slot knows nothing of the manager: the pool ends when the manager does.
        self._slot = PoolSlot(plan, self._own_ranks)
        self.page_allocator = ManagedPages(
            plan, self._slot.peek, self._slot.set_callback, self._slot.set_use_worker_ipc
        )
        self._slot.start()
        weakref.finalize(self, self._slot.close)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a manager belongs to the process that made it: send its arguments, and make one where it is needed"
        )

    # ---- blocks

    def alloc(self, need_size: int) -> list[int] | None:
        """So many block ids, those set aside first, or None: too little memory now, or a page that could not be mapped,
        which is undone and logged."""
        try:
            return self._slot.try_alloc(need_size)
        except OverflowError:
            raise ValueError(f"{need_size} blocks were asked for") from None
        except (MapFailed, OutOfMemory, WorkerFailed) as error:
            logger.error("no blocks for %d asked for: %s", need_size, error)
            return None

    def free(self, indices: Iterable[int]) -> None:
        """All of them, or ``NotLeased`` (a ``ValueError``) that names the first one that is not leased; then none."""
        if type(indices) is not list:
            indices = indices.tolist() if hasattr(indices, "tolist") else list(indices)
        self._slot.free(indices)

    def available_size(self) -> int:
        """Blocks that an allocation may hope for, those set aside included. A page that is being mapped or given back at this
        moment is not counted."""
        pool = self._slot.get()
        return pool.available() + pool.reserved()

    def try_to_reserve(self, need_size: int) -> bool:
        """Sets blocks aside for the next ``alloc``. False where there are too few."""
        try:
            return self._slot.get().try_reserve(need_size)
        except (MapFailed, OutOfMemory, WorkerFailed) as error:
            logger.error("no blocks for %d to be reserved: %s", need_size, error)
            return False

    def free_reserved(self) -> None:
        """Makes the blocks that are set aside free again."""
        self._slot.get().free_reserved()

    def clear(self) -> None:
        """Frees every block, whoever has it, and those that are set aside. The null block stays."""
        self._slot.get().clear()

    # ---- limits

    def resize(self, new_mem_size: int) -> bool:
        """Sets the limit, in bytes of one layer's K or V. False while more is in use: it is carried out as that is freed."""
        self._slot.get()
        return self.page_allocator.resize(new_mem_size)

    def trim(self) -> None:
        """Gives back every page without a block in use."""
        self._slot.get().trim()

    def set_memory_limit(self, limit_bytes: int, *, revision: int) -> dict[str, Any]:
        """Sets the limit, in bytes of all layers. A revision below the current one is ``stale``, the current one with other
        bytes a ``conflict``; ``kvctl limit`` gives revisions too, so the last order wins whoever gave it."""
        if limit_bytes < 0 or revision < 0:
            raise ValueError(f"limit_bytes is {limit_bytes} and revision {revision}: neither may be negative")
        pool = self._slot.get()
        return self._limit_state(carry_out(pool, pool.set_limit(limit_bytes, revision=revision)))

    def memory_limit_state(self) -> dict[str, Any]:
        """The limit in force and what it has come to."""
        return self._limit_state(self._slot.get().limit_state())

    def _limit_state(self, state: Any) -> dict[str, Any]:
        return {**state, "pool_name": self.pool_name or state["pool_name"], "reason": state["reason"] or ""}

    # ---- what there is

    def get_page_occupancy(self, page_ids: Sequence[int]) -> dict[int, int]:
        """Blocks in use on each of these pages. To shrink, evict where there are few."""
        pages = list(page_ids)
        return dict(zip(pages, self._slot.get().occupancy(pages)))

    def get_mapped_memory_size(self, unit: str = "bytes") -> float:
        """Memory of the pages with blocks in use, in ``bytes``, ``kb``, ``mb`` or ``gb``."""
        if unit not in _UNITS:
            raise ValueError(f"Unknown unit: {unit}; choose from {', '.join(_UNITS)}")
        used = int(self._slot.get().snapshot()["used_bytes"])
        return used if unit == "bytes" else used / _UNITS[unit]

    def observability_snapshot(self, integration: str | None = None) -> KVCachePoolSnapshot:
        return build_kv_cache_pool_snapshot(self, integration=integration)

    def observability_snapshot_dict(self, integration: str | None = None) -> dict[str, Any]:
        return self.observability_snapshot(integration=integration).to_dict()

    @property
    def null_block(self) -> list[int] | None:
        """``[0]`` where block 0 is kept as padding."""
        if not self.reserve_null_block:
            return None
        block = self._slot.get().null_block
        return None if block is None else [block]

    @property
    def reserved_blocks(self) -> list[int]:
        pool = self._slot.peek()
        return [] if pool is None else pool.reserved_blocks()

    @property
    def num_avail_blocks(self) -> int:
        """Free blocks on pages that have others in use."""
        pool = self._slot.peek()
        if pool is None:
            return 0
        now = pool.snapshot()
        return int(now["free_mapped_blocks"] - now["reserved_pages"] * now["blocks_per_page"])

    @property
    def in_shrink(self) -> bool:
        """Whether more is held than a lowered limit allows."""
        pool = self._slot.peek()
        return pool is not None and bool(pool.snapshot()["in_shrink"])

    @property
    def target_num_blocks(self) -> int | None:
        """Blocks that the limit leaves, while shrinking."""
        pool = self._slot.peek()
        now = None if pool is None else pool.snapshot()
        if now is None or not now["in_shrink"]:
            return None
        return int(now["limit_pages"] * now["blocks_per_page"])

    @property
    def avail_pages(self) -> dict[int, PageOccupancy]:
        """Pages with blocks in use and blocks free, by page id. Looks at every page: for tests and people."""
        return {page.page_id: page for page in self._pages_in_use() if page.free}

    @property
    def full_pages(self) -> dict[int, PageOccupancy]:
        """Pages without a free block, by page id."""
        return {page.page_id: page for page in self._pages_in_use() if not page.free}

    def _pages_in_use(self) -> list[PageOccupancy]:
        pool = self._slot.peek()
        if pool is None:
            return []
        blocks = pool.geometry.blocks_per_page
        used = pool.occupancy(range(pool.snapshot()["total_pages"]))
        return [PageOccupancy(page, count, blocks - count) for page, count in enumerate(used) if count]

    def _get_num_alloced_blocks(self) -> int:
        """Blocks handed out or set aside, the null block included."""
        now = self._slot.get().snapshot()
        return int(now["allocated_blocks"] + now["reserved_blocks"])


class RankKVCacheManager(KVCacheManager):
    """A manager for engines like SGLang, where every rank runs a scheduler: each maps its own tensors, and only those.

    With kvcached every rank orders all ranks about, so each page is mapped as many times as there are ranks.
    """

    _own_ranks = True
