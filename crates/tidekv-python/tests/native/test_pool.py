"""The pool from Python: blocks, limits, requests to give back, the segment that operators see."""

from __future__ import annotations

import random
import select
import struct
import threading
from pathlib import Path

import pytest
import tidekv
from tidekv import Layout, Pool

SMALL = Layout.heads(2, 2, 32, dtype="float16", block_tokens=4, chunk_bytes=16384)


def small(name: str = "pool", **more: object) -> Pool:
    settings: dict[str, object] = {"device": "cpu", "pages": 8, "name": name, "reserve": (0, 1), **more}
    return Pool(SMALL, **settings)  # type: ignore[arg-type]


def test_blocks_come_and_go_as_a_set_would_have_it() -> None:
    """A pool against a set of ids, over a few thousand random calls."""
    chance = random.Random(7)
    with small() as pool:
        total = pool.geometry.block_count
        valid = {pool.geometry.kernel_id(index) for index in range(total)}
        held: set[int] = set()
        for _ in range(3000):
            if chance.random() < 0.55:
                count = chance.randrange(0, 20)
                got = pool.try_alloc(count)
                if got is None:
                    assert count > total - len(held)
                else:
                    assert len(got) == len(set(got)) == count and held.isdisjoint(got) and valid.issuperset(got)
                    held.update(got)
            elif held:
                freed = chance.sample(sorted(held), chance.randrange(1, len(held) + 1))
                pool.free(freed)
                held.difference_update(freed)
            assert pool.snapshot()["allocated_blocks"] == len(held)
        assert pool.clear() == len(held)


def test_a_miss_says_what_is_short_and_leaves_no_trace() -> None:
    with small() as pool:
        total = pool.geometry.block_count
        held = pool.alloc(total - 1)
        with pytest.raises(tidekv.PoolExhausted) as caught:
            pool.alloc(2)
        error = caught.value
        assert (error.needed, error.available, error.shortage, error.transient) == (2, 1, "limit", True)
        assert pool.try_alloc(2) is None and len(pool.alloc(1)) == 1
        with pytest.raises(tidekv.NeverFits) as never:
            pool.alloc(total + 1)
        assert (never.value.needed, never.value.pool_blocks) == (total + 1, total)
        assert pool.try_alloc(total + 1) is None
        pool.free(held)


def test_what_is_not_leased_cannot_be_freed() -> None:
    with small(null_block=True) as pool:
        held = pool.alloc(3)
        assert pool.null_block == 0 and 0 not in held
        outside = pool.geometry.id_count
        for wrong, culprit in [([held[0], held[0]], held[0]), ([held[1], 0], 0), ([held[1], outside], outside)]:
            with pytest.raises(tidekv.NotLeased) as caught:
                pool.free(wrong)
            assert caught.value.block == culprit and isinstance(caught.value, ValueError)
            assert pool.snapshot()["allocated_blocks"] == 3, "nothing was freed"
        pool.free(held)
        with pytest.raises(tidekv.NotLeased):
            pool.free(held)
        for wrong_type in (["one"], 5, [1.5], None):
            with pytest.raises(TypeError):
                pool.free(wrong_type)  # type: ignore[arg-type]
        with pytest.raises(tidekv.BadArgument):
            pool.free([-1])


def test_blocks_that_are_set_aside_are_given_first_and_come_back() -> None:
    with small() as pool:
        total = pool.geometry.block_count
        assert pool.try_reserve(5) and pool.reserved() == 5
        rest = pool.alloc(total - 5)
        assert pool.try_alloc(6) is None and pool.reserved() == 5, "a miss leaves them set aside"
        got = pool.try_alloc(3)
        assert got is not None and pool.reserved() == 2
        assert len(pool.alloc_reserved(2)) == 2
        with pytest.raises(tidekv.BadArgument):
            pool.alloc_reserved(1)
        assert not pool.try_reserve(1)
        pool.free(rest)
        pool.reserve(2)
        pool.free_reserved()
        assert pool.reserved() == 0


