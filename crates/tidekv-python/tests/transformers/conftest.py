"""A runtime folder of its own for every test, and tiny models that are made once."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# scripts/test-integration has both; where one is missing there is nothing to test.
if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
    import torch

    # The models are so small that threads would only wait for each other.
    torch.set_num_threads(1)
else:
    collect_ignore_glob = ["test_*.py"]

# The helpers beside the tests.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test's pools keep their segments and ledgers: apart from those of the machine."""
    monkeypatch.setenv("KVCACHED_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def models() -> Callable[..., Any]:
    """`tiny.make_model`, each combination made once in a file: continuous batching changes a model's attention."""
    from tiny import make_model

    made: dict[Any, Any] = {}

    def get(kind: str = "llama", **changes: Any) -> Any:
        key = (kind, *sorted(changes.items()))
        if key not in made:
            made[key] = make_model(kind, **changes)
        return made[key]

    return get
