"""What operators and neighbours ask for, while the scheduler runs and while it is idle."""

from __future__ import annotations

import subprocess
import sys

from engine import MIB, Engine, Shape
from test_workload import workload
from tidekv import Layout, Pool

KVCTL = [sys.executable, "-c", "from tidekv._tools import kvctl; kvctl()"]
PAGE = 2 * MIB


def kvctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVCTL, *arguments], capture_output=True, text=True, timeout=120, check=False)


def neighbour(**arguments: object) -> Pool:
    """Another engine on the same device."""
    return Pool(Layout.raw(1, PAGE, chunk_bytes=PAGE), name="vllm_test_neighbour", device="cpu", reserve=(0, 0), **arguments)


def test_a_limit_set_by_kvctl_is_obeyed_while_the_scheduler_runs() -> None:
    with Engine(Shape()) as engine:
        workload(engine, 60, prompt=300, output=12)
        engine.run(until=lambda: engine.pool.mapped_bytes >= 20 * MIB)
        done = kvctl("limit", engine.pool.name, "8M")
        assert done.returncode in (0, 3), done.stderr
        engine.wait_for(lambda: engine.pool.limit_state()["limit_bytes"] == 8 * MIB, "the limit's arrival")
        engine.run(until=lambda: engine.pool.mapped_bytes <= 8 * MIB)
        assert engine.pool.mapped_bytes <= 8 * MIB, engine.describe()
        assert engine.unfinished, "the limit was obeyed only because there was nothing left to do"
        most = []
        for _ in range(20):
            engine.step()
            most.append(engine.pool.mapped_bytes)
        assert max(most) <= 8 * MIB
        assert kvctl("limit", engine.pool.name, "256M", "--wait", "60s").returncode == 0
        engine.run()
        engine.check_no_block_is_lost()


def test_a_limit_is_obeyed_while_the_engine_is_idle_and_cached_prefixes_go_first_by_whole_pages() -> None:
    with Engine(Shape(extra={"keep_seconds": 3600.0})) as engine:
        workload(engine, 12)
        engine.run()
        engine.settle()
        engine.wait_for(lambda: engine.pool.mapped_bytes >= 8 * MIB, "memory kept for prefixes")
        # Nothing calls vLLM's scheduler from here on.
        assert kvctl("limit", engine.pool.name, "4M", "--wait", "60s").returncode == 0
        assert engine.pool.mapped_bytes <= 4 * MIB
        engine.check_no_block_is_lost()
        assert engine.block_pool.get_usage() == 0.0
        kvctl("limit", engine.pool.name, "256M", "--wait", "60s")
        again = workload(engine, 12, seed=2)
        engine.run()
        assert all(engine.output(name) for name in again)
        assert engine.scheduler.reset_prefix_cache(), "vLLM counts blocks without memory as used"


def test_a_limit_before_the_first_request_takes_pages_that_no_step_has_named() -> None:
    with Engine(Shape(extra={"start_pages": 8})) as engine:
        assert engine.blocks.balloon.pages_in == 8
        # Nothing was planned yet, so the ranks have heard of no page when these lose their memory.
        assert kvctl("limit", engine.pool.name, "4M", "--wait", "60s").returncode == 0
        assert engine.blocks.balloon.pages_in == 2
        names = workload(engine, 6)
        engine.run()
        assert all(engine.output(name) for name in names)
        engine.settle()
        engine.check_no_block_is_lost()


def test_pages_keep_their_memory_until_all_ranks_have_finished_the_step_that_may_read_them() -> None:
    with Engine(Shape(tensor_parallel=2, extra={"keep_seconds": 3600.0})) as engine:
        workload(engine, 12)
        engine.run()
        engine.settle()
        engine.hold_answers = True
        engine.add("last", list(range(40)), 4)
        engine.step()
        before = set(engine.blocks.balloon._in)
        engine.pool.resize(2 * PAGE)
        engine.wait_for(lambda: engine.pool.reclaim_requested()["pages"] > 0, "the request to give back")
        engine.run()
        # The scheduler has given up the pages; no rank has lost one: a step that may read them is not known to be over.
        gone = before - engine.blocks.balloon._in
        held = engine.blocks._fleet.held(0)
        assert gone and len(held) == 2 and all(gone <= set(pages) for pages in held.values())
        engine.hold_answers = False
        engine.settle()
        engine.wait_for(lambda: engine.pool.mapped_bytes <= 2 * PAGE, "the unmapping behind the step")
        assert {len(pages) for pages in engine.blocks._fleet.held(0).values()} == {engine.blocks.balloon.pages_in}
        engine.check_no_block_is_lost()