def test_memory_follows_use() -> None:
    with small(decay=0.0) as pool:
        page = pool.geometry.page_bytes
        held = pool.alloc(pool.geometry.blocks_per_page * 4)
        assert pool.mapped_bytes >= 4 * page
        assert pool.snapshot()["witness_bytes"] >= 4 * page, "the kernel's own count"
        pool.free(held)
        pool.trim()
        assert pool.mapped_bytes == 0 and pool.snapshot()["witness_bytes"] == 0


def test_what_is_held_is_needed_cached_or_idle() -> None:
    with small(decay=0.0) as pool:
        held = pool.alloc(pool.geometry.blocks_per_page * 4)

        def parts() -> tuple[int, int, int]:
            now = pool.snapshot()
            assert now["needed_bytes"] + now["cached_bytes"] + now["idle_bytes"] == now["mapped_bytes"]
            assert now["needed_bytes"] + now["cached_bytes"] == now["used_bytes"], "kvcached's word"
            return now["needed_bytes"], now["cached_bytes"], now["idle_bytes"]

        four = 4 * pool.geometry.page_bytes
        assert parts()[:2] == (four, 0)
        pool.set_evictable(len(held))
        assert parts()[:2] == (0, four)
        pool.free(held)
        pool.set_evictable(0)
        assert parts()[:2] == (0, 0)


def test_pages_wait_for_the_step_they_were_freed_behind() -> None:
    with small() as pool:
        held = pool.alloc(pool.geometry.blocks_per_page)
        pool.free(held, step=5)
        pool.trim()
        assert pool.is_mapped(held[0]), "step 5 may still read it"
        pool.step_completed(5)
        pool.trim()
        assert not pool.is_mapped(held[0])


def test_limits_have_revisions() -> None:
    with small() as pool:
        page = pool.geometry.page_bytes
        held = pool.alloc(pool.geometry.blocks_per_page * 3)
        lowered = pool.set_limit(page, revision=3)
        assert (lowered["status"], lowered["effective_limit_bytes"], lowered["overage_bytes"]) == ("deferred", page, 2 * page)
        assert pool.set_limit(9 * page, revision=2)["status"] == "stale"
        assert pool.set_limit(9 * page, revision=3)["status"] == "conflict"
        assert pool.set_limit(page, revision=3)["status"] == "deferred", "the same again is no conflict"
        assert pool.snapshot()["in_shrink"] and pool.try_alloc(1) is None
        pool.free(held)
        pool.trim()
        assert pool.limit_state()["status"] == "applied"
        assert pool.resize(5 * page)["revision"] == 4


def test_an_engine_hears_that_it_should_evict() -> None:
    with small() as pool:
        held = pool.alloc(pool.geometry.blocks_per_page * 3)
        assert pool.reclaim_requested()["pages"] == 0
        pool.resize(pool.geometry.page_bytes)
        ready, _, _ = select.select([pool.reclaim_fileno()], [], [], 30)
        assert ready, "the descriptor wakes an event loop"
        request = pool.reclaim_requested()
        assert request["pages"] == 2 and request["bytes"] == 2 * pool.geometry.page_bytes
        assert request["firm_pages"] == 2, "a limit is obeyed whatever it costs"
        pool.free(held)
        assert pool.reclaim_requested()["pages"] == 0


def test_what_is_only_kept_goes_to_a_neighbour_that_waits() -> None:
    geometry = SMALL.geometry(pages=8)
    page, per_page = geometry.page_bytes, geometry.blocks_per_page
    with small("idle", budget=8 * page) as idle, small("busy", budget=8 * page) as busy:
        cached = idle.alloc(4 * per_page)
        busy.alloc(4 * per_page)
        waiting = threading.Thread(target=busy.alloc, args=(3 * per_page,), kwargs={"wait": 60.0})
        idle.set_evictable(4 * per_page)
        waiting.start()
        try:
            ready, _, _ = select.select([idle.reclaim_fileno()], [], [], 60)
            assert ready, "each has its share, and half of the device is only kept"
            request = idle.reclaim_requested()
            assert (request["pages"], request["firm_pages"]) == (3, 0)
            idle.free(cached[: 3 * per_page])
            idle.set_evictable(per_page)
        finally:
            waiting.join()
        assert (idle.mapped_bytes, busy.mapped_bytes) == (page, 7 * page)


