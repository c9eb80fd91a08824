"""Views as tensors and arrays. torch and numpy are imported here and nowhere else, when somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidekv.errors import Unavailable

if TYPE_CHECKING:
    import numpy
    import torch

    from tidekv._native import Pool

#: What numpy has no type for goes there as its bits.
_BITS = {1: "uint8", 2: "uint16"}


def torch_tensor(pool: Pool, layer: int, value: bool) -> torch.Tensor:
    """One layer's K or V as torch sees it."""
    try:
        import torch
    except ImportError as error:
        raise Unavailable("tensors need torch, which is not installed: use `Pool.arrays()` or `Pool.view()`") from error
    dtype = pool.geometry.layout.dtype
    if not dtype.startswith("float8"):
        return torch.from_dlpack(pool.view(layer, value))
    # Not every torch takes float8 from others, and every one can look at bytes as float8.
    bits = torch.from_dlpack(pool.view(layer, value, dtype="uint8"))
    return bits.view(getattr(torch, dtype))


def numpy_array(pool: Pool, layer: int, value: bool) -> numpy.ndarray[Any, Any]:
    """One layer's K or V as numpy sees it."""
    try:
        import numpy
    except ImportError as error:
        raise Unavailable("arrays need numpy 2.1 or later, which is not installed: use `Pool.read_block()`") from error
    if pool.device != "cpu":
        raise Unavailable(f"numpy cannot look at memory of {pool.device}: use `Pool.tensors()`")
    layout = pool.geometry.layout
    dtype = layout.dtype
    if dtype == "bfloat16" or dtype.startswith("float8"):
        dtype = _BITS[2 if dtype == "bfloat16" else 1]
    array: numpy.ndarray[Any, Any] = numpy.from_dlpack(pool.view(layer, value, dtype=dtype))
    return array
