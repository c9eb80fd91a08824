"""SGLang's scheduler with its radix cache and a model that it computes, while memory comes and goes.

A token is a function of the K and V that attention reads back, so a block that is given out twice, unmapped under use or lost shows
in the tokens; SGLang's own books are checked at every turn. What runs without elastic memory is the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import workloads
from players import POOL, Play, Player
from workloads import PAGE_BYTES

SHORT = workloads.requests(3, 14, prompt=(30, 260), new=(16, 64), every=3)
LONG = workloads.requests(5, 5, prompt=(500, 900), new=(16, 40), every=2)
ALL_PAGES = 17


def limit(at: int, pages: int, *, once: int | None = None) -> dict[str, Any]:
    """What an operator does, in the middle of the run; `once` the pool has no more than so many pages."""
    event = {"at": at, "kvctl": ["limit", POOL, str(pages * PAGE_BYTES)]}
    return event if once is None else {**event, "pages": once}


ENOUGH = [{"events": SHORT}, {"events": LONG}]
ELASTIC = [
    *ENOUGH,
    {"events": [*SHORT, limit(20, 3), limit(45, 2, once=3), limit(120, ALL_PAGES, once=2)]},
    {"events": [*LONG, limit(5, 2), limit(9, 1, once=2), limit(40, 2, once=1), limit(60, ALL_PAGES, once=2)]},
    {"events": [*SHORT, limit(300, 2), limit(301, ALL_PAGES, once=2)]},
]

KINDS = {
    "pages of 16 tokens": {"page_size": 16, "disable_overlap_schedule": True},
    "pages of one token, overlapped": {"page_size": 1, "disable_overlap_schedule": False},
}


@pytest.fixture(scope="session", params=KINDS)
def runs(request: pytest.FixtureRequest, play_apart: Play) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What came of the same requests without elastic memory and with it."""
    players: list[Player] = [
        play_apart(ENOUGH, elastic=False, **KINDS[request.param]),
        play_apart(ELASTIC, **KINDS[request.param]),
    ]
    stock, elastic = (player.outcomes() for player in players)
    return stock, elastic


def check_all_done(outcome: dict[str, Any], reference: dict[str, Any]) -> None:
    assert outcome["complete"], "a limit was not obeyed"
    assert outcome["unfinished"] == []
    assert outcome["reasons"] == ["FINISH_LENGTH"]
    assert outcome["tokens"] == reference["tokens"]
    # Nothing is held any more: SGLang would not flush otherwise.
    assert outcome["flushed"]


def test_with_enough_memory_every_decision_is_the_same(runs: Any) -> None:
    stock, elastic = runs
    assert all(name.startswith("Elastic") for name in elastic[0]["classes"])
    assert not any(name.startswith("Elastic") for name in stock[0]["classes"])
    for reference, outcome in zip(stock, elastic):
        check_all_done(outcome, reference)
        assert outcome["batches"] == reference["batches"]
        assert outcome["cached"] == reference["cached"]
        assert outcome["retractions"] == reference["retractions"] == 0


def test_memory_is_mapped_as_requests_need_it(runs: Any) -> None:
    _, elastic = runs
    pages = [seen["mapped_pages"] for seen in elastic[0]["snapshots"]]
    assert pages[0] == 1, "only the null block's"
    assert max(pages) < ALL_PAGES // 2


def check_limits_hold(outcome: dict[str, Any], limits: list[int]) -> None:
    """Each limit was reached before the next one came, and kept from then on."""
    for pages, start, end in zip(limits, outcome["limited_at"], outcome["limited_at"][1:]):
        in_use = [seen["inuse_pages"] for seen in outcome["snapshots"][start:end]]
        reached = next(turn for turn, count in enumerate(in_use) if count <= pages)
        assert max(in_use[reached:]) <= pages


def test_requests_finish_with_the_same_tokens_while_an_operator_lowers_and_raises_the_limit(runs: Any) -> None:
    stock, elastic = runs
    check_all_done(elastic[2], stock[0])
    check_limits_hold(elastic[2], [3, 2])
    assert elastic[2]["retractions"] > 0, "the limit was below what was in use"


def test_a_prompt_between_two_chunks_gives_way_and_comes_back(runs: Any) -> None:
    stock, elastic = runs
    check_all_done(elastic[3], stock[1])
    check_limits_hold(elastic[3], [2, 1, 2])
    assert elastic[3]["retractions"] > 0


def test_an_idle_scheduler_evicts_cached_prefixes_for_a_lower_limit(runs: Any) -> None:
    stock, elastic = runs
    check_all_done(elastic[4], stock[0])
    check_limits_hold(elastic[4], [2])
    lowered = elastic[4]["limited_at"][0]
    assert elastic[4]["snapshots"][lowered - 1]["inuse_pages"] > 2, "prefixes were cached"
    assert max(elastic[4]["done_at"].values()) < lowered, "nothing ran any more"
