"""Every name of kvcached's surface is there, with its parameters and their defaults."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

SIGNATURES = {
    "kvcached.vmm_ops": {
        "init_kvcached": "(dev_str, page_size=0, contiguous_layout=True)",
        "shutdown_kvcached": "()",
        "create_kv_tensors": "(size, dtype_size, dev_str, num_layers, num_kv_buffers=2, group_id=0, unified_pool=False)",
        "kv_tensors_created": "(group_id=0)",
        "map_to_kv_tensors": "(offsets, group_id=0)",
        "unmap_from_kv_tensors": "(offsets, group_id=0)",
        "PageAllocator": (
            "(num_layers, mem_size_per_layer, page_size, world_size=1, pp_rank=0, async_sched=False, "
            "contiguous_layout=True, enable_page_prealloc=True, num_kv_buffers=2, group_id=0, ipc_name='')"
        ),
        "PageAllocator.alloc_page": "(self)",
        "PageAllocator.free_page": "(self, page_id)",
        "PageAllocator.free_pages": "(self, page_ids)",
        "PageAllocator.resize": "(self, new_mem_size)",
        "PageAllocator.trim": "(self)",
        "PageAllocator.reset_free_page_order": "(self)",
        "PageAllocator.start_prealloc_thread": "(self)",
        "PageAllocator.stop_prealloc_thread": "(self)",
        "PageAllocator.get_num_free_pages": "(self)",
        "PageAllocator.get_num_inuse_pages": "(self)",
        "PageAllocator.get_num_total_pages": "(self)",
        "PageAllocator.get_num_reserved_pages": "(self)",
        "PageAllocator.get_page_state": "(self)",
        "PageAllocator.get_avail_physical_pages": "(self)",
        "PageAllocator.check_and_get_resize_target": "(self, current_mem_size)",
        "PageAllocator.get_resize_target": "(self)",
        "PageAllocator.get_page_id": "(self, block_id, block_mem_size)",
        "PageAllocator.group_indices_by_page": "(self, indices, block_mem_size)",
        "PageAllocator.set_broadcast_map_callback": "(self, callback)",
        "PageAllocator.set_broadcast_unmap_callback": "(self, callback)",
        "PageAllocator.set_use_worker_ipc": "(self, use_worker_ipc)",
        "InternalPage": "(page_id, page_size)",
        "InternalPage.init": "(self, block_mem_size)",
        "InternalPage.alloc": "(self, num_blocks=1)",
        "InternalPage.free": "(self, block_id)",
        "InternalPage.free_batch": "(self, block_ids)",
        "InternalPage.empty": "(self)",
        "InternalPage.full": "(self)",
        "InternalPage.num_free_blocks": "(self)",
        "InternalPage.get_free_blocks": "(self)",
        "InternalPage.get_block_range": "(page_id, page_size, block_mem_size)",
        "InternalPage.get_num_blocks": "(page_size, block_mem_size)",
    },
    "kvcached.kv_cache_manager": {
        "KVCacheManager": (
            "(num_blocks, block_size, cell_size, num_layers, world_size=1, pp_rank=0, async_sched=False, "
            "reserve_null_block=False, num_kv_buffers=2, group_id=0, pool_name=None)"
        ),
        "KVCacheManager.alloc": "(self, need_size)",
        "KVCacheManager.free": "(self, indices)",
        "KVCacheManager.available_size": "(self)",
        "KVCacheManager.try_to_reserve": "(self, need_size)",
        "KVCacheManager.free_reserved": "(self)",
        "KVCacheManager.resize": "(self, new_mem_size)",
        "KVCacheManager.trim": "(self)",
        "KVCacheManager.clear": "(self)",
        "KVCacheManager.set_memory_limit": "(self, limit_bytes, *, revision)",
        "KVCacheManager.memory_limit_state": "(self)",
        "KVCacheManager.get_page_occupancy": "(self, page_ids)",
        "KVCacheManager.get_mapped_memory_size": "(self, unit='bytes')",
        "KVCacheManager.observability_snapshot": "(self, integration=None)",
        "KVCacheManager.observability_snapshot_dict": "(self, integration=None)",
    },
    "kvcached.utils": {
        "align_to": "(x, a)",
        "align_up_to_page": "(n_cells, cell_size)",
        "normalize_gpu_device": "(device)",
        "get_kvcached_logger": "(name='kvcached')",
    },
    "kvcached.cli.utils": {
        "MemInfoStruct": "(total_size, used_size, prealloc_size)",
        "MemInfoStruct.from_buffer": "(buf)",
        "MemInfoStruct.write_to_buffer": "(self, buf)",
        "RwLockedShm": "(file_path, size, lock_type)",
        "get_ipc_path": "(ipc_name)",
        "get_ipc_name": "(ipc_path)",
        "init_kv_cache_limit": "(ipc_name, kv_cache_limit)",
        "get_kv_cache_limit": "(ipc_name)",
        "update_kv_cache_limit": "(ipc_name, kv_cache_limit)",
        "delete_kv_cache_segment": "(ipc_name)",
        "get_total_gpu_memory": "()",
        "_format_size": "(num_bytes)",
    },
    "kvcached.cli.kvtop": {
        "_detect_kvcache_ipc_names": "()",
        "kvtop": "(ipc_names=None, refresh_rate=1.0)",
        "main": "()",
    },
    "kvcached.cli.kvctl": {
        "_parse_size": "(size_str)",
        "cmd_list": "(ipcs=None, json_out=False)",
        "cmd_limit": "(ipc, size_str)",
        "cmd_limit_percent": "(ipc, percent)",
        "cmd_watch": "(interval=1.0, ipcs=None)",
        "cmd_top": "(ipcs=None, refresh=1.0)",
        "cmd_delete": "(ipc)",
        "interactive_shell": "()",
        "main": "()",
    },
    "kvcached.mem_info_tracker": {
        "MemInfoTracker": "(total_mem_size, group_id=0)",
        "MemInfoTracker.check_and_get_resize_target": "(self, current_mem_size, num_layers, num_kv_buffers=2)",
        "MemInfoTracker.update_memory_usage": "(self, used_size, prealloc_size)",
    },
    "kvcached.tp_ipc_util": {
        "get_worker_socket_path": "(rank, pp_rank=0)",
        "send_msg": "(sock, msg)",
        "recv_msg": "(sock)",
        "start_worker_listener_thread": "(rank, pp_rank=0, device_index=None)",
        "broadcast_map_to_kv_tensors": "(tp_size, offsets, pp_rank=0, group_id=0)",
        "broadcast_unmap_from_kv_tensors": "(tp_size, offsets, pp_rank=0, group_id=0)",
        "broadcast_kv_tensors_created": "(tp_size, pp_rank=0, group_id=0)",
    },
    "kvcached.control": {"set_instance_memory_limit": "(limit_bytes, *, revision)"},
    "kvcached.pool_registry": {
        "register_kv_cache_pool": "(manager, *, integration=None)",
        "clear_registered_kv_cache_pools": "(*, integration=None)",
        "get_registered_kv_cache_pools": "(*, integration=None)",
    },
    "kvcached.observability": {
        "get_capabilities": "()",
        "build_runtime_snapshot": (
            "(*, engine, initialized, device, world_size, pp_rank, async_sched, contiguous_layout, is_worker=None)"
        ),
        "build_kv_cache_pool_snapshot": "(manager, *, integration=None)",
        "get_registered_kv_cache_pool_snapshots": "(*, integration=None)",
        "get_registered_kv_cache_pool_snapshot_dicts": "(*, integration=None)",
    },
    "kvcached.locks": {"NoOpLock": "()", "NoOpCondition": "(lock=None)"},
    "kvcached.integration.vllm.interfaces": {
        "init_kvcached": (
            "(tp_rank=0, world_size=1, pp_rank=0, is_worker=False, device=None, async_sched=False, *, tp_size=None)"
        ),
        "shutdown_kvcached": "()",
        "should_use_worker_ipc": "()",
        "get_world_size": "()",
        "alloc_kv_cache": (
            "(kvcache_shape, block_size, dtype, device, num_layers, attention_type='MHA', kv_layout='NHD', group_id=0, "
            "kernel_block_size=None, return_meta=False)"
        ),
        "build_kv_views": (
            "(raw_kv_tensors, kvcache_shape, block_size, dtype, attention_type, num_blocks_per_layer, "
            "gpu_mem_bytes_per_layer_k_or_v, num_layers, kernel_block_size=None)"
        ),
        "get_kv_cache_manager": (
            "(num_blocks, block_size, cell_size, num_layers, num_kv_buffers=2, group_id=0, pool_name=None)"
        ),
        "observability_snapshot": "()",
        "observability_snapshot_dict": "()",
        "kv_cache_pool_snapshots": "()",
        "kv_cache_pool_snapshot_dicts": "()",
    },
    "kvcached.integration.sglang.interfaces": {
        "init_kvcached": "(tp_rank=0, world_size=1, pp_rank=0, device=None, async_sched=False, *, tp_size=None)",
        "shutdown_kvcached": "()",
        "alloc_kv_cache": (
            "(kvcache_shape, dtype, device, num_layers, page_size=1, attention_type='MHA', kv_layout='NHD', group_id=0)"
        ),
        "alloc_mamba_states": "(*, num_slots, num_mamba_layers, cache_params, device, group_id=0)",
        "get_kv_cache_manager": (
            "(num_blocks, block_size, cell_size, num_layers, reserve_null_block=True, num_kv_buffers=2, group_id=0, "
            "pool_name=None)"
        ),
        "observability_snapshot": "()",
        "observability_snapshot_dict": "()",
        "kv_cache_pool_snapshots": "()",
        "kv_cache_pool_snapshot_dicts": "()",
    },
    "kvcached.autopatch": {"autopatch_all": "()"},
    "kvcached.integration.patch_base": {
        "enable_kvcached": "()",
        "PatchManager": "(library_name)",
        "BasePatch.apply": "(self, target_module)",
        "BasePatch.can_apply": "(self, target_module)",
    },
    "kvcached.integration.version_utils": {
        "VersionRange": "(range_spec)",
        "VersionRange.contains": "(self, ver)",
        "version_range": "(range_spec)",
        "VersionManager": "()",
        "VersionManager.detect_version": "(self, library_name, force_refresh=False)",
        "VersionAwarePatch": "(*args, **kwargs)",
    },
}
NAMES = {
    "kvcached": ["__version__"],
    "kvcached.utils": [
        "PAGE_SIZE", "GPU_UTILIZATION", "PAGE_PREALLOC_ENABLED", "MIN_RESERVED_PAGES", "MAX_RESERVED_PAGES",
        "MAX_CACHED_BLOCKS", "SANITY_CHECK", "MAX_CACHED_TOKENS", "CONTIGUOUS_LAYOUT", "DEFAULT_IPC_NAME", "SHM_DIR",
        "KVCachedConfigError", "KVCachePoolExhausted",
    ],
    "kvcached.tp_ipc_util": ["Message", "SOCKET_DIR", "IPC_TIMEOUT_S"],
    "kvcached.observability": ["SCHEMA_VERSION", "RuntimeSnapshot", "KVCachePoolSnapshot"],
    "kvcached.integration.vllm.interfaces": ["_kvcached_initialized", "_contiguous_layout", "create_kv_tensors"],
    "kvcached.integration.sglang.interfaces": ["_kvcached_initialized", "_contiguous_layout", "create_kv_tensors"],
    "kvcached.integration.patch_base": ["BasePatch"],
}  # fmt: skip


def plain(callable_: Any) -> str:
    """A signature without annotations."""
    signature = inspect.signature(callable_)
    empty = inspect.Parameter.empty
    parameters = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize(
    ("module", "name", "wanted"),
    [(module, name, wanted) for module, names in SIGNATURES.items() for name, wanted in names.items()],
)
def test_signature(module: str, name: str, wanted: str) -> None:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert plain(found) == wanted


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_name(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)


def test_a_manager_has_the_attributes_that_tests_and_engines_touch(manager: Any) -> None:
    made = manager(reserve_null_block=True, pool_name="label")
    for name in (
        "page_allocator", "avail_pages", "full_pages", "reserved_blocks", "num_avail_blocks", "in_shrink",
        "target_num_blocks", "null_block", "mem_size", "block_mem_size", "page_size", "num_layers", "num_kv_buffers",
        "group_id", "num_blocks", "pool_name",
    ):  # fmt: skip
        assert hasattr(made, name), name
    assert made.pool_name == "label"
    methods = {name.partition(".")[2] for name in SIGNATURES["kvcached.vmm_ops"] if name.startswith("PageAllocator.")}
    # Its pages are cut into blocks, and those the manager hands out.
    for name in methods - {"alloc_page", "free_page", "free_pages"}:
        assert callable(getattr(made.page_allocator, name)), name


def test_exceptions_have_kvcacheds_bases() -> None:
    from kvcached.utils import KVCachedConfigError, KVCachePoolExhausted

    assert issubclass(KVCachedConfigError, RuntimeError)
    assert issubclass(KVCachePoolExhausted, ValueError)


def test_the_native_module_has_its_guides_name(python: Any) -> None:
    said = python("from kvcached import _C; import kvcached.vmm_ops as v; print('kvcached OK', _C is v)")
    assert said.stdout == "kvcached OK True\n", said.stderr


def test_nothing_imports_torch_before_a_tensor_is_asked_for(python: Any) -> None:
    modules = ", ".join(sorted(SIGNATURES))
    said = python(f"import {modules}, sys; print('torch' in sys.modules)")
    assert said.stdout == "False\n", said.stderr
