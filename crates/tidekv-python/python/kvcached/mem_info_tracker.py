"""A segment kept by Python, for those who publish their own use of memory. Pools write theirs natively."""

from __future__ import annotations

import weakref

from tidekv import _native

from kvcached.cli.utils import get_kv_cache_limit, init_kv_cache_limit
from kvcached.utils import DEFAULT_IPC_NAME

__all__ = ["MemInfoTracker"]


class MemInfoTracker:
    """Makes a segment and removes it when it is dropped, at the latest at the end of the interpreter. It installs no
    signal handlers: what a killed process leaves is removed by ``kvctl gc``."""

    def __init__(self, total_mem_size: int, group_id: int = 0) -> None:
        self.ipc_name = DEFAULT_IPC_NAME if group_id == 0 else f"{DEFAULT_IPC_NAME}_g{group_id}"
        init_kv_cache_limit(self.ipc_name, total_mem_size)
        self.close = weakref.finalize(self, _native.segment_delete, self.ipc_name)

    def check_and_get_resize_target(
        self, current_mem_size: int, num_layers: int, num_kv_buffers: int = 2
    ) -> int | None:
        """The limit in bytes of one layer's K or V where it is not ``current_mem_size``, else None. 0 is a limit."""
        words = get_kv_cache_limit(self.ipc_name)
        if words is None:
            return None
        target = words.total_size // (num_layers * num_kv_buffers)
        return None if target == current_mem_size else target

    def update_memory_usage(self, used_size: int, prealloc_size: int) -> None:
        """Writes what is used and what is held beyond that. The limit is the operator's, and stays."""
        _native.segment_set_usage(self.ipc_name, used_size, prealloc_size)
