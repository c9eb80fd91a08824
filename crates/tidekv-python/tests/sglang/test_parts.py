"""Parts that need no scheduler: switches, refusals, ids on their way back, ranks that agree."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tidekv_plugins
import torch
from kvcached.integration import capability, versions
from kvcached.integration.sglang import plugin, refusals
from kvcached.integration.sglang.hooks import HOOKS
from kvcached.integration.sglang.returns import Returns
from kvcached.utils import KVCachedConfigError


def attribute(where: str) -> Any:
    import importlib

    module, _, path = where.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = vars(found)[name]
    return found


def test_with_the_switch_off_nothing_of_sglang_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.platforms import current_platform
    from sglang.srt.platforms.interface import SRTPlatform
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.delenv("ENABLE_KVCACHED", raising=False)
    before = [attribute(hook.where) for hook in HOOKS]
    load_plugins()
    assert [attribute(hook.where) for hook in HOOKS] == before
    assert not any(hook.target in HookRegistry._hooks for hook in HOOKS)
    assert type(current_platform) is SRTPlatform
    assert tidekv_plugins.sglang_platform() is None


def test_an_unsupported_version_is_refused_in_one_sentence_and_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    for module in (capability, plugin):
        monkeypatch.setattr(module, "installed", lambda engine: "0.5.21")
    before = [attribute(hook.where) for hook in HOOKS]
    assert tidekv_plugins.sglang_platform() is None
    # SGLang catches what a plugin raises, so it is told in a way that it lets through.
    with pytest.raises(SystemExit) as stopped:
        tidekv_plugins.sglang()
    oldest = versions.SUPPORT["sglang"].oldest
    assert str(stopped.value).startswith(f"sglang 0.5.21: refused: it is older than {oldest}: ")
    assert "\n" not in str(stopped.value)
    assert [attribute(hook.where) for hook in HOOKS] == before
    assert not any(hook.target in HookRegistry._hooks for hook in HOOKS)


@pytest.mark.parametrize("plug", ["sglang", "sglang_platform"])
def test_whatever_goes_wrong_at_the_start_ends_it_with_one_sentence(monkeypatch: pytest.MonkeyPatch, plug: str) -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    def fail(*_: object) -> None:
        raise RuntimeError("moved\n  to another place")

    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    monkeypatch.setattr(plugin, "register", fail)
    monkeypatch.setattr(plugin, "platform", fail)
    with pytest.raises(SystemExit) as stopped:
        getattr(tidekv_plugins, plug)()
    assert str(stopped.value).startswith("sglang: refused: RuntimeError: moved to another place. Mend that, or unset ENABLE_KVCACHED")
    # SGLang's own loader swallows exceptions.
    monkeypatch.setattr("sglang.srt.plugins._plugins_loaded", False)
    with pytest.raises(SystemExit):
        load_plugins()
    assert not any(hook.target in HookRegistry._hooks for hook in HOOKS)


def test_a_list_of_plugins_without_ours_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "SGLANG_PLUGINS=other keeps SGLang from loading it: add tidekv" in capability.examine("sglang").line()
    assert not capability.examine("sglang").usable
    for allowed in ("other, tidekv", ""):
        monkeypatch.setenv("SGLANG_PLUGINS", allowed)
        assert capability.examine("sglang").usable


def test_a_platform_without_its_hooks_makes_no_pool() -> None:
    from kvcached.integration.sglang.pools import ElasticMHAPool

    with pytest.raises(KVCachedConfigError, match="add tidekv to SGLANG_PLUGINS"):
        ElasticMHAPool(
            64, page_size=16, dtype=torch.float32, head_num=2, head_dim=64, layer_num=2, device="cpu", enable_memory_saver=False
        )


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform of this process was chosen with the switch off, as another plugin's would be."""
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    with pytest.raises(SystemExit, match="its platform is SRTPlatform"):
        tidekv_plugins.sglang()


def test_the_installed_version_is_one_that_is_tested() -> None:
    report = capability.examine("sglang")
    assert report.usable and report.reason is None
    assert report.version in versions.SUPPORT["sglang"].tested


def test_features_that_cannot_be_elastic_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    plain = SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        is_hybrid_swa=False,
        mambaish_config=None,
        kv_shard_size=1,
        kv_cache_dtype_str="auto",
    )
    sizes = dict.fromkeys(("pp_size", "attn_dp_size", "attn_cp_size", "attn_dcp_size"), 1)
    names = (
        "enable_hierarchical_cache",
        "enable_lmcache",
        "enable_unified_cache_external_linker",
        "enable_hisparse",
        "enable_unified_memory",
    )
    memory = SimpleNamespace(**dict.fromkeys(names, False))
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(**sizes))
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    monkeypatch.setattr(runtime_context, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    refusals.check(plain)
    memory.enable_hierarchical_cache = True
    with pytest.raises(KVCachedConfigError, match="hierarchical caching; *sliding|sliding windows.*; hierarchical caching"):
        refusals.check(SimpleNamespace(**{**vars(plain), "is_hybrid_swa": True}))


class Event:
    """A point on a device's stream that the test decides about."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class OnDevice:
    """A tensor that is not in host memory."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, ids: list[int]) -> None:
        self.ids = torch.tensor(ids)

    def numel(self) -> int:
        return self.ids.numel()


def test_ids_come_back_in_order_and_only_when_they_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def send(ids: OnDevice) -> tuple[torch.Tensor, Event]:
        events.append(Event())
        return ids.ids, events[-1]

    monkeypatch.setattr(Returns, "_send", staticmethod(send))
    returns = Returns()
    returns.put(OnDevice([1, 2]))
    returns.put(OnDevice([3]))
    returns.put(OnDevice([4, 5]))
    assert returns.count == 5
    assert returns.take() == []
    events[1].passed = True
    assert returns.take() == [], "the first is not there yet"
    events[0].passed = True
    assert returns.take(1) == [1]
    assert returns.take() == [2, 3]
    returns.put_back([3])
    assert returns.take(2, wait=True) == [3, 4]
    assert returns.count == 1
    assert events[2].passed
    assert returns.take() == [5]
    assert returns.count == 0


def test_two_ranks_count_with_what_both_have(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for rank in range(2):
        folder = tmp_path / str(rank)  # A device of its own.
        folder.mkdir()
        program = [sys.executable, "-W", "ignore", str(Path(__file__).parent / "one_rank.py"), str(rank), str(port)]
        environment = {**os.environ, "KVCACHED_RUNTIME_DIR": str(folder)}
        processes.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment))
    try:
        told = [json.loads(process.communicate(timeout=300)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert told[0] == told[1]
    assert told[0] == {
        "at first": 500,
        "pages asked for": 0,
        "with a limit on one": 127,  # Two pages of 64 blocks, one of them the null block.
        "more than one has": False,
        "in the hand": 0,
        "what both have": True,
        "left": 127,
        "given out": 100,
        "with the limit raised": True,
    }
