"""An engine of one's own in sixty lines: continuous batching, paged attention, and memory that follows the load.

The model is one layer with random weights; what matters is that it reads and writes its KV cache through block tables.
At the end every request's last output is compared with attention over a cache that is one plain array.
"""

import sys
import tempfile

import numpy as np
import tidekv

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "auto"
HEADS, SIZE, BLOCK = 4, 32, 16
RNG = np.random.default_rng(0)
WEIGHTS = RNG.normal(size=(3, HEADS * SIZE, HEADS * SIZE)).astype(np.float32) / 12


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    scores = np.einsum("hd,thd->ht", q, k) / np.sqrt(SIZE)
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", odds / odds.sum(axis=1, keepdims=True), v)


class Request:
    def __init__(self, length: int) -> None:
        self.x = RNG.normal(size=HEADS * SIZE).astype(np.float32)
        self.left, self.tokens, self.blocks, self.plain = length, 0, [], []


class Engine:
    def __init__(self, pool: tidekv.Pool) -> None:
        self.pool, self.running = pool, []
        on_gpu = pool.device.startswith("cuda")
        self.kv = pool.tensors()[0] if on_gpu else pool.arrays()[0]
        self.put = (lambda a: __import__("torch").from_numpy(a).to(pool.device)) if on_gpu else (lambda a: a)
        self.get = (lambda t: t.cpu().numpy()) if on_gpu else (lambda a: a)

    def step(self, waiting: list[Request]) -> list[Request]:
        """One token for every request that has memory; gives those that are done."""
        while waiting and len(self.running) < 32:
            self.running.append(waiting.pop())
        for request in self.running:
            if request.tokens == len(request.blocks) * BLOCK:
                block = self.pool.try_alloc(1)
                if block is None:
                    continue  # No memory now: this one waits a step.
                request.blocks += block
            self.decode(request)
        done = [request for request in self.running if request.left == 0]
        self.running = [request for request in self.running if request.left]
        for request in done:
            self.pool.free(request.blocks)
        return done

    def decode(self, request: Request) -> None:
        q, k, v = ((request.x @ weight).reshape(HEADS, SIZE) for weight in WEIGHTS)
        block, place = request.blocks[-1], request.tokens % BLOCK
        self.kv.key[block, place], self.kv.value[block, place] = self.put(k), self.put(v)
        request.tokens, request.left = request.tokens + 1, request.left - 1
        keys, values = (self.get(part[request.blocks]).reshape(-1, HEADS, SIZE) for part in self.kv)
        request.plain.append((k, v))
        request.x = attention(q, keys[: request.tokens], values[: request.tokens]).reshape(-1)
        if request.left == 0:
            expected = attention(q, *(np.stack(part) for part in zip(*request.plain))).reshape(-1)
            assert np.allclose(request.x, expected, atol=1e-4), "the paged cache differs from the plain one"


def main() -> None:
    layout = tidekv.Layout.heads(layers=1, kv_heads=HEADS, head_size=SIZE, dtype="float32", block_tokens=BLOCK)
    with tempfile.TemporaryDirectory() as folder, tidekv.Pool(
        layout, name="custom", device=DEVICE, capacity=128 << 20, runtime_dir=folder
    ) as pool:
        engine, finished = Engine(pool), 0
        waiting = [Request(int(length)) for length in RNG.integers(4, 120, size=96)]
        peak = 0
        while waiting or engine.running:
            finished += len(engine.step(waiting))
            peak = max(peak, pool.mapped_bytes)
        pool.trim()
        print(f"{finished} requests, all as a plain cache has them; {peak >> 10} KiB mapped at most, "
              f"{pool.snapshot()['used_bytes'] >> 10} KiB in use at the end")


if __name__ == "__main__":
    main()
