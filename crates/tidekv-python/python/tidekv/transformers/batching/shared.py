"""What both adapters do alike: the settings, building a cache without its memory, and the loop around the scheduler."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.overrides import TorchFunctionMode
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

from tidekv import BadArgument, PoolExhausted

if TYPE_CHECKING:
    from tidekv import Pool, TidekvError

    from ..memory import Blocks, PoolOptions

__all__ = ["ElasticCache", "ElasticProcessor", "Settings", "WithoutMemory", "lease_trash", "refuse_tensor_parallelism"]


@dataclass
class Settings:
    """How the caches that are made from now on get their memory."""

    options: PoolOptions
    patience: float
    """Seconds to wait for memory when no request can go on without."""
    pools: weakref.WeakValueDictionary[int, Pool] = field(default_factory=weakref.WeakValueDictionary)

    def note(self, cache: object, pool: Pool) -> None:
        """The pool is closed with its cache: transformers drops that when its manager stops."""
        self.pools[id(pool)] = pool
        weakref.finalize(cache, pool.close)


class ElasticCache(Protocol):
    """What the loop needs of an adapter's cache."""

    blocks: Blocks
    settings: Settings

    def settle(self) -> None:
        """Gives back what nobody uses; where memory is asked for, also the prefixes that are kept for later."""

    def keep(self, ids: list[int]) -> None:
        """Takes leased blocks, for the scheduler's next try."""


class WithoutMemory(TorchFunctionMode):
    """Tensors that are made under it have shape and type, and no memory: a cache is built, then given its pool's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def refuse_tensor_parallelism(size: int) -> None:
    # The ranks schedule apart and must agree; how much memory is free is not the same on every device.
    if size > 1:
        raise BadArgument(
            f"tensor parallelism over {size} ranks: elastic memory for continuous batching is for one rank, "
            "run it without tidekv.transformers or with one GPU"
        )


class ElasticProcessor(ContinuousBatchProcessor):
    """The loop around the scheduler: returns memory before every batch and, ten times a second, while idle."""

    cache: ElasticCache

    def prepare_next_batch(self) -> bool:
        blocks = self.cache.blocks
        self.cache.settle()
        blocks.refusal = None
        try:
            return bool(super().prepare_next_batch())
        except RuntimeError as stuck:
            # Nothing runs and nothing can be moved away. Where the pool refused, waiting may help.
            if blocks.refusal is None:
                raise
            needed = blocks.refusal.needed if isinstance(blocks.refusal, PoolExhausted) else 1
            ids = blocks.lease(needed, wait=self.cache.settings.patience)
            if ids is None:
                raise explain(blocks, f"no request can go on for {self.cache.settings.patience:g} s") from stuck
            self.cache.keep(ids)
            return bool(super().prepare_next_batch())


def lease_trash(blocks: Blocks, count: int) -> list[int]:
    """The blocks that padding reads and writes, which a cache holds for life."""
    ids = blocks.lease(count)
    if ids is None:
        raise explain(blocks, "the cache cannot start")
    return ids


def explain(blocks: Blocks, what: str) -> TidekvError:
    """The latest refusal, for whoever reads the error of a failed request."""
    name, refusal = blocks.pool.name, blocks.refusal
    assert refusal is not None
    message = (
        f"{what}: {refusal} (pool '{name}'). Raise its limit (kvctl limit {name} SIZE), let a neighbour finish, or send shorter "
        "requests"
    )
    return type(refusal)(message, **vars(refusal))
