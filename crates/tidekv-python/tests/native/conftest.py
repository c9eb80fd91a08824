"""Every test has shared files of its own, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of segments, ledgers, sockets and arenas."""
    for name in [name for name in os.environ if name.startswith("KVCACHED_")]:
        monkeypatch.delenv(name)
    # Short: a socket's path has room for 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tk-"))
    monkeypatch.setenv("KVCACHED_RUNTIME_DIR", str(folder))
    # All pools of a test share this much, whatever the machine has.
    monkeypatch.setenv("KVCACHED_HOST_BUDGET", "1G")
    try:
        yield folder
        gc.collect()
        left = sorted(path.name for path in folder.rglob("*") if not path.is_dir())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Ledgers and their events are a device's, not a pool's: they stay for the next pool.
    left = [name for name in left if not name.startswith(("kvcached-ledger-", "kvcached-events-"))]
    assert left == [], f"left behind: {left}"
