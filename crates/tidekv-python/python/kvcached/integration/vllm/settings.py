"""What an instance is told, and where its memory lies: both sides of the connector read the same configuration.

Everything has a default. `kv_connector_extra_config` of `--kv-transfer-config` may say otherwise:

| key             | default                                   | meaning                                                     |
|-----------------|-------------------------------------------|-------------------------------------------------------------|
| `name`          | `KVCACHED_IPC_NAME`, or derived from it   | the pool's name, for `kvctl`                                |
| `page_size`     | about 16 MiB                              | memory comes and goes in pages of this size, all layers     |
| `start_pages`   | 0                                         | pages that are mapped at the start; `all` for all           |
| `keep_seconds`  | 0.5                                       | how often pages that nobody uses are given back             |
| `warmup_blocks` | one, and two for each sequence and group  | blocks with memory before the scheduler runs                |
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidekv._native import parse_size

from kvcached.integration.vllm.pages import PageMap, choose_page_bytes
from kvcached.utils import DEFAULT_IPC_NAME, IPC_NAME_MAX, KVCachedConfigError

__all__ = ["Settings", "page_map"]

GRANULARITY = 2 << 20
"""CUDA maps multiples of this; host memory uses the same, so that both have the same pages."""

_KEYS = ("name", "page_size", "start_pages", "keep_seconds", "warmup_blocks")


@dataclass(frozen=True)
class Settings:
    """The table above, checked."""

    name: str
    ranks_name: str
    """Under which scheduler and workers meet: no other instance has it."""
    stages: tuple[int, ...]
    """Ranks of each pipeline stage."""
    page_bytes: int | None
    start_pages: int | None
    """None for all."""
    keep_seconds: float
    warmup_blocks: int | None

    @classmethod
    def of(cls, vllm_config: Any) -> Settings:
        transfer = vllm_config.kv_transfer_config
        extra: Mapping[str, Any] = transfer.kv_connector_extra_config or {}
        unknown = sorted(set(extra) - set(_KEYS))
        if unknown:
            raise KVCachedConfigError(
                f"kv_connector_extra_config has {', '.join(unknown)}, which this connector does not know: it knows "
                f"{', '.join(_KEYS)}"
            )
        name = str(extra.get("name") or DEFAULT_IPC_NAME)
        mark = "-" + hashlib.sha256(str(transfer.engine_id).encode()).hexdigest()[:8]
        start, warmup, size = extra.get("start_pages", 0), extra.get("warmup_blocks"), extra.get("page_size")
        return cls(
            name=name,
            ranks_name=name[: IPC_NAME_MAX - len(mark)] + mark,
            stages=_stages(vllm_config.parallel_config),
            page_bytes=_page_bytes(size),
            start_pages=None if start == "all" else _count("start_pages", start),
            keep_seconds=float(extra.get("keep_seconds", 0.5)),
            warmup_blocks=None if warmup is None else _count("warmup_blocks", warmup),
        )


def place_of(parallel_config: Any) -> tuple[int, int]:
    """(stage, rank in it) of a worker."""
    stage, rank = divmod(int(parallel_config.rank), _stages(parallel_config)[0])
    return stage, rank


def _stages(parallel_config: Any) -> tuple[int, ...]:
    ranks = int(parallel_config.tensor_parallel_size) * int(getattr(parallel_config, "prefill_context_parallel_size", 1))
    return (ranks,) * int(parallel_config.pipeline_parallel_size)


def _page_bytes(size: Any) -> int | None:
    if size is None:
        return None
    found: int = size if isinstance(size, int) else parse_size(str(size))
    if found <= 0 or found % GRANULARITY:
        raise KVCachedConfigError(f"page_size is {size}: give a multiple of 2 MiB, such as 16M")
    return found


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise KVCachedConfigError(f"{key} is {value!r}: give a number that is not negative")
    return int(value)


def page_map(kv_cache_config: Any, settings: Settings) -> PageMap:
    """Where the blocks of this KV cache lie, or `KVCachedConfigError` where a page would not be a run of blocks."""
    tensors = list(kv_cache_config.kv_cache_tensors)
    if not tensors:
        raise KVCachedConfigError("this model has no KV cache: unset ENABLE_KVCACHED")
    if any(getattr(tensor, "host_resident", False) for tensor in tensors):
        raise KVCachedConfigError("a part of this KV cache lies in host memory (HiSparse), which elastic memory cannot serve")
    strides = {int(tensor.block_stride) for tensor in tensors}
    stride, blocks = max(strides), int(kv_cache_config.num_blocks)
    size = int(tensors[0].size)
    if len(strides) > 1 or size != stride * blocks:
        raise KVCachedConfigError(
            f"the KV cache's layout is {kv_cache_config.kv_cache_layout or 'not block-outermost'}: {size} bytes for {blocks} "
            f"blocks that lie {sorted(strides)} bytes apart. Elastic memory needs a block's layers side by side: set "
            "VLLM_KV_CACHE_LAYOUT=BLNHC (or BLHNC), or choose an attention backend that has it"
        )
    layer_bytes = int(tensors[0].layer_stride) if len(tensors[0].layers) > 1 else stride
    page_bytes = choose_page_bytes(
        stride,
        GRANULARITY,
        layer_bytes=layer_bytes,
        stages=len(settings.stages),
        wanted_bytes=settings.page_bytes or _kvcached_page_bytes(kv_cache_config),
    )
    return PageMap(blocks, stride, page_bytes)


def _kvcached_page_bytes(kv_cache_config: Any) -> int | None:
    """`KVCACHED_PAGE_SIZE_MB`, where it is set, is for one layer and one of K and V, as in kvcached."""
    mib = os.environ.get("KVCACHED_PAGE_SIZE_MB", "").strip()
    if not mib:
        return None
    layers = sum(len(tensor.layers) for tensor in kv_cache_config.kv_cache_tensors)
    return (int(mib) << 20) * layers * 2
