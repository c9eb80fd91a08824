"""Continuous batching with our memory and with its own: the same tokens, and memory that follows the load."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import cache as cache_module
from transformers.generation.continuous_batching import continuous_api

from tiny import make_prompts, pool_files

from tidekv import BadArgument
from tidekv.transformers import UnsupportedTransformers, batching, elastic_memory, install

PARAMETERS = inspect.signature(ContinuousBatchingConfig).parameters
# Tokens of a block: renamed between the two shapes.
BLOCK = "page_size" if "page_size" in PARAMETERS else "block_size"
GREEDY = dict(do_sample=False, eos_token_id=-1, pad_token_id=0)
# Far more than it takes: machines that run tests are busy.
DEADLINE = 300.0


def config(*, share: bool = False, blocks: int = 96, **changes: Any) -> ContinuousBatchingConfig:
    settings = dict(num_blocks=blocks, max_batch_tokens=64, allow_block_sharing=share, cpu_offload_space=0)
    return ContinuousBatchingConfig(**({key: settings[key] for key in settings if key in PARAMETERS} | {BLOCK: 16} | changes))


def run(model: Any, prompts: list[list[int]], *, tokens: int = 24, **settings: Any) -> list[Any]:
    """Everything at once, as outputs in the order of the prompts."""
    generation = GenerationConfig(max_new_tokens=tokens, **GREEDY)
    outputs = model.generate_batch(
        inputs=prompts, generation_config=generation, continuous_batching_config=config(**settings), progress_bar=False
    )
    return list(outputs.values())


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    assert [output.error for output in outputs if output.error] == []
    return [output.generated_tokens for output in outputs]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """For what the manager's thread does on its own: it looks ten times a second."""
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, f"not within {DEADLINE} s: {what}"
        time.sleep(0.01)


class Serving:
    """A manager that stays up between requests."""

    def __init__(self, model: Any, *, tokens: int = 24, **settings: Any) -> None:
        generation = GenerationConfig(max_new_tokens=tokens, **GREEDY)
        self.manager = model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=config(**settings)
        )

    def __enter__(self) -> Serving:
        self.manager.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.stop(block=True)

    def serve(self, prompts: list[list[int]], on_output: Callable[[int], None] = lambda _: None) -> list[list[int]]:
        ids = [self.manager.add_request(prompt) for prompt in prompts]
        outputs: dict[str, Any] = {}
        end = time.monotonic() + DEADLINE
        while len(outputs) < len(ids):
            output = self.manager.get_result(timeout=1)
            assert time.monotonic() < end and (output is not None or self.manager.is_running())
            if output is not None and output.is_finished():
                outputs[output.request_id] = output
                on_output(len(outputs))
        return tokens_of([outputs[request] for request in ids])


def live_blocks(memory: Any) -> int:
    [pool] = memory.pools
    return pool.snapshot()["allocated_blocks"]


@contextmanager
def live_blocks_of_steps(model: Any, memory: Any) -> Iterator[list[int]]:
    """How many blocks are in use in each step. Counted on the manager's thread: this one may sleep through all of them."""
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda *_: seen.append(live_blocks(memory)))
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("share", [False, True], ids=["apart", "shared"])
def test_same_tokens(models, runtime_dir: Path, kind: str, share: bool) -> None:
    model = models(kind)
    prompts = make_prompts(10, shared=40)
    expected = tokens_of(run(model, prompts, share=share))
    with elastic_memory(name="same") as memory:
        assert tokens_of(run(model, prompts, share=share)) == expected
        gc.collect()
        assert memory.pools == []
    assert not pool_files(runtime_dir)


@pytest.mark.parametrize("share", [False, True], ids=["apart", "shared"])
def test_same_tokens_when_the_cache_is_too_small_for_all(models, share: bool) -> None:
    model = models()
    prompts = make_prompts(10, longest=60)
    expected = tokens_of(run(model, prompts, tokens=40))
    with elastic_memory(name="tight") as memory, Serving(model, blocks=12, share=share, tokens=40) as serving:
        with live_blocks_of_steps(model, memory) as live:
            assert serving.serve(prompts) == expected
        # A page has more blocks than twelve, but no more are used.
        assert 8 < max(live) <= 14


def test_forks_share_what_they_can(models) -> None:
    model = models()
    # One candidate is greedy search, and samples may be several.
    sample = GREEDY | dict(do_sample=True, top_k=1)
    generation = GenerationConfig(max_new_tokens=12, num_return_sequences=3, **sample)

    def forked() -> list[list[int]]:
        outputs = model.generate_batch(
            inputs=make_prompts(3), generation_config=generation, continuous_batching_config=config(share=True), progress_bar=False
        )
        return sorted(tokens_of(list(outputs.values())))

    expected = forked()
    with elastic_memory(name="forked"):
        assert forked() == expected


def test_memory_grows_and_shrinks_with_the_load(models) -> None:
    model = models()
    prompts = make_prompts(12, longest=60)
    expected = tokens_of(run(model, prompts))
    with elastic_memory(name="load") as memory, Serving(model) as serving:
        for _ in range(2):
            with live_blocks_of_steps(model, memory) as live:
                assert serving.serve(prompts) == expected
            assert max(live) > 8
            wait_until(lambda: live_blocks(memory) == 2, "only the trash blocks are in use")
        [pool] = memory.pools
        pool.trim()
        assert pool.mapped_bytes <= pool.geometry.page_bytes * 2


