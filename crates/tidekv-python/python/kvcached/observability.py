"""Snapshots of engines and pools as plain values, for exporters. The field names are kvcached's, schema v1.

Blocks overlap on purpose, so do not add them up: ``reserved_blocks`` are part of ``allocated_blocks`` (they are set
aside) and of ``available_blocks`` (the next ``alloc`` takes them first). ``reserved_pages`` is another matter: mapped
pages without a block in use.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from kvcached.pool_registry import get_registered_kv_cache_pools

__all__ = [
    "KVCachePoolSnapshot",
    "RuntimeSnapshot",
    "SCHEMA_VERSION",
    "build_kv_cache_pool_snapshot",
    "build_runtime_snapshot",
    "get_capabilities",
    "get_registered_kv_cache_pool_snapshot_dicts",
    "get_registered_kv_cache_pool_snapshots",
]

SCHEMA_VERSION = "kvcached.observability.v1"


@dataclass(frozen=True)
class RuntimeSnapshot:
    """How one engine's integration was set up."""

    schema_version: str
    engine: str
    initialized: bool
    device: str | None
    world_size: int
    pp_rank: int
    async_sched: bool
    contiguous_layout: bool
    is_worker: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KVCachePoolSnapshot:
    """One pool at one moment: all numbers come from one look at the native pool."""

    schema_version: str
    pool_type: str
    integration: str | None
    pool_name: str | None
    group_id: int
    num_layers: int
    num_kv_buffers: int
    page_size_bytes: int
    block_size_bytes: int
    total_blocks: int
    available_blocks: int
    allocated_blocks: int
    reserved_blocks: int
    available_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    null_block_reserved: bool
    virtual_per_layer_bytes: int
    virtual_total_bytes: int
    mapped_bytes: int
    total_pages: int | None
    free_pages: int | None
    inuse_pages: int | None
    reserved_pages: int | None
    available_physical_pages: int | None
    effective_free_pages: int | None
    in_shrink: bool
    shrink_target_blocks: int | None
    resize_target_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def get_capabilities() -> dict[str, Any]:
    """What of this module a consumer may rely on."""
    return {
        "schema_version": SCHEMA_VERSION,
        "features": {
            "runtime_snapshot": True,
            "kv_cache_pool_snapshot": True,
            "registered_kv_cache_pool_snapshots": True,
            "read_only": True,
            "policy_control": False,
        },
        "pool_snapshot_fields": [field.name for field in fields(KVCachePoolSnapshot)],
        "runtime_snapshot_fields": [field.name for field in fields(RuntimeSnapshot)],
    }


def build_runtime_snapshot(
    *,
    engine: str,
    initialized: bool,
    device: str | None,
    world_size: int,
    pp_rank: int,
    async_sched: bool,
    contiguous_layout: bool,
    is_worker: bool | None = None,
) -> RuntimeSnapshot:
    return RuntimeSnapshot(
        SCHEMA_VERSION, engine, initialized, device, world_size, pp_rank, async_sched, contiguous_layout, is_worker
    )


def build_kv_cache_pool_snapshot(manager: Any, *, integration: str | None = None) -> KVCachePoolSnapshot:
    """The same as ``manager.observability_snapshot``, also for objects that only look like a manager."""
    pages: dict[str, int] = manager.page_allocator.get_page_state()
    physical = int(manager.page_allocator.get_avail_physical_pages())
    buffers = manager.num_layers * manager.num_kv_buffers
    block_bytes = manager.block_mem_size * buffers
    available = int(manager.available_size())
    allocated = int(manager._get_num_alloced_blocks())
    reserved = len(manager.reserved_blocks)
    return KVCachePoolSnapshot(
        schema_version=SCHEMA_VERSION,
        pool_type="kv_cache",
        integration=integration,
        pool_name=manager.pool_name,
        group_id=manager.group_id,
        num_layers=manager.num_layers,
        num_kv_buffers=manager.num_kv_buffers,
        page_size_bytes=manager.page_size,
        block_size_bytes=manager.block_mem_size,
        total_blocks=manager.num_blocks,
        available_blocks=available,
        allocated_blocks=allocated,
        reserved_blocks=reserved,
        available_bytes=available * block_bytes,
        allocated_bytes=allocated * block_bytes,
        reserved_bytes=reserved * block_bytes,
        null_block_reserved=manager.null_block is not None,
        virtual_per_layer_bytes=manager.mem_size * manager.num_kv_buffers,
        virtual_total_bytes=manager.mem_size * buffers,
        mapped_bytes=int(manager.get_mapped_memory_size("bytes")),
        total_pages=pages["total_pages"],
        free_pages=pages["free_pages"],
        inuse_pages=pages["inuse_pages"],
        reserved_pages=pages["reserved_pages"],
        available_physical_pages=physical,
        effective_free_pages=min(pages["free_pages"], physical + pages["reserved_pages"]),
        in_shrink=bool(manager.in_shrink),
        shrink_target_blocks=manager.target_num_blocks,
        resize_target_bytes=int(manager.page_allocator.get_resize_target()),
    )


def get_registered_kv_cache_pool_snapshots(*, integration: str | None = None) -> list[KVCachePoolSnapshot]:
    """All pools of this process, or of one engine in it, in a stable order."""
    listed = get_registered_kv_cache_pools(integration=integration)
    snapshots = [build_kv_cache_pool_snapshot(manager, integration=engine) for manager, engine in listed]
    return sorted(snapshots, key=lambda pool: (pool.integration or "", pool.pool_name or "", pool.group_id))


def get_registered_kv_cache_pool_snapshot_dicts(*, integration: str | None = None) -> list[dict[str, Any]]:
    """The same, ready for JSON."""
    return [snapshot.to_dict() for snapshot in get_registered_kv_cache_pool_snapshots(integration=integration)]
