"""Requests for the scheduler: prompts of many lengths, some with a prefix in common."""

from __future__ import annotations

import random
from typing import Any

PAGE_TOKENS = 512
"""Tokens in a page of the pool: 2 MiB for a layer's K, of 1024 floats for each token."""
PAGE_BYTES = 4 * 2 * 1024 * 1024
"""K and V of two layers."""


def requests(seed: int, count: int, *, prompt: tuple[int, int], new: tuple[int, int], every: int) -> list[dict[str, Any]]:
    """`count` requests, one every so many turns of the scheduler's loop."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(3, 512) for _ in range(length)] for length in (48, 80, 160)]
    events = []
    for index in range(count):
        ids = [rng.randrange(3, 512) for _ in range(rng.randint(*prompt))]
        if rng.random() < 0.6:
            ids = rng.choice(prefixes) + ids
        events.append({"at": 1 + index * every, "request": f"r{index}", "ids": ids, "new": rng.randint(*new)})
    return events
