"""Lanes: where the tokens of a `TideCache` lie.

    lane      layers that keep the same tokens: those with full attention, those with a sliding window
    row       what one token costs in a lane: K and V of each of its layers, for the whole batch

        row t     [ L0.K | L0.V | L1.K | L1.V | ... ]   K, V: [batch, kv_heads, head_dim], from 256-byte boundaries
        row t+1   [ L0.K | L0.V | ...
        span      rows one after another: one driver mapping for each page of many rows

So a page holds the same tokens of every layer, and a short prompt costs one page, not one for each layer and K or V.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tidekv import NeverFits, OutOfMemory, PoolExhausted, TidekvError

from .memory import round_up
from .span import Span

if TYPE_CHECKING:
    from .cache import TideLayer
    from .memory import PoolOptions

__all__ = ["Lane", "UnsupportedModel"]

MIB = 1 << 20
# Pages are the unit of growth: enough rows that mapping is rare, few enough that a short prompt costs little.
ROWS_PER_PAGE = 64
PAGE_STEP = 2 * MIB
LARGEST_PAGE = 32 * MIB
# Kernels load K and V in vectors, and a cache line should not have two owners.
SLOT_ALIGNMENT = 256


class UnsupportedModel(TidekvError, ValueError):
    """A model whose cache is more than K and V of full or sliding attention."""


class Step(NamedTuple):
    """What one step of the model reads and writes, by layer: made for all layers of a lane at once, because a view costs more
    than the copy of a token."""

    new_keys: tuple[torch.Tensor, ...]
    new_values: tuple[torch.Tensor, ...]
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class Lane:
    """The rows of the layers that keep the same tokens."""

    def __init__(self, layer_count: int, window: int | None, max_tokens: int, options: PoolOptions) -> None:
        self.layer_count = layer_count
        self.window = window
        # A prompt is stored whole before its window is cut out.
        self.most_rows = max_tokens + (window or 0)
        self.options = options
        self.span: Span | None = None
        self.layers: list[TideLayer] = []
        self.row_bytes = 0
        self._shapes: tuple[torch.Size, torch.Size] | None = None
        self._step: Step | None = None
        self._step_rows = (0, 0, 0)

    def join(self, position: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """A layer's first tokens: the first layer decides what a row is, the others must fit."""
        shapes = key_states[:, :, :0].shape, value_states[:, :, :0].shape
        if self._shapes is None:
            self._plan(key_states, value_states)
            self._shapes = shapes
        elif shapes != self._shapes:
            raise UnsupportedModel(
                f"layer {position} of its kind has K and V of {[*shapes[0]]} and {[*shapes[1]]}, the first had "
                f"{[*self._shapes[0]]} and {[*self._shapes[1]]} (batch, heads, tokens, size): TideCache needs layers alike, use "
                "DynamicCache for this model"
            )

    def _plan(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        key_slot, value_slot = slot_bytes(key_states), slot_bytes(value_states)
        layer_bytes = key_slot + value_slot
        self.row_bytes = self.layer_count * layer_bytes
        needed = self.most_rows * self.row_bytes
        if self.span is not None and (self.span.bytes.device != key_states.device or self.span.capacity < needed):
            self.close()
        # Tensors that are made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            if self.span is None:
                page_bytes = min(round_up(ROWS_PER_PAGE * self.row_bytes, PAGE_STEP), LARGEST_PAGE)
                self.span = Span(key_states.device, page_bytes, -(-needed // page_bytes), self.options)
            rows = self.span.bytes[:needed]
            self.all_keys = self._by_layer(rows, key_states, layer_bytes, 0)
            self.all_values = self._by_layer(rows, value_states, layer_bytes, key_slot)

    def _by_layer(self, rows: torch.Tensor, states: torch.Tensor, layer_bytes: int, start: int) -> torch.Tensor:
        """`[layers, batch, heads, rows, size]` over every row there is address space for."""
        batch, heads, _, size = states.shape
        item = states.element_size()
        return rows.view(states.dtype).as_strided(
            (self.layer_count, batch, heads, self.most_rows, size),
            (layer_bytes // item, heads * size, size, self.row_bytes // item, 1),
            start // item,
        )

    def step(self, start: int, count: int, first: int) -> Step:
        """Rows `start` to `start + count` to write, `first` to there to read, with memory behind them. The layers of a
        lane ask for the same rows one after another."""
        rows = (start, count, first)
        if self._step is None or rows != self._step_rows:
            end = start + count
            self._grow(end)
            self._step = Step(
                self.all_keys.narrow(3, start, count).unbind(0),
                self.all_values.narrow(3, start, count).unbind(0),
                self.all_keys.narrow(3, first, end - first).unbind(0),
                self.all_values.narrow(3, first, end - first).unbind(0),
            )
            self._step_rows = rows
        return self._step

    def _grow(self, rows: int) -> None:
        assert self.span is not None
        pool = self.span.pool
        if rows > self.most_rows:
            raise NeverFits(
                f"{rows} tokens do not fit the address space of {self.most_rows} that the cache '{pool.name}' has: "
                f"give TideCache a larger max_tokens (it costs no memory)",
                needed=rows,
                pool_blocks=self.most_rows,
            )
        if rows * self.row_bytes <= self.span.size:
            return
        try:
            self.span.grow_to(rows * self.row_bytes)
        except (PoolExhausted, OutOfMemory) as refusal:
            raise type(refusal)(
                f"no memory for token {rows} of the cache '{pool.name}', which holds {pool.mapped_bytes} bytes: {refusal}. "
                f"Raise its limit (kvctl limit {pool.name} SIZE), let a neighbour finish, or generate fewer or shorter "
                f"sequences at once; reset() gives back what this cache holds",
                **vars(refusal),
            ) from refusal

    def shrink(self) -> None:
        """Gives back the pages that no layer's rows reach."""
        self._step = None
        if self.span is not None:
            self.span.shrink_to(max((layer.rows for layer in self.layers), default=0) * self.row_bytes)

    def forget(self) -> None:
        """No rows, and no shape: the next batch may be another."""
        self._step = None
        self._shapes = None
        if self.span is not None:
            self.span.shrink_to(0)
            self.span.pool.trim()

    def close(self) -> None:
        self._step = None
        self._shapes = None
        if self.span is not None:
            self.span.close()
            self.span = None


def slot_bytes(states: torch.Tensor) -> int:
    """One token's K or V of one layer, for the whole batch."""
    batch, heads, _, size = states.shape
    return round_up(batch * heads * size * states.element_size(), SLOT_ALIGNMENT)
