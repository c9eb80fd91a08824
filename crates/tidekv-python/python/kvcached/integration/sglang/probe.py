"""The points of SGLang that the adapter stands on. Whatever of SGLang it uses is named here or in `hooks.py`."""

from __future__ import annotations

import os

from kvcached.integration.capability import Point, look
from kvcached.integration.sglang.hooks import HOOKS

_PLUGIN = "tidekv"
_ALLOCATOR = "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator"

POINTS = (
    ("KV pools of a platform", "sglang.srt.platforms.interface:SRTPlatform.get_kv_pool_cls"),
    ("allocators of a platform", "sglang.srt.platforms.interface:SRTPlatform.get_paged_allocator_cls"),
    ("buffers of MHA", "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._create_buffers_normal"),
    ("buffers of MLA", "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool._create_buffers"),
    ("frees of pages", "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator._release_page_ids"),
    ("frees of tokens", "sglang.srt.mem_cache.allocator:TokenToKVPoolAllocator.free"),
    ("admission", f"{_ALLOCATOR}.create_prefill_budget"),
    ("chunks that wait", "sglang.srt.mem_cache.prefill_budget:PrefillBudget.fit_chunk"),
    ("decode steps", f"{_ALLOCATOR}.check_decode_capacity"),
    ("eviction", "sglang.srt.mem_cache.base_prefix_cache:BasePrefixCache.evict"),
    ("requests that are retracted", "sglang.srt.managers.schedule_batch:release_req"),
    ("hooks", "sglang.srt.plugins.hook_registry:HookRegistry.register"),
)


def points() -> list[Point]:
    """Looks for all of them."""
    allowed = os.environ.get("SGLANG_PLUGINS")
    missing = None
    # To SGLang an empty list is none.
    if allowed and _PLUGIN not in (name.strip() for name in allowed.split(",")):
        missing = f"SGLANG_PLUGINS={allowed} keeps SGLang from loading it: add {_PLUGIN}"
    plugin = Point("plugin", f"sglang.srt.plugins:{_PLUGIN}", missing)
    return [plugin] + [look(name, where) for name, where in POINTS] + [look(hook.name, hook.where) for hook in HOOKS]
