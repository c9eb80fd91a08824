"""What the engine only keeps: cached prefixes within its share go to a neighbour that waits, and no running request does."""

from __future__ import annotations

import random
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from engine import MIB, Engine, Shape
from kvcached.integration.vllm.balloon import Balloon
from kvcached.integration.vllm.demand import Demand
from kvcached.integration.vllm.elastic import ElasticBlocks
from kvcached.integration.vllm.pages import PageMap
from test_balloon import cache, free_ids
from test_orders import PAGE, neighbour
from test_workload import workload
from vllm.v1.core.block_pool import BlockPool

BUDGET = 256 * MIB


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_idle_engine_within_its_share_gives_its_prefixes_to_a_neighbour_that_waits(ranks: int) -> None:
    shape = Shape(blocks=600, tensor_parallel=ranks, extra={"keep_seconds": 3600.0})
    with Engine(shape) as engine, neighbour() as other:
        names = workload(engine, 24, prompt=250, output=12)
        engine.run()
        engine.settle()
        held = engine.pool.mapped_bytes
        # Every rank is on the device with its own part, and so is the neighbour.
        assert 30 * MIB <= held <= BUDGET // (ranks + 1), engine.describe()
        other.alloc((BUDGET - ranks * held) // PAGE, wait=60.0)
        # Nothing calls vLLM's scheduler from here on. The neighbour has more than its share and wants nearly everything.
        wanted = ranks * (held // PAGE - 5)
        assert len(other.alloc(wanted, wait=60.0)) == wanted
        # The device's ledger hears of unmapped pages before the scheduler does.
        engine.wait_for(lambda: engine.pool.mapped_bytes <= 5 * PAGE, "the answer of the ranks")
        engine.check_no_block_is_lost()
        # What is left is enough for one request at a time, and every token is what it was.
        for name in names[:3]:
            engine.add(f"again {name}", engine.prompt(name), len(engine.output(name)))
            engine.run()
            assert engine.output(f"again {name}") == engine.output(name)
        engine.settle()
        engine.check_no_block_is_lost()


def test_no_running_request_makes_room_for_what_is_only_hoped_for() -> None:
    with Engine(Shape(blocks=600, extra={"keep_seconds": 3600.0})) as engine, neighbour() as other:
        workload(engine, 24, prompt=250, output=2)
        engine.run()
        running = [f"running {index}" for index in range(4)]
        for index, name in enumerate(running):
            engine.add(name, list(range(index, index + 200)), 60)
        engine.run(until=lambda: all(engine.output(name) for name in running))
        free = (BUDGET - engine.pool.mapped_bytes) // PAGE
        taken = other.alloc(free, wait=60.0)

        def be_hungry() -> bool:
            """Takes what there is, and asks for more than the engine could ever give. Says whether it was heard."""
            while (more := other.try_alloc(1)) is not None:
                taken.extend(more)
            assert other.try_alloc(100) is None
            return engine.pool.reclaim_requested()["pages"] > 0

        # The engine goes on only while it is asked, so that its requests still run when it has nothing more to give.
        while len(taken) < free + 8:
            engine.wait_for(lambda: be_hungry() or len(taken) >= free + 8, "the request to evict")
            assert engine.pool.reclaim_requested()["firm_pages"] == 0
            engine.step()
            assert not engine.blocks.balloon.leaving, "a page that somebody uses was to be emptied"
        for _ in range(5):
            be_hungry()
            engine.step()
            assert not engine.blocks.balloon.leaving
        assert engine.preemptions == 0 and engine.unfinished == len(running)
        other.free(taken)
        other.trim()
        engine.run()
        assert all(len(engine.output(name)) == 60 for name in running)
        engine.settle()
        engine.check_no_block_is_lost()


class AskingPool:
    """A pool that asks for what the test says, and counts what it gets."""

    def __init__(self) -> None:
        self.pages = self.firm_pages = self.evictable = 0
        self.freed: list[int] = []

    def reclaim_requested(self) -> dict[str, int]:
        # What was freed since counts at once.
        pages = max(0, self.pages - len(self.freed))
        return {"pages": pages, "firm_pages": max(0, pages - (self.pages - self.firm_pages))}

    def free(self, pages: list[int], *, step: int) -> None:
        self.freed += pages

    def set_evictable(self, blocks: int) -> None:
        self.evictable = blocks


def unused_pages(pool: Any, balloon: Balloon, among: Iterable[int]) -> set[int]:
    """The dull way: those pages of which vLLM's free list and the balloon have every block."""

    def is_unused(block: int) -> bool:
        return bool(balloon._held[block]) or pool.blocks[block].ref_cnt == 0

    return {page for page in among if page > 0 and all(map(is_unused, balloon.pages.blocks_of(page)))}


@pytest.mark.parametrize("stride", [2 * MIB, 512 * 1024, 192 * 1024, 700_001])
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_take_unused_pages_and_used_ones_only_where_firm(stride: int, seed: int) -> None:
    chance = random.Random(seed)
    pages = PageMap(120, stride, 2 * MIB)
    pool = BlockPool(num_gpu_blocks=120, enable_caching=True, hash_block_size=16)
    settings: Any = SimpleNamespace(start_pages=0, keep_seconds=3600.0)
    elastic = ElasticBlocks(pool, pages, settings, Demand([16], 0, 0), None)
    asking = AskingPool()
    elastic._pool = asking  # type: ignore[assignment]
    elastic.balloon.put_in([0])
    used: dict[int, Any] = {}
    numbers = iter(range(1, 100_000))
    for _ in range(200):
        fresh = sorted(set(range(pages.pages)) - elastic.balloon._in)
        elastic.balloon.put_in(chance.sample(fresh, min(len(fresh), chance.randint(0, 3))))
        for block in pool.get_new_blocks(min(pool.get_num_free_blocks(), chance.randint(0, 9))):
            used[block.block_id] = block
            if chance.random() < 0.7:
                cache(pool, block, next(numbers))
        gone = chance.sample(sorted(used), chance.randint(0, len(used)))
        pool.free_blocks([used.pop(block) for block in gone])

        asking.pages = chance.randint(0, 6)
        asking.firm_pages = chance.choice([0, asking.pages, chance.randint(0, asking.pages)])
        asking.freed, elastic._look_at = [], 0.0
        wanted = chance.randint(0, 8)
        before = set(elastic.balloon._in)
        # Blocks of pages that are leaving are not for requests, also where vLLM has them back.
        free = sum(elastic.balloon.leaving.isdisjoint(pages.pages_of(block)) for block in free_ids(pool))
        unused = unused_pages(pool, elastic.balloon, before - elastic.balloon.leaving)
        due = unused_pages(pool, elastic.balloon, elastic.balloon.leaving)
        elastic._pay(wanted)
        freed = set(asking.freed)
        assert due <= freed <= due | unused and freed == before - elastic.balloon._in
        assert len(freed) <= max(asking.pages, len(due))
        left = asking.reclaim_requested()
        still_unused = unused_pages(pool, elastic.balloon, elastic.balloon._in - elastic.balloon.leaving)
        if left["firm_pages"] == 0:
            assert not elastic.balloon.leaving, "nothing is firm any more, and pages in use are kept from requests"
        else:
            assert not still_unused, "used pages go before unused ones"
            assert len(elastic.balloon.leaving) == min(left["firm_pages"], len(elastic.balloon._in) - 1)
        if asking.firm_pages == 0 and pages.page_bytes % stride == 0:
            assert elastic.balloon.free >= min(free, wanted), "blocks that running requests are about to take are gone"
        elastic._say_evictable(wanted)
        if asking.pages > len(due):
            assert asking.evictable <= len(still_unused), "more is said than a look has just found"
        assert all(elastic.balloon.has_memory(block) for block in used)


def test_what_is_said_is_exact_while_nothing_runs_and_what_is_kept_from_the_start_is_not_said() -> None:
    for start_pages, expected in ((0, 7), (3, 5), (None, 0)):
        pages = PageMap(120, 192 * 1024, 2 * MIB)
        pool = BlockPool(num_gpu_blocks=120, enable_caching=True, hash_block_size=16)
        settings: Any = SimpleNamespace(start_pages=start_pages, keep_seconds=3600.0)
        elastic = ElasticBlocks(pool, pages, settings, Demand([16], 0, 0), None)
        asking = AskingPool()
        elastic._pool = asking  # type: ignore[assignment]
        # Every other page: no block lies whole on two of them, and still all of them can go.
        elastic.balloon.put_in([0, 1, 3, 4, 6, 7, 9, 10])
        elastic._say_evictable(0)
        assert asking.evictable == expected
        asking.pages = 100
        elastic._pay(0)
        assert len(asking.freed) == expected
        elastic._say_evictable(0)
        assert asking.evictable == 0


class LosingPool(AskingPool):
    """A pool that takes memory away as soon as a page is given back: no step is being computed."""

    def __init__(self, pages: int) -> None:
        super().__init__()
        self.unmapped = set(range(pages))

    def try_alloc(self, count: int) -> list[int] | None:
        if count > len(self.unmapped):
            return None
        found = random.Random(len(self.unmapped)).sample(sorted(self.unmapped), count)
        self.unmapped.difference_update(found)
        return found

    def available(self) -> int:
        return len(self.unmapped)

    def free(self, pages: list[int], *, step: int) -> None:
        super().free(pages, step=step)
        self.unmapped.update(pages)


@pytest.mark.parametrize("seed", range(8))
def test_orders_name_pages_that_have_memory_and_ranks_know_all_of_them(seed: int) -> None:
    chance = random.Random(seed)
    pages = PageMap(120, 512 * 1024, 2 * MIB)
    pool = BlockPool(num_gpu_blocks=120, enable_caching=True, hash_block_size=16)
    settings: Any = SimpleNamespace(start_pages=0, keep_seconds=0.0)
    elastic = ElasticBlocks(pool, pages, settings, Demand([16], 0, 0), None)
    losing = LosingPool(pages.pages)
    elastic._pool = losing  # type: ignore[assignment]
    known: set[int] = set()
    for _ in range(300):
        act = chance.choice(["lease", "lease", "pay", "plan", "idle"])
        # What a step frees keeps its memory until the step is over, so this is what its orders may name.
        mapped = set(range(pages.pages)) - losing.unmapped
        losing.freed, losing.pages, losing.firm_pages, elastic._look_at = [], 0, 0, 0.0
        if act == "lease":
            elastic._lease(chance.randint(1, 5))
        elif act == "pay":
            losing.pages = losing.firm_pages = chance.randint(1, 5)
            elastic._pay(0)
        elif act == "idle":
            elastic._restless = True
            elastic._give_back_surplus(0)
        else:
            _, came, went = elastic.plan_step({})
            assert set(came) <= mapped and not set(came) & set(went)
            assert set(went) <= known, "a rank is told to forget a page that it was never told of"
            known = (known | set(came)) - set(went)
            assert known == mapped
