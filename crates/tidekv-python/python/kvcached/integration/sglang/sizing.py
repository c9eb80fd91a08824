"""How large the KV cache may become: address space, so neighbours' memory counts as if it were free.

SGLang sizes its cache by what is free on the device when it starts. An engine that starts beside a busy neighbour would stay
small for life, or not start at all, though the neighbour's memory comes back as soon as somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["available_bytes"]


def available_bytes(original: Callable[..., int], configurator: Any, *args: Any, **kwargs: Any) -> int:
    """SGLang's figure or, where it is larger, the static share of the whole device less what this process has taken itself. The
    smallest of all ranks: they must arrive at the same size."""
    if configurator.device != "cuda":
        return original(configurator, *args, **kwargs)
    refusal = None
    try:
        profiled = original(configurator, *args, **kwargs)
    except ValueError as error:
        profiled, refusal = 0, error
    own = max(profiled, _static_share(configurator.gpu_id))
    smallest = _least_of_all(own)
    if smallest <= 0 and refusal is not None:
        raise refusal
    return smallest


def _static_share(gpu: int) -> int:
    import torch
    from sglang.srt.runtime_context import get_schedule

    total = torch.cuda.mem_get_info(gpu)[1]
    return int(total * get_schedule().mem_fraction_static) - int(torch.cuda.memory_reserved(gpu))


def _least_of_all(number: int) -> int:
    from kvcached.integration.sglang.ranks import ranks_of_this_process

    return ranks_of_this_process()[0].least_and_most(number, 0)[0]
