"""The functions that SGLang's side of kvcached calls. Every rank runs a scheduler, so every rank has its own manager, and
it maps the tensors of its own rank alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvcached import _runtime, observability, pool_registry, tp_ipc_util, vmm_ops
from kvcached.integration import _engine
from kvcached.integration._views import Arrangement, StridedView, packed
from kvcached.kv_cache_manager import KVCacheManager, RankKVCacheManager
from kvcached.utils import CONTIGUOUS_LAYOUT, PAGE_SIZE, KVCachedConfigError, align_to, get_kvcached_logger
from kvcached.vmm_ops import create_kv_tensors

__all__ = [
    "alloc_kv_cache",
    "alloc_mamba_states",
    "get_kv_cache_manager",
    "init_kvcached",
    "kv_cache_pool_snapshot",
    "kv_cache_pool_snapshot_dicts",
    "kv_cache_pool_snapshots",
    "observability_snapshot",
    "observability_snapshot_dict",
    "shutdown_kvcached",
]

logger = get_kvcached_logger()

_CELL_ALIGNMENT = 16

_kvcached_initialized: bool = False
_kvcached_device: str | None = None
_world_size: int = 1
_pp_rank: int = 0
_async_sched: bool = False
_contiguous_layout: bool = CONTIGUOUS_LAYOUT


def init_kvcached(
    tp_rank: int = 0,
    world_size: int = 1,
    pp_rank: int = 0,
    device: str | None = None,
    async_sched: bool = False,
    *,
    tp_size: int | None = None,
) -> None:
    """Sets this rank's process up. With several ranks it also listens for orders from others, as kvcached does."""
    global _kvcached_initialized, _kvcached_device, _world_size, _pp_rank, _async_sched
    ranks = _engine.ranks_of(world_size, tp_size)
    if _kvcached_initialized:
        if device is not None and not _runtime.same_device(_engine.choose_device(device), _kvcached_device or ""):
            raise RuntimeError(
                f"kvcached is already initialized for {_kvcached_device} and was now asked for {device}: a process has one "
                "device. Call shutdown_kvcached() first, or start a process for each device"
            )
        return
    _kvcached_device = _engine.choose_device(device)
    vmm_ops.init_kvcached(_kvcached_device, PAGE_SIZE, _contiguous_layout)
    if ranks > 1:
        try:
            tp_ipc_util.start_worker_listener_thread(tp_rank, pp_rank)
        except BaseException:
            vmm_ops.shutdown_kvcached()
            raise
    _kvcached_initialized, _world_size, _pp_rank, _async_sched = True, ranks, pp_rank, async_sched


def shutdown_kvcached() -> bool:
    """Gives everything back. False where a listener is still busy with an order: try again then."""
    global _kvcached_initialized, _kvcached_device, _async_sched
    pool_registry.clear_registered_kv_cache_pools(integration="sglang")
    if not _kvcached_initialized:
        return True
    if not tp_ipc_util.stop_worker_listener_threads():
        return False
    vmm_ops.shutdown_kvcached()
    _kvcached_initialized, _kvcached_device, _async_sched = False, None, False
    return True


# ---- tensors


