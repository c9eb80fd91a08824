"""Regions by hand, by pools, by workers; and the table of those who map themselves."""

from __future__ import annotations

import fcntl
import random
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tidekv
from tidekv import BlockTable, Fleet, Layout, Pool, Region, Worker

CHUNK = 16384
LAYERS, BUFFERS = 3, 2


def kv_region(contiguous: bool, pages: int = 6) -> Region:
    return Region("cpu", pages=pages, chunk_bytes=CHUNK, chunks=LAYERS * BUFFERS, contiguous=contiguous)


def kv_layout(contiguous: bool) -> Layout:
    return Layout.raw(LAYERS * BUFFERS, 2048, layout="interleaved" if contiguous else "per-layer", chunk_bytes=CHUNK)


@pytest.mark.parametrize("contiguous", [True, False])
def test_pages_lie_where_kvcacheds_offsets_say(contiguous: bool) -> None:
    region = kv_region(contiguous)
    stride = CHUNK * LAYERS * BUFFERS if contiguous else CHUNK
    assert [region.offset_of_page(page) for page in range(3)] == [0, stride, 2 * stride]
    assert region.page_of_offset(2 * stride) == 2
    for wrong in (1, 6 * stride):
        with pytest.raises(tidekv.BadArgument, match="multiple of"):
            region.page_of_offset(wrong)
    region.map([4])
    for chunk in range(LAYERS * BUFFERS):
        start = 4 * stride + chunk * CHUNK if contiguous else (chunk * 6 + 4) * CHUNK
        region.write(start, b"x" * CHUNK)
        if not contiguous or chunk == 0:
            with pytest.raises(tidekv.Unmapped):
                region.write(start - 1, b"x")
    assert region.nbytes == 6 * region.page_bytes


def test_a_batch_maps_whole_or_not_at_all() -> None:
    region = kv_region(True)
    region.map([1])
    for wrong, kind in [([0, 1], tidekv.MapFailed), ([0, 0], tidekv.MapFailed), ([0, 6], tidekv.BadArgument)]:
        with pytest.raises(kind):
            region.map(wrong)
        assert region.mapped_pages == 1 and not region.is_mapped(0)
    with pytest.raises(tidekv.MapFailed) as caught:
        region.unmap([1, 2])
    assert caught.value.page == 2 and region.is_mapped(1)
    region.unmap([1])
    assert region.mapped_pages == 0


def test_threads_that_copy_from_one_page_never_hear_that_it_has_no_memory() -> None:
    layout = Layout.raw(1, 1 << 20, chunk_bytes=4 << 20)
    with Pool(layout, device="cpu", pages=2, name="copied") as pool:
        blocks = pool.alloc(4)
        assert len(set(pool.pages_of(blocks))) == 1
        together = threading.Barrier(len(blocks))

        def copy(block: int) -> None:
            data = bytes([block]) * (1 << 20)
            together.wait(60)
            for _ in range(40):
                pool.write_block(block, 0, False, data)
                assert pool.read_block(block, 0) == data
                assert pool.is_mapped(block)

        with ThreadPoolExecutor(len(blocks)) as threads:
            assert list(threads.map(copy, blocks)) == [None] * len(blocks)


