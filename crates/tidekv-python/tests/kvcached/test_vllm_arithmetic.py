"""What the vLLM adapter computes without vLLM: blocks on pages, and blocks that requests will want."""

from __future__ import annotations

import random
import types
from fractions import Fraction
from typing import Any

import pytest
from kvcached.integration.vllm.demand import Demand
from kvcached.integration.vllm.pages import PageMap, choose_page_bytes
from kvcached.integration.vllm.settings import Settings, page_map, place_of
from kvcached.utils import KVCachedConfigError

MIB = 1 << 20


@pytest.mark.parametrize("seed", range(20))
def test_blocks_and_pages_against_bytes(seed: int) -> None:
    chance = random.Random(seed)
    stride = chance.choice([1, 7, 64, 100, 128, chance.randint(1, 300)])
    pages = PageMap(chance.randint(1, 60), stride, chance.randint(stride, 400))
    byte_pages = [{byte // pages.page_bytes for byte in range(b * stride, (b + 1) * stride)} for b in range(pages.blocks)]
    for block, expected in enumerate(byte_pages):
        assert set(pages.pages_of(block)) == expected and 1 <= len(expected) <= 2
    for page in range(pages.pages):
        assert list(pages.blocks_of(page)) == [block for block, found in enumerate(byte_pages) if page in found]
    assert pages.pages == len(set().union(*byte_pages))


@pytest.mark.parametrize("seed", range(20))
def test_pages_for_so_many_blocks_are_enough_wherever_they_lie(seed: int) -> None:
    chance = random.Random(seed)
    pages = PageMap(400, chance.randint(20, 100), 300)
    wanted = chance.randint(1, 30)
    chosen = set(chance.sample(range(pages.pages - 1), pages.pages_for(wanted)))
    whole = [block for block in range(pages.blocks) if all(page in chosen for page in pages.pages_of(block))]
    assert len(whole) >= wanted


def test_the_size_of_a_page() -> None:
    assert choose_page_bytes(2 * MIB, 2 * MIB, layer_bytes=65536) == 16 * MIB
    assert choose_page_bytes(917_504, 2 * MIB, layer_bytes=32768, wanted_bytes=2 * MIB) == 2 * MIB
    assert choose_page_bytes(40 * MIB + 1, 2 * MIB, layer_bytes=65536) == 42 * MIB
    with pytest.raises(ValueError, match="larger than a page"):
        PageMap(4, 3 * MIB, 2 * MIB)


@pytest.mark.parametrize("layer_bytes", [65536, 8192, 18_432, 2 * MIB, 98_304])
def test_stages_with_unequal_layers_have_the_same_blocks_on_a_page(layer_bytes: int) -> None:
    found = set()
    for layers in (1, 2, 3, 16, 17, 61):
        page = choose_page_bytes(layers * layer_bytes, 2 * MIB, layer_bytes=layer_bytes, stages=2)
        assert page % (2 * MIB) == 0
        found.add(Fraction(page, layers * layer_bytes))
    assert len(found) == 1
    with pytest.raises(KVCachedConfigError, match="equally much"):
        choose_page_bytes(layer_bytes + 1, 2 * MIB, layer_bytes=layer_bytes, stages=2)


def request(name: str, tokens: int, computed: int = 0) -> Any:
    return types.SimpleNamespace(request_id=name, num_tokens=tokens, num_computed_tokens=computed)


def test_what_is_wanted_is_what_vllm_will_take() -> None:
    demand = Demand([16], lookahead_tokens=0, watermark_blocks=3)
    one = request("one", 100)
    demand.begin(one)
    # 102 tokens with those that come: 7 blocks, and the watermark.
    assert demand.to_admit(one, 64) == 3 + 3, "four blocks are cached"
    assert [demand.to_admit(one, 64) for _ in range(2)] == [7 + 1 + 3, 7 + 2 + 3], "it was not enough, so it is more"
    demand.admitted(one)
    assert demand.to_admit(request("two", 10), 0) == 1 + 7 + 3, "what the first still needs is not given away"
    # 64 of its tokens are computed in this step: 4 of its 7 blocks are taken.
    assert demand.after_step({"one": 64}) == 3
    one.num_computed_tokens = 100
    one.num_tokens = 101
    assert demand.after_step({"one": 1}) == 0, "its block has room"
    one.num_computed_tokens, one.num_tokens = 110, 111
    assert demand.after_step({"one": 1}) == 1, "its block will be full"
    demand.end("one")
    assert demand.after_step({"one": 1}) == 0 and demand.alive == 0


def test_requests_that_wait_with_something_computed_are_counted_and_groups_add_up() -> None:
    demand = Demand([16, 32], lookahead_tokens=4, watermark_blocks=0)
    loaded = request("loaded", 64, computed=32)
    demand.begin(loaded)
    demand.begin(request("new", 1000))
    assert demand.after_step({}) == (5 - 2) + (3 - 1) + 2


def config(**extra: Any) -> Any:
    parallel = types.SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=3, rank=5)
    transfer = types.SimpleNamespace(kv_connector_extra_config=extra, engine_id="e")
    return types.SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)


def test_settings_are_checked() -> None:
    settings = Settings.of(config(name="x" * 80, page_size="4M", start_pages="all", warmup_blocks=2))
    assert settings.stages == (2, 2, 2) and place_of(config().parallel_config) == (2, 1)
    assert settings.page_bytes == 4 * MIB and settings.start_pages is None and len(settings.ranks_name) == 64
    assert Settings.of(config()).ranks_name == Settings.of(config()).ranks_name != Settings.of(config()).name
    for wrong, words in (
        ({"page_size": "3M"}, "multiple of 2 MiB"),
        ({"start_pages": -1}, "not negative"),
        ({"pagesize": 1}, "pagesize, which this connector does not know"),
    ):
        with pytest.raises(KVCachedConfigError, match=words):
            Settings.of(config(**wrong))


def cache(*tensors: Any, blocks: int = 8) -> Any:
    return types.SimpleNamespace(kv_cache_tensors=list(tensors), num_blocks=blocks, kv_cache_layout="LBNHC")


def tensor(block_stride: int, size: int, layers: int = 2, **more: Any) -> Any:
    names = [f"l{i}" for i in range(layers)]
    return types.SimpleNamespace(block_stride=block_stride, layer_stride=block_stride // layers, size=size, layers=names, **more)


def test_a_cache_whose_pages_are_no_runs_of_blocks_is_refused() -> None:
    one = Settings.of(types.SimpleNamespace(
        kv_transfer_config=config().kv_transfer_config,
        parallel_config=types.SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0),
    ))
    assert page_map(cache(tensor(MIB, 8 * MIB)), one) == PageMap(8, MIB, 16 * MIB)
    for wrong, words in (
        (cache(), "no KV cache"),
        (cache(tensor(MIB, 16 * MIB)), "VLLM_KV_CACHE_LAYOUT=BLNHC"),
        (cache(tensor(MIB, 8 * MIB), tensor(2 * MIB, 8 * MIB)), "side by side"),
        (cache(tensor(MIB, 8 * MIB, host_resident=True)), "host memory"),
    ):
        with pytest.raises(KVCachedConfigError, match=words):
            page_map(wrong, one)


def test_kvcacheds_page_size_is_for_one_layer_and_one_of_k_and_v(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHED_PAGE_SIZE_MB", "2")
    single = config()
    single.parallel_config = types.SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0)
    assert page_map(cache(tensor(MIB, 8 * MIB, layers=4)), Settings.of(single)).page_bytes == 2 * MIB * 4 * 2
