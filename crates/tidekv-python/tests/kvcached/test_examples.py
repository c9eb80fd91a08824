"""The examples run, and say what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("two_engines", "gave back what the other's share is"),
        ("limit_while_serving", "all 1000 requests finished"),
        ("prefix_caching", "after the last: 0 blocks in use"),
        ("custom_engine", "96 requests, all as a plain cache has them"),
    ],
)
def test_example(name: str, promise: str) -> None:
    said = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "cpu"], capture_output=True, text=True, timeout=300, check=False
    )
    assert said.returncode == 0, said.stderr
    assert promise in said.stdout
