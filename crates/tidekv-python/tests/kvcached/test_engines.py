"""What engines call without torch: views as arithmetic, against a dull reference; versions, patches, autopatch; the benchmark."""

from __future__ import annotations

import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
from kvcached import autopatch, bench_tp_ipc
from kvcached.integration import patch_base
from kvcached.integration._views import Arrangement, StridedView, packed
from kvcached.integration.version_utils import VersionAwarePatch, VersionManager, VersionRange, version_range
from kvcached.utils import KVCachedConfigError

# ---- views


def test_strides_of_dense_arrays() -> None:
    for shape in ((), (3,), (2, 3), (4, 1, 5), (2, 3, 4, 5)):
        assert packed(shape) == tuple(stride // 8 for stride in numpy.zeros(shape, dtype="int64").strides)


def as_array(flat: list[numpy.ndarray[Any, Any]], view: StridedView) -> numpy.ndarray[Any, Any]:
    base = flat[view.tensor]
    last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides))
    assert last < base.size, "the view leaves its tensor"
    strides = tuple(stride * base.itemsize for stride in view.strides)
    return numpy.lib.stride_tricks.as_strided(base[view.offset :], view.shape, strides)


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("kv_axis", [0, 1, None])
@pytest.mark.parametrize("form", ["contiguous", "per-layer", "unified"])
def test_every_element_has_one_place_inside_its_own_block(form: str, kv_axis: int | None, ratio: int) -> None:
    """Writes every element of every layer through its view and reads the bytes back where the pool maps the block."""
    layers, blocks, tokens, heads, size = 3, 5, 4, 2, 3
    buffers = 1 if kv_axis is None else 2
    unified = form == "unified"
    block = tokens * heads * size
    half = blocks * block + 7  # Pages leave slack behind the last block.
    total = layers * buffers * blocks * block
    flat = [numpy.full(total if form == "contiguous" else buffers * half, -1) for _ in range(1 if form == "contiguous" else layers)]
    arrangement = Arrangement(layers, buffers, form == "contiguous", unified, half)
    views = arrangement.layer_views(blocks * ratio, (tokens // ratio, heads, size), kv_axis)
    value = itertools.count()
    owner: dict[int, int] = {}
    for view in views:
        array = as_array(flat, view)
        kv_dim = () if kv_axis is None else (2,)
        assert array.shape == (
            (blocks * ratio, tokens // ratio, heads, size)
            if kv_axis is None
            else (*kv_dim, blocks * ratio, tokens // ratio, heads, size)
            if kv_axis == 0
            else (blocks * ratio, *kv_dim, tokens // ratio, heads, size)
        )
        for index in numpy.ndindex(array.shape):
            array[index] = number = next(value)
            unit = index[1] if kv_axis == 0 else index[0]
            owner[number] = unit // ratio
    written = [(tensor, place, int(number)) for tensor, data in enumerate(flat) for place, number in enumerate(data) if number >= 0]
    assert len(written) == len(owner), "two elements share a place"
    for _, place, number in written:
        # Where the pool has the block: a row of all layers, a row of K and V, or a part of K or of V.
        if form == "contiguous":
            found = place // (layers * buffers * block)
        elif unified:
            found = place // (buffers * block)
        else:
            found = place % half // block
        assert found == owner[number]


# ---- versions and patches


@pytest.mark.parametrize(
    ("spec", "inside", "outside"),
    [
        (">=0.9.0,<0.11", ["0.9", "0.9.0", "0.10.2", "0.11rc1", "0.9.0+cu128"], ["0.8.4", "0.11", "0.9.0rc1", "0.9.0.dev3"]),
        (">0.5", ["0.5.1", "0.5.post1"], ["0.5", "0.5.0", "0.5rc2"]),
        ("==1.0", ["1.0", "1.0.0", "1"], ["1.0.1", "1.0rc1"]),
        ("1.2", ["1.2.0"], ["1.3"]),
        ("!=2", ["2.1"], ["2.0"]),
        ("<=0.24", ["0.24.0"], ["0.24.1", "0.24.post1"]),
    ],
)
def test_version_ranges(spec: str, inside: list[str], outside: list[str]) -> None:
    allowed = VersionRange(spec)
    assert str(allowed) == spec
    assert [ver for ver in inside if not allowed.contains(ver)] == []
    assert [ver for ver in outside if allowed.contains(ver)] == []
    assert not allowed.contains("unknown")


def test_a_malformed_range_is_an_error_at_once() -> None:
    for bad in ("", ">=", "~=1.0", "one"):
        with pytest.raises(ValueError):
            VersionRange(bad)


class Patch(VersionAwarePatch, patch_base.BasePatch):
    library = "numpy"
    target_module = "json"
    target_class = "JSONDecoder"

    @version_range("<0.1")
    @version_range(">=1.0")
    def for_new(self) -> None: ...

    @version_range("<0.1")
    def for_old(self) -> None: ...

    def apply(self, target_module: types.ModuleType) -> bool:
        assert self._get_target_class(target_module) is json.JSONDecoder
        self._mark_as_patched(self)
        return True


def test_a_patch_finds_what_is_meant_for_the_installed_engine() -> None:
    patch = Patch()
    assert patch.is_version_supported() and patch.detected_version == numpy.__version__
    assert [method.__name__ for method in patch.applicable_methods or []] == ["for_new"]
    assert VersionManager().detect_version("no-such-engine") is None
    manager = patch_base.PatchManager("numpy")
    manager.register_patches([patch])
    assert manager.apply_all_patches() == {"Patch": True}
    assert patch._is_already_patched(patch)
    with pytest.raises(ValueError, match="is for numpy"):
        patch_base.PatchManager("vllm").register_patch(patch)


class Missing(Patch):
    target_class = "NoSuchClass"


class Raises(Patch):
    def apply(self, target_module: types.ModuleType) -> bool:
        raise KeyError("moved")


def test_w23_a_patch_that_fails_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = patch_base.PatchManager("numpy")
    manager.register_patches([Patch(), Missing(), Raises()])
    assert manager.apply_all_patches() == {"Patch": True, "Missing": False, "Raises": False}
    monkeypatch.setenv("ENABLE_KVCACHED", "TRUE")
    assert patch_base.enable_kvcached()
    with pytest.raises(patch_base.PatchFailed, match="json has no NoSuchClass.*KeyError") as caught:
        manager.apply_all_patches()
    assert set(caught.value.failures) == {"Missing", "Raises"}


def test_autopatch_does_nothing_unasked_and_pretends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm": "0.32.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise autopatch.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(autopatch.importlib.metadata, "version", version)
    assert autopatch.autopatch_all() == {}
    monkeypatch.setenv("KVCACHED_AUTOPATCH", "1")
    assert autopatch.autopatch_all() == {}
    monkeypatch.setenv("ENABLE_KVCACHED", "1")
    with pytest.raises(KVCachedConfigError, match=r"vllm 0\.32\.0 is installed and this version has no adapter"):
        autopatch.autopatch_all()
    manager = patch_base.PatchManager("numpy")
    manager.register_patch(Patch())
    monkeypatch.setitem(autopatch.ENGINES, "vllm", manager)
    assert autopatch.autopatch_all() == {"vllm": {"Patch": True}}


# ---- the benchmark

OWN = """
calls = []
async def broadcast_map_to_kv_tensors_to_workers(tp_size, offsets):
    from kvcached.tp_ipc_util import broadcast_map_to_kv_tensors
    broadcast_map_to_kv_tensors(tp_size, offsets)
"""


def test_a_strategy_of_ones_own_runs_in_the_benchmark(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "broadcast_map_impl").mkdir()
    (tmp_path / "broadcast_map_impl" / "mine.py").write_text(OWN)
    result = tmp_path / "result.json"
    arguments = ["--tp-size", "2", "--iters", "3", "--num-layers", "2", "--base-page", "3", "--pages-per-iter", "2",
                 "--map-impl", "mine", "--backend", "host", "-v", "--output", str(result)]
    said = subprocess.run(
        [sys.executable, "-m", "kvcached.bench_tp_ipc", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    begin = lines.index("=== IPC Benchmark Summary ===")
    assert lines[begin + 1 : begin + 5] == [
        "Broadcast impl       : mine (mine.py)",
        "TP size                 : 2",
        "Iterations              : 3",
        "Pages Per Iteration     : 2",
    ]
    assert lines[begin + 6 : begin + 9] == [
        "+---------------+-----------+------------+",
        "| Metric        |  Map (ms) | Unmap (ms) |",
        "|---------------|-----------|------------|",
    ]
    assert [line.split("|")[1].strip() for line in lines[begin + 9 : begin + 15]] == [
        "mean", "p95", "max", "min", "---------------", "per-page mean",
    ]  # fmt: skip
    assert sum(line.startswith("[iter ") for line in lines) == 3
    kept = json.loads(result.read_text())
    assert kept["name"] == "tp-ipc-python" and len(kept["samples"]["mine"]["map"]) == 3


def test_strategies_are_found_by_name_or_named_in_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert set(bench_tp_ipc.get_broadcast_impl.name_map) == {"seq", "thread", "async"}  # type: ignore[attr-defined]
    for name in ("seq", "thread", "async"):
        assert callable(bench_tp_ipc.get_broadcast_impl(name))
    with pytest.raises(ValueError, match="Choose from: seq, thread, async"):
        bench_tp_ipc.get_broadcast_impl("nobody")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broadcast_map_impl").mkdir()
    (tmp_path / "broadcast_map_impl" / "empty.py").write_text("")
    monkeypatch.setitem(bench_tp_ipc.get_broadcast_impl.name_map, "alias", "empty")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="does not define broadcast_map_to_kv_tensors_to_workers"):
        bench_tp_ipc.get_broadcast_impl("alias")


def test_percentiles_are_of_the_samples() -> None:
    assert bench_tp_ipc.percentile([4, 1, 3, 2], 50) == 2.5
    assert bench_tp_ipc.percentile([1.0], 95) == 1.0
    figures = bench_tp_ipc.summarise([0.001, 0.003], 2)
    assert {key: round(value, 6) for key, value in figures.items()} == {
        "mean": 2.0, "p95": 2.9, "max": 3.0, "min": 1.0, "per-page mean": 1.0,
    }  # fmt: skip
