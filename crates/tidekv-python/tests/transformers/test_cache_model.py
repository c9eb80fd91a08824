"""`TideCache` against `DynamicCache`: the same calls, compared after every one of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from tidekv.transformers import TideCache

KV_HEADS, HEAD_DIM = 4, 128
SHAPE: dict[str, Any] = dict(
    num_hidden_layers=4,
    num_attention_heads=KV_HEADS,
    num_key_value_heads=KV_HEADS,
    hidden_size=KV_HEADS * HEAD_DIM,
    max_position_embeddings=4096,
)
CONFIGS = {
    "full": AutoConfig.for_model("llama", **SHAPE),
    "sliding": AutoConfig.for_model("mistral", sliding_window=24, **SHAPE),
    "both": AutoConfig.for_model(
        "qwen2",
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        **SHAPE,
    ),
}


class Both:
    """The two caches, and one call for both."""

    def __init__(self, kind: str, batch: int, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.ours = TideCache(CONFIGS[kind], name="model")
        self.theirs = DynamicCache(config=CONFIGS[kind])
        self.kind = kind
        self.batch = batch

    def update(self, count: int) -> None:
        for layer in range(len(self.ours.layers)):
            assert self.ours.get_mask_sizes(count, layer) == self.theirs.get_mask_sizes(count, layer)
            keys = torch.randn(self.batch, KV_HEADS, count, HEAD_DIM)
            values = torch.randn(self.batch, KV_HEADS, count, HEAD_DIM)
            for ours, theirs in zip(
                self.ours.update(keys, values, layer), self.theirs.update(keys, values, layer), strict=True
            ):
                assert torch.equal(ours, theirs)

    def on_both(self, method: str, *arguments: Any) -> None:
        getattr(self.ours, method)(*arguments)
        getattr(self.theirs, method)(*arguments)

    def compare(self) -> None:
        for layer in range(len(self.ours.layers)):
            assert self.ours.get_seq_length(layer) == self.theirs.get_seq_length(layer)
            assert self.ours.get_max_length(layer) == self.theirs.get_max_length(layer)


def step(both: Both) -> None:
    """One random call. A window that forgot cannot be cropped, so only full attention is."""
    kind = both.rng.random()
    length = both.theirs.get_seq_length()
    if kind < 0.6 or length == 0:
        both.update(both.rng.choice([1, 1, 1, 2, 5, 40]))
    elif kind < 0.7 and both.kind == "full":
        both.on_both("crop", -both.rng.randrange(length))
    elif kind < 0.8:
        both.on_both("reorder_cache", torch.tensor([both.rng.randrange(both.batch) for _ in range(both.batch)]))
    elif kind < 0.85 and both.batch < 4:
        both.on_both("batch_repeat_interleave", 2)
        both.batch *= 2
    elif kind < 0.9 and both.batch > 1:
        both.on_both("batch_select_indices", torch.arange(both.batch - 1))
        both.batch -= 1
    elif kind < 0.93:
        both.ours.reset()
        both.theirs = DynamicCache(config=CONFIGS[both.kind])
        both.batch = both.rng.choice([1, 2, 3])


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_same_as_dynamic_cache_whatever_is_called(kind: str, seed: int) -> None:
    both = Both(kind, 2, seed)
    with both.ours:
        for _ in range(80):
            step(both)
            both.compare()
        # What was stored before the last calls is what attention sees after them.
        both.update(3)


@pytest.mark.parametrize("kind", ["sliding", "both"])
def test_a_window_can_be_rolled_back_after_recording(kind: str) -> None:
    both = Both(kind, 2, 0)
    with both.ours:
        both.on_both("activate_past_recording")
        both.update(60)
        both.on_both("crop", 0)
        for _ in range(12):
            both.update(5)
            both.on_both("crop", -3)
            both.compare()


def test_a_window_that_forgot_refuses_to_be_rolled_back() -> None:
    both = Both("sliding", 1, 0)
    with both.ours:
        for _ in range(60):
            both.update(1)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            both.ours.crop(-40)


def test_a_window_holds_two_windows_at_most() -> None:
    cache = TideCache(AutoConfig.for_model("mistral", sliding_window=128, **SHAPE), name="window")
    states = torch.randn(4, KV_HEADS, 1, HEAD_DIM)
    with cache:
        for layer in range(4):
            prompt = torch.randn(4, KV_HEADS, 3000, HEAD_DIM)
            cache.update(prompt, prompt, layer)
        [pool] = cache.pools
        after_prompt = pool.snapshot()["allocated_blocks"]
        for _ in range(2):
            for layer in range(4):
                cache.update(states, states, layer)
        assert pool.snapshot()["allocated_blocks"] < after_prompt / 4
