"""The heart: vLLM's scheduler over memory that shrinks and grows, with a model that reads its KV cache."""

from __future__ import annotations

import random

import pytest
from engine import MIB, Engine, Shape
from vllm.v1.core.sched.async_scheduler import AsyncScheduler


def workload(engine: Engine, count: int, seed: int = 1, prompt: int = 120, output: int = 40) -> list[str]:
    """Requests of mixed lengths, some of which share a prefix."""
    chance = random.Random(seed)
    shared = [chance.randrange(900) for _ in range(64)]
    names = []
    for index in range(count):
        own = [chance.randrange(900) for _ in range(chance.randint(1, prompt))]
        engine.add(f"r{seed}-{index}", shared + own if index % 3 == 0 else own, chance.randint(1, output))
        names.append(f"r{seed}-{index}")
    return names


@pytest.mark.parametrize("ahead", [False, True], ids=["one step at a time", "asynchronous scheduling"])
def test_with_enough_memory_the_decisions_are_those_of_stock_vllm(ahead: bool) -> None:
    with Engine(Shape(ahead=ahead), elastic=False) as stock, Engine(Shape(ahead=ahead)) as elastic:
        for engine in (stock, elastic):
            workload(engine, 24)
            engine.run()
            engine.settle()
            assert isinstance(engine.scheduler, AsyncScheduler) is ahead
        assert elastic.decisions == stock.decisions
        assert elastic.outputs == stock.outputs
        assert elastic.preemptions == stock.preemptions
        elastic.check_no_block_is_lost()


@pytest.mark.parametrize("ahead", [False, True], ids=["one step at a time", "asynchronous scheduling"])
def test_memory_taken_and_given_in_the_middle_changes_no_token(ahead: bool) -> None:
    with Engine(Shape(), elastic=False) as stock, Engine(Shape(tensor_parallel=2, ahead=ahead)) as elastic:
        workload(stock, 100, output=16)
        stock.run()
        workload(elastic, 100, output=16)
        for limit in (30 * MIB, 14 * MIB, 6 * MIB, 30 * MIB, 10 * MIB):
            elastic.pool.resize(limit)
            elastic.run(until=lambda limit=limit: elastic.pool.mapped_bytes <= limit)  # type: ignore[misc]
            assert elastic.unfinished, "the limit was obeyed only because there was nothing left to do"
            for _ in range(6):
                elastic.step()
                assert elastic.pool.mapped_bytes <= limit
        elastic.pool.resize(40 * MIB)
        elastic.run()
        elastic.settle()
        assert elastic.outputs == stock.outputs
        elastic.check_no_block_is_lost()
