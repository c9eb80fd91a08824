"""The allocators against a dull model: random operations, contents that are checked, limits that change in between."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import tidekv
import torch
from kvcached.integration.sglang import plugin
from kvcached.integration.sglang.allocators import ElasticPagedAllocator, ElasticTokenAllocator
from kvcached.integration.sglang.pools import ElasticMHAPool, ElasticMLAPool

HEADS, HEAD_DIM = 8, 64  # 2 KiB of float32 for a token: 1024 tokens in a page of the pool.


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pools of this test, closed with it. Nobody loads plugins here, and nothing here needs SGLang's scheduler."""
    monkeypatch.setattr(plugin, "_is_registered", True)
    for name in ("KVCACHED_MIN_RESERVED_PAGES", "KVCACHED_MAX_RESERVED_PAGES"):
        monkeypatch.setenv(name, "0")
    pools: list[Any] = []
    yield pools
    for pool in pools:
        pool.pool.close()


def mha(made: Any, size: int, page_size: int, heads: int = HEADS) -> Any:
    pool = ElasticMHAPool(
        size, page_size=page_size, dtype=torch.float32, head_num=heads, head_dim=HEAD_DIM, layer_num=2, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    made.append(pool)
    return pool


def allocator_of(made: Any, size: int, page_size: int, heads: int = HEADS) -> Any:
    kvcache = mha(made, size, page_size, heads)
    if page_size == 1:
        return ElasticTokenAllocator(size, torch.float32, "cpu", kvcache, False)
    return ElasticPagedAllocator(size, page_size, torch.float32, "cpu", kvcache, False)


class Sequences:
    """What requests hold, and what they have written: K of layer 0 and V of layer 1, another number for each token."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.kvcache = allocator.get_kvcache()
        self.page = allocator.page_size
        self.held: dict[int, list[tuple[int, float]]] = {}
        self._names, self._numbers = itertools.count(), itertools.count(1)

    def add(self, name: int, slots: list[int]) -> None:
        numbers = [float(next(self._numbers)) for _ in slots]
        index = torch.tensor(slots)
        self.kvcache.k_buffer[0][index] = torch.tensor(numbers)[:, None, None]
        self.kvcache.v_buffer[1][index] = -torch.tensor(numbers)[:, None, None]
        self.held.setdefault(name, []).extend(zip(slots, numbers))

    def extend(self, length: int) -> bool:
        """A new request, or a miss."""
        if self.page == 1:
            slots = self.allocator.alloc(length)
        else:
            lengths = torch.tensor([length])
            slots = self.allocator.alloc_extend(
                torch.tensor([0]), torch.tensor([0]), lengths, lengths, torch.tensor([-1]), length
            )
        if slots is None:
            return False
        self.add(next(self._names), slots.tolist())
        return True

    def decode(self) -> bool:
        """One token for every request, or a miss."""
        names = list(self.held)
        if not names:
            return True
        if self.page == 1:
            slots = self.allocator.alloc(len(names))
        else:
            lengths = torch.tensor([len(self.held[name]) + 1 for name in names])
            last = torch.tensor([self.held[name][-1][0] for name in names])
            slots = self.allocator.alloc_decode(lengths, lengths, last)
        if slots is None:
            return False
        for name, slot in zip(names, slots.tolist()):
            self.add(name, [slot])
        return True

    def free(self, name: int, how: str) -> None:
        slots = torch.tensor([slot for slot, _ in self.held.pop(name)])
        if how == "segment":
            self.allocator.free_segment(slots, start_pos=0)
        elif how == "group":
            self.allocator.free_group_begin()
            half = len(slots) // 2 // self.page * self.page
            self.allocator.free(slots[:half])
            self.allocator.free(slots[half:])
            self.allocator.free_group_end()
        else:
            self.allocator.free(slots)

    def blocks(self) -> int:
        return len({slot // self.page for tokens in self.held.values() for slot, _ in tokens})

    def check(self) -> None:
        slots = [slot for tokens in self.held.values() for slot, _ in tokens]
        assert len(set(slots)) == len(slots), "a slot was given out twice"
        assert all(slot >= self.page for slot in slots), "the null block was given out"
        tokens = [token for tokens in self.held.values() for token in tokens]
        index = torch.tensor([slot for slot, _ in tokens], dtype=torch.int64)
        numbers = torch.tensor([number for _, number in tokens])
        for corner in ((0, 0), (-1, -1)):
            assert torch.equal(self.kvcache.k_buffer[0][index, corner[0], corner[1]], numbers)
            assert torch.equal(self.kvcache.v_buffer[1][index, corner[0], corner[1]], -numbers)
        slots_of_ours = self.allocator.slots
        assert slots_of_ours.given_out == self.blocks()
        with self.allocator.counting_ids():
            assert self.allocator.available_size() == self.allocator.size - self.blocks() * self.page


@pytest.mark.parametrize(("page_size", "heads"), [(16, HEADS), (1, HEADS), (16, 5), (64, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations_against_a_model(made: Any, page_size: int, heads: int, seed: int) -> None:
    rng = random.Random(f"{page_size} {heads} {seed}")
    allocator = allocator_of(made, 8192, page_size, heads)
    pool, sequences = allocator.slots.pool, Sequences(allocator)
    full = pool.snapshot()["limit_bytes"]
    for _ in range(150):
        kind = rng.choices(["extend", "decode", "free", "settle", "limit"], [4, 6, 3, 3, 1])[0]
        if kind == "extend":
            sequences.extend(rng.randint(1, 700))
        elif kind == "decode":
            sequences.decode()
        elif kind == "free" and sequences.held:
            sequences.free(rng.choice(list(sequences.held)), rng.choice(["plain", "segment", "group"]))
        elif kind == "settle":
            allocator.settle(idle=rng.random() < 0.3)
        elif kind == "limit":
            pool.resize(rng.choice([full, full // 2, full // 4, pool.geometry.page_bytes]))
        sequences.check()
    for name in list(sequences.held):
        sequences.free(name, "plain")
    allocator.settle(idle=True)
    assert pool.snapshot()["allocated_blocks"] == 0
    pool.resize(full)
    allocator.settle(idle=True)
    # All of it can be had again, once the pool's thread has done with what the limit took.
    assert len(pool.alloc(allocator.slots.capacity, wait=60.0)) == allocator.slots.capacity


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_miss_is_none_and_leaves_everything_as_it_was(made: Any, page_size: int) -> None:
    """kvcached makes a tensor of None for pages of one token, and its scheduler dies."""
    allocator = allocator_of(made, 4096, page_size)
    allocator.slots.pool.resize(allocator.slots.pool.geometry.page_bytes)
    before = allocator.available_size()
    assert 0 < before <= 1024
    assert allocator.alloc(2048) is None
    assert allocator.available_size() == before
    assert allocator.alloc(before // page_size * page_size) is not None
    assert allocator.alloc(page_size) is None


def test_what_was_checked_cannot_be_taken_by_a_neighbour(made: Any, runtime_dir: Path) -> None:
    allocator = allocator_of(made, 4096, 16)
    pool = allocator.slots.pool
    assert allocator.check_decode_capacity(num_tokens=1500, tree_cache=None)
    pool.resize(pool.geometry.page_bytes)  # As if a neighbour had everything else from here on.
    assert allocator.alloc(1504) is not None
    assert not allocator.check_decode_capacity(num_tokens=3000, tree_cache=None)


def test_mla_reserves_addresses_for_its_tokens_and_not_for_their_square(made: Any) -> None:
    """kvcached passes tokens where blocks are meant: capacity times the page size."""
    pool = ElasticMLAPool(
        8192, page_size=64, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    made.append(pool)
    token_bytes = 3 * 576 * 2
    geometry = pool.pool.geometry
    assert 8192 * token_bytes <= geometry.reservation_bytes < 1.5 * 8192 * token_bytes + geometry.page_bytes
    assert [tuple(buffer.shape) for buffer in pool.kv_buffer] == [(pool.size + 64, 1, 576)] * 3
    allocator = ElasticPagedAllocator(8192, 64, torch.bfloat16, "cpu", pool, False)
    assert allocator.available_size() == 8192
    slots = allocator.alloc(8192)
    assert slots is not None and len(set(slots.tolist())) == 8192
    for layer, buffer in enumerate(pool.kv_buffer):
        buffer[slots] = torch.arange(8192, dtype=torch.bfloat16)[:, None, None] + layer
    for layer, buffer in enumerate(pool.kv_buffer):
        assert torch.equal(buffer[slots][:, 0, 0], torch.arange(8192, dtype=torch.bfloat16) + layer)
    assert allocator.alloc(64) is None
    allocator.clear()
    assert len(pool.pool.alloc(8192 // 64, wait=60.0)) == 8192 // 64


def test_buffers_are_those_of_sglang_to_every_kernel(made: Any) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = mha(made, 4096, 16, heads=5)
    stock = MHATokenToKVPool(
        pool.size, page_size=16, dtype=torch.float32, head_num=5, head_dim=HEAD_DIM, layer_num=2, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    for ours, theirs in zip([*pool.k_buffer, *pool.v_buffer], [*stock.k_buffer, *stock.v_buffer]):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert pool.get_contiguous_buf_infos()[1:] == stock.get_contiguous_buf_infos()[1:]
    distance = pool.v_buffer[0].data_ptr() - pool.k_buffer[0].data_ptr()
    assert distance % (16 * 5 * HEAD_DIM * 4) == 0, "V is a whole number of blocks behind K"
    assert torch.equal(pool.k_buffer[0][:16], torch.zeros(16, 5, HEAD_DIM)), "padded tokens are written here"


def test_each_pool_of_a_process_has_its_own_segment(made: Any, runtime_dir: Path) -> None:
    """kvcached's groups share one, and a limit of one is a limit of the other."""
    first, second = mha(made, 2048, 16), mha(made, 2048, 16)
    names = {tidekv._native.segment_path(pool.pool.name, group=pool.pool.group) for pool in (first, second)}
    assert len(names) == 2 and all(Path(name).exists() for name in names)
    limit = second.pool.snapshot()["limit_bytes"]
    first.pool.resize(first.pool.geometry.page_bytes)
    assert second.pool.snapshot()["limit_bytes"] == limit


def test_k_and_v_of_different_widths_are_refused(made: Any) -> None:
    from kvcached.utils import KVCachedConfigError

    with pytest.raises(KVCachedConfigError, match="K heads of 64 and V heads of 32"):
        ElasticMHAPool(
            2048, page_size=16, dtype=torch.float32, head_num=2, head_dim=64, v_head_dim=32, layer_num=2, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_larger_pages_of_the_operator_are_fewer(made: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("KVCACHED_PAGE_SIZE_MB", "8")
    if kind == "mha":
        kvcache = mha(made, 8192, 64)
    else:
        kvcache = ElasticMLAPool(
            8192, page_size=64, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=2, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        made.append(kvcache)
    geometry = kvcache.pool.geometry
    assert geometry.chunk_bytes == 8 << 20
    # Room for what was asked for and the null block, in whole pages, and not for a multiple of it.
    tokens = geometry.blocks_per_page * 64
    assert 8192 <= kvcache.size < 8192 + 2 * tokens
