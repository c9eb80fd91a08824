"""``kvctl`` from Python. Each function runs the native command and gives its exit code: 0 done, 1 the answer is no,
2 error, 3 accepted and still draining."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tidekv import _native

from kvcached.cli.kvtop import _detect_kvcache_ipc_names, kvtop

__all__ = [
    "cmd_delete",
    "cmd_limit",
    "cmd_limit_percent",
    "cmd_list",
    "cmd_top",
    "cmd_watch",
    "interactive_shell",
    "main",
]


def _parse_size(size_str: str) -> int:
    """``512M``, ``1.5g``, ``1_000``: bytes, 1024-based. What is no size, or below zero, is a ``ValueError``."""
    return _native.parse_size(size_str)


def _kvctl(*arguments: str) -> int:
    return _native.run_tool("kvctl", arguments)


def cmd_list(ipcs: Sequence[str] | None = None, json_out: bool = False) -> int:
    return _kvctl("list", *(ipcs or ()), *(["--json"] if json_out else []))


def cmd_limit(ipc: str, size_str: str) -> int:
    return _kvctl("limit", ipc, size_str)


def cmd_limit_percent(ipc: str, percent: float) -> int:
    return _kvctl("limit-percent", ipc, f"{percent:g}")


def cmd_watch(interval: float = 1.0, ipcs: Sequence[str] | None = None) -> int:
    return _kvctl("watch", "-n", f"{interval:g}", *(ipcs or ()))


def cmd_top(ipcs: Sequence[str] | None = None, refresh: float = 1.0) -> int:
    return kvtop(ipcs, refresh)


def cmd_delete(ipc: str) -> int:
    return _kvctl("delete", ipc)


def interactive_shell() -> int:
    """The prompt ``kvcached> ``. An unknown line is an error there, and never handed to a shell."""
    return _kvctl("shell")


def main() -> int:
    """The command, with the arguments of this process; gives its exit code."""
    return _kvctl(*sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
