"""KVCacheManager: blocks, limits, and what it says about itself; against a dull model."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kvcached import _runtime, vmm_ops
from kvcached.kv_cache_manager import KVCacheManager
from tidekv import NotLeased

PAGE = 2 << 20
LAYERS = 2

BUNDLE = PAGE * LAYERS * 2


@pytest.mark.parametrize("seed", range(12))
def test_blocks_are_leased_once(manager: Any, eventually: Any, contiguous: bool, seed: int) -> None:
    rng = random.Random(seed)
    made = manager(6, 16, contiguous)
    held: set[int] = set()
    for _ in range(150):
        if rng.random() < 0.55:
            count = rng.randrange(40)
            if count > 6 * 16 - len(held):
                assert made.alloc(count) is None
                continue
            # A page that is on its way in or out may be missed, for a moment.
            blocks = made.alloc(count) if count == 0 else eventually(lambda: made.alloc(count))
            assert len(set(blocks)) == count and not held & set(blocks)
            assert all(0 <= block < made.num_blocks for block in blocks)
            region = _runtime.region(0)
            assert all(region.is_mapped(block // 16) for block in blocks)
            held |= set(blocks)
        elif held:
            given = rng.sample(sorted(held), rng.randrange(1, len(held) + 1))
            made.free(given)
            held -= set(given)
        assert made.available_size() <= 6 * 16 - len(held)
        assert made._get_num_alloced_blocks() == len(held)
        occupancy = made.get_page_occupancy(range(6))
        assert occupancy == {page: sum(block // 16 == page for block in held) for page in range(6)}
        assert set(made.full_pages) == {page for page, used in occupancy.items() if used == 16}
        assert set(made.avail_pages) == {page for page, used in occupancy.items() if 0 < used < 16}
        assert made.num_avail_blocks == sum(16 - used for used in occupancy.values() if used)
    eventually(lambda: made.available_size() == 6 * 16 - len(held))


def test_blocks_that_straddle_pages_are_never_handed_out(tensors: Any, contiguous: bool) -> None:
    tensors(6, contiguous)
    block = 300_000
    made = KVCacheManager(6 * PAGE // block, 1, block, LAYERS)
    blocks: list[int] = []
    while (more := made.alloc(1)) is not None:
        blocks += more
    assert len(set(blocks)) == len(blocks) > 0
    for number in blocks:
        assert number * block // PAGE == ((number + 1) * block - 1) // PAGE


def test_more_than_there_is_is_none(manager: Any, eventually: Any) -> None:
    made = manager(2, 16)
    assert made.alloc(33) is None
    assert made.alloc(0) == []
    assert len(eventually(lambda: made.alloc(32))) == 32
    assert made.alloc(1) is None
    with pytest.raises(ValueError):
        made.alloc(-1)


def test_block_zero_is_kept_as_padding(manager: Any, eventually: Any) -> None:
    made = manager(2, 16, reserve_null_block=True)
    assert made.null_block == [0]
    eventually(lambda: made.available_size() == 31)
    blocks = eventually(lambda: made.alloc(31))
    assert 0 not in blocks and made.alloc(1) is None
    with pytest.raises(NotLeased):
        made.free([0])
    assert made.observability_snapshot().null_block_reserved


def test_a_manager_without_padding_hands_out_block_zero(manager: Any, eventually: Any) -> None:
    made = manager(1, 16)
    assert made.null_block is None and sorted(eventually(lambda: made.alloc(16))) == list(range(16))


def test_free_takes_whatever_has_numbers(manager: Any, eventually: Any) -> None:
    import numpy

    made = manager()
    for kind in (list, tuple, set, iter, numpy.array):
        made.free(kind(made.alloc(5)))
    made.free([])
    eventually(lambda: made.available_size() == 8 * 16)


def test_reserved_blocks_go_first(manager: Any, eventually: Any) -> None:
    made = manager(2, 16)
    assert made.try_to_reserve(10) is True
    aside = made.reserved_blocks
    assert len(aside) == 10
    eventually(lambda: made.available_size() == 32)
    assert made.try_to_reserve(23) is False
    assert set(made.alloc(10)) == set(aside) and made.reserved_blocks == []
    assert eventually(lambda: made.try_to_reserve(22))
    assert made.alloc(23) is None and len(made.reserved_blocks) == 22
    made.free_reserved()
    assert made.reserved_blocks == []
    eventually(lambda: made.available_size() == 22)


def test_clear_frees_all_but_the_padding(manager: Any, eventually: Any) -> None:
    made = manager(4, 16, reserve_null_block=True)
    made.alloc(20)
    made.try_to_reserve(5)
    made.clear()
    eventually(lambda: made.available_size() == 63)
    assert made.null_block == [0]


def test_trim_gives_back_what_is_not_in_use(manager: Any, eventually: Any) -> None:
    made = manager(8, 16)
    blocks = eventually(lambda: made.alloc(8 * 16))
    made.free(blocks[16:])
    made.trim()
    kept = {block // 16 for block in blocks[:16]}
    # And at most what is kept in reserve.
    eventually(lambda: len(kept) <= _runtime.region(0).mapped_pages <= len(kept) + 1)
    assert made.get_mapped_memory_size() == len(kept) * BUNDLE
    assert made.get_mapped_memory_size("mb") == len(kept) * BUNDLE / 2**20
    with pytest.raises(ValueError, match="Unknown unit"):
        made.get_mapped_memory_size("furlongs")


def test_resize_and_back(manager: Any, eventually: Any) -> None:
    made = manager(8, 16)
    assert made.resize(4 * PAGE) is True
    eventually(lambda: made.available_size() == 64)
    assert not made.in_shrink
    blocks = eventually(lambda: made.alloc(64))
    assert made.alloc(1) is None
    assert made.resize(2 * PAGE) is False
    assert made.in_shrink and made.target_num_blocks == 32
    made.free(blocks)
    made.trim()
    eventually(lambda: not made.in_shrink)
    assert made.target_num_blocks is None
    assert made.resize(8 * PAGE) is True
    eventually(lambda: made.available_size() == 128)
    with pytest.raises(ValueError):
        made.resize(-1)


def test_revisions_decide_which_limit_is_in_force(manager: Any, eventually: Any) -> None:
    made = manager(8, 16)
    state = made.set_memory_limit(4 * BUNDLE + 5, revision=3)
    assert (state["status"], state["limit_bytes"], state["effective_limit_bytes"]) == ("applied", 4 * BUNDLE + 5, 4 * BUNDLE)
    assert set(state) == {
        "status", "pool_name", "group_id", "limit_bytes", "effective_limit_bytes", "current_capacity_bytes", "revision",
        "mapped_bytes", "remaining_bytes", "overage_bytes", "reason",
    }  # fmt: skip
    assert made.set_memory_limit(4 * BUNDLE + 5, revision=3)["status"] == "applied"
    assert made.set_memory_limit(BUNDLE, revision=3)["status"] == "conflict"
    assert made.set_memory_limit(BUNDLE, revision=2)["status"] == "stale"
    eventually(lambda: made.alloc(64))
    assert made.set_memory_limit(BUNDLE, revision=4)["status"] == "deferred"
    assert made.memory_limit_state()["overage_bytes"] == 3 * BUNDLE
    with pytest.raises(ValueError):
        made.set_memory_limit(-1, revision=5)


@pytest.mark.parametrize("by_callbacks", [False, True])
def test_the_first_order_is_carried_out_with_revision_0_too(manager: Any, by_callbacks: bool) -> None:
    made = manager(8, 16)
    if by_callbacks:
        made.page_allocator.set_broadcast_map_callback(lambda size, offsets: None)
        made.page_allocator.set_broadcast_unmap_callback(lambda size, offsets: None)
    assert made.memory_limit_state()["revision"] == 0
    state = made.set_memory_limit(2 * BUNDLE, revision=0)
    assert (state["status"], state["revision"], state["effective_limit_bytes"]) == ("applied", 0, 2 * BUNDLE)
    assert made.alloc(33) is None
    assert made.set_memory_limit(2 * BUNDLE, revision=0)["status"] == "applied"
    assert made.set_memory_limit(3 * BUNDLE, revision=0)["status"] == "conflict"
    # An order without a revision is the next one, so 0 is an old one from now on.
    assert made.resize(8 * PAGE) and made.memory_limit_state()["revision"] == 1
    assert made.set_memory_limit(2 * BUNDLE, revision=0)["status"] == "stale"


def test_tensors_may_come_after_their_manager(tensors: Any) -> None:
    made = KVCacheManager(8 * 16, 16, PAGE // 256, LAYERS, reserve_null_block=True)
    assert made.page_allocator.get_num_total_pages() == 8
    assert made.reserved_blocks == [] and made.avail_pages == {} and made.num_avail_blocks == 0
    tensors(8)
    assert len(made.alloc(16)) == 16 and made.null_block == [0]


def test_tensors_that_never_come_are_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcached import _opening

    monkeypatch.setattr(_opening, "TENSOR_PATIENCE_S", 0.05)
    made = KVCacheManager(8 * 16, 16, PAGE // 256, LAYERS, reserve_null_block=True)
    for call in (lambda: made.alloc(1), made.available_size, made.trim, lambda: made.null_block):
        with pytest.raises(RuntimeError, match="create_kv_tensors"):
            call()


def test_the_pool_ends_with_its_manager(manager: Any, eventually: Any) -> None:
    import gc

    from kvcached.cli.utils import get_kv_cache_limit

    made = manager(4, 16)
    eventually(lambda: made.alloc(64))
    assert get_kv_cache_limit("contract") is not None and _runtime.region(0).mapped_pages == 4
    del made
    gc.collect()
    assert get_kv_cache_limit("contract") is None and _runtime.region(0).mapped_pages == 0


def test_fewer_blocks_than_the_tensors_have_room_for(tensors: Any, eventually: Any, contiguous: bool) -> None:
    tensors(8, contiguous)
    made = KVCacheManager(3 * 16, 16, PAGE // 256, LAYERS)
    blocks = eventually(lambda: made.alloc(48))
    assert sorted(blocks) == list(range(48)) and made.alloc(1) is None


def test_callbacks_take_over_a_manager(tensors: Any, eventually: Any) -> None:
    tensors(8)
    made = KVCacheManager(8 * 16, 16, PAGE // 256, LAYERS, reserve_null_block=True)
    mapped: set[int] = set()
    made.page_allocator.set_broadcast_map_callback(lambda size, offsets: mapped.update(offsets))
    made.page_allocator.set_broadcast_unmap_callback(lambda size, offsets: mapped.difference_update(offsets))
    blocks = made.alloc(40)
    assert 0 not in blocks and made.null_block == [0]
    assert mapped == {block // 16 * BUNDLE for block in [0, *blocks]}
    eventually(lambda: made.available_size() == 127 - 40)
    assert made.try_to_reserve(8) and len(made.reserved_blocks) == 8
    assert made.observability_snapshot().allocated_blocks >= 48
    made.free_reserved()
    made.free(blocks)
    made.trim()
    assert mapped == {0}


def test_a_callback_that_raises_is_a_miss(tensors: Any, eventually: Any) -> None:
    tensors(8)
    made = KVCacheManager(8 * 16, 16, PAGE // 256, LAYERS)

    def refuse(size: int, offsets: list[int]) -> None:
        raise OSError("no")

    made.page_allocator.set_broadcast_map_callback(refuse)
    assert made.alloc(4) is None and not made.try_to_reserve(4)
    eventually(lambda: made.available_size() == 128)
    assert made.reserved_blocks == []


def test_a_closed_manager_with_callbacks_leaves_no_page_to_the_next_one(tensors: Any) -> None:
    tensors(8)
    for _ in range(2):
        made = KVCacheManager(8 * 16, 16, PAGE // 256, LAYERS, reserve_null_block=True)
        # The tensors' own functions, as an engine that maps by itself would call them.
        made.page_allocator.set_broadcast_map_callback(lambda size, offsets: vmm_ops.map_to_kv_tensors(offsets))
        made.page_allocator.set_broadcast_unmap_callback(lambda size, offsets: vmm_ops.unmap_from_kv_tensors(offsets))
        blocks = made.alloc(40)
        assert blocks is not None and 0 not in blocks and _runtime.region(0).is_mapped(0)
        made.free(blocks[:20])
        made._slot.close()
        assert _runtime.region(0).mapped_pages == 0


def test_what_could_not_be_unmapped_is_tried_again_at_the_end(tensors: Any) -> None:
    tensors(4)
    made = KVCacheManager(4 * 16, 16, PAGE // 256, LAYERS, reserve_null_block=True)
    mapped: set[int] = set()
    is_busy = True

    def unmap(size: int, offsets: list[int]) -> None:
        if is_busy:
            raise OSError("the device is busy")
        mapped.difference_update(offsets)

    made.page_allocator.set_broadcast_map_callback(lambda size, offsets: mapped.update(offsets))
    made.page_allocator.set_broadcast_unmap_callback(unmap)
    made.free(made.alloc(40))
    made.trim()
    assert len(mapped) == 3
    is_busy = False
    made._slot.close()
    assert mapped == set()
