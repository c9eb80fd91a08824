"""What people do wrong: every case is an exception that says what to do, and the process lives."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import tidekv
from tidekv import Layout, Pool, Region

LAYOUT = Layout.heads(2, 2, 32, dtype="float16", block_tokens=4, chunk_bytes=16384)


def test_use_after_close_says_so() -> None:
    pool = Pool(LAYOUT, device="cpu", pages=2, name="gone")
    pool.close()
    pool.close()
    assert pool.closed
    for use in [lambda: pool.alloc(1), lambda: pool.try_alloc(1), lambda: pool.free([1]), pool.available, pool.snapshot,
                lambda: pool.view(0), lambda: pool.read_block(0, 0)]:
        with pytest.raises(tidekv.Closed, match="make a new one"):
            use()
    region = Region("cpu", pages=2, chunk_bytes=4096)
    region.close()
    region.close()
    with pytest.raises(tidekv.Closed):
        region.map([0])


def test_nothing_here_goes_into_a_pickle() -> None:
    region = Region("cpu", pages=1, chunk_bytes=4096)
    arena = tidekv.Arena("pickled", segment_bytes=1 << 20, limit_bytes=1 << 20)
    with Pool(LAYOUT, device="cpu", pages=2, name="pickled") as pool:
        for thing in [pool, region, pool.view(0), arena, tidekv.BlockTable(pool.geometry)]:
            with pytest.raises(TypeError, match="cannot be pickled: .+"):
                pickle.dumps(thing)
    arena.close()
    assert tidekv.Arena.unlink("pickled")


def test_errors_go_into_a_pickle_with_their_fields() -> None:
    with Pool(LAYOUT, device="cpu", pages=1, name="errors") as pool:
        with pytest.raises(tidekv.NotLeased) as caught:
            pool.free([1])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is tidekv.NotLeased and copy.block == 1 and str(copy) == str(caught.value)


def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    pool = Pool(LAYOUT, device="cpu", pages=4, name="forked")
    region = Region("cpu", pages=1, chunk_bytes=4096)
    arena = tidekv.Arena("forked", segment_bytes=1 << 20, limit_bytes=1 << 20)
    held = pool.alloc(3)

    def in_child() -> None:
        for use in [lambda: pool.alloc(1), lambda: pool.free(held), pool.snapshot, lambda: region.map([0]),
                    lambda: arena.alloc(4096)]:
            with pytest.raises(tidekv.Forked, match="in the child"):
                use()
        pool.close()
        # A pool of the child's own is what it should have.
        with Pool(LAYOUT, device="cpu", pages=2, name="childs-own") as own:
            own.free(own.alloc(2))

    assert run_in_fork(in_child) == 0
    pool.free(held)
    assert pool.snapshot()["allocated_blocks"] == 0
    pool.close()
    arena.close()
    tidekv.Arena.unlink("forked")


def run_in_fork(body: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pages": 1, "capacity": 1 << 20}, "not both"),
        ({"device": "tpu"}, "use cuda:N"),
        ({"weight": 0}, "at least 1"),
        ({"utilization": 1.5}, "at most 1"),
        ({"reserve": (3, 1)}, "must not exceed"),
        ({"wait": -1.0}, "from 0 on"),
        ({"unmapped_reads": "nonsense"}, "fault or zeros"),
        ({"stage": 1}, "fleet"),
        ({"name": ""}, "empty"),
        ({"capacity": 1}, "below one page"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, object], words: str) -> None:
    more = {"pages": 2, "device": "cpu", "name": "wrong", **settings}
    if "capacity" in settings and "pages" not in settings:
        del more["pages"]
    with pytest.raises(tidekv.BadArgument, match=words):
        Pool(LAYOUT, **more)  # type: ignore[arg-type]


def test_counts_that_are_no_counts() -> None:
    with Pool(LAYOUT, device="cpu", pages=2, name="counts") as pool:
        assert pool.alloc(0) == [] and pool.try_alloc(0) == []
        for wrong in (-1, 1 << 40):
            with pytest.raises(tidekv.BadArgument, match="whole number"):
                pool.alloc(wrong)


def test_numbers_that_no_memory_could_hold_are_refused_before_any_is_taken() -> None:
    """In a process of its own: the end of it is what this is about."""
    run_script(
        """
        import sys
        import tidekv

        def refused(kind, call, *arguments, **more):
            try:
                call(*arguments, **more)
            except kind:
                return
            raise AssertionError(f"{call} did not raise {kind}")

        most = 2**32 - 1
        layout = tidekv.Layout.heads(2, 2, 32, dtype="float16", block_tokens=4, chunk_bytes=16384)
        region = tidekv.Region("cpu", pages=2, chunk_bytes=4096)
        region.map([0])
        for size in (4097, 1 << 50, 2**63 - 1):
            refused(tidekv.Unmapped, region.read, 0, size)
        refused(tidekv.Unmapped, region.read, 4095, 2)
        assert region.read(0, 4096) == bytes(4096)
        with tidekv.Pool(layout, device="cpu", pages=2, name="numbers") as pool:
            refused(tidekv.NeverFits, pool.alloc, most)
            refused(tidekv.NeverFits, pool.alloc, most, wait=1e300)
            assert pool.try_alloc(most) is None and not pool.try_reserve(most)
            refused(tidekv.NeverFits, pool.reserve, most)
            refused(tidekv.BadArgument, pool.alloc_reserved, most)
            assert pool.snapshot()["allocated_blocks"] == pool.reserved() == 0
            # For ever: as long as anybody waits.
            for wait in (sys.maxsize, float("inf"), 1e300):
                pool.free(pool.alloc(pool.geometry.blocks_per_page, wait=wait))
                pool.trim()
            refused(tidekv.BadArgument, pool.alloc, 1 << 10, wait=float("nan"))
            table = tidekv.BlockTable(pool.geometry)
            assert table.try_alloc(most) is None and table.claim(most) is None
            assert table.retire(most) == []
        with tidekv.Pool(layout, device="cpu", pages=2, name="patient", wait=sys.maxsize, decay=float("inf")) as pool:
            pool.free(pool.alloc(pool.geometry.blocks_per_page))
        """
    )


def test_a_machine_without_a_gpu_says_so() -> None:
    if tidekv._native.device_count() > 0:
        pytest.skip("SKIPPED: there is a GPU")
    with pytest.raises(tidekv.Unavailable, match="cuda"):
        Pool(LAYOUT, device="cuda:0", pages=2, name="no-gpu")
    with Pool(LAYOUT, pages=2, name="auto") as pool:
        assert pool.device == "cpu"


def test_what_is_open_at_the_end_is_closed(runtime_dir: Path) -> None:
    """A pool that somebody forgot, even in a cycle, leaves no segment."""
    run_script(
        """
        import tidekv
        layout = tidekv.Layout.heads(2, 2, 32, chunk_bytes=16384)
        class Engine: pass
        engine = Engine()
        engine.pool, engine.me = tidekv.Pool(layout, device="cpu", pages=2, name="forgotten"), engine
        engine.pool.alloc(2)
        """
    )
    assert not (runtime_dir / "forgotten").exists()


def test_importing_needs_neither_numpy_nor_torch() -> None:
    run_script(
        """
        import sys
        sys.modules["numpy"] = sys.modules["torch"] = None
        import tidekv
        pool = tidekv.Pool(tidekv.Layout.heads(1, 1, 64, dtype="float16"), device="cpu", pages=1, name="bare")
        block, = pool.alloc(1)
        pool.write_block(block, 0, True, bytes(range(256)) * 8)
        assert pool.read_block(block, 0, True) == bytes(range(256)) * 8
        for ask in (pool.tensors, pool.arrays):
            try:
                ask()
            except tidekv.Unavailable as error:
                assert "not installed" in str(error)
            else:
                raise AssertionError("no error")
        """
    )


def run_script(text: str) -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
