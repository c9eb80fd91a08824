"""How large a pool is opened for transformers."""

from __future__ import annotations

import pytest
import torch
from tidekv import Layout
from tidekv.transformers.memory import open_pool


@pytest.mark.parametrize("page_size", [None, "8"])
def test_a_pool_has_room_for_the_blocks_and_less_than_a_page_more(
    monkeypatch: pytest.MonkeyPatch, page_size: str | None
) -> None:
    if page_size is not None:
        monkeypatch.setenv("KVCACHED_PAGE_SIZE_MB", page_size)
    with open_pool(Layout.heads(2, 2, 64), torch.device("cpu"), 5000, {"name": "sized"}) as pool:
        assert (pool.geometry.chunk_bytes == 8 << 20) == (page_size == "8")
        assert 5000 <= pool.geometry.block_count < 5000 + pool.geometry.blocks_per_page
