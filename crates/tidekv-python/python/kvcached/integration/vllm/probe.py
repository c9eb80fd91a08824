"""The points of vLLM that the adapter stands on. Whatever of vLLM it uses is named here, and nothing else is used."""

from __future__ import annotations

import os

from kvcached.integration.capability import Point, look

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_PLUGIN = "tidekv"

POINTS = (
    ("connector from a module", "vllm.config.kv_transfer:KVTransferConfig.kv_connector_module_path"),
    ("default connector", "vllm.engine.arg_utils:EngineArgs.create_engine_config"),
    ("memory of the KV cache", f"{_BASE}:KVConnectorBase_V1.get_mem_pool_context"),
    ("one buffer for all layers", "vllm.v1.worker.utils:allocate_kv_cache"),
    ("block-outermost layout", "vllm.v1.kv_cache_layout:KVCacheLayout.BLNHC"),
    ("live block pool", f"{_BASE}:KVConnectorBase_V1.bind_gpu_block_pool"),
    ("blocks taken", f"{_POOL}.touch"),
    ("prefixes evicted", f"{_POOL}.evict_blocks"),
    ("blocks given back", f"{_POOL}.free_blocks"),
    ("order of eviction", "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.get_all_free_blocks"),
    ("new requests", f"{_BASE}:KVConnectorBase_V1.on_new_request"),
    ("handshake of the workers", f"{_BASE}:KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware"),
    ("orders with each step", f"{_BASE}:KVConnectorBase_V1.build_connector_meta"),
    ("answers with each step", f"{_BASE}:KVConnectorBase_V1.build_connector_worker_meta"),
    ("hybrid models", f"{_BASE}:SupportsHMA"),
)


def points() -> list[Point]:
    """Looks for all of them."""
    allowed = os.environ.get("VLLM_PLUGINS")
    missing = None
    if allowed is not None and _PLUGIN not in (name.strip() for name in allowed.split(",")):
        missing = f"VLLM_PLUGINS={allowed} keeps vLLM from loading it: add {_PLUGIN}"
    return [Point("plugin", f"vllm.general_plugins:{_PLUGIN}", missing), *(look(name, where) for name, where in POINTS)]
