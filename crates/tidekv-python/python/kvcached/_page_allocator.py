"""kvcached's page allocator and its pages of blocks, for engines that hold pages themselves.

A ``PageAllocator`` is a pool whose blocks are as large as a page, so one page of it is one lease: the same ledger, the
same limits, the same background thread as behind a ``KVCacheManager``. A manager's own allocator is a view of its pool.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from tidekv import NotLeased, TidekvError, _native

from kvcached import _opening, _runtime
from kvcached._callback_pool import Callback, CallbackPool

__all__ = ["InternalPage", "PageAllocator"]


class InternalPage:
    """A page's blocks: ids count from the start of the layer, and a block that straddles two pages is in neither."""

    def __init__(self, page_id: int, page_size: int) -> None:
        self._page_id = page_id
        self._page_size = page_size
        self._blocks = range(0)
        # Taken from the end, so that low ids are handed out first.
        self._free: list[int] = []
        self._is_free: set[int] = set()

    @property
    def page_id(self) -> int:
        return self._page_id

    @property
    def page_size(self) -> int:
        return self._page_size

    def init(self, block_mem_size: int) -> None:
        """Cuts the page into blocks, all of them free."""
        self._blocks = range(*self.get_block_range(self._page_id, self._page_size, block_mem_size))
        self._free = list(reversed(self._blocks))
        self._is_free = set(self._blocks)

    def alloc(self, num_blocks: int = 1) -> list[int]:
        """So many blocks, or ``RuntimeError``."""
        if num_blocks > len(self._free):
            raise RuntimeError(
                f"Not enough free blocks in page: page {self._page_id} has {len(self._free)} of the {num_blocks}"
            )
        taken = [self._free.pop() for _ in range(num_blocks)]
        self._is_free.difference_update(taken)
        return taken

    def free(self, block_id: int) -> None:
        self.free_batch([block_id])

    def free_batch(self, block_ids: Sequence[int]) -> None:
        """All of them, or ``NotLeased`` for the first that is not allocated here, and then none."""
        seen: set[int] = set()
        for block in block_ids:
            if block not in self._blocks or block in self._is_free or block in seen:
                raise NotLeased(
                    f"block {block} is not allocated in page {self._page_id}: it was freed twice or is another page's; "
                    "nothing was freed",
                    block=block,
                )
            seen.add(block)
        self._free.extend(block_ids)
        self._is_free |= seen

    def empty(self) -> bool:
        """No block is allocated."""
        return len(self._free) == len(self._blocks)

    def full(self) -> bool:
        """No block is free."""
        return not self._free

    def num_free_blocks(self) -> int:
        return len(self._free)

    def get_free_blocks(self) -> list[int]:
        return list(self._free)

    @staticmethod
    def get_block_range(page_id: int, page_size: int, block_mem_size: int) -> tuple[int, int]:
        """First block that begins in the page, and the first after it that does not end there."""
        return -(-page_id * page_size // block_mem_size), (page_id + 1) * page_size // block_mem_size

    @staticmethod
    def get_num_blocks(page_size: int, block_mem_size: int) -> int:
        return page_size // block_mem_size


class PoolNumbers(Protocol):
    """What is read of a pool, be it native or driven by callbacks."""

    def snapshot(self) -> Any: ...
    def trim(self) -> int: ...
    def limit_state(self) -> _native.LimitState: ...
    def resize(self, limit: int) -> _native.LimitState: ...


def carry_out(pool: PoolNumbers, state: _native.LimitState) -> _native.LimitState:
    """What a new limit has come to once idle pages above it are gone. The pool's thread would see to that a moment later;
    callers of kvcached's functions expect it when they return."""
    if state["overage_bytes"] == 0 or state["status"] not in ("applied", "deferred"):
        return state
    pool.trim()
    return pool.limit_state()


class PageView:
    """Everything of a page allocator that only looks at a pool."""

    def __init__(self, plan: _opening.Plan) -> None:
        self._plan = plan

    def _pool(self) -> PoolNumbers | None:
        """The pool, once it is open."""
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a page allocator belongs to the process that made it: send its arguments, and make one where it is needed"
        )

    def get_page_state(self) -> dict[str, int]:
        """All counts at one moment. Free pages are those without a block in use, mapped or not."""
        pool = self._pool()
        if pool is None:
            pages = self._plan.pages
            return {"total_pages": pages, "free_pages": pages, "inuse_pages": 0, "reserved_pages": 0}
        now = pool.snapshot()
        total = max(min(now["limit_pages"], now["total_pages"]), now["inuse_pages"])
        return {
            "total_pages": total,
            "free_pages": total - now["inuse_pages"],
            "inuse_pages": now["inuse_pages"],
            "reserved_pages": now["reserved_pages"],
        }

    def get_num_free_pages(self) -> int:
        return self.get_page_state()["free_pages"]

    def get_num_inuse_pages(self) -> int:
        return self.get_page_state()["inuse_pages"]

    def get_num_total_pages(self) -> int:
        return self.get_page_state()["total_pages"]

    def get_num_reserved_pages(self) -> int:
        """Mapped pages without a block in use."""
        return self.get_page_state()["reserved_pages"]

    def get_avail_physical_pages(self) -> int:
        """Pages that limit and shared budget would still allow to be mapped."""
        pool = self._pool()
        return int(pool.snapshot()["available_physical_pages"]) if pool is not None else self._plan.pages

    def resize(self, new_mem_size: int) -> bool:
        """Sets the limit, in bytes of one layer's K or V. False while more than that is in use: it is then carried out
        as blocks are freed."""
        if new_mem_size < 0:
            raise ValueError(f"a limit of {new_mem_size} bytes: give the bytes of one layer's K or V, 0 for none")
        pool = self._pool()
        if pool is None:
            raise RuntimeError("there is nothing to resize before the KV tensors exist: call create_kv_tensors first")
        return carry_out(pool, pool.resize(new_mem_size * self._plan.buffers))["status"] == "applied"

    def get_resize_target(self) -> int:
        """The limit in force, in bytes of one layer's K or V; -1 while it is the one at the start."""
        pool = self._pool()
        limit = pool.snapshot()["limit_bytes"] if pool is not None else self._plan.limit
        return -1 if limit == self._plan.limit else int(limit) // self._plan.buffers

    def check_and_get_resize_target(self, current_mem_size: int) -> int:
        """The limit in force where it is not ``current_mem_size``, else -1. It is carried out without being asked."""
        pool = self._pool()
        limit = pool.snapshot()["limit_bytes"] if pool is not None else self._plan.limit
        target = int(limit) // self._plan.buffers
        return -1 if target == current_mem_size else target

    def trim(self) -> None:
        """Gives back every page without a block in use."""
        pool = self._pool()
        if pool is not None:
            pool.trim()

    def get_page_id(self, block_id: int, block_mem_size: int) -> int:
        return block_id * block_mem_size // self._plan.page_size

    def group_indices_by_page(self, indices: Sequence[int], block_mem_size: int) -> dict[int, list[int]]:
        return _native.group_by_page(indices, block_mem_size, self._plan.page_size)

    def reset_free_page_order(self) -> None:
        """Nothing to do: pages have no order that use could disturb."""

    def start_prealloc_thread(self) -> None:
        """The pool's thread runs from the start, because limits need it too. ``enable_page_prealloc`` decides whether it
        also maps ahead."""

    def stop_prealloc_thread(self) -> None:
        """See ``start_prealloc_thread``: the thread ends with the pool."""


