"""What engines call without torch: views as arithmetic, against a dull reference; versions, patches, autopatch; the benchmark."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy
import pytest
import tidekv_plugins
from kvcached import autopatch, bench_tp_ipc
from kvcached.integration import capability, patch_base, versions
from kvcached.integration._views import Arrangement, StridedView, packed
from kvcached.integration.version_utils import VersionAwarePatch, VersionManager, VersionRange, version_range
from kvcached.utils import KVCachedConfigError
from tidekv import check

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


def pretend_installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_version_that_is_too_old_is_refused_with_one_sentence(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    pretend_installed(monkeypatch, **{engine: "0.4.0"})
    refused = capability.examine(engine)
    assert (refused.outcome, refused.usable) == ("refused", False)
    assert refused.line().startswith(f"{engine} 0.4.0: refused: it is older than {versions.SUPPORT[engine].oldest}: ")
    assert "\n" not in refused.line() and "unset ENABLE_KVCACHED" in refused.line()
    with pytest.raises(capability.EngineRefused) as caught:
        refused.require()
    assert str(caught.value) == refused.line()


def test_an_engine_that_is_missing_and_one_that_lacks_a_point_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch)
    assert capability.examine("vllm").line().startswith("vllm: not installed. Install vllm")
    there, moved = capability.look("numbers", "json:loads"), capability.look("words", "json:no.such")
    gone = capability.look("letters", "no_such_module:x")
    assert there.missing is None and moved.missing == "json:no.such is not there" and "no_such_module" in str(gone.missing)
    probe = types.ModuleType("probe")
    probe.points = lambda: [there, moved]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, versions.SUPPORT["vllm"].probe, probe)
    refused = capability.examine("vllm", versions.SUPPORT["vllm"].newest)
    assert "refused: it lacks words (json:no.such is not there). Install vllm" in refused.line()
    probe.points = lambda: [there]  # type: ignore[attr-defined]
    newer = capability.examine("vllm", "99.0").require().used()
    assert newer.line() == f"vllm 99.0: used: numbers; not tested with this version, the newest that is: {versions.SUPPORT['vllm'].newest}"
    assert newer.as_dict()["tested"] == list(versions.SUPPORT["vllm"].tested)


def test_check_answers_with_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend_installed(monkeypatch, vllm="0.4.0")
    assert check.main(["vllm"]) == 1
    assert capsys.readouterr().out.startswith("vllm 0.4.0: refused")
    assert check.main(["sglang", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["outcome"] == "absent"
    with pytest.raises(SystemExit, match="2"):
        check.main(["numpy"])


@pytest.mark.parametrize(
    ("enable", "autopatch_variable", "wanted"),
    [(None, None, False), (None, "1", False), ("false", "1", False), ("true", None, True), ("1", "TRUE", True), ("1", "0", False)],
)
def test_the_switches(
    monkeypatch: pytest.MonkeyPatch, enable: str | None, autopatch_variable: str | None, wanted: bool
) -> None:
    pretend_installed(monkeypatch, vllm="0.4.0")
    for name, value in (("ENABLE_KVCACHED", enable), ("KVCACHED_AUTOPATCH", autopatch_variable)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert tidekv_plugins.is_wanted() is wanted
    for start in (tidekv_plugins.vllm, autopatch.autopatch_all):
        if wanted:
            with pytest.raises(KVCachedConfigError, match="vllm 0.4.0: refused"):
                start()
        else:
            assert not start()


def test_plugins_import_nothing_of_ours_while_they_are_off() -> None:
    script = "import sys, tidekv_plugins as p; p.vllm(); p.sglang(); p.sglang_platform(); print([m for m in sys.modules if m.startswith(('tidekv.', 'kvcached'))])"
    off = {name: value for name, value in os.environ.items() if name not in ("ENABLE_KVCACHED", "KVCACHED_AUTOPATCH")}
    done = subprocess.run([sys.executable, "-c", script], env=off, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("plug", ["sglang", "sglang_platform"])
def test_a_variable_that_cannot_be_read_ends_sglang_with_one_sentence(plug: str) -> None:
    script = f"import tidekv_plugins as p\ntry:\n    p.{plug}()\nexcept Exception:\n    print('swallowed')"
    wrong = {**os.environ, "ENABLE_KVCACHED": "true", "KVCACHED_MIN_RESERVED_PAGES": "few"}
    done = subprocess.run([sys.executable, "-c", script], env=wrong, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("sglang: refused: ValueError: KVCACHED_MIN_RESERVED_PAGES='few' is not a number of pages")


def test_a_module_that_raises_while_it_is_imported_is_a_missing_point(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half_an_engine.py").write_text("raise KeyError('moved')")
    monkeypatch.syspath_prepend(tmp_path)
    assert capability.look("half", "half_an_engine:x").missing == "half_an_engine cannot be imported: KeyError: 'moved'"


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
