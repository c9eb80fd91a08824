"""The functions that vLLM's side of kvcached calls.

A scheduler process calls ``init_kvcached()`` and ``get_kv_cache_manager``; every worker ``init_kvcached(is_worker=True)``
and ``alloc_kv_cache``. With one rank all of it may happen in one process. The module's globals are read at each call, as
tests of kvcached's users replace them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvcached import _runtime, observability, pool_registry, tp_ipc_util, vmm_ops
from kvcached.integration import _engine
from kvcached.integration._views import Arrangement
from kvcached.kv_cache_manager import KVCacheManager
from kvcached.utils import CONTIGUOUS_LAYOUT, PAGE_SIZE, get_kvcached_logger
from kvcached.vmm_ops import create_kv_tensors

__all__ = [
    "alloc_kv_cache",
    "build_kv_views",
    "get_kv_cache_manager",
    "get_world_size",
    "init_kvcached",
    "kv_cache_pool_snapshot",
    "kv_cache_pool_snapshot_dicts",
    "kv_cache_pool_snapshots",
    "observability_snapshot",
    "observability_snapshot_dict",
    "should_use_worker_ipc",
    "shutdown_kvcached",
]

logger = get_kvcached_logger()

_kvcached_initialized: bool = False
_kvcached_device: str | None = None
_world_size: int = 1
_pp_rank: int = 0
_is_worker: bool = False
_async_sched: bool = False
_contiguous_layout: bool = CONTIGUOUS_LAYOUT


def init_kvcached(
    tp_rank: int = 0,
    world_size: int = 1,
    pp_rank: int = 0,
    is_worker: bool = False,
    device: str | None = None,
    async_sched: bool = False,
    *,
    tp_size: int | None = None,
) -> None:
    """Sets this process up as a scheduler or as the worker of a rank. Called again, it takes over what is new: with one
    rank vLLM's scheduler becomes the worker too."""
    global _kvcached_initialized, _kvcached_device, _world_size, _pp_rank, _is_worker, _async_sched
    ranks = _engine.ranks_of(world_size, tp_size)
    if _kvcached_initialized:
        wanted = _engine.choose_device(device) if device is not None else _kvcached_device
        if wanted is None or _kvcached_device is None or not _runtime.same_device(wanted, _kvcached_device):
            raise RuntimeError(
                f"kvcached is already initialized for {_kvcached_device} and was now asked for {wanted}: a process has one "
                "device. Call shutdown_kvcached() first, or start a process for each device"
            )
    else:
        _kvcached_device = _engine.choose_device(device)
        vmm_ops.init_kvcached(_kvcached_device, PAGE_SIZE, _contiguous_layout)
        _kvcached_initialized = True
    if is_worker and not _is_worker:
        tp_ipc_util.start_worker_listener_thread(tp_rank, pp_rank)
        _is_worker = True
    _world_size, _pp_rank = ranks, pp_rank
    _async_sched = _async_sched or async_sched


def shutdown_kvcached() -> bool:
    """Gives everything back. False where a listener is still busy with an order: try again then."""
    global _kvcached_initialized, _kvcached_device, _is_worker, _async_sched
    pool_registry.clear_registered_kv_cache_pools(integration="vllm")
    if not _kvcached_initialized:
        return True
    if not tp_ipc_util.stop_worker_listener_threads():
        return False
    vmm_ops.shutdown_kvcached()
    _kvcached_initialized, _kvcached_device, _is_worker, _async_sched = False, None, False, False
    return True


def should_use_worker_ipc() -> bool:
    """Whether this is a scheduler whose tensors are with workers."""
    return _kvcached_initialized and not _is_worker


def get_world_size() -> int:
    """Ranks, as they were last given to ``init_kvcached``."""
    if not _kvcached_initialized:
        raise RuntimeError(_engine.NOT_INITIALIZED)
    return _world_size


# ---- tensors


def alloc_kv_cache(
    kvcache_shape: Sequence[int],
    block_size: int,
    dtype: Any,
    device: str,
    num_layers: int,
    attention_type: str = "MHA",
    kv_layout: str = "NHD",
    group_id: int = 0,
    kernel_block_size: int | None = None,
    return_meta: bool = False,
) -> Any:
    """Each layer's KV cache, as torch tensors over address space for the whole device; no memory is taken.

    ``kvcache_shape`` is ``(2, blocks, block_size, heads, head_size)``, or with the first two swapped, or for ``MLA``
    ``(blocks, block_size, size)``; its number of blocks is replaced by what the device has room for. ``HYBRID_LINEAR``
    (attention and state-space layers in one pool) also gives a dict that says how to read the same bytes as states.
    """
    if not _kvcached_initialized:
        raise RuntimeError(_engine.NOT_INITIALIZED)
    if kv_layout != "NHD":
        raise ValueError(f"KV layout {kv_layout} is not supported: vLLM's NHD is")
    shape = _CacheShape(kvcache_shape, block_size, attention_type, kernel_block_size)
    buffers = shape.buffers
    per_buffer = _engine.buffer_bytes(device, num_layers, buffers)
    blocks = per_buffer // (shape.block_elements * dtype.itemsize)
    if shape.requested_blocks > blocks:
        logger.warning("%d blocks were requested and there is room for %d", shape.requested_blocks, blocks)
    unified = attention_type == "HYBRID_LINEAR"
    raw = create_kv_tensors(
        per_buffer * buffers,
        dtype.itemsize,
        device,
        num_layers,
        num_kv_buffers=1 if unified else buffers,
        group_id=group_id,
        unified_pool=unified,
    )
    tensors, block_bytes = build_kv_views(
        raw, kvcache_shape, block_size, dtype, attention_type, blocks, per_buffer, num_layers, kernel_block_size
    )
    answer: list[Any] = [tensors]
    if unified:
        answer.append(_states_info(raw, blocks, block_bytes, num_layers))
    if return_meta:
        answer.append({
            "raw_kv_tensors": raw,
            "num_blocks_per_layer": blocks,
            "gpu_mem_bytes_per_layer_k_or_v": per_buffer,
            "num_layers": num_layers,
            "dtype": dtype,
        })
    return tuple(answer) if len(answer) > 1 else tensors


