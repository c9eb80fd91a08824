"""A worker's side: the memory of its KV cache.

    get_mem_pool_context()      vLLM allocates its KV cache: one `torch.zeros` of int8. It gets a tensor over a Region
                                instead, addresses for everything and memory for what the warm-up may touch
    get_handshake_metadata()    the warm-up is over and the scheduler exists: from now on a Worker of tidekv maps and
                                unmaps what the scheduler's pool orders, on a thread of its own
    bind_connector_metadata()   a step begins: the pages that it may touch for the first time are looked at

vLLM zeroes its KV cache at the start. A page that comes later holds what the device gives (zeros on host memory), as a block that
is used again holds what its last request left; vLLM itself clears the blocks of models that need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import tidekv
from tidekv import _native

from kvcached.integration.vllm.pages import PageMap
from kvcached.integration.vllm.settings import Settings
from kvcached.utils import GPU_UTILIZATION, KVCachedConfigError, get_kvcached_logger

__all__ = ["KvBuffer"]

logger = get_kvcached_logger()

_GROUP = 0
_PADDING = 4096
"""vLLM rounds the allocation up to at most this on some platforms."""
_WARMUP_WAIT_S = 30.0


def _utilization() -> float | None:
    """The part of the device that pools may use, where somebody said so: a default is nobody else's budget."""
    return GPU_UTILIZATION if os.environ.get("KVCACHED_GPU_UTILIZATION", "").strip() else None


class KvBuffer:
    """The KV cache of one rank."""

    def __init__(self, pages: PageMap, settings: Settings, place: tuple[int, int], warmup_blocks: int) -> None:
        self.pages = pages
        self._settings = settings
        self._stage, self._rank = place
        self._warmup_blocks = warmup_blocks
        self._region: _native.Region | None = None
        self._warmup: _native.Pool | None = None
        self._worker: _native.Worker | None = None

    @property
    def region(self) -> _native.Region | None:
        return self._region

    def allocation(self) -> _AnswerOneAllocation:
        """Answers vLLM's allocation of the KV cache while it is entered."""
        return _AnswerOneAllocation(self)

    def make(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """The tensor, with memory for the warm-up alone."""
        if self._region is not None:
            raise KVCachedConfigError("vLLM allocates its KV cache a second time: this connector serves one")
        pages = max(self.pages.pages, -(-nbytes // self.pages.page_bytes))
        self._region = _native.Region(_device_name(device), pages=pages, chunk_bytes=self.pages.page_bytes)
        self._warm_up(self._region)
        logger.info(
            "rank %d of stage %d: %s of KV cache on %s, %s of it with memory",
            self._rank,
            self._stage,
            _native.format_size(nbytes),
            device,
            _native.format_size(self._region.mapped_pages * self._region.page_bytes),
        )
        return torch.from_dlpack(self._region.view("int8", [nbytes]))

    def _warm_up(self, region: _native.Region) -> None:
        """Until the scheduler exists vLLM computes on the first blocks: they get memory of a pool of their own."""
        last = max(self.pages.pages_of(min(self._warmup_blocks, self.pages.blocks - 1)))
        page_bytes = self.pages.page_bytes
        self._warmup = _native.Pool(
            _native.Layout.raw(1, page_bytes, chunk_bytes=page_bytes),
            region=region,
            pages=last + 1,
            name=f"{self._settings.ranks_name[:40]}-s{self._stage}w{self._rank}-warmup",
            utilization=_utilization(),
        )
        try:
            self._warmup.alloc(last + 1, wait=_WARMUP_WAIT_S)
        except tidekv.PoolExhausted as error:
            self.close()
            raise KVCachedConfigError(
                f"vLLM's warm-up computes on {self._warmup_blocks} blocks, {_native.format_size((last + 1) * page_bytes)}, and "
                f"that much memory is not free on {region.device}: {error}. Lower --max-num-seqs, or give warmup_blocks in "
                "kv_connector_extra_config"
            ) from error

    def serve(self) -> None:
        """The warm-up is over: the scheduler orders from now on. May be called twice."""
        if self._worker is not None:
            return
        if self._region is None:
            raise KVCachedConfigError(
                "vLLM has allocated its KV cache without asking the connector for memory: this kind of worker cannot be used. Unset "
                "ENABLE_KVCACHED to run it with its own memory"
            )
        if self._warmup is not None:
            self._warmup.close()
            self._warmup = None
        worker = _native.Worker(self._settings.ranks_name, self._rank, stage=self._stage)
        worker.add_group(_GROUP, self._region, utilization=_utilization())
        worker.start()
        self._worker = worker

    def check(self, came: Iterable[int]) -> None:
        """That the pages which a step may touch from now on have memory: an address without would end the device's context."""
        region = self._region
        missing = [page for page in came if region is not None and not region.is_mapped(page)]
        if missing:
            raise RuntimeError(
                f"rank {self._rank} of stage {self._stage} is to compute on pages {missing[:8]}, which have no memory here: "
                "its scheduler is gone or was replaced. Start the engine again"
            )

    def close(self) -> None:
        """Gives the memory back; addresses stay while tensors have them. May be called twice."""
        if self._worker is not None:
            self._worker.stop()
        if self._warmup is not None:
            self._warmup.close()
            self._warmup = None
        if self._region is not None:
            self._region.close()


class _AnswerOneAllocation(TorchFunctionMode):
    """Gives vLLM our tensor for the one call that allocates its KV cache, and lets every other call through.

    It must be exactly one: with none the KV cache would be vLLM's own memory, with two a second one.
    """

    def __init__(self, buffer: KvBuffer) -> None:
        super().__init__()
        self._buffer = buffer
        self._answered = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and self._is_ours(args, kwargs):
            self._answered += 1
            return self._buffer.make(int(args[0]), torch.device(kwargs.get("device") or "cpu"))
        return func(*args, **kwargs)

    def _is_ours(self, args: Any, kwargs: Any) -> bool:
        wanted = self._buffer.pages.blocks * self._buffer.pages.stride
        return (
            len(args) == 1
            and isinstance(args[0], int)
            and kwargs.get("dtype") is torch.int8
            and wanted <= args[0] < wanted + _PADDING
        )

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self._answered != 1:
            wanted = self._buffer.pages.blocks * self._buffer.pages.stride
            raise KVCachedConfigError(
                f"vLLM was to allocate its KV cache by one torch.zeros of {wanted} int8 and did so {self._answered} times: "
                "this version allocates it otherwise. Unset ENABLE_KVCACHED to run it with its own memory"
            )


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device.type)
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
