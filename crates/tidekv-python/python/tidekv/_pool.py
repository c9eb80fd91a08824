"""`Pool`: the native pool, and its memory as tensors and arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidekv import _native
from tidekv._tensors import numpy_array, torch_tensor
from tidekv.errors import Unmapped

if TYPE_CHECKING:
    import numpy
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class KV(Generic[T]):
    """One layer, also as `key, value = kv`. MLA keeps one buffer: its `value` is None."""

    key: T
    value: T | None

    def __iter__(self) -> Iterator[T | None]:
        return iter((self.key, self.value))


class Pool(_native.Pool):
    """An elastic pool of KV-cache blocks, and views of its memory.

    A view spans the whole reservation: `(ids, block_tokens, kv_heads, head_size)`, indexed with the ids that `alloc`
    gives. Only ids that are leased may be touched. Whole-view operations (`zero_`, `fill_`, `clone`, printing) touch
    unmapped pages, and in `slab` and `interleaved` other layers too.
    """

    def tensors(self) -> list[KV[torch.Tensor]]:
        """K and V of each layer as torch tensors over the pool's memory."""
        return [self._layer(layer, torch_tensor) for layer in range(self.geometry.layout.layers)]

    def arrays(self) -> list[KV[numpy.ndarray[Any, Any]]]:
        """The same as numpy arrays, for a pool on the CPU. bfloat16 comes as uint16, float8 as uint8."""
        return [self._layer(layer, numpy_array) for layer in range(self.geometry.layout.layers)]

    def block_view(self, block: int, layer: int, value: bool = False) -> numpy.ndarray[Any, Any]:
        """One block of a pool on the CPU in place, checked: `Unmapped` where touching it would end the process.

        The check is made once, now: the array is good until the block is freed.
        """
        if not self.is_mapped(block):
            start = self.geometry.byte_offset(block, layer, value)
            end = start + self.geometry.view(layer, value).block_bytes
            message = f"block {block} has no memory: it is not leased, or its page was given back"
            raise Unmapped(message, offset=start, end=end, block=block)
        part: numpy.ndarray[Any, Any] = numpy_array(self, layer, value)[block]
        return part

    def _layer(self, layer: int, view: Callable[[_native.Pool, int, bool], T]) -> KV[T]:
        has_value = self.geometry.layout.buffers_per_layer == 2
        return KV(view(self, layer, False), view(self, layer, True) if has_value else None)
