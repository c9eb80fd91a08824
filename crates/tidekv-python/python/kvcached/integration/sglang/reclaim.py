"""What happens at a scheduler's safe point: memory that is asked for goes, cached prefixes first.

    safe point --> settle            what requests have freed, and an idle scheduler's hand, goes to the pool
               --> agree             how much there is; how much is asked for            (with several ranks: one exchange)
               --> evict             from the radix tree, by its own `evict`, until so many pages of the pool are empty
               --> say               what the tree still holds that no request uses

A page becomes empty when its last block goes, and which prefixes share a page the tree does not know. So eviction goes in steps
of one page's tokens, as the tree orders them, and stops as soon as enough pages are empty; each step is looked at by all ranks.
What running requests hold stays: where an operator has lowered the limit below it, the next decode step retracts requests
(`check_decode_capacity`); for a neighbour's sake no request is retracted. A prompt that waits between two of its chunks goes back to
the queue, when it is in the way of the limit or nothing runs that could make room for it.

What is said at the end is what a neighbour that waits may ask for, also where this pool holds no more than its share
(docs/decisions/0019). It is evicted like what is owed above the share: no request is retracted for either.

An idle scheduler passes here all the time. With `--sleep-on-idle` it sleeps up to a second: the pool's descriptor is put among
those that wake it.
"""

from __future__ import annotations

from typing import Any

from kvcached.integration.sglang.allocators import ElasticAllocator, evict, evictable_tokens
from kvcached.utils import get_kvcached_logger

__all__ = ["at_safe_point", "empty_pages"]

logger = get_kvcached_logger()

_WOKEN = "_tidekv_wakes"


def at_safe_point(scheduler: Any) -> None:
    """For a scheduler of SGLang, between two of its decisions."""
    allocator = scheduler.token_to_kv_pool_allocator
    if not isinstance(allocator, ElasticAllocator):
        return
    _wake_when_asked(scheduler, allocator)
    idle = scheduler.last_batch is None and scheduler.running_batch.is_empty()
    owed = allocator.settle(idle=idle)
    if owed:
        empty_pages(allocator, scheduler.tree_cache, owed)
    allocator.slots.say_evictable(evictable_tokens(scheduler.tree_cache) // allocator.page_size)
    _retract_parked_chunk(scheduler, allocator)
    if allocator.slots.has_more_in_reach():
        # SGLang tries to admit again when a request has left; here memory may come without that.
        scheduler.running_batch.batch_is_full = False


def empty_pages(allocator: ElasticAllocator, tree_cache: Any, pages: int) -> int:
    """Evicts until so many pages more are empty, or nothing is left to evict. Says how many tokens went."""
    slots = allocator.slots
    per_page = slots.pool.geometry.blocks_per_page * allocator.page_size
    target = slots.pages_in_use() - pages
    evicted, step = 0, pages * per_page
    while slots.ranks.least_and_most(0, slots.pages_in_use() - target)[1] > 0:
        gone = evict(tree_cache, step)
        if gone == 0:
            break
        slots.give_back(empty_hand=False, wait=True)
        evicted += gone
        step = per_page
    if evicted:
        logger.debug("%d tokens of cached prefixes evicted for %d pages of pool '%s'", evicted, pages, slots.pool.name)
        allocator.settle(idle=False)
    return evicted


def _retract_parked_chunk(scheduler: Any, allocator: ElasticAllocator) -> None:
    """As SGLang retracts a request that decodes. Its cached chunks stay in the tree, where they can be evicted."""
    request, last = scheduler.chunked_req, scheduler.last_batch
    if request is None or request.extend_end is None or request.extend_end > request.prefix_len:
        return
    if last is not None and request in last.reqs:
        return
    if allocator.slots.over_limit or scheduler.running_batch.is_empty():
        from sglang.srt.managers.schedule_batch import release_req

        scheduler.chunked_req = None
        release_req(
            req=request,
            remaing_req_count=0,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        scheduler._add_request_to_queue(request, is_retracted=True)
        logger.info("request %s waits for memory of pool '%s'", request.rid, allocator.slots.pool.name)


def _wake_when_asked(scheduler: Any, allocator: ElasticAllocator) -> None:
    """A scheduler that sleeps while idle is woken by what arrives at sockets, and by this."""
    poller = getattr(getattr(scheduler, "idle_sleeper", None), "poller", None)
    if poller is None or getattr(poller, _WOKEN, False):
        return
    poller.register(allocator.slots.pool.reclaim_fileno(), 1)
    setattr(poller, _WOKEN, True)