def build_kv_views(
    raw_kv_tensors: Sequence[Any],
    kvcache_shape: Sequence[int],
    block_size: int,
    dtype: Any,
    attention_type: str,
    num_blocks_per_layer: int,
    gpu_mem_bytes_per_layer_k_or_v: int,
    num_layers: int,
    kernel_block_size: int | None = None,
) -> tuple[list[Any], int]:
    """Views of tensors that exist, for a group of layers with its own shape: several groups may share a pool if a block
    has the same bytes in all of them. Gives each layer's view, and the bytes of one layer's block."""
    shape = _CacheShape(kvcache_shape, block_size, attention_type, kernel_block_size)
    arrangement = Arrangement(
        layers=num_layers,
        buffers=shape.buffers,
        contiguous=_contiguous_layout,
        unified=attention_type == "HYBRID_LINEAR",
        half=gpu_mem_bytes_per_layer_k_or_v // dtype.itemsize,
    )
    views = arrangement.layer_views(num_blocks_per_layer * shape.ratio, shape.kernel_block, shape.kv_axis)
    block_bytes = shape.block_elements * shape.buffers * dtype.itemsize
    return _engine.as_tensors(raw_kv_tensors, dtype, views), block_bytes


class _CacheShape:
    """vLLM's shape of one layer's cache, read and checked."""

    def __init__(
        self, shape: Sequence[int], block_size: int, attention_type: str, kernel_block_size: int | None
    ) -> None:
        if attention_type not in ("MHA", "GQA", "MLA", "HYBRID_LINEAR"):
            raise ValueError(
                f"Attention type {attention_type} is not supported: MHA, GQA, MLA and HYBRID_LINEAR are"
            )
        is_latent = attention_type == "MLA"
        self.buffers = 1 if is_latent else 2
        self.kv_axis = None if is_latent else 0 if shape[0] == 2 else 1 if len(shape) > 1 and shape[1] == 2 else -1
        token_axis = 1 if is_latent else 2
        if self.kv_axis == -1 or len(shape) <= token_axis + 1 or shape[token_axis] != block_size:
            wanted = "(blocks, block_size, ...)" if is_latent else "(2, blocks, block_size, ...) or (blocks, 2, ...)"
            raise ValueError(
                f"Unsupported kv cache shape: {tuple(shape)} with block_size {block_size}; {attention_type} has {wanted}"
            )
        kernel = kernel_block_size or block_size
        if block_size % kernel:
            raise ValueError(f"block_size ({block_size}) must be a multiple of kernel_block_size ({kernel})")
        self.ratio = block_size // kernel
        self.requested_blocks = shape[1 if self.kv_axis == 0 else 0]
        self.kernel_block = (kernel, *shape[token_axis + 1 :])
        self.block_elements = math.prod(shape[token_axis:])


def _states_info(raw: Sequence[Any], blocks: int, block_bytes: int, num_layers: int) -> dict[str, Any]:
    """How the pool's bytes are read as states: block b of layer l, in one buffer for each layer or in one for all."""
    import torch

    flat = [tensor.view(torch.int8) for tensor in raw]
    return {
        "buffers": flat if _contiguous_layout else [tensor[: blocks * block_bytes] for tensor in flat],
        "num_blocks": blocks,
        "page_size_bytes": block_bytes,
        "block_stride_bytes": block_bytes * num_layers if _contiguous_layout else block_bytes,
        "num_pools": num_layers,
        "is_contiguous": _contiguous_layout,
    }


# ---- blocks and what there is


def get_kv_cache_manager(
    num_blocks: int,
    block_size: int,
    cell_size: int,
    num_layers: int,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    pool_name: str | None = None,
) -> KVCacheManager:
    """The manager of a group, with block 0 kept as padding, listed under ``vllm``."""
    if not _kvcached_initialized:
        raise RuntimeError(_engine.NOT_INITIALIZED)
    manager = KVCacheManager(
        num_blocks,
        block_size,
        cell_size,
        num_layers,
        world_size=_world_size,
        pp_rank=_pp_rank,
        async_sched=_async_sched,
        reserve_null_block=True,
        num_kv_buffers=num_kv_buffers,
        group_id=group_id,
        pool_name=pool_name,
    )
    pool_registry.register_kv_cache_pool(manager, integration="vllm")
    return manager


def observability_snapshot() -> observability.RuntimeSnapshot:
    return observability.build_runtime_snapshot(
        engine="vllm",
        initialized=_kvcached_initialized,
        device=_kvcached_device,
        world_size=_world_size,
        pp_rank=_pp_rank,
        async_sched=_async_sched,
        contiguous_layout=_contiguous_layout,
        is_worker=_is_worker,
    )


def observability_snapshot_dict() -> dict[str, Any]:
    return observability_snapshot().to_dict()


def kv_cache_pool_snapshot(manager: KVCacheManager) -> observability.KVCachePoolSnapshot:
    return manager.observability_snapshot(integration="vllm")


def kv_cache_pool_snapshots() -> list[observability.KVCachePoolSnapshot]:
    return observability.get_registered_kv_cache_pool_snapshots(integration="vllm")


def kv_cache_pool_snapshot_dicts() -> list[dict[str, Any]]:
    return observability.get_registered_kv_cache_pool_snapshot_dicts(integration="vllm")
