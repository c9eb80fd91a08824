"""What a broadcast to all workers costs when it is written in Python: ``python -m kvcached.bench_tp_ipc --tp-size 4``.

The question: how long does the scheduler wait until every worker has mapped, and then unmapped, its pages? Workers are
processes of their own, each with its own reservation. The flags are those of ``kvbench tp-ipc``, which measures the
native strategies on the same work. Page ids are base-page to base-page + pages-per-iter - 1.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import inspect
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Broadcast = Callable[[int, list[int]], None]
FUNCTION = "broadcast_map_to_kv_tensors_to_workers"
START_PATIENCE_S = 60.0
_MS = 1e3


def get_broadcast_impl(name: str) -> Broadcast:
    """The strategy of this name: looked up in ``get_broadcast_impl.name_map``, else taken as the name of a file."""
    stem = get_broadcast_impl.name_map.get(name, name)  # type: ignore[attr-defined]
    path = next((path for path in _places(stem) if path.is_file()), None)
    if path is None:
        known = ", ".join(get_broadcast_impl.name_map)  # type: ignore[attr-defined]
        looked = " or ".join(str(path) for path in _places(stem))
        raise ValueError(f"Unknown broadcast impl '{name}'. Choose from: {known}; or write {looked}")
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, FUNCTION, None)
    if function is None:
        raise ValueError(f"{path} does not define {FUNCTION}(tp_size: int, offsets: list[int]) -> None")
    if not inspect.iscoroutinefunction(function):
        return function  # type: ignore[no-any-return]

    def run(tp_size: int, offsets: list[int]) -> None:
        asyncio.run(function(tp_size, offsets))

    run.__module__ = stem
    return run


get_broadcast_impl.name_map = {  # type: ignore[attr-defined]
    "seq": "sequential_sync",
    "thread": "threadpool",
    "async": "python_async_await",
}


def _places(stem: str) -> list[Path]:
    folder = "broadcast_map_impl"
    return [Path.cwd() / folder / f"{stem}.py", Path(__file__).parent / folder / f"{stem}.py"]


# ---- workers


def _work(rank: int, args: argparse.Namespace, ready: multiprocessing.connection.Connection) -> None:
    """One rank, until the pipe to the scheduler ends. Its memory is address space for ``pages`` pages."""
    from kvcached import tp_ipc_util, vmm_ops
    from kvcached.utils import PAGE_SIZE

    device = f"cuda:{0 if args.device_map == 'same' else rank}" if args.backend == "cuda" else "cpu"
    try:
        vmm_ops.init_kvcached(device, PAGE_SIZE, args.layout == "interleaved")
        pages = args.base_page + args.pages_per_iter
        vmm_ops.create_kv_tensors(pages * PAGE_SIZE * 2, 2, device, args.num_layers)
        tp_ipc_util.start_worker_listener_thread(rank)
        ready.send(None)
    except Exception as error:
        ready.send(f"worker {rank}: {error}")
        return
    try:
        ready.recv()
    except EOFError:
        pass  # The scheduler is gone: so is the work.
    vmm_ops.shutdown_kvcached()


class Workers:
    """The processes, as a context: they end with it whatever happens."""

    def __init__(self, args: argparse.Namespace) -> None:
        start = multiprocessing.get_context("spawn")
        pairs = [start.Pipe() for _ in range(args.tp_size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            start.Process(target=_work, args=(rank, args, theirs), daemon=True) for rank, (_, theirs) in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self._processes, pairs):
            process.start()
            theirs.close()

    def __enter__(self) -> Workers:
        for rank, pipe in enumerate(self._pipes):
            try:
                problem = pipe.recv() if pipe.poll(START_PATIENCE_S) else f"worker {rank} does not start"
            except EOFError:
                problem = f"worker {rank} ended while it started"
            if problem is not None:
                self.__exit__()
                raise RuntimeError(problem)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


# ---- measuring


def measure(broadcast: Broadcast, args: argparse.Namespace, period_s: float = 0.0) -> dict[str, list[float]]:
    """Seconds of every map and every unmap; with a period, one map begins in each."""
    from kvcached.tp_ipc_util import broadcast_unmap_from_kv_tensors
    from kvcached.utils import PAGE_SIZE

    unit = PAGE_SIZE * args.num_layers * 2 if args.layout == "interleaved" else PAGE_SIZE
    pages = range(args.base_page, args.base_page + args.pages_per_iter)
    offsets = [] if args.noop else [page * unit for page in pages]
    times: dict[str, list[float]] = {"map": [], "unmap": []}
    begin = time.perf_counter()
    for _ in range(args.iters):
        begin += period_s
        while time.perf_counter() < begin:
            pass
        started = time.perf_counter()
        broadcast(args.tp_size, offsets)
        mapped = time.perf_counter()
        broadcast_unmap_from_kv_tensors(args.tp_size, offsets)
        times["map"].append(mapped - started)
        times["unmap"].append(time.perf_counter() - mapped)
    return times


def percentile(values: Sequence[float], percent: float) -> float:
    """Of the raw samples, between neighbours where it falls between them."""
    ordered, place = sorted(values), (len(values) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(times: Sequence[float], pages: int) -> dict[str, float]:
    """Milliseconds."""
    mean = sum(times) / len(times) * _MS
    return {
        "mean": mean,
        "p95": percentile(times, 95) * _MS,
        "max": max(times) * _MS,
        "min": min(times) * _MS,
        "per-page mean": mean / pages,
    }


def table(name: str, module: str, args: argparse.Namespace, times: dict[str, list[float]]) -> str:
    """As kvcached's benchmark prints it."""
    figures = {deed: summarise(values, args.pages_per_iter) for deed, values in times.items()}
    edge, rule = "+---------------+-----------+------------+", "|---------------|-----------|------------|"
    lines = [
        "=== IPC Benchmark Summary ===",
        f"Broadcast impl       : {name} ({module}.py)",
        f"TP size                 : {args.tp_size}",
        f"Iterations              : {args.iters}",
        f"Pages Per Iteration     : {args.pages_per_iter}",
        "",
        edge,
        "| Metric        |  Map (ms) | Unmap (ms) |",
        rule,
    ]
    for row in figures["map"]:
        if row == "per-page mean":
            lines.append(rule)
        lines.append(f"| {row:<13} | {figures['map'][row]:>9.2f} | {figures['unmap'][row]:>10.2f} |")
    return "\n".join([*lines, edge])


