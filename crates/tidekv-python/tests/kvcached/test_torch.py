"""Tensors that engines get, against a plain reference: every layout, every attention type, both engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from kvcached.integration import _engine  # noqa: E402
from kvcached.integration.sglang import interfaces as sglang  # noqa: E402
from kvcached.integration.vllm import interfaces as vllm  # noqa: E402

PAGE = 2 << 20
LAYERS, HEADS, SIZE, TOKENS = 3, 2, 16, 16


@pytest.fixture(autouse=True)
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address space for 16 pages of each buffer, whatever the machine has."""
    monkeypatch.setattr(_engine, "memory_of", lambda device: 16 * PAGE * LAYERS * 2)


def fill(tensors: list[Any], blocks: list[int], axis: int) -> list[list[Any]]:
    """Writes random values into these blocks of every tensor, block by block: operations on whole views may touch bytes that
    are not mapped. Gives copies of the values."""
    kept = []
    for tensor in tensors:
        values = [torch.randn(tensor.select(axis, block).shape).to(tensor.dtype) for block in blocks]
        for block, value in zip(blocks, values):
            tensor.select(axis, block).copy_(value)
        kept.append(values)
    return kept


def check(tensors: list[Any], blocks: list[int], axis: int, kept: list[list[Any]]) -> None:
    for tensor, values in zip(tensors, kept):
        for block, value in zip(blocks, values):
            assert torch.equal(tensor.select(axis, block), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("attention", "shape", "axis", "buffers"),
    [
        ("MHA", (2, 999, TOKENS, HEADS, SIZE), 1, 2),
        ("GQA", (999, 2, TOKENS, HEADS, SIZE), 0, 2),
        ("MLA", (999, TOKENS, 3 * SIZE), 0, 1),
        ("HYBRID_LINEAR", (2, 999, TOKENS, HEADS, SIZE), 1, 1),
    ],
)
def test_vllm_caches_hold_what_is_written(
    monkeypatch: pytest.MonkeyPatch, contiguous: bool, attention: str, shape: Any, axis: int, buffers: int, dtype: Any
) -> None:
    monkeypatch.setattr(vllm, "_contiguous_layout", contiguous)
    vllm.init_kvcached(device="cpu", is_worker=True)
    answer = vllm.alloc_kv_cache(shape, TOKENS, dtype, "cpu", LAYERS, attention)
    caches = answer[0] if attention == "HYBRID_LINEAR" else answer
    assert len(caches) == LAYERS and all(cache.dtype == dtype for cache in caches)
    blocks = caches[0].shape[axis]
    assert tuple(caches[0].shape) == (*shape[:axis], blocks, *shape[axis + 1 :])
    cell = caches[0].select(axis, 0).numel() * dtype.itemsize // TOKENS // buffers
    manager = vllm.get_kv_cache_manager(blocks, TOKENS, cell, LAYERS, num_kv_buffers=buffers)
    first, second = manager.alloc(40), manager.alloc(7)
    kept = fill(caches, first, axis)
    fill(caches, second, axis)
    manager.free(second)
    manager.trim()
    check(caches, first, axis, kept)
    fill(caches, manager.alloc(7), axis)
    check(caches, first, axis, kept)


def test_vllm_states_share_the_pool_with_attention(monkeypatch: pytest.MonkeyPatch, contiguous: bool) -> None:
    monkeypatch.setattr(vllm, "_contiguous_layout", contiguous)
    vllm.init_kvcached(device="cpu", is_worker=True)
    shape = (2, 1, TOKENS, HEADS, SIZE)
    caches, info, meta = vllm.alloc_kv_cache(
        shape, TOKENS, torch.bfloat16, "cpu", LAYERS, "HYBRID_LINEAR", kernel_block_size=4, return_meta=True
    )
    assert info["num_pools"] == LAYERS and info["is_contiguous"] is contiguous and meta["num_layers"] == LAYERS
    assert info["page_size_bytes"] == 2 * TOKENS * HEADS * SIZE * 2
    manager = vllm.get_kv_cache_manager(info["num_blocks"], TOKENS, 2 * HEADS * SIZE * 2, LAYERS, num_kv_buffers=1)
    (block,) = manager.alloc(1)
    for layer in range(LAYERS):
        for kernel_block in range(4 * block, 4 * block + 4):
            caches[layer][:, kernel_block] = layer + 1
    row = info["block_stride_bytes"]
    size = info["page_size_bytes"]
    seen = set()
    for layer in range(LAYERS):
        buffer = info["buffers"][0 if contiguous else layer]
        start = block * row + (layer * size if contiguous else 0)
        seen |= set(buffer[start : start + size].view(torch.bfloat16).tolist())
    assert seen == {1.0, 2.0, 3.0}


