"""What ``init_kvcached`` sets up in a process: one device, one layout, and the address range of each group.

    init_kvcached            create_kv_tensors(group 0)        KVCacheManager(group 0)
      device, page, layout ->   Region 0  ------------ waits for ->  Pool over Region 0
                                    \\---- or, on request ------->   Worker: a scheduler elsewhere maps it

One lock, never held across a driver call or a wait. A forked child inherits none of it: the native objects refuse to
work there, and so does this.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidekv import Forked
from tidekv._native import Region

from kvcached.utils import PAGE_SIZE, KVCachedConfigError, normalize_gpu_device

TENSOR_TYPES = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass
class _State:
    device: str
    page_size: int
    contiguous: bool
    pid: int = field(default_factory=os.getpid)
    regions: dict[int, Region] = field(default_factory=dict)
    # What must be closed before the regions are: pools, workers. Called newest first.
    closers: list[Callable[[], object]] = field(default_factory=list)


_changed = threading.Condition()
_state: _State | None = None


def start(device: str, page_size: int, contiguous: bool) -> None:
    """``vmm_ops.init_kvcached``."""
    global _state
    page_size = page_size or PAGE_SIZE
    if page_size < 0 or page_size % (2 << 20):
        raise ValueError(f"page_size is {page_size}: give a multiple of 2 MiB, or 0 for KVCACHED_PAGE_SIZE_MB's")
    with _changed:
        if _state is not None and _state.pid == os.getpid():
            raise RuntimeError(
                f"kvcached is already initialized for {_state.device}. Call shutdown_kvcached() first, which gives "
                "back all its memory, or go on with what there is."
            )
        _state = _State(normalize_gpu_device(device), page_size, contiguous)


def stop() -> None:
    """``vmm_ops.shutdown_kvcached``: everything is given back. May be called twice."""
    global _state
    with _changed:
        state, _state = _state, None
        _changed.notify_all()
    if state is None or state.pid != os.getpid():
        return
    for close in reversed(state.closers):
        close()
    for region in state.regions.values():
        region.close()


def current() -> _State:
    """The state, where there is one that this process may use."""
    state = _state
    if state is None:
        raise RuntimeError("kvcached is not initialized. Please call init_kvcached() first.")
    if state.pid != os.getpid():
        raise Forked(
            f"kvcached was initialized in process {state.pid} and this is a forked child, {os.getpid()}: GPU contexts "
            "and mappings do not survive fork. Start workers with the 'spawn' method, or call init_kvcached() in each."
        )
    return state


def is_started() -> bool:
    return _state is not None and _state.pid == os.getpid()


def add_region(group: int, make: Callable[[_State], Region]) -> Region:
    """Makes a group's address range. A group has one for as long as kvcached is initialized."""
    state = current()
    with _changed:
        if group in state.regions:
            raise RuntimeError(
                f"group {group} has its tensors already: keep and share those, use another group_id for other layers, "
                "or call shutdown_kvcached() first"
            )
    region = make(state)
    with _changed:
        state.regions[group] = region
        _changed.notify_all()
    return region


def region(group: int) -> Region:
    """The address range of a group, which must exist."""
    found = current().regions.get(group)
    if found is None:
        raise RuntimeError(f"group {group} has no tensors in this process: call create_kv_tensors first")
    return found


def find_region(group: int) -> Region | None:
    """The same, or None: also where kvcached is not initialized, as in a scheduler without a device."""
    return current().regions.get(group) if is_started() else None


def await_region(group: int, until: float) -> Region | None:
    """Waits for a group's tensors until ``time.monotonic()`` says so."""
    with _changed:
        _changed.wait_for(lambda: find_region(group) is not None, max(0.0, until - time.monotonic()))
    return find_region(group)


def close_at_stop(close: Callable[[], object]) -> None:
    """Has this called before the regions go. Does nothing where kvcached is not initialized here."""
    with _changed:
        if is_started():
            current().closers.append(close)


def tensor(region: Region, dtype_size: int, offset: int, nbytes: int) -> Any:
    """A flat tensor of integers over a part of a region: torch's, or numpy's on host memory where torch is missing."""
    view = region.view(TENSOR_TYPES[dtype_size], [nbytes // dtype_size], offset=offset)
    try:
        import torch
    except ImportError:
        if region.device != "cpu":
            raise ImportError(
                f"create_kv_tensors on {region.device} gives torch tensors: install torch, or use device 'cpu' for numpy"
            ) from None
        import numpy

        return numpy.from_dlpack(view)
    return torch.from_dlpack(view)


def same_device(first: str, second: str) -> bool:
    """``cuda`` is ``cuda:0``."""
    return _spelled_out(first) == _spelled_out(second)


def _spelled_out(device: str) -> tuple[str, str]:
    kind, _, index = normalize_gpu_device(device).partition(":")
    return kind, index or "0"


def config_error_for_block(block_bytes: int, page_size: int) -> KVCachedConfigError:
    """A block larger than a page: only the operator can change that."""
    mib = -(-block_bytes // (2 << 20)) * 2
    return KVCachedConfigError(
        f"one block takes {block_bytes} bytes per layer and buffer, more than a page of {page_size}: set "
        f"KVCACHED_PAGE_SIZE_MB={mib} (or a larger multiple of 2), or use smaller blocks"
    )
