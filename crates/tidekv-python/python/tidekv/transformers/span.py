"""Linear memory that grows and shrinks at its end.

    address   0        1        2        3        4        5        page = block of a private pool
              [ leased ][ leased ][ leased ][  ahead ][   --   ][   --   ]
              `------ bytes that may be used ------'              `--` has address space but no memory

A pool hands out whichever page is cheapest, a span needs the next one. In a pool of its own that is nearly always the
same: never used pages come in rising order, and pages given back from the top down come back from the bottom up. Pages
that come early (the pool keeps some idle ones mapped, and leases the latest first) are kept until the span reaches them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidekv import Layout

from .memory import open_pool, tensor_of

if TYPE_CHECKING:
    import torch

    from .memory import PoolOptions

__all__ = ["Span"]


class Span:
    """Bytes `[0, size)` of a reservation, where `size` moves in whole pages."""

    def __init__(self, device: torch.device, page_bytes: int, page_count: int, options: PoolOptions) -> None:
        layout = Layout.raw(1, page_bytes, layout="interleaved", chunk_bytes=page_bytes)
        self.pool = open_pool(layout, device, page_count, options)
        geometry = self.pool.geometry
        if geometry.blocks_per_page != 1 or geometry.kernel_id(page_count - 1) != page_count - 1:
            self.pool.close()
            raise AssertionError(f"blocks of {page_bytes} bytes are not pages: {geometry}")
        self.page_bytes = page_bytes
        self.capacity = page_bytes * page_count
        self.bytes = tensor_of(self.pool, 0).flatten()
        """The whole reservation as uint8. Only the first `size` bytes have memory."""
        self.size = 0
        self._ahead: set[int] = set()

    def grow_to(self, size: int) -> None:
        """Gives the first `size` bytes memory, or raises what the pool raised and changes nothing."""
        first, end = self.size // self.page_bytes, -(-size // self.page_bytes)
        missing = set(range(first, end)) - self._ahead
        leased: list[int] = []
        try:
            while missing:
                ids = self.pool.alloc(len(missing))
                leased += ids
                missing.difference_update(ids)
        except BaseException:
            self.pool.free(sorted(leased, reverse=True))
            raise
        self._ahead.update(leased)
        self._ahead.difference_update(range(first, end))
        self.size = max(self.size, end * self.page_bytes)

    def shrink_to(self, size: int) -> None:
        """Gives back the pages above `size`: at once where they are needed, else after the pool's decay."""
        end = -(-size // self.page_bytes)
        leaving = self._ahead.union(range(end, self.size // self.page_bytes))
        if leaving:
            self.pool.free(sorted(leaving, reverse=True))
            self._ahead.clear()
            self.size = min(self.size, end * self.page_bytes)

    def close(self) -> None:
        """Gives everything back. Tensors over the span keep their addresses and must not be touched any more."""
        self.pool.close()
        self.size = 0
        self._ahead.clear()
