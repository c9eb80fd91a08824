"""One of two ranks with a pool each: says what it sees, as one JSON object. Usage: one_rank.py RANK PORT"""

from __future__ import annotations

import json
import sys
from typing import Any

import tidekv
import torch
from kvcached.integration.sglang.ranks import InStep
from kvcached.integration.sglang.slots import Slots


def main() -> None:
    rank, port = int(sys.argv[1]), sys.argv[2]
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    layout = tidekv.Layout.heads(2, 8, 64, dtype="float32", block_tokens=16, layout="per-layer")
    told: dict[str, Any] = {}
    with tidekv.Pool(layout, name="rank", device="cpu", pages=8, null_block=True, reserve=(0, 0)) as pool:
        slots = Slots(pool, 500, InStep(torch.distributed.group.WORLD))
        slots.clear()
        told["at first"] = slots.available()
        if rank == 1:
            pool.resize(2 * pool.geometry.page_bytes)
        told["pages asked for"] = slots.settle(empty_hand=True)
        told["with a limit on one"] = slots.available()
        told["more than one has"] = slots.fill(200)
        told["in the hand"] = len(slots.hand)
        told["what both have"] = slots.fill(100)
        told["left"] = slots.available()
        slots.give_out(100)
        told["given out"] = slots.given_out
        if rank == 1:
            pool.resize(8 * pool.geometry.page_bytes)
        slots.settle(empty_hand=True)
        told["with the limit raised"] = slots.fill(200)
    torch.distributed.destroy_process_group()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