def test_what_is_kept_is_a_count() -> None:
    pool = small()
    for blocks in (-1, 1 << 32):
        with pytest.raises(tidekv.errors.BadArgument):
            pool.set_evictable(blocks)
    pool.close()
    with pytest.raises(tidekv.Closed):
        pool.set_evictable(1)


def test_operators_see_it(runtime_dir: Path) -> None:
    with small("seen", limit=5 * 131072) as pool:
        segment = runtime_dir / "seen"
        assert struct.unpack("3q", segment.read_bytes())[0] == 5 * 131072
        assert tidekv._native.segment_owned("seen")
        other = small("seen")
        assert (pool.name, other.name) == ("seen", "seen-2"), "two living pools never share a segment"
        other.close()
        grouped = small("seen", group=7)
        assert (runtime_dir / "seen_g7").exists() and grouped.group == 7
        grouped.close()
    assert not segment.exists()


def test_the_environment_fills_in_what_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHED_IPC_NAME", "from the environment")
    monkeypatch.setenv("KVCACHED_PAGE_SIZE_MB", "1")
    layout = Layout.heads(1, 1, 64, layout="per-layer")
    with Pool(layout, device="cpu", pages=1) as pool:
        assert pool.name == "from-the-environment" and pool.geometry.chunk_bytes == 1 << 20
    with Pool(layout, device="cpu", pages=1, name="said", env=False) as pool:
        assert pool.name == "said" and pool.geometry.chunk_bytes == 2 << 20
    monkeypatch.setenv("KVCACHED_GPU_UTILIZATION", "much")
    with pytest.raises(tidekv.BadArgument, match="KVCACHED_GPU_UTILIZATION"):
        Pool(layout, device="cpu", pages=1)


def test_two_pools_share_one_budget() -> None:
    page = SMALL.geometry(pages=1).page_bytes
    with small("one", budget=6 * page, decay=60.0) as one, small("two", budget=6 * page) as two:
        per_page = one.geometry.blocks_per_page
        one.free(one.alloc(6 * per_page))
        # Everything is idle in the other pool; its thread gives back what this one waits for.
        got = two.alloc(3 * per_page, wait=30.0)
        assert one.mapped_bytes + two.mapped_bytes <= 6 * page
        two.free(got)


def test_calls_from_many_threads() -> None:
    """No block is ever in two hands, and waiting threads do not keep others from Python."""
    with small(pages=4) as pool:
        mutex, held, clashes = threading.Lock(), set(), []

        def work() -> None:
            for _ in range(300):
                got = pool.try_alloc(3)
                if got is None:
                    continue
                with mutex:
                    clashes.extend(held.intersection(got))
                    held.update(got)
                with mutex:
                    held.difference_update(got)
                pool.free(got)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert clashes == [] and pool.snapshot()["allocated_blocks"] == 0


def test_an_alloc_that_waits_lets_others_run() -> None:
    with small() as pool:
        held = pool.alloc(pool.geometry.block_count)
        got: list[list[int]] = []
        thread = threading.Thread(target=lambda: got.append(pool.alloc(1, wait=60.0)))
        thread.start()
        # Were the GIL kept by the waiting thread, this would not run before its minute is over.
        pool.free(held)
        thread.join(timeout=30)
        assert len(got) == 1


def test_pages_of_blocks_and_their_use() -> None:
    with small() as pool:
        per_page = pool.geometry.blocks_per_page
        held = pool.alloc(per_page + 1)
        pages = pool.pages_of(held)
        assert sorted(set(pages)) == [0, 1]
        assert sorted(pool.occupancy([0, 1, 2, 99])) == sorted([per_page, 1, 0, 0])
