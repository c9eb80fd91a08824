"""How many blocks vLLM's scheduler may want before it asks us again: arithmetic over its requests.

vLLM admits a request only when its whole prompt fits beside what the running ones still need, so that is what is counted:
for each running request the rest of its prompt or its next tokens, for one that is about to be admitted all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

__all__ = ["Demand"]

_WAITING_LOOK = 256
"""At most so many waiting requests are looked at in a step; the others are looked at when their turn comes."""
_MOST_EXTRA = 64
"""At most so many blocks more are wanted for a request that was not admitted with what was thought enough."""


class Demand:
    """The requests that live, and what they need."""

    def __init__(self, block_sizes: list[int], lookahead_tokens: int, watermark_blocks: int) -> None:
        self._block_sizes = block_sizes
        # One token is being sampled, and with asynchronous scheduling one more before that is known.
        self._ahead = lookahead_tokens + 2
        self._watermark = watermark_blocks
        # Groups with windows or states take and give blocks by rules of their own: one more for each request and group.
        self._slack = len(block_sizes) if len(block_sizes) > 1 else 0
        self._live: dict[str, Any] = {}
        self._tries: dict[str, int] = {}
        self._running_need = 0

    @property
    def alive(self) -> int:
        return len(self._live)

    def begin(self, request: Any) -> None:
        self._live[request.request_id] = request

    def end(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._tries.pop(request_id, None)

    def blocks(self, computed: int, tokens: int) -> int:
        """Blocks that a request still needs to have room for `tokens`, of which `computed` have theirs."""
        new = sum(-(-(tokens + self._ahead) // size) - -(-computed // size) for size in self._block_sizes)
        return new + self._slack

    def to_admit(self, request: Any, cached_tokens: int) -> int:
        """Free blocks, beside those of its cached prefix, that vLLM wants to see when it admits this request.

        One that is asked about again was not admitted: more is wanted every time, so that an estimate that is too low keeps
        nobody waiting."""
        tries = self._tries.get(request.request_id, 0)
        self._tries[request.request_id] = tries + 1
        own = self.blocks(0 if tries else cached_tokens, int(request.num_tokens)) + min(tries, _MOST_EXTRA)
        return own + self._running_need + self._watermark

    def admitted(self, request: Any) -> None:
        """From now on it is one of those that run."""
        self._tries.pop(request.request_id, None)
        self._running_need += self.blocks(0, int(request.num_tokens))

    def after_step(self, scheduled: Mapping[str, int]) -> int:
        """Free blocks that the next step may take, when this one computes `scheduled` tokens for each request."""
        need = 0
        for request_id, tokens in scheduled.items():
            request = self._live.get(request_id)
            if request is not None:
                computed = int(request.num_computed_tokens) + tokens
                need += self.blocks(computed, max(int(request.num_tokens), computed))
        self._running_need = need
        for request_id in itertools.islice(self._live, _WAITING_LOOK + len(scheduled)):
            request = self._live[request_id]
            # Those that have nothing yet are asked about one by one, when they are admitted.
            if request_id not in scheduled and request.num_computed_tokens > 0:
                computed = int(request.num_computed_tokens)
                need += self.blocks(computed, max(int(request.num_tokens), computed))
        return need
