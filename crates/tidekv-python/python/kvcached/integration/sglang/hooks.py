"""What is hooked in SGLang, by its own registry of hooks: the table, and the functions.

| where                                        | how    | why                                                              |
|----------------------------------------------|--------|------------------------------------------------------------------|
| `Scheduler.ingest_requests`                  | after  | the safe point: every loop passes it, busy, idle or paused       |
| `KVCacheConfigurator.configure`              | before | features that cannot be elastic are refused at the start         |
| `KVCacheConfigurator._profile_available_bytes` | around | the size is address space: what neighbours hold comes back     |
| `..._build_token_to_kv_pool_allocator`       | after  | the platform is not asked for pages of one token                 |
| `post_capture_kv_sizing_planned`             | after  | SGLang's own grow-only backing of buffers has nothing to back    |
| `SchedulerPoolStatsObserver.get_pool_stats`  | around | books that must add up count ids, not memory                     |
| `ScheduleBatch.retract_decode`               | after  | a last request that finds no memory waits instead of failing     |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["HOOKS", "Hook"]

_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator"


class Hook(NamedTuple):
    """One row of the table."""

    name: str
    """What it is for, in the words of the report."""
    where: str
    """`module:attribute`"""
    kind: str
    """A `HookType` of SGLang."""
    function: Callable[..., Any]

    @property
    def target(self) -> str:
        """As SGLang's registry spells it."""
        return self.where.replace(":", ".")


def at_safe_point(received: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """New requests are in and nothing is decided yet: memory may come and go."""
    from kvcached.integration.sglang import reclaim

    reclaim.at_safe_point(scheduler)


def refuse_features(configurator: Any, *args: Any, **kwargs: Any) -> None:
    """`KVCachedConfigError` where this model or these settings cannot be elastic."""
    from kvcached.integration.sglang import refusals

    refusals.check(configurator)


def size_addresses(original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any) -> int:
    """Bytes for the KV cache: SGLang's figure, or all of the device that weights leave, whoever has it at the moment."""
    from kvcached.integration.sglang import sizing

    return sizing.available_bytes(original, configurator, *args, **kwargs)


def replace_token_allocator(allocator: Any, *args: Any, **kwargs: Any) -> Any:
    """Ours for SGLang's, where pages have one token; None keeps what it is."""
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

    from kvcached.integration.sglang.allocators import ElasticTokenAllocator

    if type(allocator) is not TokenToKVPoolAllocator:
        return None
    kvcache = allocator.get_kvcache()
    return ElasticTokenAllocator(allocator.size, allocator.dtype, allocator.device, kvcache, allocator.need_sort)


def no_post_capture_sizing(planned: bool, *args: Any, **kwargs: Any) -> bool:
    return False


def count_ids(original: Callable[..., Any], observer: Any, *args: Any, **kwargs: Any) -> Any:
    """Statistics and leak checks: available, evictable and held add up to the size that SGLang was given."""
    from kvcached.integration.sglang.allocators import ElasticAllocator

    allocator = observer.token_to_kv_pool_allocator
    if not isinstance(allocator, ElasticAllocator):
        return original(observer, *args, **kwargs)
    with allocator.counting_ids():
        return original(observer, *args, **kwargs)


def let_the_last_one_wait(result: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang fails a request that does not fit alone, because its pool will never be larger. Ours may be, a little later: the
    request goes back to the queue and is computed again."""
    from kvcached.integration.sglang.allocators import ElasticAllocator

    retracted, ratio, to_abort = result
    if not isinstance(batch.token_to_kv_pool_allocator, ElasticAllocator):
        return None
    waiting = [request for request in to_abort if request.beam_group is None]
    for request in waiting:
        request.to_finish = None
    # With nobody left SGLang estimates that nobody will need anything.
    ratio = ratio if batch.reqs else 1.0
    return retracted + waiting, ratio, [request for request in to_abort if request.beam_group is not None]


HOOKS = (
    Hook("safe point of the scheduler", "sglang.srt.managers.scheduler:Scheduler.ingest_requests", "AFTER", at_safe_point),
    Hook("settings", f"{_CONFIGURATOR}.configure", "BEFORE", refuse_features),
    Hook("size of the KV cache", f"{_CONFIGURATOR}._profile_available_bytes", "AROUND", size_addresses),
    Hook("pages of one token", f"{_CONFIGURATOR}._build_token_to_kv_pool_allocator", "AFTER", replace_token_allocator),
    Hook(
        "backing of buffers",
        "sglang.srt.arg_groups.overrides:post_capture_kv_sizing_planned",
        "AFTER",
        no_post_capture_sizing,
    ),
    Hook(
        "statistics and leak checks",
        "sglang.srt.managers.scheduler_components.pool_stats_observer:SchedulerPoolStatsObserver.get_pool_stats",
        "AROUND",
        count_ids,
    ),
    Hook(
        "retraction", "sglang.srt.managers.schedule_batch:ScheduleBatch.retract_decode", "AFTER", let_the_last_one_wait
    ),
)
