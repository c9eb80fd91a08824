"""Every run has a folder of its own for segments, ledgers and sockets: nothing of the machine is met or left behind.

The package reads the environment when it is imported, so this must happen before.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RUNTIME_DIR = tempfile.mkdtemp(prefix="kvc-")
# Also where collecting the tests fails; after everything that the package does at the end.
atexit.register(shutil.rmtree, RUNTIME_DIR, ignore_errors=True)
ENVIRONMENT = {
    "KVCACHED_RUNTIME_DIR": RUNTIME_DIR,
    "KVCACHED_IPC_NAME": "contract",
    # Tests must not depend on what the machine has free.
    "KVCACHED_HOST_BUDGET": "512M",
    "KVCACHED_IPC_TIMEOUT": "60",
}
UNSET = ("KVCACHED_PAGE_SIZE_MB", "KVCACHED_CONTIGUOUS_LAYOUT", "KVCACHED_AUTOPATCH", "ENABLE_KVCACHED")


def set_up(environment: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        environment.setenv(name, value)
    for name in UNSET:
        environment.delenv(name, raising=False)


with pytest.MonkeyPatch.context() as _at_import:
    # Other tests may run in this process, and have their own environment.
    set_up(_at_import)
    import kvcached.tp_ipc_util  # noqa: F401

PAGE = 2 << 20
LAYERS = 2


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """kvcached as it is before ``init_kvcached``, before and after every test; and nothing stays in the folder."""
    set_up(monkeypatch)
    yield
    from kvcached import pool_registry, tp_ipc_util, vmm_ops
    from kvcached.integration.sglang import interfaces as sglang
    from kvcached.integration.vllm import interfaces as vllm

    assert vllm.shutdown_kvcached() and sglang.shutdown_kvcached()
    assert tp_ipc_util.stop_worker_listener_threads()
    vmm_ops.shutdown_kvcached()
    pool_registry.clear_registered_kv_cache_pools()
    gc.collect()  # A caught exception and its frames are a cycle, with the test's objects in it.
    left = [path.name for path in Path(RUNTIME_DIR).rglob("*") if path.suffix == ".sock" or _is_segment(path)]
    assert not left, f"left behind: {left}"


def _is_segment(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 24


@pytest.fixture(params=[True, False], ids=["contiguous", "per-layer"])
def contiguous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def tensors() -> Callable[..., list[Any]]:
    """Initializes kvcached on host memory and makes the tensors of one group: flat numpy arrays, or torch's."""

    def make(pages: int = 8, contiguous: bool = True, layers: int = LAYERS, buffers: int = 2, group: int = 0) -> list[Any]:
        from kvcached import _runtime, vmm_ops

        if not _runtime.is_started():
            vmm_ops.init_kvcached("cpu", PAGE, contiguous)
        return vmm_ops.create_kv_tensors(pages * PAGE * buffers, 1, "cpu", layers, buffers, group)

    return make


@pytest.fixture
def manager(tensors: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A manager over tensors of its own: 8 pages of 16 blocks unless told otherwise."""

    def make(pages: int = 8, blocks_per_page: int = 16, contiguous: bool = True, group: int = 0, **kwargs: Any) -> Any:
        from kvcached.kv_cache_manager import KVCacheManager

        tensors(pages, contiguous, group=group)
        return KVCacheManager(pages * blocks_per_page, 16, PAGE // blocks_per_page // 16, LAYERS, group_id=group, **kwargs)

    return make


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Any]:
    """Waits until a pool's own thread has come to what is asked for; its answer, which is true."""

    def wait(ask: Callable[[], Any]) -> Any:
        until = time.monotonic() + 30
        while not (answer := ask()):
            assert time.monotonic() < until, "it never came to that"
            threading.Event().wait(0.002)
        return answer

    return wait


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in an interpreter of its own, with this environment and changes to it (None removes)."""

    def run(code: str, *, timeout: float = 120, **changes: str | None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **{key: value for key, value in changes.items() if value is not None}}
        for key in (key for key, value in changes.items() if value is None):
            environment.pop(key, None)
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run