def test_prefixes_are_kept_until_memory_is_asked_for(models) -> None:
    model = models()
    prompts = make_prompts(6, shared=48)
    expected = tokens_of(run(model, prompts, share=True))
    with elastic_memory(name="prefixes") as memory, Serving(model, share=True) as serving:
        assert serving.serve(prompts) == expected
        kept = live_blocks(memory)
        assert kept > 2, "finished prefixes are kept"
        [pool] = memory.pools
        pool.resize(0)
        wait_until(lambda: live_blocks(memory) == 2, "prefixes are evicted for an operator who wants the memory")
        pool.resize(1 << 30)
        assert serving.serve(prompts) == expected


def test_a_limit_lowered_while_generating_slows_down_and_breaks_nothing(models) -> None:
    model = models(hidden_size=512, num_attention_heads=8, num_key_value_heads=8, num_hidden_layers=2)
    prompts = make_prompts(30, longest=60)
    expected = tokens_of(run(model, prompts, blocks=256))
    limit = 8 << 20  # 64 blocks of 128 KiB
    with elastic_memory(name="lowered") as memory, Serving(model, blocks=256) as serving:
        before = 0

        def operator(finished: int) -> None:
            nonlocal before
            if finished == 1:
                before = live_blocks(memory)
                memory.pools[0].resize(limit)

        assert serving.serve(prompts, operator) == expected
        assert before > 64, "there was more in use than the limit allows"
        # Whatever is left over goes without anybody asking again.
        wait_until(lambda: memory.pools[0].mapped_bytes <= limit, "the pool is within its limit")
        assert serving.serve(prompts) == expected


def test_a_stuck_manager_waits_for_memory(models) -> None:
    model = models(hidden_size=512, num_attention_heads=8, num_key_value_heads=8)
    long = [[7] * 995]
    expected = tokens_of(run(model, long))
    with (
        elastic_memory(name="waits", limit=16 << 20, patience=DEADLINE) as memory,
        Serving(model) as serving,
        ThreadPoolExecutor(1) as executor,
    ):
        served = executor.submit(serving.serve, long)
        wait_until(lambda: any(pool.snapshot()["counters"]["failures"] for pool in memory.pools), "the pool refused")
        memory.pools[0].resize(64 << 20)
        assert served.result(timeout=DEADLINE) == expected


@pytest.mark.parametrize("limit", [1 << 20, 16 << 20], ids=["to-start", "for-a-request"])
def test_too_little_memory_fails_the_requests_and_not_the_process(models, limit: int) -> None:
    model = models(hidden_size=512, num_attention_heads=8, num_key_value_heads=8)
    prompts = make_prompts(3)
    expected = tokens_of(run(model, prompts))
    # 64 blocks of 256 KiB, two less under the larger limit.
    long = [[7] * 995]
    with elastic_memory(name="little", limit=limit, patience=0.1):
        errors = run_or_errors(model, long)
        assert errors and all("kvctl limit little" in error for error in errors)
    with elastic_memory(name="enough"):
        assert tokens_of(run(model, prompts)) == expected


def run_or_errors(model: Any, prompts: list[list[int]], **settings: Any) -> list[str]:
    """A manager's thread ends with the error, and it depends on the version whether the caller sees it or its requests do."""
    try:
        return [output.error for output in run(model, prompts, **settings) if output.error]
    except (RuntimeError, MemoryError) as error:
        return [f"{error} {error.__cause__}"]


def test_size_is_address_space(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks for more tokens than there is memory for are refused by the stock check and not by ours."""
    model = models()
    prompts = make_prompts(2)
    expected = tokens_of(run(model, prompts))
    memory = 24 << 20
    monkeypatch.setattr(
        cache_module, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), memory, 0, 0)
    )
    # 3 MiB of masks and indices, and a cache of 2 * 4 * 2 * 16 * 4 bytes for each of 32,768 tokens: 32 MiB.
    size = dict(blocks=2048, max_batch_tokens=16, max_memory_percent=1.0)
    assert any("footprint" in error for error in run_or_errors(model, prompts, **size))
    with elastic_memory(name="virtual"):
        assert tokens_of(run(model, prompts, **size)) == expected


def test_install_says_what_it_found_and_uninstall_puts_it_back() -> None:
    before = continuous_api.PagedAttentionCache, continuous_api.ContinuousBatchProcessor
    memory = install()
    try:
        assert "\n" not in memory.report and "adapter" in memory.report
        with pytest.raises(UnsupportedTransformers, match="already"):
            install()
    finally:
        memory.uninstall()
    memory.uninstall()
    assert (continuous_api.PagedAttentionCache, continuous_api.ContinuousBatchProcessor) == before


def test_an_unknown_shape_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "PACKAGE", "transformers.models")
    with pytest.raises(UnsupportedTransformers, match="install 5.17 or 5.22"):
        install()
    monkeypatch.undo()
    monkeypatch.delattr(cache_module.PagedAttentionMemoryHandler, "compute_memory_footprint")
    with pytest.raises(UnsupportedTransformers, match="lacks cache.PagedAttentionMemoryHandler.compute_memory_footprint"):
        install()


def test_tensor_parallelism_is_refused() -> None:
    with elastic_memory(), pytest.raises(BadArgument, match="one rank"):
        continuous_api.PagedAttentionCache(distributed_helper=SimpleNamespace(tp_size=2))
