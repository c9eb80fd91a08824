"""Whether an engine that is installed can be given elastic memory, without starting it.

    $ python -m tidekv.check vllm
    vllm 0.32.0: usable: connector from a module, memory of the KV cache, ...
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

__all__ = ["main"]

_EPILOG = """examples:
  python -m tidekv.check vllm            one line: version, what was found, used or refused and why
  python -m tidekv.check sglang --json   the same for programs

exit code: 0 it can be used, 1 it cannot, 2 an error"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the report; the exit code is the answer."""
    from kvcached.integration.capability import examine
    from kvcached.integration.versions import SUPPORT

    parser = argparse.ArgumentParser(
        prog="python -m tidekv.check",
        description="Says whether the engine that is installed here can be given elastic memory. Starts nothing.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine", choices=sorted(SUPPORT), help="which engine")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of one line")
    chosen = parser.parse_args(arguments)
    capability = examine(chosen.engine)
    print(json.dumps(capability.as_dict()) if chosen.json else capability.line())
    return 0 if capability.usable else 1


if __name__ == "__main__":
    sys.exit(main())
