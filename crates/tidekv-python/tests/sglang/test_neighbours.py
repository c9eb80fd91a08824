"""Other processes on the same device: one that takes all memory, a scheduler that is killed, ranks that must agree."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import tidekv
import workloads
from players import POOL, Play
from workloads import PAGE_BYTES

BLOCK_BYTES = 1 << 20
BUDGET_PAGES = 12

REQUESTS = workloads.requests(3, 6, prompt=(30, 260), new=(16, 40), every=3)
TO_BE_CACHED = workloads.requests(11, 5, prompt=(150, 400), new=(2, 4), every=2)
"""A little less than the share of one of two on the device."""
IDLE_AT = 400
LEFT_WHILE_BUSY = 3
TOO_LONG_FOR_A_PAGE = {"at": 2, "request": "long", "ids": [7 + index % 500 for index in range(700)], "new": 20}


def neighbour(folder: Path) -> tidekv.Pool:
    """Another engine on the device, which gives nothing back that it has."""
    return tidekv.Pool(
        tidekv.Layout.raw(1, BLOCK_BYTES, chunk_bytes=PAGE_BYTES),
        name="neighbour",
        device="cpu",
        capacity=BUDGET_PAGES * PAGE_BYTES,
        budget=BUDGET_PAGES * PAGE_BYTES,
        reserve=(0, 0),
        runtime_dir=str(folder),
        env=False,
    )


def test_a_neighbour_that_takes_everything_makes_requests_wait_and_a_killed_scheduler_leaves_nothing(
    play: Play, runtime_dir: Path
) -> None:
    work = [*REQUESTS, TOO_LONG_FOR_A_PAGE]
    scripts: list[dict[str, Any]] = [
        {"events": work},
        {"events": [{"at": 1, "say": "idle"}, {"say": "all memory is the neighbour's"}]},
        {"events": [*work, {"at": 2500, "say": "waiting"}]},
        {"events": [*work, {"at": 10, "say": "busy"}, {"say": "killed before"}]},
    ]
    with neighbour(runtime_dir) as other:
        player = play(scripts, environment={"KVCACHED_HOST_BUDGET": str(BUDGET_PAGES * PAGE_BYTES)})
        player.wait_for("idle")
        # All but the page of the null block, which a pool has for life.
        other.alloc((BUDGET_PAGES - 1) * PAGE_BYTES // BLOCK_BYTES, wait=60.0)
        player.go_on()
        player.wait_for("waiting")
        other.clear()
        player.wait_for("busy")
        player.kill()
        # What the dead one held is there for whoever asks.
        assert len(other.alloc(BUDGET_PAGES * PAGE_BYTES // BLOCK_BYTES, wait=60.0)) == BUDGET_PAGES * 8
    alone, _, beside = (
        json.loads(line.removeprefix("OUTCOME ")) for line in player.log if line.startswith("OUTCOME ")
    )
    assert alone["complete"] and beside["complete"]
    assert alone["unfinished"] == beside["unfinished"] == []
    assert beside["tokens"] == alone["tokens"]
    assert beside["reasons"] == ["FINISH_LENGTH"]
    assert beside["done_at"]["long"] > 2500, "it waited until the neighbour gave back"


def test_prefixes_within_the_share_go_to_a_neighbour_that_waits_and_no_request_is_retracted(
    play: Play, runtime_dir: Path
) -> None:
    first = [{**event, "request": f"first {event['request']}"} for event in TO_BE_CACHED]
    second = [{**event, "request": f"second {event['request']}", "at": IDLE_AT + 2} for event in TO_BE_CACHED]
    running = {"at": IDLE_AT, "request": "running", "ids": [9 + index % 400 for index in range(100)], "new": 200}

    def say(word: str, after: int, **when: int) -> dict[str, Any]:
        return {"at": IDLE_AT + after, "say": word, **when}

    scripts: list[dict[str, Any]] = [
        {"events": [*first, *second, running]},
        # What comes second waits until the pool has one page; the running request does not.
        {"events": [*first, say("idle", 0), say("given by an idle one", 1, pages=1), *second]},
        # It can do with a page: nothing would be cached in the next one if the neighbour had not given back by then.
        {"events": [{"say": "all memory is back"}]},
        {"events": [*first, running, say("busy", 20), say("given by a busy one", 21, pages=LEFT_WHILE_BUSY)]},
    ]
    per_page = PAGE_BYTES // BLOCK_BYTES
    with neighbour(runtime_dir) as other:
        player = play(scripts, environment={"KVCACHED_HOST_BUDGET": str(BUDGET_PAGES * PAGE_BYTES)})
        for moment, left in (("idle", 1), ("busy", LEFT_WHILE_BUSY)):
            player.wait_for(moment)
            taken: list[int] = []
            while (page := other.try_alloc(per_page)) is not None:
                taken += page
            held = BUDGET_PAGES - len(taken) // per_page
            assert left < held <= BUDGET_PAGES // 2, "prefixes are cached, and all is within the share"
            taken += other.alloc((held - left) * per_page, wait=60.0)
            player.wait_for(f"given by {'an' if moment == 'idle' else 'a'} {moment} one")
            other.free(taken)
            other.trim()
            if moment == "idle":
                player.go_on()
        plenty, idle, _, busy = player.outcomes()
    for outcome in (plenty, idle, busy):
        assert outcome["complete"] and outcome["unfinished"] == []
        assert outcome["retractions"] == 0 and outcome["reasons"] == ["FINISH_LENGTH"]
        assert max(at for name, at in outcome["done_at"].items() if name.startswith("first")) < IDLE_AT
        assert outcome["flushed"], "a block is lost"
        assert outcome["tokens"] == {name: plenty["tokens"][name] for name in outcome["tokens"]}
    hits = [sum(outcome["cached"][event["request"]] for event in second) for outcome in (plenty, idle)]
    assert hits[1] < hits[0], "the prefixes of the idle one are gone"


def test_ranks_take_the_same_decisions_though_one_has_less_memory(play: Play, splittable_model: str) -> None:
    def limit_of_one(at: int, pages: int) -> dict[str, Any]:
        # kvctl waits a moment for the pool to hear of it, and with it both ranks.
        order = ["limit", f"{POOL}_tp1", str(pages * PAGE_BYTES), "--wait", "1s"]
        return {"at": at, "kvctl": order, "rank": 1}

    scripts = [{"events": REQUESTS}, {"events": [*REQUESTS, limit_of_one(12, 1), limit_of_one(60, 9)]}]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    players = [
        play(
            scripts,
            rank=rank,
            model_path=splittable_model,
            tp_size=2,
            nccl_port=port,
            environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|0"},
        )
        for rank in range(2)
    ]
    first, second = (player.outcomes() for player in players)
    for one, other in zip(first, second):
        assert one["batches"] == other["batches"]
        assert one["unfinished"] == other["unfinished"] == []
        assert one["tokens"] == other["tokens"]
    enough, short = first
    assert short["tokens"] == enough["tokens"]
    assert short["batches"] != enough["batches"], "the limit of one rank was felt by both"
    assert max(seen["inuse_pages"] for seen in second[0]["snapshots"]) > 1
    in_use = [seen["inuse_pages"] for seen in second[1]["snapshots"]]
    assert in_use[58] <= 1
