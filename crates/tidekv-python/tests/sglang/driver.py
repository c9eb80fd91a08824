"""A scheduler of SGLang in a process of its own, with a model that it really computes, told by a script what arrives when.

    driver.py FILE [RANK]    ->    for each script one line on stdout that begins with OUTCOME, and what scripts say

Everything is SGLang's: scheduler, event loop, radix cache, batches, model. Only requests come from the script instead of a
socket, at numbered turns of the loop, so that two runs can be compared decision by decision. The file is JSON:

    instance   a name for the files that SGLang makes
    server     keywords of ServerArgs
    scripts    played one after the other by the same scheduler, whose cache is flushed in between:
        events     {"at": turn, "request": id, "ids": [...], "new": count}
                   {"at": turn, "kvctl": [arguments], "rank": 0}
                   {"at": turn, "say": word}         for the other side to wait for
                   any of them with "pages": not before the pool has at most so many, and later events not before that
        patience   seconds after which it stops in any case

With several ranks there is a process for each, and all play the same scripts: at the same turn the same request arrives in each.
Events without "at" come one by one, each when a line is read from stdin. A script ends when all is said and every request done.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from array import array
from typing import Any


class Script:
    """Stands where SGLang receives requests, and sees every turn of its loop."""

    def __init__(self, scheduler: Any, script: dict[str, Any], rank: int) -> None:
        self.scheduler = scheduler
        self.rank = rank
        self.timed = sorted((event for event in script["events"] if "at" in event), key=lambda event: event["at"])
        self.told = [event for event in script["events"] if "at" not in event]
        self.until = time.monotonic() + script.get("patience", 120)
        self.turn = 0
        self.wanted = sum("request" in event for event in script["events"])
        self.requests: dict[str, Any] = {}
        self.done_at: dict[str, int] = {}
        self.limited_at: list[int] = []
        self.batches: list[list[Any]] = []
        self.snapshots: list[dict[str, int]] = []
        slots = getattr(scheduler.token_to_kv_pool_allocator, "slots", None)
        self.pool = slots and slots.pool

    def recv_requests(self, local_reqs: Any = None) -> list[Any]:
        self.turn += 1
        self.look()
        arrived = []
        while self.timed and self.is_due(self.timed[0]):
            arrived += self.do(self.timed.pop(0))
        if self.told and select.select([sys.stdin], [], [], 0)[0]:
            arrived += self.do(self.told.pop(0)) if sys.stdin.readline() else []
        done = len(self.requests) == self.wanted and all(req.finished() for req in self.requests.values())
        if (done and not self.timed and not self.told) or time.monotonic() > self.until:
            self.scheduler.gracefully_exit = True
        return arrived

    def is_due(self, event: dict[str, Any]) -> bool:
        if event["at"] > self.turn:
            return False
        seen = self.snapshots[-1] if "pages" in event else {}
        return all(seen[name] <= event["pages"] for name in seen if name in ("inuse_pages", "mapped_pages"))

    def do(self, event: dict[str, Any]) -> list[Any]:
        if "request" in event:
            return [self.request(event)]
        if "kvctl" in event and event.get("rank", 0) == self.rank:
            import tidekv

            code = tidekv._native.run_tool("kvctl", event["kvctl"])
            assert code in (0, 3), (event, code)
            self.limited_at.append(self.turn)
        if "say" in event:
            print(event["say"], flush=True)
        return []

    @staticmethod
    def request(event: dict[str, Any]) -> Any:
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=event["new"], temperature=0, ignore_eos=True)
        sampling.normalize(None)
        return TokenizedGenerateReqInput(
            rid=event["request"],
            input_text=None,
            input_ids=array("q", event["ids"]),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )

    def look(self) -> None:
        """What there is at the start of a turn."""
        for req in self.scheduler.waiting_queue:
            self.requests.setdefault(req.rid, req)
        for rid, req in self.requests.items():
            if req.finished():
                self.done_at.setdefault(rid, self.turn)
        if self.pool is not None:
            seen = self.pool.snapshot()
            self.snapshots.append(
                {
                    "inuse_pages": seen["inuse_pages"],
                    "mapped_pages": seen["mapped_bytes"] // seen["page_bytes"],
                    "limit_pages": seen["limit_pages"],
                }
            )

    def outcome(self) -> dict[str, Any]:
        finished = {rid: req for rid, req in self.requests.items() if req.finished()}
        return {
            "complete": not self.timed and not self.told,
            "turns": self.turn,
            "limited_at": self.limited_at,
            "done_at": self.done_at,
            "tokens": {rid: list(req.output_ids) for rid, req in finished.items()},
            "unfinished": sorted(self.requests.keys() - finished.keys()),
            "reasons": sorted({type(req.finished_reason).__name__ for req in finished.values()}),
            "cached": {rid: req.cached_tokens for rid, req in finished.items()},
            "retractions": sum(req.retraction_count for req in self.requests.values()),
            "batches": self.batches,
            "snapshots": self.snapshots,
        }


def note_batches(scheduler: Any) -> None:
    """Has every batch that is run noted by the script of the moment."""
    run_batch = scheduler.run_batch

    def noted(batch: Any, *args: Any, **kwargs: Any) -> Any:
        script = scheduler.request_receiver
        for req in batch.reqs:
            script.requests.setdefault(req.rid, req)
        lengths = list(batch.extend_lens) if batch.forward_mode.is_extend() else None
        script.batches.append([batch.forward_mode.name, [req.rid for req in batch.reqs], lengths])
        return run_batch(batch, *args, **kwargs)

    scheduler.run_batch = noted


def new_scheduler(server: dict[str, Any], rank: int, instance: str) -> Any:
    """As SGLang starts one in its process. Its files in /dev/shm are named after the instance, and left there."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    make_group = GroupCoordinator.__init__

    def make_group_without_nccl(group: Any, *args: Any, **kwargs: Any) -> None:
        # Where SGLang finds no device it knows, it takes it for one of NVIDIA here.
        make_group(group, *args, **{**kwargs, "use_pynccl": False})

    GroupCoordinator.__init__ = make_group_without_nccl
    server_args = ServerArgs(
        device="cpu",
        attention_backend="torch_native",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        dtype="float32",
        log_level="warning",
        disable_custom_all_reduce=True,
        random_seed=1,
        **server,
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank))
    port_args = PortArgs.init_new(server_args)
    port_args.instance_id = instance
    return Scheduler(server_args, port_args)


def main() -> None:
    with open(sys.argv[1]) as file:
        told = json.load(file)
    rank = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    scheduler = new_scheduler(told["server"], rank, told["instance"])
    note_batches(scheduler)
    allocator = scheduler.token_to_kv_pool_allocator
    classes = [type(allocator).__name__, type(allocator.get_kvcache()).__name__]
    for script in told["scripts"]:
        scheduler.gracefully_exit = False
        scheduler.last_batch = None
        scheduler.request_receiver = Script(scheduler, script, rank)
        scheduler.run_event_loop()
        outcome = scheduler.request_receiver.outcome()
        outcome["flushed"] = scheduler.flush_cache()
        print("OUTCOME", json.dumps({**outcome, "classes": classes}), flush=True)
    # SGLang's threads and gloo have no orderly end in a process that is not its server.
    os._exit(0)


if __name__ == "__main__":
    main()
