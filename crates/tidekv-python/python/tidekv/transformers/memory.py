"""Pools as transformers needs them: opened for a torch device, leased from without exceptions, seen as tensors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypedDict

import torch

from tidekv import Layout, OutOfMemory, Pool, PoolExhausted
from tidekv._tensors import torch_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Blocks", "PoolOptions", "dtype_name", "open_pool", "round_up", "tensor_of"]


class PoolOptions(TypedDict, total=False):
    """What `tidekv.Pool` is told beside its layout, size and device, which follow from the model."""

    name: str
    limit: int
    budget: int
    utilization: float
    floor: int
    ceiling: int
    weight: int
    priority: int
    reserve: tuple[int, int]
    decay: float
    runtime_dir: str


def open_pool(layout: Layout, device: torch.device, blocks: int, options: PoolOptions) -> Pool:
    """A pool on the device that torch means, with address space for at least so many blocks."""
    place = device.type
    pages = -(-blocks // layout.geometry(pages=1, device=place, env=True).blocks_per_page)
    if place == "cuda":
        place = f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    # Nothing is mapped ahead of demand: a page lasts for many tokens, and what is trimmed stays away.
    usual: PoolOptions = {"name": f"transformers_{os.getpid()}", "reserve": (0, 10)}
    return Pool(layout, device=place, pages=pages, **(usual | options))


def tensor_of(pool: Pool, layer: int, value: bool = False) -> torch.Tensor:
    """One layer's K or V over the whole reservation, `[ids, ...]`. Only leased ids have memory behind them."""
    return torch_tensor(pool, layer, value)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Blocks:
    """Blocks leased from a pool on behalf of an engine that keeps its own lists of them, at most `capacity` at once: a pool
    is made of whole pages and may have a few more."""

    def __init__(self, pool: Pool, capacity: int) -> None:
        self.pool = pool
        self.capacity = capacity
        self.held = 0
        self.refusal: PoolExhausted | OutOfMemory | None = None
        """Why the pool refused the latest lease; None where it did not, or was not asked for want of capacity."""

    def available(self) -> int:
        return min(self.capacity - self.held, self.pool.available())

    def lease(self, count: int, *, wait: float = 0.0) -> list[int] | None:
        """All of them or None; `refusal` says whether waiting can help."""
        self.refusal = None
        if count > self.capacity - self.held:
            return None
        try:
            ids = self.pool.alloc(count, wait=wait)
        except (PoolExhausted, OutOfMemory) as refusal:
            self.refusal = refusal
            return None
        self.held += count
        return ids

    def give_back(self, ids: Sequence[int]) -> None:
        # No step is named, so the pool synchronises the device before it unmaps: a batch in flight may still read.
        if ids:
            self.pool.free(ids)
            self.held -= len(ids)

    def reclaim_wanted(self) -> bool:
        """Whether a lowered limit or a starving neighbour asks for memory that is in use."""
        return self.pool.reclaim_requested()["bytes"] > 0
