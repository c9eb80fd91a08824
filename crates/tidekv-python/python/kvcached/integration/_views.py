"""Where one layer's K and V lie in the flat tensors of ``create_kv_tensors``: arithmetic, no torch.

A *unit* is what a kernel indexes with: a kernel block of vLLM, a token of SGLang. One unit of one K or V has ``unit``
elements; all counts below are elements of the engine's type.

    contiguous     unit u of layer l:   [ l0.K l0.V l1.K l1.V ... ][ l0.K ...      u * layers * buffers * unit
                                                                                   + (l * buffers + kv) * unit
    per layer      the layer's tensor:  [ K of unit 0, 1, 2 ... | V of unit 0, 1, 2 ... ]     kv * half + u * unit
    unified        the layer's tensor:  [ K0 V0 ][ K1 V1 ] ...                                (u * 2 + kv) * unit

Contiguous views are linear in the unit, whatever part of a block it is, and a block's units fill the bytes of exactly
that block: kernel blocks smaller than blocks need no case of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StridedView:
    """A tensor over one of the flat ones."""

    tensor: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Arrangement:
    """One group of layers."""

    layers: int
    buffers: int
    contiguous: bool
    unified: bool = False
    half: int = 0
    """Elements from K to V, per layer and not unified."""

    def layer_views(self, units: int, inner: Sequence[int], kv_axis: int | None) -> list[StridedView]:
        """Each layer's view: ``units`` units of shape ``inner``, with K and V on ``kv_axis`` (0 or 1), or none."""
        unit = math.prod(inner)
        if self.contiguous:
            unit_stride, kv_stride = self.layers * self.buffers * unit, unit
        elif self.unified:
            unit_stride, kv_stride = self.buffers * unit, unit
        else:
            unit_stride, kv_stride = unit, self.half
        strides = packed(inner)
        views = []
        for layer in range(self.layers):
            offset = layer * self.buffers * unit if self.contiguous else 0
            shape: tuple[int, ...] = (units, *inner)
            stride: tuple[int, ...] = (unit_stride, *strides)
            if kv_axis == 0:
                shape, stride = (self.buffers, *shape), (kv_stride, *stride)
            elif kv_axis == 1:
                shape, stride = (units, self.buffers, *inner), (unit_stride, kv_stride, *strides)
            views.append(StridedView(0 if self.contiguous else layer, offset, shape, stride))
        return views


def packed(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense array."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()