def test_no_memory_is_an_exception_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.raw(1, 4096, chunk_bytes=1 << 20)
    with Pool(layout, device="cpu", pages=64, name="poor", budget=3 << 20, reserve=(0, 1)) as pool:
        held = pool.alloc(pool.geometry.blocks_per_page * 3)
        with pytest.raises(tidekv.PoolExhausted) as caught:
            pool.alloc(1)
        assert caught.value.shortage == "budget" and caught.value.grantable_bytes == 0
        assert caught.value.needed_bytes == 1 << 20
        pool.free(held)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_pool_over_a_region_has_it_alone(contiguous: bool) -> None:
    region = kv_region(contiguous)
    pool = Pool(kv_layout(contiguous), region=region, name="over")
    assert pool.region is region and pool.geometry.page_count == 6
    held = pool.alloc(pool.geometry.blocks_per_page * 2)
    assert region.mapped_pages >= 2
    for wrong in [lambda: region.map([5]), lambda: region.unmap([0]), region.close,
                  lambda: Pool(kv_layout(contiguous), region=region, name="second")]:
        with pytest.raises(tidekv.BadArgument, match="pool"):
            wrong()
    assert held == list(range(len(held))), "dense ids"
    pool.close()
    assert region.mapped_pages == 0, "the region stays, its memory goes with the pool"
    region.map([5])
    with pytest.raises(tidekv.BadArgument, match="mapped already"):
        Pool(kv_layout(contiguous), region=region, name="third")
    region.unmap([5])
    Pool(kv_layout(contiguous), region=region, name="fourth").close()


def test_a_pool_does_not_take_a_region_of_another_shape() -> None:
    region = kv_region(True)
    for layout in [kv_layout(False), Layout.raw(5, 2048, chunk_bytes=CHUNK), Layout.raw(6, 2048, chunk_bytes=2 * CHUNK)]:
        with pytest.raises(tidekv.BadArgument, match="same number"):
            Pool(layout, region=region, name="other")
    Pool(kv_layout(True), region=region, name="right").close()


@pytest.mark.parametrize("null_block", [False, True])
def test_a_table_decides_what_its_caller_maps(null_block: bool) -> None:
    """The table against sets of blocks and pages, with a driver that refuses now and then."""
    chance = random.Random(11)
    geometry = kv_layout(True).geometry(pages=6)
    table = BlockTable(geometry, null_block=null_block)
    per_page, mapped, held = geometry.blocks_per_page, set[int](), set[int]()
    for _ in range(2000):
        move = chance.random()
        if move < 0.5:
            count = chance.randrange(1, 12)
            got = table.try_alloc(count)
            if got is None:
                pages = table.claim(count)
                if pages is None:
                    assert count > table.available()
                    continue
                assert mapped.isdisjoint(pages)
                if chance.random() < 0.3:
                    table.refused(pages)
                    continue
                mapped.update(pages)
                table.mapped(pages)
                got = table.try_alloc(count)
            assert got is not None and len(set(got)) == count and held.isdisjoint(got)
            assert mapped.issuperset(table.pages_of(got)) and not (null_block and 0 in got)
            held.update(got)
        elif move < 0.8 and held:
            gone = chance.sample(sorted(held), chance.randrange(1, len(held) + 1))
            table.free(gone)
            held.difference_update(gone)
        else:
            pages = table.retire(chance.randrange(0, 3))
            assert mapped.issuperset(pages)
            used = set(table.pages_of(sorted(held))) | ({0} if null_block else set())
            assert used.isdisjoint(pages)
            table.unmapped(pages)
            mapped.difference_update(pages)
        counts = table.counts()
        assert counts["leased_blocks"] == len(held)
        assert counts["idle_pages"] + counts["inuse_pages"] == len(mapped)
        assert counts["free_blocks"] <= per_page * len(mapped) - len(held)
    assert table.clear() == len(held)


def test_a_table_knows_what_it_was_not_asked() -> None:
    table = BlockTable(kv_layout(True).geometry(pages=2))
    for wrong in (table.mapped, table.refused, table.unmapped, table.unmap_failed):
        with pytest.raises(tidekv.BadArgument):
            wrong([0])
    with pytest.raises(tidekv.NotLeased):
        table.free([0])
    assert table.claim(1000) is None
    table.set_limit(1)
    pages = table.claim(1)
    assert pages == [0] and table.claim(table.geometry.blocks_per_page + 1) is None
    table.mapped(pages)
    assert table.retire(5) == [0]
    table.unmap_failed([0])
    table.unmapped([0])
    assert table.counts()["reserved_pages"] == 2


