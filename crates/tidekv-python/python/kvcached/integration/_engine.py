"""What both engines' interfaces share: the state of one engine in this process, and tensors from views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidekv import _native

from kvcached.integration._views import StridedView
from kvcached.utils import PAGE_SIZE, normalize_gpu_device

NOT_INITIALIZED = "kvcached is not initialized. Please call init_kvcached() first."


def ranks_of(world_size: int, tp_size: int | None) -> int:
    """``tp_size`` is what older versions call ``world_size``."""
    if tp_size is None:
        return world_size
    if world_size not in (1, tp_size):
        raise ValueError(f"world_size={world_size} and tp_size={tp_size} are two names of one number: give one of them")
    return tp_size


def choose_device(device: Any) -> str:
    """The device given, or torch's current GPU, or host memory where there is no GPU."""
    if device is not None:
        return normalize_gpu_device(device)
    if _native.device_count() == 0:
        return "cpu"
    import torch

    return f"cuda:{torch.cuda.current_device()}"


def memory_of(device: str) -> int:
    """All bytes of a device: address space is taken for that much, whoever uses the memory now."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return _native.device_memory(device)[1]


def buffer_bytes(device: str, num_layers: int, buffers: int) -> int:
    """Address space of one layer's K or V, in whole pages."""
    share = memory_of(device) // num_layers // buffers // PAGE_SIZE
    if share == 0:
        raise ValueError(
            f"{num_layers} layers of {buffers} buffers do not get one page of {PAGE_SIZE} bytes each on {device}: lower "
            "KVCACHED_PAGE_SIZE_MB, or use a larger device"
        )
    return share * PAGE_SIZE


def as_tensors(flat: Sequence[Any], dtype: Any, views: Sequence[StridedView]) -> list[Any]:
    """torch tensors over the flat ones."""
    import torch

    typed = [tensor.view(dtype) for tensor in flat]
    return [torch.as_strided(typed[view.tensor], view.shape, view.strides, view.offset) for view in views]