class PageAllocator(PageView):
    """Hands out whole pages."""

    def __init__(
        self,
        num_layers: int,
        mem_size_per_layer: int,
        page_size: int,
        world_size: int = 1,
        pp_rank: int = 0,
        async_sched: bool = False,
        contiguous_layout: bool = True,
        enable_page_prealloc: bool = True,
        num_kv_buffers: int = 2,
        group_id: int = 0,
        ipc_name: str = "",
    ) -> None:
        plan = _opening.Plan(
            block_bytes=page_size,
            block_count=mem_size_per_layer // page_size,
            num_layers=num_layers,
            num_kv_buffers=num_kv_buffers,
            page_size=page_size,
            contiguous=contiguous_layout,
            world_size=world_size,
            pp_rank=pp_rank,
            group=group_id,
            name=ipc_name or None,
            null_block=False,
            map_ahead=enable_page_prealloc,
        )
        super().__init__(plan)
        self._opened: _native.Pool | CallbackPool | None = None
        self._close_opened: weakref.finalize[Any, Any] | None = None
        self._callbacks: dict[str, Callback] = {}
        self._use_worker_ipc = world_size > 1

    def _pool(self) -> PoolNumbers | None:
        if self._opened is None and (self._callbacks or not self._waits_for_tensors()):
            self._open()
        return self._opened

    def _waits_for_tensors(self) -> bool:
        return self._use_worker_ipc or _runtime.find_region(self._plan.group) is None

    def _open(self) -> _native.Pool | CallbackPool:
        if self._opened is None:
            if self._callbacks:
                self._opened = _opening.open_with_callbacks(self._plan, self._callbacks)
            elif self._use_worker_ipc:
                self._opened = _opening.open_on_workers(self._plan)
            else:
                self._opened = _opening.open_here(self._plan, _runtime.region(self._plan.group))
            # The pool ends with its allocator, wherever else somebody has it, or at the stop; then callbacks that hold the
            # allocator are let go of too.
            self._close_opened = weakref.finalize(self, _close_own, self._opened, os.getpid())
            _runtime.close_at_stop(self._close_opened)
        return self._opened

    def alloc_page(self) -> InternalPage:
        """A page with memory. ``RuntimeError`` with "No free pages left", or "Failed to map page N" and why."""
        pool = self._open()
        try:
            pages = pool.try_alloc(1)
        except TidekvError as error:
            if str(error).startswith("Failed to map page"):
                raise
            page = getattr(error, "page", None)
            raise RuntimeError(f"Failed to map page {'?' if page is None else page}: {error}") from error
        if pages is None:
            state = self.get_page_state()
            raise RuntimeError(
                f"No free pages left: {state['inuse_pages']} of {state['total_pages']} are in use, and "
                f"{self.get_avail_physical_pages()} more could be mapped now"
            )
        return InternalPage(pages[0], self._plan.page_size)

    def free_page(self, page_id: int) -> None:
        self.free_pages([page_id])

    def free_pages(self, page_ids: Sequence[int]) -> None:
        """All, or ``NotLeased`` (a ``ValueError``) for the first that is not allocated, and then none."""
        self._open().free(page_ids)

    def set_broadcast_map_callback(self, callback: Callback) -> None:
        """Has ``callback(world_size, offsets)`` map pages, on the thread that allocates; no other thread maps then."""
        self._set_callback("map", callback)

    def set_broadcast_unmap_callback(self, callback: Callback) -> None:
        self._set_callback("unmap", callback)

    def _set_callback(self, which: str, callback: Callback) -> None:
        _opening.check_callback(callback)
        if self._opened is not None:
            if self._opened.snapshot()["allocated_blocks"]:
                raise RuntimeError("pages are in use: set the callbacks before the first page is allocated")
            if self._close_opened is not None:
                self._close_opened()
            self._opened = None
        self._callbacks[which] = callback

    def set_use_worker_ipc(self, use_worker_ipc: bool) -> None:
        """Whether pages are mapped by workers in other processes rather than here."""
        if self._opened is not None:
            raise RuntimeError("pages were mapped already: choose before the first page is allocated")
        self._use_worker_ipc = use_worker_ipc


class ManagedPages(PageView):
    """The pages of a manager: to look at, and to have mapped by callbacks. Blocks are the manager's to hand out."""

    def __init__(
        self,
        plan: _opening.Plan,
        pool: Callable[[], PoolNumbers | None],
        set_callback: Callable[[str, Callback], None],
        set_use_worker_ipc: Callable[[bool], None],
    ) -> None:
        super().__init__(plan)
        self._get_pool = pool
        self._set_callback = set_callback
        self.set_use_worker_ipc = set_use_worker_ipc

    def _pool(self) -> PoolNumbers | None:
        return self._get_pool()

    def set_broadcast_map_callback(self, callback: Callback) -> None:
        self._set_callback("map", callback)

    def set_broadcast_unmap_callback(self, callback: Callback) -> None:
        self._set_callback("unmap", callback)


def _close_own(pool: _native.Pool | CallbackPool, pid: int) -> None:
    """A forked child that ends closes nothing: the pages are its parent's."""
    if os.getpid() == pid:
        pool.close()
