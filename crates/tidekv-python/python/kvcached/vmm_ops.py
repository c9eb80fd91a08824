"""Tensors over address space whose memory comes and goes, page by page. kvcached's native module, and ``_C``.

    create_kv_tensors(size, ...)     contiguous: one tensor       [page 0: all layers, K and V][page 1: ...
                                     else: one tensor per layer   [K of page 0, 1, ... | V of page 0, 1, ...]

    map_to_kv_tensors([offset])      puts memory behind one page of every layer; offset = page * bytes of a page, which
                                     are page_size * layers * buffers (contiguous) or page_size (not)

A batch is mapped whole or not at all, and every refusal is an exception: nothing ends the process. Touching bytes that
are not mapped is an illegal access (SIGSEGV on host memory); there is no page of zeros behind them that would hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidekv._native import Region

from kvcached import _runtime
from kvcached._page_allocator import InternalPage, PageAllocator

__all__ = [
    "InternalPage",
    "PageAllocator",
    "create_kv_tensors",
    "init_kvcached",
    "kv_tensors_created",
    "map_to_kv_tensors",
    "shutdown_kvcached",
    "unmap_from_kv_tensors",
]


def init_kvcached(dev_str: str, page_size: int = 0, contiguous_layout: bool = True) -> None:
    """Chooses device (``cuda:0``, ``cpu``), page size (0: KVCACHED_PAGE_SIZE_MB's) and layout for this process."""
    _runtime.start(dev_str, page_size, contiguous_layout)


def shutdown_kvcached() -> None:
    """Gives all memory back. Tensors that still live keep their addresses, and must not be touched any more."""
    _runtime.stop()


def create_kv_tensors(
    size: int,
    dtype_size: int,
    dev_str: str,
    num_layers: int,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    unified_pool: bool = False,
) -> list[Any]:
    """Reserves address space and gives flat integer tensors over it; no memory is taken.

    ``size`` is the bytes of one layer, all its buffers together. With ``unified_pool`` K and V share one buffer.
    Without torch, tensors on ``cpu`` are numpy arrays.
    """
    if dtype_size not in _runtime.TENSOR_TYPES:
        raise ValueError(f"dtype_size is {dtype_size}: give the bytes of one element, 1, 2, 4 or 8")
    if num_layers < 1 or num_kv_buffers not in (1, 2):
        raise ValueError(
            f"num_layers is {num_layers} and num_kv_buffers {num_kv_buffers}: give at least one layer, and 2 buffers "
            "for K and V or 1 where they are one"
        )
    buffers = 1 if unified_pool else num_kv_buffers

    def make(state: _runtime._State) -> Region:
        if not _runtime.same_device(dev_str, state.device):
            raise ValueError(
                f"tensors were asked for on {dev_str}, but kvcached is initialized for {state.device}: use that device, "
                "or call shutdown_kvcached() and init_kvcached() with the other"
            )
        pages, odd = divmod(size, buffers * state.page_size)
        if pages < 1 or odd:
            raise ValueError(
                f"{size} bytes for a layer are not {buffers} buffers of whole pages of {state.page_size} bytes: round the "
                f"size up to {max(1, pages + bool(odd)) * buffers * state.page_size}"
            )
        return Region(
            state.device,
            pages=pages,
            chunk_bytes=state.page_size,
            chunks=num_layers * buffers,
            contiguous=state.contiguous,
        )

    region = _runtime.add_region(group_id, make)
    if region.contiguous:
        return [_runtime.tensor(region, dtype_size, 0, region.nbytes)]
    layer = region.nbytes // num_layers
    return [_runtime.tensor(region, dtype_size, place * layer, layer) for place in range(num_layers)]


def kv_tensors_created(group_id: int = 0) -> bool:
    """Whether the group has its tensors in this process."""
    return _runtime.find_region(group_id) is not None


def map_to_kv_tensors(offsets: Sequence[int], group_id: int = 0) -> bool:
    """Puts memory behind the pages at these offsets, all or none. True, or an exception that says which and why."""
    region = _runtime.region(group_id)
    region.map(_pages(region, offsets))
    return True


def unmap_from_kv_tensors(offsets: Sequence[int], group_id: int = 0) -> bool:
    """Waits for the device and takes the memory away again. True, or an exception."""
    region = _runtime.region(group_id)
    region.unmap(_pages(region, offsets))
    return True


def _pages(region: Region, offsets: Sequence[int]) -> list[int]:
    try:
        return [region.page_of_offset(offset) for offset in offsets]
    except OverflowError:
        raise ValueError(f"offsets begin at 0, and one of {list(offsets)!r:.80} does not") from None