def alloc_kv_cache(
    kvcache_shape: Sequence[int],
    dtype: Any,
    device: str,
    num_layers: int,
    page_size: int = 1,
    attention_type: str = "MHA",
    kv_layout: str = "NHD",
    group_id: int = 0,
) -> Any:
    """Each layer's K and each layer's V, ``(tokens, heads, head_size)``, over address space for the whole device; for
    ``MLA`` one list. The number of tokens is replaced by what the device has room for."""
    if not _kvcached_initialized:
        raise RuntimeError(_engine.NOT_INITIALIZED)
    if attention_type not in ("MHA", "GQA", "MLA"):
        raise ValueError(f"Attention type {attention_type} is not supported: MHA, GQA and MLA are")
    if attention_type != "MLA" and kv_layout != "NHD":
        raise ValueError(f"KV layout {kv_layout} is not supported: SGLang's NHD is")
    if len(kvcache_shape) < 3:
        raise ValueError(f"Unsupported kv cache shape: {tuple(kvcache_shape)}; give (tokens, heads, head_size)")
    buffers = 1 if attention_type == "MLA" else 2
    per_buffer = _engine.buffer_bytes(device, num_layers, buffers)
    token = tuple(kvcache_shape[1:])
    token_bytes = math.prod(token) * dtype.itemsize
    tokens = per_buffer // (token_bytes * page_size) * page_size
    if kvcache_shape[0] > tokens:
        logger.warning("%d tokens were requested and there is room for %d", kvcache_shape[0], tokens)
    raw = create_kv_tensors(
        per_buffer * buffers, dtype.itemsize, device, num_layers, num_kv_buffers=buffers, group_id=group_id
    )
    arrangement = Arrangement(num_layers, buffers, _contiguous_layout, half=per_buffer // dtype.itemsize)
    if buffers == 1:
        return _engine.as_tensors(raw, dtype, arrangement.layer_views(tokens, token, None))
    both = _engine.as_tensors(raw, dtype, arrangement.layer_views(tokens, token, 0))
    return [layer[0] for layer in both], [layer[1] for layer in both]


def alloc_mamba_states(
    *,
    num_slots: int,
    num_mamba_layers: int,
    cache_params: Any,
    device: str,
    group_id: int = 0,
) -> tuple[Any, Any, dict[str, Any]]:
    """Convolution and temporal states of state-space layers. One slot is one block; in each layer it is a cell:

        [ conv 0 | conv 1 | ... | temporal | padding ]      of a size that divides a page, so that no cell straddles two

    Gives the conv states, the temporal state, and where they lie. Contiguous, each is one tensor ``(layers, slots, ...)``;
    else each is a list over the layers.
    """
    if not _kvcached_initialized:
        raise RuntimeError(_engine.NOT_INITIALIZED)
    conv_type, temporal_type = cache_params.dtype.conv, cache_params.dtype.temporal
    conv_shapes = [tuple(shape) for shape in cache_params.shape.conv]
    temporal_shape = tuple(cache_params.shape.temporal)
    offsets, end = [], 0
    for shape, dtype in [*((shape, conv_type) for shape in conv_shapes), (temporal_shape, temporal_type)]:
        start = align_to(end, dtype.itemsize)
        offsets.append(start)
        end = start + math.prod(shape) * dtype.itemsize
    cell = _cell_bytes(align_to(end, max(conv_type.itemsize, temporal_type.itemsize)))
    raw = create_kv_tensors(
        align_to(num_slots * cell, PAGE_SIZE), 1, device, num_mamba_layers, num_kv_buffers=1, group_id=group_id,
        unified_pool=True,
    )  # fmt: skip

    def state(shape: tuple[int, ...], dtype: Any, offset: int) -> Any:
        step = cell // dtype.itemsize
        inner, start = packed(shape), offset // dtype.itemsize
        if _contiguous_layout:
            view = StridedView(
                0, start, (num_mamba_layers, num_slots, *shape), (step, num_mamba_layers * step, *inner)
            )
            return _engine.as_tensors(raw, dtype, [view])[0]
        views = [StridedView(layer, start, (num_slots, *shape), (step, *inner)) for layer in range(num_mamba_layers)]
        return _engine.as_tensors(raw, dtype, views)

    conv = [state(shape, conv_type, offset) for shape, offset in zip(conv_shapes, offsets)]
    return conv, state(temporal_shape, temporal_type, offsets[-1]), {
        "cell_size": cell,
        "num_slots": num_slots,
        "num_mamba_layers": num_mamba_layers,
        "conv_offsets": offsets[:-1],
        "temporal_offset": offsets[-1],
        "is_contiguous": _contiguous_layout,
    }


def _cell_bytes(needed: int) -> int:
    """The least part of a page that is not below ``needed`` and keeps every type aligned."""
    if needed > PAGE_SIZE:
        raise KVCachedConfigError(
            f"one slot's states take {needed} bytes in a layer, more than a page of {PAGE_SIZE}: set "
            f"KVCACHED_PAGE_SIZE_MB={align_to(needed, 2 << 20) >> 20} or more"
        )
    return PAGE_SIZE // next(
        parts for parts in range(PAGE_SIZE // needed, 0, -1) if PAGE_SIZE % (parts * _CELL_ALIGNMENT) == 0
    )


# ---- blocks and what there is


def get_kv_cache_manager(
    num_blocks: int,
    block_size: int,
    cell_size: int,
    num_layers: int,
    reserve_null_block: bool = True,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    pool_name: str | None = None,
) -> KVCacheManager:
    """This rank's manager of a group, listed under ``sglang``."""
    if not _kvcached_initialized:
        raise RuntimeError(_engine.NOT_INITIALIZED)
    manager = RankKVCacheManager(
        num_blocks,
        block_size,
        cell_size,
        num_layers,
        world_size=_world_size,
        pp_rank=_pp_rank,
        async_sched=_async_sched,
        reserve_null_block=reserve_null_block,
        num_kv_buffers=num_kv_buffers,
        group_id=group_id,
        pool_name=pool_name,
    )
    pool_registry.register_kv_cache_pool(manager, integration="sglang")
    return manager


def observability_snapshot() -> observability.RuntimeSnapshot:
    return observability.build_runtime_snapshot(
        engine="sglang",
        initialized=_kvcached_initialized,
        device=_kvcached_device,
        world_size=_world_size,
        pp_rank=_pp_rank,
        async_sched=_async_sched,
        contiguous_layout=_contiguous_layout,
    )


def observability_snapshot_dict() -> dict[str, Any]:
    return observability_snapshot().to_dict()


def kv_cache_pool_snapshot(manager: KVCacheManager) -> observability.KVCachePoolSnapshot:
    return manager.observability_snapshot(integration="sglang")


def kv_cache_pool_snapshots() -> list[observability.KVCachePoolSnapshot]:
    return observability.get_registered_kv_cache_pool_snapshots(integration="sglang")


def kv_cache_pool_snapshot_dicts() -> list[dict[str, Any]]:
    return observability.get_registered_kv_cache_pool_snapshot_dicts(integration="sglang")
