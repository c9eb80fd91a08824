"""The worker's half: whose memory vLLM's KV cache is."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import LAYOUTS, Shape, make_config, make_kv_cache_configs
from kvcached.utils import KVCachedConfigError
from ranks import allocate
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole


def make_worker(shape: Shape, layout: str) -> tuple[Any, Any, Any]:
    config = make_config(shape, elastic=True)
    config.cache_config.kv_cache_layout = layout
    (kv_cache_config,) = make_kv_cache_configs(shape, config)
    return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config), config, kv_cache_config


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("B")])
def test_the_kv_cache_is_addresses_and_memory_only_where_pages_are_mapped(layout: str) -> None:
    # Eight gigabytes on a device that may use 256 MiB.
    shape = Shape(blocks=45_000, extra={"warmup_blocks": 3})
    connector, config, kv_cache_config = make_worker(shape, layout)
    try:
        before = resident_bytes()
        caches = allocate(connector, config, kv_cache_config)
        region = connector._buffer.region
        assert region.nbytes >= 8 << 30 and region.mapped_pages == 1
        assert resident_bytes() - before < 64 << 20
        start, end = region.base_address, region.base_address + region.nbytes
        for cache in caches.values():
            assert cache.shape[0] == shape.blocks and cache.stride(0) * cache.element_size() == connector._pages.stride
            assert start <= cache.data_ptr() < end
            cache[0], cache[3] = 1.0, 2.0
        for cache in caches.values():
            assert bool((cache[0] == 1.0).all()) and bool((cache[3] == 2.0).all()) and bool((cache[1] == 0.0).all())
        connector.get_handshake_metadata()
        assert region.mapped_pages == 0, "the warm-up's memory was not given back"
    finally:
        connector.shutdown()


def test_a_layout_that_spreads_blocks_is_refused_with_what_to_set() -> None:
    with pytest.raises(KVCachedConfigError, match="VLLM_KV_CACHE_LAYOUT=BLNHC"):
        make_worker(Shape(), "LBNHC")


def test_exactly_one_allocation_is_answered() -> None:
    connector, config, kv_cache_config = make_worker(Shape(), "BLNHC")
    try:
        with pytest.raises(KVCachedConfigError, match="without asking the connector"):
            connector.get_handshake_metadata()
        with pytest.raises(KVCachedConfigError, match="did so 0 times"), connector.get_mem_pool_context():
            assert torch.zeros(7, dtype=torch.int8).numel() == 7
        with pytest.raises(ZeroDivisionError), connector.get_mem_pool_context():
            1 // 0  # What went wrong inside is told, not that nothing was allocated.
        allocate(connector, config, kv_cache_config)
        with pytest.raises(KVCachedConfigError, match="a second time"):
            allocate(connector, config, kv_cache_config)
    finally:
        connector.shutdown()


def test_a_step_on_a_page_without_memory_is_stopped_before_it_computes() -> None:
    from kvcached.integration.vllm.messages import StepOrders

    connector, config, kv_cache_config = make_worker(Shape(extra={"warmup_blocks": 0}), "BLNHC")
    try:
        allocate(connector, config, kv_cache_config)
        connector.bind_connector_metadata(StepOrders(1, [0], []))
        assert connector.build_connector_worker_meta().step == 1
        with pytest.raises(RuntimeError, match=r"pages \[5\], which have no memory here"):
            connector.bind_connector_metadata(StepOrders(2, [5], []))
    finally:
        connector.shutdown()


def test_a_warm_up_that_does_not_fit_says_what_to_lower() -> None:
    connector, config, kv_cache_config = make_worker(Shape(blocks=45_000, extra={"warmup_blocks": 40_000}), "BLNHC")
    from kvcached.integration.vllm import buffer

    patience, buffer._WARMUP_WAIT_S = buffer._WARMUP_WAIT_S, 0.0
    try:
        with pytest.raises(KVCachedConfigError, match="Lower --max-num-seqs"):
            allocate(connector, config, kv_cache_config)
    finally:
        buffer._WARMUP_WAIT_S = patience
        connector.shutdown()