def test_what_nobody_uses_is_given_back_and_prefixes_are_kept() -> None:
    with Engine(Shape()) as engine:
        names = workload(engine, 12)
        engine.run()
        engine.settle()
        cached = len(engine.block_pool.cached_block_hash_to_block)
        engine.wait_for(lambda: not engine.blocks._restless, "the look for pages that nobody uses")
        assert kvctl("trim", engine.pool.name).returncode in (0, 3)
        engine.wait_for(lambda: engine.pool.snapshot()["prealloc_bytes"] == 0, "the end of the pages that were kept ahead")
        assert len(engine.block_pool.cached_block_hash_to_block) == cached, "a prefix was evicted for nothing"
        needed = {page for block in engine.block_pool.blocks if block.block_hash for page in engine.blocks._pages.pages_of(block.block_id)}
        assert engine.blocks.balloon.pages_in <= len(needed) + 1
        engine.add("again", engine.prompt(names[0]), 4)
        engine.run()
        assert engine.output("again") == engine.output(names[0])[:4] or len(engine.output(names[0])) < 4


def test_cached_prefixes_beyond_their_bound_go_page_by_page(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from kvcached.integration.vllm import connector

    monkeypatch.setattr(connector, "MAX_CACHED_TOKENS", 320)
    with Engine(Shape()) as engine:
        workload(engine, 12)
        engine.run()
        engine.settle()
        engine.wait_for(lambda: not engine.blocks._restless, "the look for pages that nobody uses")
        free = engine.block_pool.free_block_queue.get_all_free_blocks()
        assert sum(block.block_hash is not None for block in free) <= 20
        engine.check_no_block_is_lost()


def test_a_neighbour_takes_everything_and_the_engine_waits_and_recovers() -> None:
    with Engine(Shape()) as engine, neighbour() as other:
        # All of the budget but what the engine holds already.
        taken: list[int] = []
        while (more := other.try_alloc(1)) is not None:
            taken += more
        assert len(taken) * PAGE >= 200 * MIB
        workload(engine, 8)
        for _ in range(50):
            engine.step()
        assert engine.unfinished > 0
        other.free(taken)
        other.trim()
        engine.run()
        engine.settle()
        engine.check_no_block_is_lost()


def test_a_neighbour_that_starves_gets_memory_of_idle_prefixes() -> None:
    with Engine(Shape(blocks=1000, extra={"keep_seconds": 3600.0})) as engine, neighbour() as other:
        for seed in range(1, 8):
            workload(engine, 16, seed=seed, prompt=250, output=2)
            engine.run()
        engine.settle()
        held = engine.pool.mapped_bytes
        assert held >= 150 * MIB, engine.describe()
        # The engine is idle and above its half of the budget; the neighbour waits for it.
        assert len(other.alloc(60, wait=60.0)) == 60
        assert engine.pool.mapped_bytes < held
        engine.check_no_block_is_lost()


def test_a_limit_below_what_is_in_use_preempts_and_never_fails() -> None:
    with Engine(Shape(prefix_caching=False)) as engine:
        engine.add("long", list(range(500)), 120)
        engine.add("short", list(range(40)), 100)
        engine.run(until=lambda: engine.steps >= 20)
        in_use = engine.pool.mapped_bytes
        assert kvctl("limit", engine.pool.name, "2M").returncode in (0, 3)
        engine.wait_for(lambda: engine.pool.reclaim_requested()["pages"] > 0, "the request to give back")
        engine.run(until=lambda: engine.pool.mapped_bytes < in_use and engine.preemptions > 0)
        for _ in range(20):
            engine.step()
        assert engine.unfinished == 2
        assert kvctl("limit", engine.pool.name, "64M", "--wait", "60s").returncode == 0
        engine.run()
        assert len(engine.output("long")) == 120 and len(engine.output("short")) == 100
        engine.check_no_block_is_lost()
