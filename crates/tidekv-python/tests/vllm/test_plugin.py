"""Plain engine arguments, with the switches on and off."""

from __future__ import annotations

import importlib.metadata
import logging
import types
from collections.abc import Iterator
from typing import Any

import pytest
import vllm.plugins
from engine import MODEL_DIR, ours
from kvcached.integration.capability import EngineRefused
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

STOCK = EngineArgs.create_engine_config


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the package logs."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, keep = logging.getLogger("kvcached"), Keep()
    level = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(keep)
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def stock_again() -> Iterator[None]:
    yield
    EngineArgs.create_engine_config = STOCK


def load_as_vllm_does(monkeypatch: pytest.MonkeyPatch, enable: str | None) -> None:
    if enable is not None:
        monkeypatch.setenv("ENABLE_KVCACHED", enable)
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    vllm.plugins.load_general_plugins()


def arguments(**more: Any) -> EngineArgs:
    return EngineArgs(model=str(MODEL_DIR), skip_tokenizer_init=True, dtype="float32", max_model_len=2048, **more)


@pytest.mark.parametrize("enable", [None, "false"])
def test_off_means_that_nothing_is_changed(monkeypatch: pytest.MonkeyPatch, enable: str | None) -> None:
    load_as_vllm_does(monkeypatch, enable)
    assert EngineArgs.create_engine_config is STOCK
    assert arguments().create_engine_config().kv_transfer_config is None


def test_enabled_alone_gives_plain_arguments_our_connector(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    load_as_vllm_does(monkeypatch, "true")
    load_as_vllm_does(monkeypatch, "true")  # vLLM may load plugins again.
    config = arguments().create_engine_config()
    transfer = config.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == ("ElasticConnector", "kv_both")
    assert transfer.kv_connector_module_path == "kvcached.integration.vllm.connector"
    (line,) = said
    assert line.startswith(f"vllm {importlib.metadata.version('vllm')}: used: plugin, ")


def test_a_connector_of_the_users_stays_and_ours_comes_first(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    load_as_vllm_does(monkeypatch, "1")
    his = {"kv_connector": "Beside", "kv_connector_module_path": "beside", "kv_role": "kv_both"}
    transfer = arguments(kv_transfer_config=KVTransferConfig(**his)).create_engine_config().kv_transfer_config
    assert transfer.kv_connector == "MultiConnector"
    names = [child["kv_connector"] for child in transfer.kv_connector_extra_config["connectors"]]
    assert names == ["ElasticConnector", "Beside"]
    assert said[-1].endswith("; beside Beside")
    both = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": [his]}}
    transfer = arguments(kv_transfer_config=KVTransferConfig(**both)).create_engine_config().kv_transfer_config
    names = [child["kv_connector"] for child in transfer.kv_connector_extra_config["connectors"]]
    assert names == ["ElasticConnector", "Beside"]
    transfer = arguments(kv_transfer_config=KVTransferConfig(**ours(name="mine"))).create_engine_config().kv_transfer_config
    assert transfer.kv_connector_extra_config["name"] == "mine"


def test_what_cannot_be_composed_is_refused_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    load_as_vllm_does(monkeypatch, "1")
    nixl = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    with pytest.raises(EngineRefused, match="NixlConnector registers the whole KV cache"):
        arguments(kv_transfer_config=nixl).create_engine_config()
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    with pytest.raises(EngineRefused, match="VLLM_KV_CACHE_LAYOUT=NHD spreads a block.*Unset it"):
        arguments().create_engine_config()


def test_on_a_gpu_there_are_addresses_for_all_of_its_memory_beside_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcached.integration.vllm import plugin

    gib = 1 << 30
    memory = {"cuda:0": (70 * gib, 80 * gib), "cuda:1": (30 * gib, 80 * gib)}
    gpu = types.SimpleNamespace(device_memory=memory.__getitem__, format_size=lambda size: f"{size} bytes")
    monkeypatch.setattr(plugin, "_native", gpu)
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "num_gpu_blocks_override": None}
    chosen = types.SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.92, **ranks)
    plugin._choose_size(chosen)
    assert chosen.kv_cache_memory_bytes == int(80 * gib * 0.95)
    assert chosen.gpu_memory_utilization < 30 / 80, "vLLM would not start beside a neighbour"
    told = types.SimpleNamespace(kv_cache_memory_bytes=gib, gpu_memory_utilization=0.92, **ranks)
    assert plugin._choose_size(told) == [] and (told.kv_cache_memory_bytes, told.gpu_memory_utilization) == (gib, 0.92)


def test_an_unsupported_version_refuses_and_is_not_half_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.30.0" if name == "vllm" else version(name))
    with pytest.raises(EngineRefused, match=r"vllm 0\.30\.0: refused: it is older than 0\.31\.0: ") as caught:
        load_as_vllm_does(monkeypatch, "true")
    assert "\n" not in str(caught.value)
    assert EngineArgs.create_engine_config is STOCK


def test_a_list_of_plugins_without_ours_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcached.integration.capability import examine

    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "add tidekv" in examine("vllm").line() and not examine("vllm").usable
    monkeypatch.setenv("VLLM_PLUGINS", "other,tidekv")
    assert examine("vllm").usable
