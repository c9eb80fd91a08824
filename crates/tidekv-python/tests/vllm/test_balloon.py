"""The balloon in vLLM's real block pool, against the dullest model: sets of blocks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kvcached.integration.vllm.balloon import Balloon
from kvcached.integration.vllm.pages import PageMap
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

MIB = 1 << 20


def make(blocks: int, stride: int, page: int = 2 * MIB) -> tuple[Any, Balloon, PageMap]:
    pool = BlockPool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=16)
    pages = PageMap(blocks, stride, page)
    return pool, Balloon(pool, pages), pages


def free_ids(pool: Any) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def cache(pool: Any, block: Any, number: int) -> None:
    """As if a full block had been computed."""
    pool._insert_block_hash(make_block_hash_with_group_id(number.to_bytes(32, "big"), 0), block, num_tokens=16)


def check(pool: Any, balloon: Balloon, pages: PageMap, used: dict[int, Any], in_pages: set[int], leaving: set[int]) -> None:
    whole = in_pages - leaving
    expected_free = {
        block
        for block in range(1, pages.blocks)
        if block not in used and all(page in whole for page in pages.pages_of(block))
    }
    assert set(free_ids(pool)) == expected_free
    assert balloon.held == pages.blocks - 1 - len(used) - len(expected_free)
    assert balloon.in_use == len(used)
    assert balloon.pages_in == len(in_pages) and balloon.leaving == leaving
    assert pool.num_gpu_blocks == pages.blocks - balloon.held
    for block in used:
        assert pool.blocks[block].ref_cnt == 1 and balloon.has_memory(block), block
    for page in set(range(pages.pages)) - whole:
        assert all(pool.blocks[block].block_hash is None for block in pages.blocks_of(page)), "a prefix is found where none may be"


@pytest.mark.parametrize("stride", [2 * MIB, MIB, 192 * 1024, 700_001, 1_500_000])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_against_sets(stride: int, seed: int) -> None:
    chance = random.Random(seed)
    pool, balloon, pages = make(90, stride)
    used: dict[int, Any] = {}
    in_pages: set[int] = set()
    leaving: set[int] = set()
    numbers = iter(range(1, 100_000))
    balloon.put_in([0])
    in_pages.add(0)
    for _ in range(300):
        act = chance.choice(["in", "in", "use", "use", "free", "leave", "out", "keep"])
        if act == "in":
            fresh = set(range(pages.pages)) - in_pages
            chosen = set(chance.sample(sorted(fresh), min(len(fresh), chance.randint(1, 4))))
            balloon.put_in(chosen)
            in_pages |= chosen
        elif act == "use" and (count := min(pool.get_num_free_blocks(), chance.randint(1, 9))):
            for block in pool.get_new_blocks(count):
                used[block.block_id] = block
                if chance.random() < 0.5:
                    cache(pool, block, next(numbers))
        elif act == "free" and used:
            gone = chance.sample(sorted(used), chance.randint(1, len(used)))
            pool.free_blocks([used.pop(block) for block in gone])
        elif act == "leave":
            cheapest = balloon.figures()
            assert [one.key for one in cheapest] == sorted(one.key for one in cheapest)
            assert {one.page for one in cheapest} == in_pages - leaving - {0}
            for one in cheapest:
                assert one.used == sum(block in used for block in pages.blocks_of(one.page))
            chosen = {one.page for one in cheapest[: chance.randint(0, 3)]}
            balloon.start_leaving(chosen)
            leaving |= chosen
        elif act == "keep" and leaving:
            chosen = set(chance.sample(sorted(leaving), chance.randint(1, len(leaving))))
            balloon.keep(chosen)
            leaving -= chosen
        # Blocks that were freed since may be taken now; vLLM must not get them in between.
        gone_pages = set(balloon.take_out())
        for page in gone_pages:
            assert page in leaving and not any(block in used for block in pages.blocks_of(page))
        leaving -= gone_pages
        in_pages -= gone_pages
        check(pool, balloon, pages, used, in_pages, leaving)
    pool.free_blocks(used.values())
    used.clear()
    balloon.start_leaving(range(1, pages.pages))
    balloon.take_out()
    assert balloon.pages_in == 1
    assert pool.reset_prefix_cache(), "vLLM takes blocks without memory for used ones"
    assert pool.get_usage() == 0.0


def test_pages_with_the_fewest_and_oldest_prefixes_go_first() -> None:
    pool, balloon, pages = make(41, 512 * 1024)
    balloon.put_in(range(pages.pages))
    blocks = {block.block_id: block for block in pool.get_new_blocks(40)}
    # Four blocks on a page. Page 10 is empty, 9 is used; 8 has two old prefixes, 7 one young, 6 one old, the others four.
    kept = [blocks.pop(36)]
    for block in (24, 32, 33, 28):
        cache(pool, blocks[block], block)
        pool.free_blocks([blocks.pop(block)])
    for block in range(4, 24):
        cache(pool, blocks[block], block)
    pool.free_blocks(blocks.values())
    order = [one.page for one in balloon.figures()]
    assert order[:4] == [10, 6, 7, 8] and order[-1] == 9
    balloon.start_leaving(order[1:2])
    assert balloon.take_out() == [6]
    assert pool.get_num_free_blocks() == 40 - 4 - len(kept)


def test_free_before_cached_counts_what_costs_no_prefix() -> None:
    pool, balloon, pages = make(33, MIB)
    assert balloon.free_before_cached(5) == 0
    balloon.put_in(range(pages.pages))
    assert balloon.free_before_cached(5) == 5 and balloon.free_before_cached(99) == 32
    taken = pool.get_new_blocks(32)
    for number, block in enumerate(taken[:30], 1):
        cache(pool, block, number)
    pool.free_blocks(taken)
    assert balloon.free_before_cached(99) == 2
    balloon.forget_contents()
    assert balloon.free_before_cached(99) == 32
