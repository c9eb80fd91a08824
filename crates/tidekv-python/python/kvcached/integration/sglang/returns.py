"""Block ids on their way back from the device.

SGLang frees slots that it knows as tensors on the device. Reading them would make the scheduler wait for everything that runs
there, so they are copied to host memory behind it and looked at when they have arrived:

    put(ids)  --copy, event-->  on the way  --the event has passed-->  arrived  --take()-->  pool

On the CPU they arrive at once.
"""

from __future__ import annotations

from collections import deque
from typing import Any

__all__ = ["Returns"]


class Returns:
    """Ids in the order in which they were freed."""

    def __init__(self) -> None:
        self.count = 0
        """All of them, on the way or arrived."""
        self._arrived: list[int] = []
        self._on_the_way: deque[tuple[Any, Any]] = deque()

    def put(self, ids: Any) -> None:
        """Takes a tensor of ids. What happens to it afterwards on the same stream does not matter."""
        self.count += ids.numel()
        if ids.device.type == "cpu":
            self._arrived.extend(ids.tolist())
        else:
            self._on_the_way.append(self._send(ids))

    def take(self, count: int | None = None, *, wait: bool = False) -> list[int]:
        """Up to `count` ids that have arrived (None: all); with `wait`, those on the way are waited for where they are needed."""
        while self._on_the_way and (count is None or len(self._arrived) < count):
            host, event = self._on_the_way[0]
            if wait:
                event.synchronize()
            elif not event.query():
                break
            self._on_the_way.popleft()
            self._arrived.extend(host.tolist())
        taken = self._arrived[:count]
        del self._arrived[: len(taken)]
        self.count -= len(taken)
        return taken

    def put_back(self, ids: list[int]) -> None:
        """Ids that were taken and not needed."""
        self._arrived[:0] = ids
        self.count += len(ids)

    def clear(self) -> None:
        """Forgets all of them. What is on the way is waited for, so that its memory is not written after it was freed."""
        self.take(wait=True)

    @staticmethod
    def _send(ids: Any) -> tuple[Any, Any]:
        import torch

        host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
        host.copy_(ids, non_blocking=True)
        event = torch.get_device_module(ids.device).Event()
        event.record()
        return host, event
