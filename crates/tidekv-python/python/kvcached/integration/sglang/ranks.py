"""How the ranks of one model stay in step.

SGLang runs a scheduler in every rank of tensor parallelism. They see the same requests and must take the same decisions, but
each has its own device, and how much memory that has left differs and changes at any time. So no decision looks at a rank's
own memory: what a decision needs is agreed on first, at points that all ranks pass in the same order.

    safe point        least(blocks that can be had)      what `available_size` counts with until the next safe point
    a lease           every(I have mapped mine)          all ranks have the memory, or those that have it give it back
"""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Alone", "InStep", "Ranks", "ranks_of_this_process"]


class Ranks(Protocol):
    """The schedulers that decide alike."""

    in_step: bool
    """Whether there are several."""

    def every(self, done: bool) -> bool:
        """Whether it is true on all of them."""

    def least_and_most(self, least: int, most: int) -> tuple[int, int]:
        """The smallest of the first numbers and the largest of the second ones."""


class Alone:
    """One rank: nobody to ask."""

    in_step = False

    def every(self, done: bool) -> bool:
        return done

    def least_and_most(self, least: int, most: int) -> tuple[int, int]:
        return least, most


class InStep:
    """The ranks of a process group whose tensors are in host memory. A rank that is gone raises, as in SGLang's own exchange."""

    in_step = True

    def __init__(self, group: Any) -> None:
        self._group = group

    def every(self, done: bool) -> bool:
        return self._smallest([int(done)]) == [1]

    def least_and_most(self, least: int, most: int) -> tuple[int, int]:
        smallest = self._smallest([least, -most])
        return smallest[0], -smallest[1]

    def _smallest(self, numbers: list[int]) -> list[int]:
        import torch
        import torch.distributed

        tensor = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN, group=self._group)
        return [int(number) for number in tensor.tolist()]


def ranks_of_this_process() -> tuple[Ranks, int | None]:
    """Who decides alike with this process, and its rank among them; None where it is alone."""
    from sglang.srt.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return Alone(), None
    group = parallel_state.get_tp_group()
    if group.world_size == 1:
        return Alone(), None
    return InStep(group.cpu_group), int(group.rank_in_group)
