"""SGLang's server as people start it: the switch is all there is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import tidekv

SECONDS = 300


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"} if data else {}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def wait_until_it_serves(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and server.poll() is None:
        try:
            ask(port, "/health")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            # Nobody tells when it is ready: its own clients ask like this.
            time.sleep(0.5)
    raise AssertionError(f"the server does not serve:\n{log.read_text()[-6000:]}")


def test_the_plain_command_with_the_switch_on(model: str, runtime_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    log = tmp_path / "server.log"
    command = [
        *(sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "8192"),
        *("--disable-cuda-graph", "--skip-tokenizer-init", "--skip-server-warmup"),
    ]
    environment = {**os.environ, "ENABLE_KVCACHED": "true", "KVCACHED_IPC_NAME": "served", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        # A session of its own: SGLang's processes are ended together.
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        wait_until_it_serves(port, server, log)
        body = {"input_ids": [5, 6, 7] * 10, "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
        assert len(json.loads(ask(port, "/generate", body))["output_ids"]) == 12
        limit, used, _ = tidekv._native.segment_read("served") or (0, 0, 0)
        assert limit > 0 and used > 0, "the KV cache is a pool"
        assert f"sglang {_installed()}: used: plugin, KV pools of a platform" in log.read_text()
    finally:
        left = shared_files(server.pid)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        for path in left:
            path.unlink(missing_ok=True)


def shared_files(group: int) -> set[Path]:
    """What the processes of a group have mapped in shared memory: SGLang names it at random and leaves it there."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                maps = (process / "maps").read_text()
                found |= {Path(line.split()[5]) for line in maps.splitlines() if "/dev/shm/sglang_" in line}
        except (OSError, IndexError):
            continue  # It has ended meanwhile.
    return found


def _installed() -> str:
    import importlib.metadata

    return importlib.metadata.version("sglang")
