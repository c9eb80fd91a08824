"""`TideCache`: the KV cache of `generate`, in memory that is mapped as tokens come.

    TideCache -- TideLayer, one for each layer -- Lane (lane.py): the rows of layers that keep the same tokens
                                                    `-- Span (span.py): linear memory over a pool of its own

A layer's keys are a view of its lane, `[batch, kv_heads, tokens, head_dim]` with a stride of one row between tokens: a
step writes its token in place and returns a longer view. `DynamicCache` copies the whole cache at every step instead.

A window needs only the latest tokens, so its lane is compacted: once two windows of rows are stored, the latest one moves
to the front and the pages behind it go back.

    rows      [ ........ older ........ | window - 1 | ]       -> [ window - 1 | ]
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .lane import Lane, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from transformers import PretrainedConfig
    from typing_extensions import Self, Unpack

    from tidekv import Pool

    from .memory import PoolOptions

__all__ = ["TideCache", "UnsupportedModel"]

# Address space where the model does not say how far it reaches.
FALLBACK_TOKENS = 131_072


class TideLayer(CacheLayerMixin):
    """One layer's K and V, as views of its lane."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, lane: Lane) -> None:
        super().__init__()
        self.lane = lane
        self.position = len(lane.layers)
        lane.layers.append(self)
        self.rows = 0
        """Rows of the lane that hold tokens of this layer."""
        self.tokens = 0
        """Tokens seen: more than `rows` where a window forgot the oldest."""
        self.record_past = False

    @property
    def is_sliding(self) -> bool:
        return self.lane.window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.requires_grad and torch.is_grad_enabled():
            raise UnsupportedModel("TideCache is for inference: call the model under torch.no_grad(), or use DynamicCache")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.lane.join(self.position, key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        lane, count, first = self.lane, key_states.shape[2], 0
        if lane.window is not None:
            if self.rows >= 2 * lane.window and not self.record_past:
                self._compact(lane.window)
            first = max(0, self.rows - (lane.window - 1))
        step = lane.step(self.rows, count, first)
        position = self.position
        step.new_keys[position].copy_(key_states)
        step.new_values[position].copy_(value_states)
        self.rows += count
        self.tokens += count
        self.keys, self.values = step.keys[position], step.values[position]
        return self.keys, self.values

    def _stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of this layer."""
        lane = self.lane
        return (
            lane.all_keys[self.position].narrow(2, 0, self.rows),
            lane.all_values[self.position].narrow(2, 0, self.rows),
        )

    def _compact(self, window: int) -> None:
        """Moves the latest `window - 1` rows to the front. At least two windows are stored, so they do not overlap."""
        kept = window - 1
        for states in self._stored():
            states.narrow(2, 0, kept).copy_(states.narrow(2, self.rows - kept, kept))
        self.rows = kept
        if self is self.lane.layers[-1]:
            self.lane.shrink()

    def visible(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next step will find."""
        seen = self.rows if self.lane.window is None else min(self.rows, self.lane.window - 1)
        keys, values = self._stored()
        return keys.narrow(2, self.rows - seen, seen), values.narrow(2, self.rows - seen, seen)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self.lane.window is None:
            return self.tokens + query_length, 0
        past = min(self.tokens, self.lane.window - 1)
        return past + query_length, self.tokens - past

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1 if self.lane.window is None else self.lane.window

    def activate_past_recording(self) -> None:
        """From now on nothing is compacted until the next `crop`."""
        self.record_past = self.is_sliding

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the latest tokens. As in transformers, a positive number is the length to keep."""
        length = tokens_to_remove if tokens_to_remove > 0 else self.tokens + tokens_to_remove
        removed = self.tokens - max(length, 0)
        if not self.is_initialized or removed < 0:
            return
        window = self.lane.window
        if window is not None and self.rows - removed < min(self.tokens - removed, window - 1):
            raise RuntimeError(
                f"crop of {removed} tokens: the window of {window} forgot tokens that would be visible again. "
                "Call activate_past_recording() before generating what is cropped later"
            )
        self.rows -= removed
        self.tokens -= removed
        if window is not None and self.rows >= 2 * window:
            self._compact(window)
        self.keys, self.values = self.visible()
        if self is self.lane.layers[-1]:
            self.lane.shrink()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row b becomes what row `beam_idx[b]` was; the batch keeps its size."""
        if self.rows:
            beams = beam_idx.to(self.device)
            for states in self._stored():
                states.copy_(states.index_select(0, beams))

    def offload(self) -> NoReturn:
        raise UnsupportedModel("TideCache gives memory back by itself and does not offload: use it without offloading")

    prefetch = offload

    def reset(self) -> None:
        """Forgets all tokens. The memory goes back when the cache is reset, for all layers at once."""
        self.keys = self.values = None
        self.is_initialized = False
        self.rows = self.tokens = 0


class TideCache(Cache):
    """A KV cache for `generate` whose memory comes and goes with its tokens.

        with TideCache(model.config) as cache:
            model.generate(**inputs, past_key_values=cache)

    `max_tokens` is address space (default: what the model's positions reach), not memory. The options are those of
    `tidekv.Pool`: `name` and `limit` are the common ones. A model that mixes full and sliding attention has two pools, the
    second with `_window` in its name. Where memory is short, `generate` raises `tidekv.PoolExhausted`, whose message says
    what to do; the process and its neighbours go on.

    Tensors taken from it (`cache.layers[0].keys`) are valid until `crop`, `reset` or `close`."""

    def __init__(
        self, config: PretrainedConfig, *, max_tokens: int | None = None, **options: Unpack[PoolOptions]
    ) -> None:
        decoder = config.get_text_config(decoder=True)
        windows = attention_windows(decoder)
        if max_tokens is None:
            max_tokens = getattr(decoder, "max_position_embeddings", None) or FALLBACK_TOKENS
        self.lanes: dict[int | None, Lane] = {}
        for window in dict.fromkeys(windows):
            named = dict(options)
            if self.lanes and "name" in options:
                named["name"] = f"{options['name']}_window"
            self.lanes[window] = Lane(windows.count(window), window, max_tokens, named)  # type: ignore[arg-type]
        super().__init__(layers=[TideLayer(self.lanes[window]) for window in windows])
        # Also when an exception keeps the cache alive until the interpreter ends.
        self._finalizer = weakref.finalize(self, close_lanes, list(self.lanes.values()))

    @property
    def pools(self) -> list[Pool]:
        """The pools in use: none before the first token."""
        return [lane.span.pool for lane in self.lanes.values() if lane.span is not None]

    @property
    def mapped_bytes(self) -> int:
        """Memory held right now, idle pages included."""
        return sum(pool.mapped_bytes for pool in self.pools)

    def crop(self, tokens_to_remove: int) -> None:
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forgets everything and gives the memory back; the cache can be used again, also for another batch."""
        for layer in self.layers:
            layer.reset()
        for lane in self.lanes.values():
            lane.forget()

    def close(self) -> None:
        """As `reset`, and the pools leave the ledger. A later `generate` opens them again. May be called twice."""
        for layer in self.layers:
            layer.reset()
        close_lanes(list(self.lanes.values()))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rebatch(lambda states: states.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._rebatch(lambda states: states[indices.to(states.device), ...])

    def _rebatch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Another batch size is another row, so everything is stored anew, from copies outside the pool."""
        stored = []
        for layer in self.layers:
            if layer.tokens:
                keys, values = layer.visible()
                stored.append((layer, layer.tokens, change(keys), change(values)))
        self.reset()
        for layer, tokens, keys, values in stored:
            layer.update(keys, values)
            layer.tokens = tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a TideCache owns device memory and cannot be copied: make one for each sequence that is continued")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TideCache owns memory of this process and cannot be pickled: make one in the other process")


def close_lanes(lanes: list[Lane]) -> None:
    for lane in lanes:
        lane.close()


def attention_windows(decoder: PretrainedConfig) -> list[int | None]:
    """For each layer that has a cache of its own: the window it sees, None for everything."""
    sliding = getattr(decoder, "sliding_window", None)
    chunk = getattr(decoder, "attention_chunk_size", None)
    kinds = getattr(decoder, "layer_types", None)
    if kinds is None:
        kind = "sliding_attention" if sliding else "chunked_attention" if chunk else "full_attention"
        kinds = [kind] * decoder.num_hidden_layers
    known = {"full_attention": None, "sliding_attention": sliding, "chunked_attention": chunk}
    for kind in kinds:
        if kind not in known or (kind != "full_attention" and not known[kind]):
            raise UnsupportedModel(
                f"{decoder.model_type} has layers of kind '{kind}': TideCache keeps full, sliding and chunked attention "
                "only, use transformers' own cache for this model"
            )
    # The last layers of some models read the cache of earlier ones.
    shared = getattr(decoder, "num_kv_shared_layers", None) or 0
    return [known[kind] for kind in kinds[: len(kinds) - shared]]
