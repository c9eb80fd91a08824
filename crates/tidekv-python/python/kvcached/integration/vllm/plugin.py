"""What vLLM calls in each of its processes when the switches are on: it makes our connector the default.

vLLM has no official default for `--kv-transfer-config`, so one public method is wrapped, `EngineArgs.create_engine_config`; before
it runs, the arguments get what a user would have to write:

| the user's                         | becomes                                                                          |
|------------------------------------|----------------------------------------------------------------------------------|
| no `kv_transfer_config`            | ours                                                                             |
| ours                               | as it is                                                                         |
| another connector                  | `MultiConnector` with ours first, then his                                       |
| one that registers all memory with a network device | refused: memory that comes and goes cannot be registered        |
| no `kv_cache_memory_bytes` (GPU)   | the device's memory times `KVCACHED_GPU_UTILIZATION`: addresses, not memory      |

A layout is asked for by the connector itself (`get_required_kvcache_layout`); a `VLLM_KV_CACHE_LAYOUT` that contradicts it is refused.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tidekv
from tidekv import _native

from kvcached.integration.capability import Capability, EngineRefused, examine
from kvcached.utils import GPU_UTILIZATION, get_kvcached_logger

__all__ = ["CONNECTOR", "CONNECTOR_MODULE", "FLAG", "register"]

logger = get_kvcached_logger()

CONNECTOR = "ElasticConnector"
CONNECTOR_MODULE = "kvcached.integration.vllm.connector"
FLAG = (
    f'--kv-transfer-config \'{{"kv_connector":"{CONNECTOR}","kv_connector_module_path":"{CONNECTOR_MODULE}",'
    '"kv_role":"kv_both"}\''
)
_OURS = {"kv_connector": CONNECTOR, "kv_connector_module_path": CONNECTOR_MODULE, "kv_role": "kv_both"}
_REGISTER_MEMORY = ("Nixl", "Mooncake", "MoRIIO", "P2pNccl", "HiSparse")
"""Connectors whose names begin so give the addresses of the whole KV cache to a device that pins what is behind them."""
_LAYOUTS = ("BLNHC", "BLHNC", "BHLNC")
_WRAPPED = "__kvcached_wrapped__"


def register() -> None:
    """Makes our connector the default of engine arguments. `EngineRefused` where this vLLM cannot use it; nothing is changed
    then. May be called again, as vLLM does."""
    capability = examine("vllm").require()
    from vllm.engine.arg_utils import EngineArgs

    create: Callable[..., Any] = EngineArgs.create_engine_config
    if hasattr(create, _WRAPPED):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(self, capability)
        return create(self, *args, **kwargs)

    setattr(create_engine_config, _WRAPPED, create)
    EngineArgs.create_engine_config = create_engine_config


def prepare(arguments: Any, capability: Capability) -> None:
    """Gives engine arguments our connector, and says so in one line."""
    from vllm.config.kv_transfer import KVTransferConfig

    layout = os.environ.get("VLLM_KV_CACHE_LAYOUT")
    if layout is not None and layout not in _LAYOUTS:
        raise _refused(capability, f"VLLM_KV_CACHE_LAYOUT={layout} spreads a block over the whole KV cache", "Unset it")
    given = arguments.kv_transfer_config
    if isinstance(given, dict):
        given = KVTransferConfig(**given)
    notes = []
    if given is None or given.kv_connector is None:
        arguments.kv_transfer_config = KVTransferConfig(**_OURS)
    elif not _has_ours(given):
        arguments.kv_transfer_config = KVTransferConfig(**_beside_ours(given, capability), engine_id=given.engine_id)
        notes.append(f"beside {given.kv_connector}")
    notes += _choose_size(arguments)
    logger.info("%s", capability.used("; ".join(notes) or None).line())


def _has_ours(given: Any) -> bool:
    children = (given.kv_connector_extra_config or {}).get("connectors", [])
    return CONNECTOR in (given.kv_connector, *(child.get("kv_connector") for child in children))


def _beside_ours(given: Any, capability: Capability) -> dict[str, Any]:
    """The user's connector or connectors, after ours: the first one is asked first when the workers are ready."""
    if given.kv_connector == "MultiConnector":
        theirs = list(given.kv_connector_extra_config.get("connectors", []))
    else:
        names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy")
        theirs = [{name: getattr(given, name) for name in names if getattr(given, name, None) is not None}]
    for child in theirs:
        if str(child.get("kv_connector")).startswith(_REGISTER_MEMORY):
            raise _refused(
                capability,
                f"{child['kv_connector']} registers the whole KV cache with a device, and elastic memory comes and goes",
                "Run that connector without ENABLE_KVCACHED",
            )
    return {
        "kv_connector": "MultiConnector",
        "kv_role": given.kv_role,
        "kv_connector_extra_config": {"connectors": [_OURS, *theirs]},
    }


def _choose_size(arguments: Any) -> list[str]:
    """Addresses for all of a GPU's memory, whoever has it now. vLLM's own check of free memory is for memory it would take.

    NVML is asked and not CUDA: vLLM forks from this process, and CUDA does not survive that.
    """
    if arguments.kv_cache_memory_bytes is not None or arguments.num_gpu_blocks_override is not None:
        return []
    ranks = int(arguments.tensor_parallel_size) * int(arguments.pipeline_parallel_size)
    try:
        memory = [_native.device_memory(f"cuda:{rank}") for rank in range(ranks)]
    except tidekv.Unavailable:
        return []
    arguments.kv_cache_memory_bytes = int(min(total for _, total in memory) * GPU_UTILIZATION)
    part = min(free / total for free, total in memory)
    arguments.gpu_memory_utilization = min(arguments.gpu_memory_utilization, max(0.01, round(0.98 * part, 3)))
    return [f"addresses for {_native.format_size(arguments.kv_cache_memory_bytes)}"]


def _refused(capability: Capability, reason: str, advice: str) -> EngineRefused:
    return EngineRefused(Capability(capability.engine, capability.version, "refused", capability.points, reason, advice))
