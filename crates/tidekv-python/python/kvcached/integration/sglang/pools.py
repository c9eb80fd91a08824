"""SGLang's KV pools with their buffers in an elastic pool.

Each layer's K and V lies in one piece, as attention kernels of all back-ends want it, so a page of the pool has a chunk in every
buffer (`per-layer`); SGLang's own page-major layout cannot be constructed in the versions that are supported.

    layer 0 K   [ null | block 1 | block 2 | ... ]        page 0 of the pool: the first chunk of every buffer
    layer 0 V   [ null | block 1 | block 2 | ... ]        page 1: the second, ...
    layer 1 K   [ ...

Ids are SGLang's page ids. Id 0 is where padded tokens are written: it has memory for the pool's life. Where blocks do not fill a
chunk evenly, the ids of those that would straddle two pages are never given out, and the buffers reach a little further.
"""

from __future__ import annotations

import itertools
import weakref
from math import gcd
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from tidekv import Layout, Pool
from tidekv._tensors import torch_tensor

from kvcached.integration.sglang.plugin import require_hooks
from kvcached.integration.sglang.ranks import ranks_of_this_process
from kvcached.integration.sglang.slots import Slots
from kvcached.utils import DEFAULT_IPC_NAME, KVCachedConfigError, get_kvcached_logger

if TYPE_CHECKING:
    from kvcached.integration.sglang.ranks import Ranks

__all__ = ["ElasticMHAPool", "ElasticMLAPool", "ElasticPool"]

logger = get_kvcached_logger()

_groups = itertools.count()


class ElasticPool:
    """What both have in common. Comes before SGLang's class among the bases."""

    size: int
    page_size: int
    layer_num: int
    device: str
    store_dtype: torch.dtype
    pool: Pool
    ranks: Ranks

    def new_slots(self, blocks: int) -> Slots:
        """The blocks for an allocator of this pool."""
        return Slots(self.pool, blocks, self.ranks)

    def _open_pool(self, layout: Layout) -> None:
        """Reserves addresses for at least `size` tokens and the null block, and makes `size` what they are enough for."""
        require_hooks()
        place = self.device.partition(":")[0]
        shape = layout.geometry(pages=1, device=place, env=True)
        pages = -(-(self.size // self.page_size + 1) // shape.blocks_per_page)
        if layout.buffers_per_layer == 2:
            # V begins a whole number of blocks behind K, for kernels that reach it by block ids.
            block_bytes = shape.view(0).block_bytes
            whole = block_bytes // gcd(shape.chunk_bytes, block_bytes)
            pages = -(-pages // whole) * whole
        self.ranks, rank = ranks_of_this_process()
        self.pool = Pool(
            layout,
            name=DEFAULT_IPC_NAME if rank is None else f"{DEFAULT_IPC_NAME}_tp{rank}",
            device=_device_of_torch(self.device),
            pages=pages,
            group=next(_groups),
            null_block=True,
        )
        weakref.finalize(self, self.pool.close)
        self.size = (self.pool.geometry.id_count - 1) * self.page_size

    def _finalize_allocation_log(self, num_tokens: int) -> None:
        # SGLang would say that all of it is allocated.
        geometry = self.pool.geometry
        self.mem_usage = self.pool.mapped_bytes / (1 << 30)
        logger.info(
            "pool '%s' on %s: addresses for %d tokens (%.2f GiB), mapped in pages of %.0f MiB as requests need them",
            self.pool.name,
            self.pool.device,
            num_tokens,
            geometry.reservation_bytes / (1 << 30),
            geometry.page_bytes / (1 << 20),
        )

    def _clear_buffers(self) -> None:
        super()._clear_buffers()  # type: ignore[misc]
        self.pool.close()

    def _buffer(self, layer: int, value: bool, shape: tuple[int, ...]) -> torch.Tensor:
        """One layer's K or V in SGLang's shape."""
        buffer = torch_tensor(self.pool, layer, value)
        buffer[0].zero_()
        return buffer.view(shape)


class ElasticMHAPool(ElasticPool, MHATokenToKVPool):
    """K and V for each head."""

    def _create_buffers_normal(self) -> None:
        if self.v_head_dim != self.head_dim:
            raise KVCachedConfigError(
                f"K heads of {self.head_dim} and V heads of {self.v_head_dim} elements cannot share block ids: run this model "
                "without ENABLE_KVCACHED"
            )
        self._open_pool(
            Layout.heads(
                self.layer_num,
                self.head_num,
                self.head_dim,
                dtype=_name(self.store_dtype),
                block_tokens=self.page_size,
                layout="per-layer",
            )
        )
        if self.use_hnd:
            self.num_pages = self.size // self.page_size + 1
        key_shape, value_shape = self._kv_buffer_shapes()
        self.k_buffer = [self._buffer(layer, False, key_shape) for layer in range(self.layer_num)]
        self.v_buffer = [self._buffer(layer, True, value_shape) for layer in range(self.layer_num)]


    def _create_quantized_buffers(self) -> None:
        raise KVCachedConfigError(
            f"a KV cache quantised by {self.quant_method.name!r} has buffers of its own making: choose another --kv-cache-dtype, or "
            "run this model without ENABLE_KVCACHED"
        )


class ElasticMLAPool(ElasticPool, MLATokenToKVPool):
    """One latent vector for each token."""

    def _create_buffers(self) -> None:
        self._open_pool(
            Layout.latent(
                self.layer_num,
                self.kv_cache_dim,
                dtype=_name(self.store_dtype),
                block_tokens=self.page_size,
                layout="per-layer",
            )
        )
        shape = (self.size + self.page_size, 1, self.kv_cache_dim)
        self.kv_buffer = [self._buffer(layer, False, shape) for layer in range(self.layer_num)]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _device_of_torch(device: str) -> str:
    """SGLang says `cuda` and means torch's current device."""
    if device != "cuda":
        return device
    return f"cuda:{torch.cuda.current_device()}"