# ---- the command


def _duration(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 500us, 1ms or 0s")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvcached.bench_tp_ipc", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--tp-size", type=_count, required=True, metavar="N", help="workers")
    add("--pages-per-iter", type=_count, default=1, metavar="N", help="pages mapped and unmapped in each iteration")
    add("--iters", type=_count, metavar="N", help="iterations [default: 20, with --quick 10]")
    add("--map-impl", default="seq", metavar="NAME", help="strategy: seq, thread, async, or a file's name [default: seq]")
    add("--all-impls", action="store_true", help="every registered strategy, one after the other")
    add("--device-map", choices=("per-rank", "same"), default="per-rank", help="where the workers map")
    add("--base-page", type=int, default=50, metavar="ID", help="first page id")
    add("--noop", action="store_true", help="the messages alone: orders without pages")
    add("--async-sched", action="store_true", help="accepted; unmapping waits for the device either way")
    add("--cadence", type=_duration, default=0.0, metavar="DURATION", help="once more, one broadcast in each such period")
    add("--num-layers", type=_count, default=32, metavar="N", help="layers, each with K and V")
    add("--block-size", type=_count, default=16, metavar="N", help="accepted; pages do not depend on it")
    add("--layout", choices=("interleaved", "per-layer"), help="[default: KVCACHED_CONTIGUOUS_LAYOUT]")
    add("--not-contiguous", action="store_true", help="kvcached's name for --layout per-layer")
    add("--page-size-mb", metavar="N", help="MiB of one layer's K or V in a page [default: $KVCACHED_PAGE_SIZE_MB, else 2]")
    add("--backend", choices=("auto", "host", "cuda"), default="auto", help="memory to map")
    add("--quick", action="store_true", help="fewer iterations")
    add("-v", "--verbose", action="store_true", help="print every iteration")
    add("--json", action="store_true", help="print one object instead of the table")
    add("--output", metavar="FILE", help="write the same object to a file")
    args = parser.parse_args(arguments)
    args.iters = args.iters or (10 if args.quick else 20)
    return args


def _settle(args: argparse.Namespace) -> None:
    """What the environment must say before the package is imported, here and in the workers; then what it answers."""
    # A folder and a name of our own: nothing of a running instance is met.
    os.environ["KVCACHED_IPC_NAME"] = f"bench_tp_ipc_{os.getpid()}"
    if args.page_size_mb:
        os.environ["KVCACHED_PAGE_SIZE_MB"] = args.page_size_mb
    from tidekv import _native

    from kvcached.utils import CONTIGUOUS_LAYOUT

    if args.backend == "auto":
        args.backend = "cuda" if _native.device_count() else "host"
    if args.not_contiguous:
        args.layout = "per-layer"
    args.layout = args.layout or ("interleaved" if CONTIGUOUS_LAYOUT else "per-layer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 error."""
    args = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="kvcached-bench-") as folder:
        os.environ["KVCACHED_RUNTIME_DIR"] = folder
        _settle(args)
        try:
            results = run(args)
        except (RuntimeError, ValueError, OSError) as error:
            print(f"bench_tp_ipc: {error}", file=sys.stderr)
            return 2
    if args.json:
        print(json.dumps(results))
    if args.output:
        Path(args.output).write_text(json.dumps(results) + "\n", encoding="utf-8")
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints, and gives everything as one object."""
    from tidekv import __version__

    names = list(get_broadcast_impl.name_map) if args.all_impls else [args.map_impl]  # type: ignore[attr-defined]
    impls = {name: get_broadcast_impl(name) for name in names}
    samples, summary = {}, {}
    with Workers(args):
        for name, broadcast in impls.items():
            times = measure(broadcast, args)
            samples[name] = times
            summary[name] = {deed: summarise(values, args.pages_per_iter) for deed, values in times.items()}
            if args.json:
                continue
            if args.verbose:
                for number, (mapped, unmapped) in enumerate(zip(times["map"], times["unmap"])):
                    print(f"[iter {number:02d}] map={mapped:.6f}s  unmap={unmapped:.6f}s")
            print(f"\n{table(name, broadcast.__module__.rpartition('.')[2], args, times)}")
            if args.cadence:
                paced = measure(broadcast, args, args.cadence)
                samples[f"{name}.cadence"] = paced
                print(f"One in each {args.cadence * _MS:g} ms      : map p95 {percentile(paced['map'], 95) * _MS:.2f} ms")
    host = {"machine": platform.machine(), "system": platform.release(), "cpus": os.cpu_count()}
    return {
        "name": "tp-ipc-python",
        "args": {key: value for key, value in vars(args).items() if key not in ("json", "output")},
        "host": {**host, "python": platform.python_version(), "version": __version__},
        "samples": samples,
        "summary": summary,
    }


if __name__ == "__main__":
    raise SystemExit(main())