def test_groups_with_equal_blocks_share_a_pool(monkeypatch: pytest.MonkeyPatch, contiguous: bool) -> None:
    monkeypatch.setattr(vllm, "_contiguous_layout", contiguous)
    vllm.init_kvcached(device="cpu", is_worker=True)
    _, meta = vllm.alloc_kv_cache(
        (2, 1, TOKENS, HEADS, SIZE), TOKENS, torch.bfloat16, "cpu", LAYERS, return_meta=True
    )
    other, block_bytes = vllm.build_kv_views(
        meta["raw_kv_tensors"], (2, 1, 2 * TOKENS, HEADS, SIZE // 2), 2 * TOKENS, torch.bfloat16, "MHA",
        meta["num_blocks_per_layer"], meta["gpu_mem_bytes_per_layer_k_or_v"], LAYERS, kernel_block_size=8,
    )  # fmt: skip
    assert block_bytes == 2 * TOKENS * HEADS * SIZE * 2
    manager = vllm.get_kv_cache_manager(meta["num_blocks_per_layer"], TOKENS, HEADS * SIZE * 2, LAYERS)
    blocks = manager.alloc(5)
    units = [4 * block + part for block in blocks for part in range(4)]
    check(other, units, 1, fill(other, units, 1))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("attention", ["MHA", "MLA"])
def test_sglang_caches_hold_what_is_written(
    monkeypatch: pytest.MonkeyPatch, contiguous: bool, attention: str, page_size: int
) -> None:
    monkeypatch.setattr(sglang, "_contiguous_layout", contiguous)
    sglang.init_kvcached(device="cpu")
    answer = sglang.alloc_kv_cache((999, HEADS, SIZE), torch.float16, "cpu", LAYERS, page_size, attention)
    caches = [*answer[0], *answer[1]] if attention == "MHA" else answer
    buffers = 2 if attention == "MHA" else 1
    assert len(caches) == LAYERS * buffers
    blocks = caches[0].shape[0] // page_size
    manager = sglang.get_kv_cache_manager(blocks, page_size, HEADS * SIZE * 2, LAYERS, num_kv_buffers=buffers)
    leased = manager.alloc(20)
    assert 0 not in leased
    tokens = [block * page_size + token for block in leased for token in range(page_size)]
    check(caches, tokens, 0, fill(caches, tokens, 0))


def test_sglang_states_have_cells_of_their_own(monkeypatch: pytest.MonkeyPatch, contiguous: bool) -> None:
    monkeypatch.setattr(sglang, "_contiguous_layout", contiguous)
    sglang.init_kvcached(device="cpu")
    params = SimpleNamespace(
        shape=SimpleNamespace(conv=[(5, 3), (2, 7)], temporal=(4, 4, 8)),
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
    )
    slots = 4096
    conv, temporal, where = sglang.alloc_mamba_states(
        num_slots=slots, num_mamba_layers=LAYERS, cache_params=params, device="cpu", group_id=1000
    )
    assert PAGE % where["cell_size"] == 0 and where["is_contiguous"] is contiguous
    manager = sglang.get_kv_cache_manager(slots, 1, where["cell_size"], LAYERS, num_kv_buffers=1, group_id=1000)
    taken = manager.alloc(9)
    layers = [[state[layer] for layer in range(LAYERS)] for state in [*conv, temporal]]
    kept = [fill(states, taken, 0) for states in layers]
    for states, values in zip(layers, kept):
        check(states, taken, 0, values)


def test_numpy_and_torch_see_the_same_bytes(tensors: Any) -> None:
    from kvcached import vmm_ops

    (tensor,) = tensors(2)
    vmm_ops.map_to_kv_tensors([0])
    tensor[3] = 42
    assert isinstance(tensor, torch.Tensor) and tensor.numpy()[3] == 42
