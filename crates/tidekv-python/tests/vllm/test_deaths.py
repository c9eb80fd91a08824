"""Processes that are killed, and who is left."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from engine import PATIENCE_S, Engine, Shape, _processes, make_request, make_scheduler
from test_workload import workload
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT


def test_a_rank_that_is_killed_is_waited_for_and_nothing_blank_is_read() -> None:
    with Engine(Shape(tensor_parallel=2, blocks=400)) as engine:
        names = workload(engine, 6)
        engine.run()
        engine.settle()
        assert len(engine.block_pool.cached_block_hash_to_block)
        engine.ranks[1].kill()
        # A request for which memory must be added, and a rank that is not there to map it: the request waits.
        engine.add("large", list(range(2000)), 3)
        for _ in range(20):
            plan = engine.scheduler.schedule()
            assert plan.total_num_scheduled_tokens == 0
            engine.scheduler.update_from_output(plan, EMPTY_MODEL_RUNNER_OUTPUT)

        engine.ranks[1].start()
        engine.ranks[1].receive()
        engine.wait_for(
            lambda: [rank["rejoins"] for rank in engine.blocks._fleet.status() if rank["state"] == "member"] == [0, 1],
            "the rank's return",
        )
        # Prefixes that are whole on one rank and blank on the other must not be found.
        for name in names:
            engine.add(f"{name}-again", engine.prompt(name), 3)
        engine.run()
        assert len(engine.output("large")) == 3
        assert all(engine.output(f"{name}-again") == engine.output(name)[:3] for name in names if len(engine.output(name)) >= 3)
        engine.settle()
        engine.check_no_block_is_lost()


def scheduler_process(pipe: Connection, config: Any, rank_configs: list[Any]) -> None:
    """Has a request admitted, so that it holds memory on every rank, and waits for its end."""
    scheduler = make_scheduler(config, rank_configs)
    scheduler.add_request(make_request("held", list(range(400)), 10))
    plan = scheduler.schedule()
    pipe.send((os.getpid(), plan.total_num_scheduled_tokens, scheduler.connector._blocks.balloon.pages_in))
    pipe.recv()


def test_a_scheduler_that_is_killed_leaves_no_memory_behind_and_the_next_one_goes_on() -> None:
    engine = Engine(Shape(tensor_parallel=2), scheduler=False)
    with engine:
        pipe, theirs = _processes.Pipe()
        process = _processes.Process(target=scheduler_process, args=(theirs, engine.config, engine.rank_configs), daemon=True)
        process.start()
        try:
            assert pipe.poll(PATIENCE_S)
            pid, tokens, pages = pipe.recv()
            assert tokens == 256 and pages > 2
        finally:
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join(PATIENCE_S)
        assert pid == process.pid
        engine.start_scheduler()
        held = engine.blocks._fleet.held(0)
        assert set(held) == {(0, 0), (0, 1)} and all(0 in pages for pages in held.values())
        workload(engine, 10)
        engine.run()
        engine.settle()
        engine.check_no_block_is_lost()
