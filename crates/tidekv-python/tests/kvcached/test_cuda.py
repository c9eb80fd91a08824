"""The drop-in on a GPU. Prints its figures as JSON lines that begin with `RESULT`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvcached.integration.vllm import interfaces as vllm  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="SKIPPED: no GPU"),
]

LAYERS, TOKENS, HEADS, SIZE = 32, 16, 8, 128


def engine(contiguous: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Any]:
    """vLLM's caches of a Llama-like model over the whole GPU, and their manager."""
    monkeypatch.setattr(vllm, "_contiguous_layout", contiguous)
    vllm.init_kvcached(device="cuda:0", is_worker=True)
    caches = vllm.alloc_kv_cache((2, 1, TOKENS, HEADS, SIZE), TOKENS, torch.bfloat16, "cuda:0", LAYERS)
    return caches, vllm.get_kv_cache_manager(caches[0].shape[1], TOKENS, HEADS * SIZE * 2, LAYERS)


def test_what_is_written_stays_across_unmap_and_remap(contiguous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    caches, manager = engine(contiguous, monkeypatch)
    kept = manager.alloc(100)
    index = torch.tensor(kept, device="cuda")
    values = [torch.randn(2, 100, TOKENS, HEADS, SIZE, device="cuda", dtype=torch.bfloat16) for _ in caches]
    for cache, value in zip(caches, values):
        cache[:, index] = value
    for _ in range(10):
        other = manager.alloc(300)
        place = torch.tensor(other, device="cuda")
        for cache in caches:
            cache[:, place] = 7
        manager.free(other)
        manager.trim()
    for cache, value in zip(caches, values):
        assert torch.equal(cache[:, index], value)


def test_alloc_and_free_of_16_blocks_take_less_than_2_us(monkeypatch: pytest.MonkeyPatch) -> None:
    _, manager = engine(True, monkeypatch)
    manager.free(manager.alloc(1000))
    rounds = []
    for _ in range(30):
        began = time.perf_counter()
        for _ in range(1000):
            manager.free(manager.alloc(16))
        rounds.append((time.perf_counter() - began) * 1e3)
    print("RESULT " + json.dumps({"kvcached_alloc_free_16_us": {"p50": statistics.median(rounds), "min": min(rounds)}}))
    assert statistics.median(rounds) < 2.0


OTHER = """
import sys, torch
from kvcached.integration.vllm import interfaces as vllm
vllm.init_kvcached(device="cuda:0", is_worker=True)
caches = vllm.alloc_kv_cache((2, 1, 16, 8, 128), 16, torch.bfloat16, "cuda:0", 32)
manager = vllm.get_kv_cache_manager(caches[0].shape[1], 16, 8 * 128 * 2, 32)
blocks = manager.alloc(4000)
for cache in caches:
    cache[:, torch.tensor(blocks, device="cuda")] = 3
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
manager.free(blocks[1000:])
sys.stdin.read()
"""


def test_two_processes_share_a_gpu_and_a_limit_changes(monkeypatch: pytest.MonkeyPatch, eventually: Any) -> None:
    from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit

    _, manager = engine(True, monkeypatch)
    assert manager.alloc(500) is not None
    limit = 32 * (2 << 20) * LAYERS * 2
    with subprocess.Popen(
        [sys.executable, "-c", OTHER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "KVCACHED_IPC_NAME": "neighbour"},
    ) as other:
        try:
            assert other.stdin is not None and other.stdout is not None and other.stdout.readline() == "ready\n"
            update_kv_cache_limit("neighbour", limit)
            before = get_kv_cache_limit("neighbour")
            assert before is not None and before.used_size > limit
            other.stdin.write("go\n")
            other.stdin.flush()

            def is_within() -> bool:
                now = get_kv_cache_limit("neighbour")
                return now is not None and now.used_size + now.prealloc_size <= limit

            eventually(is_within)
        finally:
            other.communicate(timeout=60)
    assert manager.alloc(100) is not None
