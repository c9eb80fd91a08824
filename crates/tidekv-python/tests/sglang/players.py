"""Schedulers in processes of their own, started and listened to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

POOL = "sglang_test"
SECONDS = 400


class Player:
    """One process that plays scripts. What it writes is read by a thread, so that nobody waits for a full pipe."""

    def __init__(self, file: Path, rank: int, environment: dict[str, str], instance: str) -> None:
        self.log: list[str] = []
        self.instance = instance
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).parent / "driver.py"), str(file), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.log.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, word: str) -> None:
        """Until a script has said it."""
        with self._news:
            heard = self._news.wait_for(lambda: word in self.log or self.process.poll() is not None, SECONDS)
            assert heard and word in self.log, self.told(f"never said {word!r}")

    def go_on(self) -> None:
        """The next event that waits for a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def outcomes(self) -> list[dict[str, Any]]:
        """What came of each script, once all are played."""
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        assert code == 0, self.told(f"ended with {code}")
        return [json.loads(line.removeprefix("OUTCOME ")) for line in self.log if line.startswith("OUTCOME ")]

    def told(self, what: str) -> str:
        shown = [line[:2000] for line in self.log if not line.startswith("OUTCOME ")]
        return "\n".join([f"the scheduler {what}; it wrote:", *shown[-60:]])

    def kill(self) -> None:
        """Ends it, and removes what SGLang leaves in shared memory."""
        self.process.kill()
        self.process.wait()
        for left in Path("/dev/shm").glob(f"sglang_loads_{self.instance}_*"):
            left.unlink(missing_ok=True)


Play = Callable[..., Player]


def starter(model: str, folder: Path, players: list[Player]) -> Play:
    """Starts a scheduler that plays these scripts."""

    def play(
        scripts: list[dict[str, Any]],
        *,
        elastic: bool = True,
        rank: int = 0,
        environment: dict[str, str] | None = None,
        **server: Any,
    ) -> Player:
        file = folder / f"scripts-{len(players)}.json"
        wanted = {"max_total_tokens": 8192, "page_size": 16, "chunked_prefill_size": 128, "disable_overlap_schedule": True}
        instance = f"tidekv-{uuid.uuid4().hex}"
        told = {"instance": instance, "server": {"model_path": model, **wanted, **server}, "scripts": scripts}
        file.write_text(json.dumps(told))
        variables = {
            **os.environ,
            "ENABLE_KVCACHED": "true" if elastic else "false",
            "KVCACHED_IPC_NAME": POOL,
            "KVCACHED_RUNTIME_DIR": str(folder),
            # Nothing is mapped ahead, so that pages can be counted.
            "KVCACHED_MIN_RESERVED_PAGES": "0",
            "KVCACHED_MAX_RESERVED_PAGES": "0",
            # SGLang checks its books at every turn, and raises where they do not add up.
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2",
            # Sums come out alike, and a busy machine is not made busier.
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        players.append(Player(file, rank, variables, instance))
        return players[-1]

    return play
