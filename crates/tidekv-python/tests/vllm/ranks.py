"""A rank as a process: the worker's side of the connector, and a model whose next token is a function of its KV cache.

    for each position   KV of all layers at (block, slot) := mark(token, position)
    the next token      := sum of the marks that are read back for all positions, weighted, modulo VOCABULARY

So a block that is given to two requests, loses its memory or its contents while somebody needs it, or lies elsewhere on
another rank, gives another token than `next_token` computes from the tokens alone.
"""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

VOCABULARY = 997
_MARKS = 4093


def mark(token: int, position: int) -> int:
    return (token * 31 + position * 17 + 1) % _MARKS


def next_token(tokens: list[int]) -> int:
    """What the model says when its KV cache is what it should be."""
    return sum(mark(token, at) * (at % 7 + 1) for at, token in enumerate(tokens)) % VOCABULARY


@dataclass
class Row:
    """One request in one step."""

    request_id: str
    blocks: list[int]
    start: int
    tokens: list[int]
    """The tokens at `start` and behind."""
    samples: bool


class SimulatedModel:
    """Writes and reads the KV cache through the tensors that vLLM made."""

    def __init__(self, kv_caches: dict[str, Any], block_size: int) -> None:
        # Layers of one shape and type; a cache that several layers share is one.
        self.caches = list(kv_caches.values())
        self.block_size = block_size

    def step(self, rows: list[Row]) -> dict[str, int]:
        import torch

        for row in rows:
            at = torch.arange(row.start, row.start + len(row.tokens))
            blocks, slots = self._places(row, at)
            marks = torch.tensor([mark(token, row.start + i) for i, token in enumerate(row.tokens)], dtype=torch.float32)
            for layer, cache in enumerate(self.caches):
                cache[blocks, :, slots, :] = (marks + layer)[:, None, None].to(cache.dtype)
        return {row.request_id: self._sample(row) for row in rows if row.samples}

    def _sample(self, row: Row) -> int:
        import torch

        end = row.start + len(row.tokens)
        at = torch.arange(end)
        blocks, slots = self._places(row, at)
        seen = None
        for layer, cache in enumerate(self.caches):
            found = cache[blocks, :, slots, :].reshape(end, -1).to(torch.int64) - layer
            assert torch.equal(found.amin(dim=1), found.amax(dim=1)), f"{row.request_id}: a torn slot in layer {layer}"
            assert seen is None or torch.equal(seen, found[:, 0]), f"{row.request_id}: layers 0 and {layer} differ"
            seen = found[:, 0]
        assert seen is not None
        return int((seen * (at % 7 + 1)).sum()) % VOCABULARY

    def _places(self, row: Row, at: Any) -> tuple[Any, Any]:
        import torch

        table = torch.tensor(row.blocks, dtype=torch.int64)
        return table[at // self.block_size], at % self.block_size


def allocate(connector: Any, vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """As vLLM's worker does: its own allocation inside the connector's context."""
    import torch
    from vllm.v1.worker.utils import allocate_kv_cache

    context = contextlib.nullcontext() if connector is None else connector.get_mem_pool_context()
    with context:
        return allocate_kv_cache(
            kv_cache_config, torch.device("cpu"), vllm_config.cache_config.get_resolved_kv_cache_layout()
        )


def run_rank(pipe: Connection, vllm_config: Any, kv_cache_config: Any, block_size: int) -> None:
    """A worker process: does what its pipe says until it closes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

    connector = None
    try:
        connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        model = SimulatedModel(allocate(connector, vllm_config, kv_cache_config), block_size)
        connector.get_handshake_metadata()
        pipe.send("ready")
        while True:
            metadata, rows = pipe.recv()
            connector.bind_connector_metadata(metadata)
            tokens = model.step(rows)
            pipe.send((tokens, connector.build_connector_worker_meta()))
            connector.clear_connector_metadata()
    except (EOFError, BrokenPipeError):
        pass
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        if connector is not None:
            connector.shutdown()
