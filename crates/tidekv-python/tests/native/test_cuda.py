"""What only a GPU can show. Prints its figures as JSON lines that begin with `RESULT`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import tidekv
from tidekv import Layout, Pool

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="SKIPPED: no GPU"),
]

LLAMA = Layout.heads(32, 8, 128, dtype="bfloat16")


def report(**figures: object) -> None:
    print("RESULT " + json.dumps(figures), flush=True)


def test_map_unmap_remap_under_running_kernels() -> None:
    with Pool(LLAMA, device="cuda:0", pages=64, name="remap", reserve=(0, 1)) as pool:
        kv = pool.tensors()
        held: list[int] = []
        for step in range(1, 60):
            blocks = pool.alloc(40)
            index = torch.tensor(blocks, device="cuda")
            for layer in (0, 31):
                kv[layer].key[index] = step
                kv[layer].value[index] = -step
            assert (kv[31].value[index] == -step).all()
            if held:
                pool.free(held, step=step)
            held = blocks
            torch.cuda.synchronize()
            pool.step_completed(step)
            pool.trim()
        pool.free(held)
        pool.trim()
        assert pool.mapped_bytes == 0


def test_out_of_memory_is_an_exception_and_the_process_lives() -> None:
    free, total = torch.cuda.mem_get_info()
    # All that is free, as one neighbour that knows nothing of the ledger takes it.
    hog = torch.empty(free - (600 << 20), dtype=torch.uint8, device="cuda")
    with Pool(LLAMA, device="cuda:0", capacity=total, name="oom", budget=total, reserve=(0, 1)) as pool:
        held: list[int] = []
        with pytest.raises(tidekv.PoolExhausted) as caught:
            while True:
                held += pool.alloc(pool.geometry.blocks_per_page * 4)
        assert caught.value.shortage in ("device", "budget") and caught.value.transient
        kv = pool.tensors()
        kv[0].key[held[0]] = 1.0
        assert (kv[0].key[held[0]] == 1.0).all(), "what was had before still works"
        del hog
        torch.cuda.empty_cache()
        held += pool.alloc(pool.geometry.blocks_per_page * 4, wait=10.0)
        assert (kv[0].key[held[0]] == 1.0).all()


def test_alloc_and_free_of_16_blocks() -> None:
    with Pool(LLAMA, device="cuda:0", pages=64, name="speed") as pool:
        pool.free(pool.alloc(64))
        rounds, calls = [], 20_000
        for _ in range(15):
            start = time.perf_counter_ns()
            for _ in range(calls):
                pool.free(pool.try_alloc(16))
            rounds.append((time.perf_counter_ns() - start) / calls)
        report(test="alloc_free_16", ns_min=min(rounds), ns_median=statistics.median(rounds))
        assert min(rounds) < 2000


def test_two_processes_share_a_gpu_and_a_limit_changes(runtime_dir: Path) -> None:
    page = LLAMA.geometry(pages=1, device="cuda").page_bytes
    budget = 64 * page
    script = f"""
        import sys, tidekv, torch
        layout = tidekv.Layout.heads(32, 8, 128, dtype="bfloat16")
        pool = tidekv.Pool(layout, device="cuda:0", pages=64, name="child", budget={budget}, reserve=(0, 1))
        kv, held = pool.tensors(), []
        print("ready", flush=True)
        for line in sys.stdin:
            word, _, count = line.strip().partition(" ")
            if word == "alloc":
                got = pool.alloc(int(count), wait=20.0)
                kv[7].key[torch.tensor(got, dtype=torch.long, device="cuda")] = 9.0
                held += got
            elif word == "evict":
                request = pool.reclaim_requested()
                freed = held[: request["pages"] * pool.geometry.blocks_per_page]
                held = held[len(freed):]
                pool.free(freed)
                pool.trim()
            assert (kv[7].key[torch.tensor(held, dtype=torch.long, device="cuda")] == 9.0).all()
            print(pool.mapped_bytes, flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None

    def ask(line: str) -> int:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(line + "\n")
        child.stdin.flush()
        return int(child.stdout.readline())

    try:
        assert child.stdout.readline() == "ready\n"
        with Pool(LLAMA, device="cuda:0", pages=64, name="parent", budget=budget, reserve=(0, 1)) as pool:
            per_page = pool.geometry.blocks_per_page
            assert ask(f"alloc {40 * per_page}") >= 40 * page
            mine = pool.alloc(20 * per_page, wait=20.0)
            with pytest.raises(tidekv.PoolExhausted) as caught:
                pool.alloc(30 * per_page)
            assert caught.value.shortage == "budget"
            start = time.perf_counter()
            assert tidekv._native.segment_set_limit("child", 10 * page)
            while True:
                held = ask("evict")
                if held <= 10 * page:
                    break
                assert time.perf_counter() - start < 30, f"the child still holds {held}"
            report(test="limit_lowered", seconds=time.perf_counter() - start)
            more = pool.alloc(30 * per_page, wait=20.0)
            assert pool.mapped_bytes + ask("none") <= budget
            pool.free(mine + more)
    finally:
        child.stdin.close()
        child.wait(timeout=60)
    assert child.returncode == 0