def test_a_scheduler_maps_on_all_its_workers() -> None:
    regions = [kv_region(True) for _ in range(2)]
    workers = [Worker("fleet", rank) for rank in range(2)]
    for worker in workers:
        worker.start()
        assert worker.running
    fleet = Fleet("fleet", [2], timeout=30.0, start_timeout=30.0)
    assert not fleet.has_group(0)
    for worker, region in zip(workers, regions):
        worker.add_group(0, region)
        with pytest.raises(tidekv.BadArgument, match="already"):
            worker.add_group(0, region)
    assert fleet.has_group(0) and [rank["state"] for rank in fleet.status()] == ["member", "member"]
    with pytest.raises(tidekv.BadArgument, match="worker"):
        regions[0].map([0])

    pool = Pool(kv_layout(True), fleet=fleet, pages=6, name="fleet", device="cpu", reserve=(0, 1))
    held = pool.alloc(pool.geometry.blocks_per_page * 2)
    pages = sorted(set(pool.pages_of(held)))
    assert all(set(pages) <= set(on_rank) for on_rank in fleet.held(0).values())
    assert all(region.is_mapped(page) for region in regions for page in pages)
    with pytest.raises(tidekv.BadArgument, match="workers"):
        pool.view(0)
    pool.close()
    assert [region.mapped_pages for region in regions] == [0, 0]

    group = fleet.group(0, 6)
    group.map([1, 3])
    with pytest.raises(tidekv.WorkerFailed):
        group.map([3])
    assert fleet.held(0) == {(0, 0): [1, 3], (0, 1): [1, 3]}
    group.unmap([1, 3])
    group.close()

    workers[1].stop()
    workers[1].stop()
    assert not workers[1].running
    group = None
    with pytest.raises(tidekv.WorkerFailed) as caught:
        fleet.group(0, 6).map([2])
    assert caught.value.rank == 1 and caught.value.reason and not regions[0].is_mapped(2)
    fleet.close()
    workers[0].stop()
    with pytest.raises(tidekv.Closed):
        fleet.status()


def test_fleets_and_workers_that_cannot_be() -> None:
    with pytest.raises(tidekv.BadArgument, match="seq"):
        Fleet("none", [1], strategy="pigeon")
    with pytest.raises(tidekv.WorkerFailed) as caught:
        Fleet("none", [1], start_timeout=0.0)
    assert (caught.value.stage, caught.value.rank, caught.value.fault) == (0, 0, "lost")
    worker = Worker("taken", 0)
    with pytest.raises(tidekv.FileProblem, match="running") as taken:
        Worker("taken", 0)
    assert taken.value.path == worker.socket_path
    worker.stop()


def test_a_look_at_a_worker_that_is_busy_leaves_the_interpreter_to_others(runtime_dir: Path) -> None:
    """Here it is busy with the ledger, whose lock another has; on a GPU it would be waiting for the device."""
    neighbour = Pool(kv_layout(True), region=kv_region(True), name="neighbour")
    (ledger,) = runtime_dir.glob("kvcached-ledger-*")
    worker = Worker("busy", 0)

    def lock_table(kind: int) -> None:
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kind, 0, 0, 1, 0))

    asked, stop = [0], threading.Event()

    def look() -> None:
        while not stop.is_set():
            worker.groups()
            asked[0] += 1

    with ledger.open("r+b") as file, ThreadPoolExecutor(2) as threads:
        lock_table(fcntl.F_WRLCK)
        added = threads.submit(worker.add_group, 0, kv_region(True))
        looked = threads.submit(look)
        # Until the looks find it busy. It gives the ledger up after two seconds, unless somebody lets it go on.
        try:
            seen, until = -1, time.monotonic() + 1
            while asked[0] != seen and time.monotonic() < until:
                seen = asked[0]
                stop.wait(0.05)
            lock_table(fcntl.F_UNLCK)
            added.result(60)
        finally:
            stop.set()
        looked.result(60)
    assert worker.groups() == [0]
    worker.stop()
    neighbour.close()
