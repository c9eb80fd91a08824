"""vLLM's own scheduler on a machine without a GPU. Every run has a folder of its own for segments, ledgers and sockets.

vLLM and the packages read the environment when they are imported, so this must happen before. Where vLLM is not installed, and other
tests run in this process, nothing here is collected or changed.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

RUNTIME_DIR = tempfile.mkdtemp(prefix="kvv-")
atexit.register(shutil.rmtree, RUNTIME_DIR, ignore_errors=True)
ENVIRONMENT = {
    "KVCACHED_RUNTIME_DIR": RUNTIME_DIR,
    "KVCACHED_IPC_NAME": "vllm_test",
    # Tests must not depend on what the machine has free.
    "KVCACHED_HOST_BUDGET": "256M",
    "KVCACHED_MAX_CACHED_TOKENS": "-1",
    "KVCACHED_LOG_LEVEL": "WARNING",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}
UNSET = ("ENABLE_KVCACHED", "KVCACHED_AUTOPATCH", "VLLM_PLUGINS", "VLLM_KV_CACHE_LAYOUT", "KVCACHED_PAGE_SIZE_MB")

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    os.environ.update(ENVIRONMENT)
    for name in UNSET:
        os.environ.pop(name, None)
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No segment and no socket stays after a test. Ledgers do: they are the machine's, and the folder goes at the end."""
    before = set(Path(RUNTIME_DIR).iterdir())
    yield
    left = [path.name for path in Path(RUNTIME_DIR).iterdir() if "vllm_test" in path.name and path not in before]
    assert left == [], f"left in {RUNTIME_DIR}"
