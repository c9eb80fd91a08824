"""The example and the program for GPUs run, in their small form, on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    load(ROOT / "crates/tidekv-python/examples/transformers_generate.py").main()
    printed = capsys.readouterr().out
    assert printed.count("the same tokens as without tidekv: True") == 2
    assert "after reset: 0 MiB" in printed
    assert "pools that are left: 0" in printed


def test_program_for_gpus(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    program = load(Path(__file__).with_name("gpu_transformers.py"))
    assert program.main(["--quick", "--device", "cpu", "--output", str(output)]) == 0
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["summary"]["identical"] and result["summary"]["given_back"]
