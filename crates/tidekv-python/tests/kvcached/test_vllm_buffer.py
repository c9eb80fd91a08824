"""The vLLM worker's memory without vLLM: its one allocation, the warm-up, and a scheduler's orders; on host memory and on a GPU."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from tidekv import _native

torch = pytest.importorskip("torch")

from kvcached.integration.vllm.buffer import KvBuffer  # noqa: E402
from kvcached.integration.vllm.pages import PageMap  # noqa: E402
from kvcached.integration.vllm.settings import Settings  # noqa: E402

pytestmark = pytest.mark.torch

MIB = 1 << 20
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="SKIPPED: no GPU")],
    ),
]
STRIDE = 786_432
"""Two and two thirds blocks on a page of 2 MiB."""


def settings() -> Settings:
    return Settings.of(
        types.SimpleNamespace(
            kv_transfer_config=types.SimpleNamespace(kv_connector_extra_config={"name": "buffer"}, engine_id="one"),
            parallel_config=types.SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, rank=0),
        )
    )


@pytest.mark.parametrize("device", DEVICES)
def test_orders_of_a_scheduler_reach_the_tensor_that_vllm_got(device: str, eventually: Callable[..., Any]) -> None:
    pages = PageMap(40_000, STRIDE, 2 * MIB)
    buffer = KvBuffer(pages, settings(), (0, 0), warmup_blocks=4)
    fleet = pool = None
    try:
        with buffer.allocation():
            cache = torch.zeros(pages.blocks * STRIDE, dtype=torch.int8, device=torch.device(device))
        region = buffer.region
        assert region is not None and cache.data_ptr() == region.base_address and cache.device.type == device
        assert cache.numel() == pages.blocks * STRIDE and region.mapped_pages == 2
        # The warm-up, and its end.
        cache[: 5 * STRIDE] = 3
        assert int(cache[: 5 * STRIDE].sum(dtype=torch.int64)) == 15 * STRIDE
        buffer.serve()
        buffer.serve()
        assert region.mapped_pages == 0

        config = settings()
        fleet = _native.Fleet(config.ranks_name, [1], start_timeout=30.0)
        layout = _native.Layout.raw(1, pages.page_bytes, chunk_bytes=pages.page_bytes)
        pool = _native.Pool(layout, fleet=fleet, pages=pages.pages, name="buffer", null_block=True, reserve=(0, 0))
        assert pool.null_block == 0 and region.is_mapped(0)
        given = pool.alloc(20)
        assert all(region.is_mapped(page) for page in given)
        buffer.check(given)
        blocks = [b for b in range(1, 200) if all(page in (0, *given) for page in pages.pages_of(b))]
        rows = cache.view(pages.blocks, STRIDE)
        for block in blocks:
            rows[block] = block % 100
        # Pages that are freed behind a step keep their memory until the step is over.
        gone = given[10:]
        pool.free(gone, step=7)
        pool.trim()
        assert all(region.is_mapped(page) for page in gone)
        sums = [rows[block].sum(dtype=torch.int64) for block in blocks]
        pool.step_completed(7)
        pool.trim()
        eventually(lambda: not any(region.is_mapped(page) for page in gone))
        assert [int(total) for total in sums] == [block % 100 * STRIDE for block in blocks], "unmapped under a kernel"
        for block in blocks:
            if not any(page in gone for page in pages.pages_of(block)):
                assert bool((rows[block] == block % 100).all())
        with pytest.raises(RuntimeError, match="which have no memory here"):
            buffer.check(gone)
    finally:
        if pool is not None:
            pool.close()
        if fleet is not None:
            fleet.close()
        buffer.close()
