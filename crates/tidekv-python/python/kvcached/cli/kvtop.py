"""``kvtop`` from Python: the native screen, no torch and no CUDA context."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tidekv import _native

__all__ = ["kvtop", "main"]


def _detect_kvcache_ipc_names() -> list[str]:
    """Every segment: a file of 24 bytes in the folder whose first number is above zero."""
    return _native.segment_names()


def kvtop(ipc_names: Sequence[str] | None = None, refresh_rate: float = 1.0) -> int:
    """Shows these pools, or all, until ``q`` is pressed; gives the exit code."""
    return _native.run_tool("kvtop", [*(ipc_names or ()), "--refresh", f"{refresh_rate:g}"])


def main() -> int:
    """The command, with the arguments of this process; gives its exit code."""
    return _native.run_tool("kvtop", sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
