"""`generate` with our cache and with its own: the same tokens, and memory that follows them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LogitsProcessor, LogitsProcessorList

from tiny import make_prompts, pool_files

from tidekv import NeverFits, PoolExhausted
from tidekv.transformers import TideCache, UnsupportedModel

GREEDY: dict[str, Any] = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
# Rows of 16 KiB, so that a few hundred tokens are several pages.
WIDE: dict[str, Any] = dict(hidden_size=512, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=4)


def padded(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    """A batch of different lengths, padded on the left."""
    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("search", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_same_tokens(models, kind: str, attention: str, search: dict[str, int]) -> None:
    model = models(kind, attn_implementation=attention)
    batch = padded(make_prompts(3))
    expected = model.generate(**batch, max_new_tokens=40, **GREEDY, **search)
    with TideCache(model.config) as cache:
        assert torch.equal(model.generate(**batch, past_key_values=cache, max_new_tokens=40, **GREEDY, **search), expected)
        assert cache.mapped_bytes > 0
    assert cache.mapped_bytes == 0


def test_same_tokens_in_bfloat16(models) -> None:
    model = models(dtype=torch.bfloat16)
    batch = padded(make_prompts(2))
    expected = model.generate(**batch, max_new_tokens=40, **GREEDY)
    with TideCache(model.config) as cache:
        assert torch.equal(model.generate(**batch, past_key_values=cache, max_new_tokens=40, **GREEDY), expected)
        assert cache.layers[0].keys.dtype == torch.bfloat16


def test_a_conversation_goes_on_in_the_same_cache(models) -> None:
    model = models()
    with TideCache(model.config) as cache:
        tokens = torch.tensor(make_prompts(1))
        for turn in range(3):
            expected = model.generate(tokens, max_new_tokens=10, **GREEDY)
            told = model.generate(tokens, past_key_values=cache, max_new_tokens=10, **GREEDY)
            assert torch.equal(told, expected), f"turn {turn}"
            tokens = torch.cat([told, torch.tensor([[5, 6, 7]])], dim=1)


def test_memory_follows_tokens_and_goes_back(models, runtime_dir: Path) -> None:
    model = models(**WIDE)
    held = []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            held.append(cache.pools[0].snapshot()["used_bytes"])
            return scores

    with TideCache(model.config, name="follows") as cache:
        prompt = torch.tensor(make_prompts(1))
        for _ in range(2):
            held.clear()
            model.generate(
                prompt, past_key_values=cache, max_new_tokens=300, logits_processor=LogitsProcessorList([Watch()]), **GREEDY
            )
            assert held == sorted(held)
            lane = cache.lanes[None]
            assert lane.row_bytes * 300 <= held[-1] <= lane.row_bytes * 300 + 4 * lane.span.page_bytes
            assert held[0] < held[-1]
            cache.reset()
            assert cache.mapped_bytes == 0
        assert pool_files(runtime_dir), "a pool that is open has a segment"
    assert not pool_files(runtime_dir)


def test_too_little_memory_is_an_error_that_says_what_to_do(models) -> None:
    model = models(**WIDE)
    prompt = torch.tensor(make_prompts(1))
    with TideCache(model.config, name="small", limit=4 << 20) as cache:
        with pytest.raises(PoolExhausted, match="kvctl limit small") as caught:
            model.generate(prompt, past_key_values=cache, max_new_tokens=400, **GREEDY)
        assert caught.value.needed >= 1
        assert caught.value.shortage == "limit"
        # The process lives, and so does the cache.
        cache.reset()
        expected = model.generate(prompt, max_new_tokens=20, **GREEDY)
        assert torch.equal(model.generate(prompt, past_key_values=cache, max_new_tokens=20, **GREEDY), expected)


def test_a_limit_lowered_and_raised_while_generating(models) -> None:
    model = models(**WIDE)
    prompt = torch.tensor(make_prompts(1))
    steps = 0

    class Operator(LogitsProcessor):
        """Lowers the limit to what is used at the tenth token."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal steps
            steps += 1
            if steps == 10:
                [pool] = cache.pools
                pool.resize(pool.snapshot()["used_bytes"])
            return scores

    with TideCache(model.config, name="operated") as cache:
        with pytest.raises(PoolExhausted, match="operated"):
            model.generate(
                prompt, past_key_values=cache, max_new_tokens=400, logits_processor=LogitsProcessorList([Operator()]), **GREEDY
            )
        assert 10 < steps < 400
        cache.reset()
        cache.pools[0].resize(256 << 20)
        expected = model.generate(prompt, max_new_tokens=200, **GREEDY)
        assert torch.equal(model.generate(prompt, past_key_values=cache, max_new_tokens=200, **GREEDY), expected)


def test_address_space_ends_with_advice(models) -> None:
    model = models()
    with TideCache(model.config, max_tokens=16) as cache, pytest.raises(NeverFits, match="max_tokens"):
        model.generate(torch.tensor([[5] * 12]), past_key_values=cache, max_new_tokens=20, **GREEDY)


def test_a_dropped_cache_gives_its_memory_back(models, runtime_dir: Path) -> None:
    model = models()
    cache = TideCache(model.config)
    model.generate(torch.tensor([[5, 6]]), past_key_values=cache, max_new_tokens=4, **GREEDY)
    [pool] = cache.pools
    del cache
    assert pool.closed
    assert not pool_files(runtime_dir)


def test_two_caches_at_once(models) -> None:
    model = models()
    prompts = [torch.tensor([[5, 6, 7]]), torch.tensor([[9, 8]])]
    with TideCache(model.config, name="twin") as one, TideCache(model.config, name="twin") as two:
        for prompt, cache in zip(prompts, (one, two), strict=True):
            expected = model.generate(prompt, max_new_tokens=8, **GREEDY)
            assert torch.equal(model.generate(prompt, past_key_values=cache, max_new_tokens=8, **GREEDY), expected)
        assert one.pools[0].name != two.pools[0].name


def test_what_it_cannot_do_it_says(models) -> None:
    with pytest.raises(UnsupportedModel, match="own cache"):
        TideCache(AutoConfig.for_model("qwen3_next", num_hidden_layers=4))
    cache = TideCache(models().config)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(cache)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(cache)
    with pytest.raises(UnsupportedModel, match="offload"):
        cache.layers[0].offload()
    states = torch.zeros(1, 2, 3, 16)
    with cache:
        cache.update(states, states, 0)
        with pytest.raises(UnsupportedModel, match="DynamicCache"):
            cache.update(torch.zeros(1, 4, 3, 16), torch.zeros(1, 4, 3, 16), 1)
