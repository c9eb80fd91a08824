"""Blocks over pages that Python maps: what a ``PageAllocator`` with a broadcast callback runs on.

    alloc -> table.try_alloc                        from mapped pages, no callback
               | short
             table.claim -> map callback(world_size, offsets) -> table.mapped, try_alloc again
                                       | raised               -> table.refused, nothing has happened
    free  -> table.free -> idle pages above the reserve -> unmap callback -> table.unmapped

Everything happens on the thread that calls: there is no background thread, so no lock can be held by one while the
interpreter is held by another. The price is that nothing is mapped ahead, and that a limit written by ``kvctl`` is
carried out at the next call instead of at once.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tidekv import FileProblem, MapFailed, TidekvError, _native

from kvcached.utils import MAX_RESERVED_PAGES, get_kvcached_logger

logger = get_kvcached_logger()

Callback = Callable[[int, list[int]], Any]
"""Called with the world size and kvcached's byte offsets. What it raises undoes the operation."""


class CallbackPool:
    """The methods of ``tidekv.Pool`` that kvcached's surface uses, over pages that callbacks map and unmap."""

    def __init__(
        self,
        layout: _native.Layout,
        pages: int,
        *,
        name: str,
        group: int,
        limit: int,
        null_block: bool,
        world_size: int,
        map_pages: Callback,
        unmap_pages: Callback,
    ) -> None:
        geometry = layout.geometry(pages=pages, granularity=layout.chunk_bytes)
        self._table = _native.BlockTable(geometry, null_block=null_block)
        self._page_bytes = geometry.page_bytes
        # kvcached's offsets: whole pages where all layers share one, else one layer's part.
        self._offset_unit = geometry.page_bytes if layout.layout == "interleaved" else geometry.chunk_bytes
        self._world_size = world_size
        self._map_pages = map_pages
        self._unmap_pages = unmap_pages
        self._set_aside: list[int] = []
        # Pages whose callback raised when they were to be unmapped.
        self._stuck: list[int] = []
        self._limit_bytes = limit
        # The limit at the start is nobody's order, so that of revision 0 is one.
        self._revision = -1
        self._group = group
        self._lock = threading.RLock()
        # What the segment shows: its limit, and what is used and kept ready.
        self._segment_word = limit
        self._written = (0, 0)
        self.name = name if group == 0 else f"{name}_g{group}"
        self.closed = False
        self._segment_path = _native.segment_path(self.name)
        self._make_segment()
        self._pid = os.getpid()
        self._remove_segment = weakref.finalize(self, _remove_own_segment, self.name, self._pid)

    # ---- blocks

    @property
    def null_block(self) -> int | None:
        return self._table.null_block

    def try_alloc(self, count: int) -> list[int] | None:
        """Blocks, or None on a miss. ``MapFailed`` where the callback raised: nothing has changed then."""
        with self._lock:
            self._follow_segment()
            ready = self._set_aside[:count]
            more = self._take(count - len(ready))
            if more is None:
                return None
            del self._set_aside[: len(ready)]
            return ready + more

    def _take(self, count: int) -> list[int] | None:
        blocks = self._table.try_alloc(count)
        if blocks is None:
            pages = self._table.claim(count)
            if pages is None and self._unmap_stuck():
                pages = self._table.claim(count)
            if pages is None:
                return None
            self._map(pages)
            blocks = self._table.try_alloc(count)
        self._publish()
        return blocks

    def _map(self, pages: list[int]) -> None:
        try:
            self._map_pages(self._world_size, [page * self._offset_unit for page in pages])
        except BaseException as error:
            self._table.refused(pages)
            if not isinstance(error, Exception):
                raise
            raise MapFailed(f"Failed to map page {pages[0]}: {error}", page=pages[0]) from error
        self._table.mapped(pages)

    def free(self, blocks: Sequence[int]) -> None:
        """All or ``NotLeased``. Idle pages above the reserve, or above the limit, are unmapped."""
        with self._lock:
            aside = set(self._set_aside).intersection(blocks)
            if aside:
                raise ValueError(f"block {min(aside)} is set aside, not allocated: call free_reserved() for it")
            self._table.free(blocks)
            self._follow_segment()
            counts = self._table.counts()
            mapped = counts["idle_pages"] + counts["inuse_pages"]
            self._unmap_idle(max(counts["idle_pages"] - MAX_RESERVED_PAGES, mapped - counts["limit_pages"]))
            self._publish()

    def _unmap_idle(self, count: int) -> int:
        return self._unmap(self._table.retire(max(0, count)))

    def _unmap(self, pages: list[int]) -> int:
        if not pages:
            return 0
        try:
            self._unmap_pages(self._world_size, [page * self._offset_unit for page in pages])
        except Exception:
            # They may still have memory, so they are neither handed out nor forgotten.
            logger.exception("%d pages could not be unmapped: they are kept, and tried again when memory is short", len(pages))
            self._table.unmap_failed(pages)
            self._stuck += pages
            return 0
        self._table.unmapped(pages)
        return len(pages)

    def _unmap_stuck(self) -> int:
        pages, self._stuck = self._stuck, []
        return self._unmap(pages)

    def available(self) -> int:
        with self._lock:
            self._follow_segment()
            return self._table.available()

    def try_reserve(self, count: int) -> bool:
        with self._lock:
            blocks = self._take(count)
            self._set_aside += blocks or []
            return blocks is not None

    def reserved_blocks(self) -> list[int]:
        return list(self._set_aside)

    def reserved(self) -> int:
        return len(self._set_aside)

    def free_reserved(self) -> None:
        with self._lock:
            blocks, self._set_aside = self._set_aside, []
            self.free(blocks)

    def clear(self) -> int:
        with self._lock:
            self._set_aside = []
            freed = self._table.clear()
            self._publish()
            return freed

    def occupancy(self, pages: Sequence[int]) -> list[int]:
        return self._table.occupancy(pages)

    def pages_of(self, blocks: Sequence[int]) -> list[int]:
        return self._table.pages_of(blocks)

    @property
    def geometry(self) -> _native.Geometry:
        return self._table.geometry

    # ---- limits

    def _follow_segment(self) -> None:
        """Takes over a limit that somebody wrote to the segment since the last look. A segment that is gone comes back."""
        if self.closed:
            return
        try:
            words = _native.segment_read(self.name)
            if words is None and not os.path.exists(self._segment_path):
                self._make_segment()
                self._publish()
        except TidekvError as error:
            logger.debug("the segment of %s is looked at later: %s", self.name, error)
            return
        if words is not None and words[0] != self._segment_word:
            self._order_next(words[0])

    def _order(self, limit: int, revision: int) -> None:
        self._limit_bytes, self._revision, self._segment_word = limit, revision, limit
        self._table.set_limit(min(limit // self._page_bytes, self.geometry.page_count))
        counts = self._table.counts()
        self._unmap_idle(counts["idle_pages"] + counts["inuse_pages"] - counts["limit_pages"])

    def _order_next(self, limit: int) -> None:
        """An order without a revision: it is the latest, and the first of them is 1, as with a native pool."""
        self._order(limit, max(self._revision, 0) + 1)

    def resize(self, limit: int) -> _native.LimitState:
        with self._lock:
            self._follow_segment()
            self._order_next(limit)
            self._show_limit()
            return self._state()

    def _show_limit(self) -> None:
        if self.closed:
            return
        try:
            if not _native.segment_set_limit(self.name, self._limit_bytes):
                self._make_segment()
        except TidekvError as error:
            logger.debug("the segment of %s shows the new limit later: %s", self.name, error)

    def set_limit(self, limit: int, *, revision: int) -> _native.LimitState:
        with self._lock:
            self._follow_segment()
            if revision < self._revision:
                return self._state("stale")
            if revision == self._revision and limit != self._limit_bytes:
                return self._state("conflict")
            if revision > self._revision:
                self._order(limit, revision)
                self._show_limit()
            return self._state()

    def limit_state(self) -> _native.LimitState:
        with self._lock:
            self._follow_segment()
            return self._state()

    def _state(self, refused: str | None = None) -> _native.LimitState:
        counts = self._table.counts()
        mapped = (counts["idle_pages"] + counts["inuse_pages"]) * self._page_bytes
        effective = counts["limit_pages"] * self._page_bytes
        status: Any = refused or ("deferred" if mapped > effective else "applied")
        return {
            "status": status,
            "pool_name": self.name,
            "group_id": self._group,
            "limit_bytes": self._limit_bytes,
            "effective_limit_bytes": effective,
            "current_capacity_bytes": self.geometry.page_count * self._page_bytes,
            "revision": max(self._revision, 0),
            "mapped_bytes": mapped,
            "remaining_bytes": max(0, effective - mapped),
            "overage_bytes": max(0, mapped - effective),
            "reason": None if status == "applied" else "inuse_capacity_above_limit" if status == "deferred" else status,
        }

    def trim(self) -> int:
        """Unmaps every idle page, and asks again for those that could not be. Says how many bytes that were."""
        with self._lock:
            pages = self._unmap_stuck() + self._unmap_idle(self._table.counts()["idle_pages"])
            self._publish()
            return pages * self._page_bytes

    # ---- numbers

    def snapshot(self) -> dict[str, Any]:
        """The part of ``tidekv.Pool.snapshot`` that is asked for here."""
        with self._lock:
            counts, geometry = self._table.counts(), self.geometry
            idle, inuse, limit = counts["idle_pages"], counts["inuse_pages"], counts["limit_pages"]
            return {
                "total_pages": geometry.page_count,
                "inuse_pages": inuse,
                "reserved_pages": idle,
                "limit_pages": limit,
                "available_physical_pages": max(0, limit - idle - inuse),
                "blocks_per_page": geometry.blocks_per_page,
                "allocated_blocks": counts["leased_blocks"] - len(self._set_aside),
                "reserved_blocks": len(self._set_aside),
                "free_mapped_blocks": counts["free_blocks"],
                "page_bytes": self._page_bytes,
                "mapped_bytes": (idle + inuse) * self._page_bytes,
                "used_bytes": inuse * self._page_bytes,
                "limit_bytes": self._limit_bytes,
                "in_shrink": idle + inuse > limit,
            }

    def _publish(self) -> None:
        counts = self._table.counts()
        words = (counts["inuse_pages"] * self._page_bytes, counts["idle_pages"] * self._page_bytes)
        if self.closed or words == self._written:
            return
        try:
            try:
                _native.segment_set_usage(self.name, *words)
            except FileProblem:
                # Most likely somebody deleted it.
                self._make_segment()
                _native.segment_set_usage(self.name, *words)
        except TidekvError as error:
            # What operators see is late then. Blocks that were leased or freed are so all the same.
            logger.debug("the segment of %s is written later: %s", self.name, error)
            return
        self._written = words

    def _make_segment(self) -> None:
        """Makes the segment with the limit in force. ``FileProblem`` where another pool has the name by now."""
        _native.segment_create(self.name, self._limit_bytes)
        self._segment_word = self._limit_bytes
        self._written = (0, 0)

    def close(self) -> None:
        """Unmaps everything and removes the segment. May be called twice. In a forked child pages and segment are the parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self.closed:
                self.closed = True
                self._set_aside = []
                self._table.clear()
                self._unmap_stuck()
                self._unmap_idle(self._table.counts()["idle_pages"])
                self._unmap_null_block()
                self._remove_segment()

    def _unmap_null_block(self) -> None:
        """Its page is in use for as long as the table lives, and so never idle; nobody else has blocks any more. Left mapped it could
        not be mapped by who comes next."""
        used = self._table.occupancy(range(self.geometry.page_count))
        pages = [page for page, count in enumerate(used) if count]
        if pages:
            try:
                self._unmap_pages(self._world_size, [page * self._offset_unit for page in pages])
            except Exception:
                logger.exception("the pages %s stay mapped after their pool", pages)


def _remove_own_segment(name: str, pid: int) -> None:
    if os.getpid() == pid:
        _native.segment_delete(name)
