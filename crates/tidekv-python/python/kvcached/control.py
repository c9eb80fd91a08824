"""One limit for an instance that has several pools."""

from __future__ import annotations

from typing import Any

from kvcached.pool_registry import get_registered_kv_cache_pools

__all__ = ["set_instance_memory_limit"]

# The answer for all pools is that of the pool which is worst off, in this order.
_WORST_FIRST = ("conflict", "stale", "deferred")
_REASONS = {
    "conflict": "revision_reused_with_different_limit",
    "stale": "a_later_revision_is_in_force",
    "deferred": "inuse_capacity_above_limit",
}


def set_instance_memory_limit(limit_bytes: int, *, revision: int) -> dict[str, Any]:
    """Splits a limit over all registered pools by their size and applies it.

    The pools are ordered by name and group; the last one takes what rounding leaves. A pool's limit is the same word
    that ``kvctl limit`` writes, with a revision: the later order wins, whoever gave it.
    """
    limit_bytes, revision = int(limit_bytes), int(revision)
    if limit_bytes < 0:
        raise ValueError(f"limit_bytes is {limit_bytes}: give the bytes that all pools together may hold, 0 for none")
    if revision < 0:
        raise ValueError(f"revision is {revision}: give a number that grows with every order, from 0 on")

    managers = [manager for manager, _ in get_registered_kv_cache_pools()]
    managers.sort(key=lambda manager: (manager.pool_name or "", manager.group_id))
    capacities = [manager.mem_size * manager.num_layers * manager.num_kv_buffers for manager in managers]
    whole = sum(capacities)
    left = to_split = min(limit_bytes, whole)
    pools = []
    for place, (manager, capacity) in enumerate(zip(managers, capacities), start=1):
        part = left if place == len(managers) else to_split * capacity // whole
        pools.append(manager.set_memory_limit(part, revision=revision))
        left -= part

    answers = {pool["status"] for pool in pools}
    status = next((bad for bad in _WORST_FIRST if bad in answers), "applied") if pools else "unavailable"
    mapped = sum(pool["mapped_bytes"] for pool in pools)
    effective = sum(pool["effective_limit_bytes"] for pool in pools)
    return {
        "status": status,
        "reason": _REASONS.get(status, "") if pools else "no_registered_kv_cache_pool",
        "limit_bytes": limit_bytes,
        "effective_limit_bytes": effective,
        "revision": revision,
        "mapped_bytes": mapped,
        "remaining_bytes": max(0, effective - mapped),
        "overage_bytes": max(0, mapped - effective),
        "pools": pools,
    }
