"""Prefixes stay cached after their request, for as long as nobody needs the memory. The pool says when, and how much.

A prefix is a chain of blocks, each known by a hash of everything up to its end. Blocks in use are counted; those that
nobody uses are kept in order of their last use, and the coldest go first when the pool asks.
"""

import collections
import random
import sys
import tempfile

import tidekv

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "auto"
TOKENS = 16
LAYOUT = tidekv.Layout.heads(layers=4, kv_heads=2, head_size=64, block_tokens=TOKENS)


class PrefixCache:
    """Blocks by the hash of the tokens up to their end."""

    def __init__(self, pool: tidekv.Pool) -> None:
        self.pool = pool
        self.block_of: dict[int, int] = {}
        self.users: collections.Counter[int] = collections.Counter()
        self.cold: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.hits = self.misses = self.evicted = 0

    def begin(self, prompt: list[int]) -> list[int]:
        """The chain of a prompt's whole blocks: found, or allocated and (in an engine) computed."""
        chain, key = [], 0
        for start in range(0, len(prompt) - TOKENS + 1, TOKENS):
            key = hash((key, *prompt[start : start + TOKENS]))
            if key in self.block_of:
                self.hits += 1
                self.cold.pop(key, None)
            else:
                self.misses += 1
                self.block_of[key] = self.allocate()
            self.users[key] += 1
            chain.append(key)
        return chain

    def end(self, chain: list[int]) -> None:
        """The blocks stay; from now on they may be evicted, the end of the chain before its beginning."""
        for key in reversed(chain):
            self.users[key] -= 1
            if self.users[key] == 0:
                self.cold[key] = None
        while self.pool.reclaim_requested()["pages"] and self.cold:
            self.evict()
        # A neighbour that waits may ask for them.
        self.pool.set_evictable(len(self.cold))

    def allocate(self) -> int:
        while (blocks := self.pool.try_alloc(1)) is None:
            self.evict()
        return blocks[0]

    def evict(self) -> None:
        key, _ = self.cold.popitem(last=False)
        self.pool.free([self.block_of.pop(key)])
        self.evicted += 1


def main() -> None:
    rng = random.Random(7)
    system_prompts = [[rng.randrange(32_000) for _ in range(40 * TOKENS)] for _ in range(12)]
    with tempfile.TemporaryDirectory() as folder, tidekv.Pool(
        LAYOUT, name="prefixes", device=DEVICE, capacity=64 << 20, runtime_dir=folder
    ) as pool:
        cache = PrefixCache(pool)
        print(f"{'requests':>8} {'hit rate':>9} {'cached':>7} {'evicted':>8} {'mapped':>9}")
        for number in range(1, 401):
            popular = system_prompts[min(int(rng.expovariate(0.4)), 11)]
            own = [rng.randrange(32_000) for _ in range(rng.randrange(1, 60) * TOKENS)]
            cache.end(cache.begin(popular + own))
            if number == 200:
                pool.resize(32 << 20)  # Half of the memory goes to somebody else.
            if number % 50 == 0:
                rate = cache.hits / (cache.hits + cache.misses)
                print(f"{number:>8} {rate:>9.1%} {len(cache.cold):>7} {cache.evicted:>8} {pool.mapped_bytes >> 20:>5} MiB")
        while cache.cold:
            cache.evict()
        pool.trim()
        print(f"after the last: {pool.snapshot()['allocated_blocks']} blocks in use")


if __name__ == "__main__":
    main()
