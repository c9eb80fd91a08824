"""Continuous batching (`generate_batch`) on a pool: one adapter for each shape that transformers' cache has had.

    found in transformers                                            adapter
    ---------------------------------------------------------------  ----------------------------------
    `cache_manager.BlockManager`, K and V tensors per layer (5.17)   blocks.py
    `cache_allocators.CachePool`, one tensor of sectors (5.22)       sectors.py

There is no official hook, so three module globals are replaced and put back: the cache, the memory check (the size of the
cache is address space here, not memory) and the loop (which returns memory and answers requests for it between batches).
What decides is what the installed package has, not its version.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers

from tidekv import TidekvError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from typing_extensions import Unpack

    from tidekv import Pool

    from ..memory import PoolOptions
    from .shared import Settings

__all__ = ["ElasticMemory", "UnsupportedTransformers", "elastic_memory", "install"]

logger = logging.getLogger("tidekv.transformers")

PACKAGE = "transformers.generation.continuous_batching"
PATIENCE = 5.0


class UnsupportedTransformers(TidekvError):
    """The installed transformers has continuous batching of a shape that no adapter knows, or none."""


@dataclass(frozen=True)
class Shape:
    """What must be there for an adapter to fit: (module, class, methods that it overrides or calls)."""

    adapter: str
    cache: str
    what: str
    needs: tuple[tuple[str, str, tuple[str, ...]], ...]

    def missing(self) -> str | None:
        """The first thing that is not there."""
        for module, class_name, methods in self.needs:
            try:
                found = getattr(importlib.import_module(f"{PACKAGE}.{module}"), class_name)
            except (ImportError, AttributeError):
                return f"{module}.{class_name}"
            for method in methods:
                if not callable(getattr(found, method, None)) and not isinstance(
                    inspect.getattr_static(found, method, None), property
                ):
                    return f"{module}.{class_name}.{method}"
        return None


PROCESSOR = ("continuous_api", "ContinuousBatchProcessor", ("prepare_next_batch",))
SHAPES = (
    Shape(
        "sectors",
        "ElasticSectorCache",
        "one tensor of sectors",
        (
            PROCESSOR,
            ("cache_allocators", "CachePool", ("allocate_sector", "try_to_free_sectors", "num_free_sectors", "reset")),
            ("cache", "PagedAttentionMemoryHandler", ("compute_memory_footprint",)),
            (
                "cache",
                "PagedAttentionCache",
                ("can_store_request_tokens", "prepare_fork_request", "free_all_requests", "evict_cached_blocks"),
            ),
        ),
    ),
    Shape(
        "blocks",
        "ElasticBlockCache",
        "K and V tensors of blocks",
        (
            PROCESSOR,
            ("cache_manager", "BlockManager", ("has_enough_free_blocks", "get_free_blocks", "num_free_blocks")),
            ("cache", "PagedAttentionMemoryHandler", ("compute_memory_footprint",)),
            (
                "cache",
                "PagedAttentionCache",
                ("allocate_blocks", "free_blocks", "blocks_needed", "mark_shareable_blocks_as_complete"),
            ),
        ),
    ),
)


class ElasticMemory:
    """Continuous batching on pools, from `install` until `uninstall`."""

    def __init__(self, report: str, settings: Settings, replaced: list[tuple[ModuleType, str, Any]]) -> None:
        self.report = report
        """One line: what was found and what is used."""
        self._settings = settings
        self._replaced = replaced

    @property
    def pools(self) -> list[Pool]:
        """The pools of caches that are alive: transformers makes a cache when a manager starts."""
        return [pool for pool in self._settings.pools.values() if not pool.closed]

    def uninstall(self) -> None:
        """Managers that are started later are as before; those that run keep their pools. May be called twice."""
        for module, name, original in self._replaced:
            setattr(module, name, original)
        self._replaced = []


def install(*, patience: float = PATIENCE, **options: Unpack[PoolOptions]) -> ElasticMemory:
    """Puts the KV cache of every continuous batching manager that is started from now on into a pool.

    `patience` is how many seconds a manager waits for memory when none of its requests can go on; after that they fail
    with a message that says what to do. The options are those of `tidekv.Pool`. How large the cache may get is decided
    by transformers as ever (`num_blocks`, `max_memory_percent`), but costs nothing until tokens come."""
    continuous_api = import_continuous_api()
    if "tidekv" in continuous_api.PagedAttentionCache.__module__:
        raise UnsupportedTransformers("elastic memory is installed already: call uninstall() on what install() gave first")
    shape = find_shape()
    shared = importlib.import_module(".shared", __name__)
    adapter = importlib.import_module(f".{shape.adapter}", __name__)
    settings = shared.Settings(options, patience)
    # A class of its own for each installation: its settings are the class's.
    cache_class = type(shape.cache, (getattr(adapter, shape.cache),), {"settings": settings, "__module__": adapter.__name__})
    cache_module = importlib.import_module(f"{PACKAGE}.cache")
    replaced = []
    for module, name, ours in (
        (continuous_api, "PagedAttentionCache", cache_class),
        (continuous_api, "ContinuousBatchProcessor", shared.ElasticProcessor),
        (cache_module, "PagedAttentionMemoryHandler", adapter.VirtualMemoryHandler),
    ):
        replaced.append((module, name, getattr(module, name)))
        setattr(module, name, ours)
    report = (
        f"tidekv.transformers: transformers {transformers.__version__} has continuous batching with {shape.what}; "
        f"its cache is a pool now (adapter '{shape.adapter}')"
    )
    logger.info(report)
    return ElasticMemory(report, settings, replaced)


@contextmanager
def elastic_memory(*, patience: float = PATIENCE, **options: Unpack[PoolOptions]) -> Iterator[ElasticMemory]:
    """`install` for as long as the `with` block runs."""
    memory = install(patience=patience, **options)
    try:
        yield memory
    finally:
        memory.uninstall()


def import_continuous_api() -> ModuleType:
    try:
        return importlib.import_module(f"{PACKAGE}.continuous_api")
    except ImportError as error:
        raise UnsupportedTransformers(
            f"transformers {transformers.__version__} has no continuous batching that tidekv knows ({error}): install 5.17 "
            "or 5.22, or use tidekv.transformers.TideCache with generate"
        ) from error


def find_shape() -> Shape:
    """The first shape of which nothing is missing."""
    missing = {shape.adapter: shape.missing() for shape in SHAPES}
    for shape in SHAPES:
        if missing[shape.adapter] is None:
            return shape
    lacks = ", ".join(f"'{adapter}' lacks {name}" for adapter, name in missing.items())
    raise UnsupportedTransformers(
        f"transformers {transformers.__version__} has continuous batching of a shape that tidekv does not know ({lacks}): "
        "install 5.17 or 5.22, or use tidekv.transformers.TideCache with generate"
    )
