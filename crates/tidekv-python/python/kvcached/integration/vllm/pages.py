"""Which blocks lie on which pages of memory: arithmetic, no vLLM.

With a block-outermost layout a block's bytes of all layers are one run of `stride` bytes, and a page of memory holds a run
of blocks. A stride is rarely a part of a page, so a block may lie on two:

    page        |----- 0 -----|----- 1 -----|----- 2 -----|
    block       |--0--|--1--|--2--|--3--|--4--|--5--|--6--|        block 2 needs pages 0 and 1

A block may be given to a request while all its pages have memory; a page may lose its memory while none of its blocks is
given to anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from kvcached.utils import KVCachedConfigError, align_to

__all__ = ["PageMap", "choose_page_bytes"]

TARGET_PAGE_BYTES = 16 << 20
"""About what a page holds unless told otherwise: small enough that an idle model keeps little, large enough for few calls."""


@dataclass(frozen=True)
class PageMap:
    """Blocks and pages of one buffer. Ranks may differ in `stride` and `page_bytes`, not in their quotient."""

    blocks: int
    stride: int
    page_bytes: int

    def __post_init__(self) -> None:
        if self.stride > self.page_bytes:
            raise ValueError(f"a block of {self.stride} bytes is larger than a page of {self.page_bytes}")

    @property
    def pages(self) -> int:
        return -(-self.blocks * self.stride // self.page_bytes)

    @property
    def blocks_per_page(self) -> Fraction:
        return Fraction(self.page_bytes, self.stride)

    def pages_of(self, block: int) -> range:
        """One page, or two."""
        first = block * self.stride // self.page_bytes
        last = ((block + 1) * self.stride - 1) // self.page_bytes
        return range(first, last + 1)

    def blocks_of(self, page: int) -> range:
        """Every block that has bytes there, whole or in part."""
        first = page * self.page_bytes // self.stride
        end = -(-(page + 1) * self.page_bytes // self.stride)
        return range(first, min(end, self.blocks))

    def pages_at_least(self, blocks: int) -> int:
        """How many pages so many blocks lie on if they lie together."""
        return -(-blocks * self.stride // self.page_bytes)

    def pages_for(self, blocks: int) -> int:
        """How many more pages give at least so many more blocks, wherever they lie."""
        whole = max(1, int(self.blocks_per_page))
        # The two blocks at a page's ends may need neighbours that have no memory.
        usable = whole if self.page_bytes % self.stride == 0 else max(1, whole - 1)
        return -(-blocks // usable)


def choose_page_bytes(
    stride: int, granularity: int, *, layer_bytes: int, stages: int = 1, wanted_bytes: int | None = None
) -> int:
    """The size of a page for blocks of `stride` bytes on a device that maps multiples of `granularity`.

    With several pipeline stages a page must hold the same blocks on every rank, though ranks have different numbers of
    layers. What a layer keeps of a block (`layer_bytes`) is the same everywhere, so a page gets as many blocks as fill whole
    granules however many layers a rank has; `wanted_bytes` means nothing then.
    """
    if stages == 1:
        return align_to(max(stride, wanted_bytes or TARGET_PAGE_BYTES), granularity)
    if stride % layer_bytes:
        raise KVCachedConfigError(
            f"with {stages} pipeline stages all layers must keep equally much of a block: {stride} bytes of a block are no "
            f"multiple of {layer_bytes} bytes of a layer. Use one stage, or unset ENABLE_KVCACHED"
        )
    return granularity // gcd(layer_bytes, granularity) * stride
