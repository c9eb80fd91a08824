"""The console scripts: the Rust tools, run in this process."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Literal

from tidekv import _native

Tool = Literal["kvctl", "kvtop", "kvbench"]


def run(name: Tool, arguments: list[str]) -> int:
    """Runs a tool and gives its exit code. Ctrl-C ends it as it ends the binary."""
    sys.stdout.flush()
    sys.stderr.flush()
    with _default_interrupt():
        return _native.run_tool(name, arguments)


@contextlib.contextmanager
def _default_interrupt() -> Iterator[None]:
    # Python only notes a Ctrl-C and waits for its interpreter, which does not run meanwhile.
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:  # not the main thread: whose handler it is stays
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def kvctl() -> None:
    sys.exit(run("kvctl", sys.argv[1:]))


def kvtop() -> None:
    sys.exit(run("kvtop", sys.argv[1:]))


def kvbench() -> None:
    sys.exit(run("kvbench", sys.argv[1:]))
