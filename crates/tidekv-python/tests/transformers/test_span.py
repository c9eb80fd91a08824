"""A span against the dullest model of it: a list of bytes that is as long as was asked for."""

from __future__ import annotations

import random

import pytest
import torch

from tidekv import PoolExhausted
from tidekv.transformers.span import Span

PAGE = 2 << 20
PAGES = 12


@pytest.fixture
def span():
    span = Span(torch.device("cpu"), PAGE, PAGES, {"name": "span"})
    yield span
    span.close()


@pytest.mark.parametrize("seed", range(4))
def test_bytes_stay_through_any_growing_and_shrinking(span: Span, seed: int) -> None:
    rng = random.Random(seed)
    marks: list[int] = []  # one byte for each page that has memory
    for step in range(60):
        if rng.random() < 0.2:
            span.pool.trim()  # pages come back in another order after their memory was given back
        size = rng.randrange(PAGES * PAGE + 1)
        if size > len(marks) * PAGE:
            span.grow_to(size)
            for page in range(len(marks), span.size // PAGE):
                marks.append(step)
                span.bytes[page * PAGE : (page + 1) * PAGE] = step
        else:
            span.shrink_to(size)
            del marks[-(-size // PAGE) :]
        assert span.size == len(marks) * PAGE
        for page, mark in enumerate(marks):
            assert span.bytes[page * PAGE] == mark and span.bytes[(page + 1) * PAGE - 1] == mark
        held = span.pool.snapshot()["allocated_blocks"]
        assert held == len(marks) + len(span._ahead)


def test_growth_costs_one_page_at_a_time(span: Span) -> None:
    for pages in range(1, PAGES + 1):
        span.grow_to(pages * PAGE)
        assert span.pool.snapshot()["allocated_blocks"] - pages <= 2, "pages that come early are few"


def test_a_refusal_changes_nothing(span: Span) -> None:
    span.grow_to(2 * PAGE)
    span.bytes[: 2 * PAGE] = 7
    span.pool.resize(4 * PAGE)
    with pytest.raises(PoolExhausted):
        span.grow_to(6 * PAGE)
    assert span.size == 2 * PAGE
    assert span.pool.snapshot()["allocated_blocks"] == 2 + len(span._ahead)
    assert bool((span.bytes[: 2 * PAGE] == 7).all())
    span.grow_to(4 * PAGE)


def test_everything_goes_back(span: Span) -> None:
    span.grow_to(5 * PAGE)
    span.shrink_to(0)
    span.pool.trim()
    assert span.pool.mapped_bytes == 0
