"""Features of SGLang that cannot be elastic, or that nobody has tried: refused at the start, each with its reason.

Running on would be worse than stopping: a cache that we do not know would be read where it has no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcached.utils import KVCachedConfigError

__all__ = ["REFUSED", "check"]


def _memory(name: str) -> Callable[[Any], bool]:
    def is_on(configurator: Any) -> bool:
        from sglang.srt.runtime_context import get_memory

        return bool(getattr(get_memory(), name))

    return is_on


def _disaggregated(configurator: Any) -> bool:
    from sglang.srt.runtime_context import get_disagg

    return str(get_disagg().disaggregation_mode) not in ("null", "None")


def _parallel(name: str) -> Callable[[Any], bool]:
    def is_split(configurator: Any) -> bool:
        from sglang.srt.runtime_context import get_parallel

        return int(getattr(get_parallel(), name)) > 1

    return is_split


REFUSED: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("speculative decoding, whose draft model has a KV cache of its own", lambda it: not it.spec_algorithm.is_none()),
    ("models with sliding windows, which keep two caches", lambda it: it.is_hybrid_swa),
    ("models with linear attention or state spaces", lambda it: it.mambaish_config is not None),
    ("KV caches that are sharded over ranks", lambda it: it.kv_shard_size > 1),
    ("KV caches in blocks with scales", lambda it: it.kv_cache_dtype_str in ("nvfp4", "fp4_mx_block16", "mxfp8")),
    ("pipeline parallelism", _parallel("pp_size")),
    ("data parallel attention", _parallel("attn_dp_size")),
    ("context parallel attention", _parallel("attn_cp_size")),
    ("decode context parallelism", _parallel("attn_dcp_size")),
    ("prefill and decode on different servers", _disaggregated),
    ("hierarchical caching", _memory("enable_hierarchical_cache")),
    ("LMCache", _memory("enable_lmcache")),
    ("external caches", _memory("enable_unified_cache_external_linker")),
    ("HiSparse", _memory("enable_hisparse")),
    ("SGLang's unified memory", _memory("enable_unified_memory")),
)


def check(configurator: Any) -> None:
    """`KVCachedConfigError` that names what is in the way."""
    found = [name for name, is_on in REFUSED if is_on(configurator)]
    if found:
        raise KVCachedConfigError(
            f"the KV cache cannot be elastic with {'; '.join(found)}: run SGLang without that, or unset ENABLE_KVCACHED to "
            "run it with its own memory"
        )
