"""A real kvserve for every test file: a process on a free port, with shared files in a folder of its own.

KVSERVE names the binary; scripts/test-serve builds it and sets that.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PATIENCE_SECONDS = 120


class Server:
    """A running kvserve."""

    def __init__(self, folder: Path, *args: str, **variables: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("KVCACHED_", "HF_"))}
        # Without cached prefixes every block that is in use is a request's.
        env |= {"KVCACHED_RUNTIME_DIR": str(folder), "KVCACHED_MAX_CACHED_TOKENS": "0", **variables}
        command = [os.environ["KVSERVE"], "--port", "0", "--kv-budget", "64M", *args]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        first, second = self.process.stdout.readline(), self.process.stdout.readline()
        found = re.fullmatch(r"listening on (http://\S+)\n", second)
        assert found, first + second
        self.url = found[1]

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE_SECONDS) as page:
            text = page.read().decode()
        found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in\n{text}"
        return float(found[1])

    def wait_until_idle(self) -> None:
        """No request runs and no block is in use."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "kvcached_kv_cache_pool_allocated_blocks")
        while figures := {name: value for name in names if (value := self.metric(name))}:
            assert time.monotonic() < deadline, figures
            time.sleep(0.01)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers; at the end each must have given everything back and end well."""
    servers: list[Server] = []

    def one_more(*args: str, **variables: str) -> Server:
        server = Server(tmp_path_factory.mktemp("shared"), *args, **variables)
        servers.append(server)
        return server

    try:
        yield one_more
        for server in servers:
            server.wait_until_idle()
            assert server.stop() == 0
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start()
