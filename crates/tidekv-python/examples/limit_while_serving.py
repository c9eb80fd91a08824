"""An operator changes a limit while requests are served. `kvctl limit NAME 64M` does the same from a shell.

The pool gives idle pages back by itself; what is in use, the engine is asked for, and preempts its youngest requests.
"""

import collections
import random
import sys
import tempfile
import time

import tidekv
from tidekv import _native

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "auto"
MIB = 1 << 20
LAYOUT = tidekv.Layout.heads(layers=4, kv_heads=2, head_size=64, block_tokens=16)


class Engine:
    """Requests of 8 to 64 blocks that run for a while; those that do not fit wait."""

    def __init__(self, pool: tidekv.Pool) -> None:
        self.pool = pool
        self.random = random.Random(1)
        self.waiting = collections.deque(self.random.randrange(8, 65) for _ in range(1000))
        self.running: list[tuple[list[int], int]] = []
        self.finished = self.preempted = 0

    def step(self) -> None:
        time.sleep(0.001)  # The model computes.
        while self.pool.reclaim_requested()["pages"] and self.running:
            blocks, _ = self.running.pop()
            self.pool.free(blocks)
            self.waiting.appendleft(len(blocks))
            self.preempted += 1
        while self.waiting and len(self.running) < 96 and (blocks := self.pool.try_alloc(self.waiting[0])) is not None:
            self.waiting.popleft()
            self.running.append((blocks, self.random.randrange(3, 12)))
        for blocks, left in self.running:
            if left == 0:
                self.pool.free(blocks)
                self.finished += 1
        self.running = [(blocks, left - 1) for blocks, left in self.running if left > 0]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, tidekv.Pool(
        LAYOUT, name="served", device=DEVICE, capacity=256 * MIB, runtime_dir=folder
    ) as pool:
        engine = Engine(pool)
        steps = 0
        orders = {40: 64 * MIB, 120: 256 * MIB}
        print(f"{'step':>5} {'limit':>9} {'mapped':>9} {'running':>8} {'finished':>9} {'preempted':>10}")
        while engine.waiting or engine.running:
            if limit := orders.get(steps):
                _native.segment_set_limit("served", limit, runtime_dir=folder)
            engine.step()
            if steps % 20 == 0:
                limit_mib, mapped = pool.limit_state()["limit_bytes"] // MIB, pool.mapped_bytes // MIB
                print(f"{steps:>5} {limit_mib:>5} MiB {mapped:>5} MiB {len(engine.running):>8} {engine.finished:>9} "
                      f"{engine.preempted:>10}")
            steps += 1
        print(f"all {engine.finished} requests finished in {steps} steps; {pool.snapshot()['allocated_blocks']} blocks left")


if __name__ == "__main__":
    main()
