"""What kvcached gets wrong, as tests: one for each row that Python can reach. The ids are those of the table in
docs/python-migration.md; rows about drivers, ledgers and processes are tests of the Rust crates
(crates/tidekv-pool/tests/weaknesses.rs)."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from kvcached import _runtime, tp_ipc_util, vmm_ops
from kvcached.cli.utils import delete_kv_cache_segment, get_kv_cache_limit, update_kv_cache_limit
from kvcached.kv_cache_manager import KVCacheManager
from tidekv import NotLeased, TidekvError

PAGE = 2 << 20
LAYERS = 2
BUNDLE = PAGE * LAYERS * 2


def test_w2_two_engines_never_both_get_the_last_page(python: Any) -> None:
    """Two processes take all they can from one budget of 8 pages: together they get 8."""
    program = """
import sys
from kvcached import vmm_ops
from kvcached.kv_cache_manager import KVCacheManager
vmm_ops.init_kvcached("cpu")
vmm_ops.create_kv_tensors(16 << 21 << 1, 1, "cpu", 2)
manager = KVCacheManager(16 * 16, 16, (2 << 20) // 256, 2)
pages = 0
while manager.alloc(16) is not None:
    pages += 1
print(pages, flush=True)
sys.stdin.read()
"""
    import subprocess
    import sys

    environment = {**os.environ, "KVCACHED_HOST_BUDGET": "64M", "KVCACHED_PAGE_PREALLOC_ENABLED": "false"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environment, "KVCACHED_IPC_NAME": f"engine{number}"},
        )
        for number in range(2)
    ]
    try:
        pages = [int(process.stdout.readline()) for process in processes if process.stdout is not None]
        assert sum(pages) == 8, pages
    finally:
        for process in processes:
            process.communicate(timeout=60)


def test_w3_mapping_a_page_twice_is_an_error_and_changes_nothing(tensors: Any) -> None:
    tensors(4)
    vmm_ops.map_to_kv_tensors([0])
    with pytest.raises(TidekvError):
        vmm_ops.map_to_kv_tensors([BUNDLE, 0])
    assert _runtime.region(0).mapped_pages == 1


def test_w4_shrink_and_grow_hand_out_no_page_twice(manager: Any, eventually: Any) -> None:
    made = manager(10, 16)
    for pages in (8, 10, 3, 10):
        eventually(lambda pages=pages: made.resize(pages * PAGE))
        blocks = eventually(lambda pages=pages: made.alloc(pages * 16))
        assert sorted(blocks) == sorted(set(blocks)) and max(blocks) < made.num_blocks
        assert made.alloc(1) is None
        made.free(blocks)
    assert made.resize(1000 * PAGE) is True
    assert made.alloc(10 * 16 + 1) is None, "a limit above the address space does not make more of it"


def test_w5_groups_have_segments_of_their_own(manager: Any, eventually: Any) -> None:
    first, second = manager(8, 16), manager(2, 16, group=1)
    words = [get_kv_cache_limit(name) for name in ("contract", "contract_g1")]
    assert [word.total_size for word in words if word is not None] == [8 * BUNDLE, 2 * BUNDLE]
    second._slot.close()
    assert get_kv_cache_limit("contract_g1") is None and get_kv_cache_limit("contract") is not None
    assert len(eventually(lambda: first.alloc(128))) == 128


@pytest.mark.parametrize("deed", ["map", "unmap"])
def test_w6_orders_name_their_stage_and_group(monkeypatch: pytest.MonkeyPatch, deed: str) -> None:
    """A callback for one direction leaves the other to the messages, which must say whom and what they are for."""
    orders = []
    name = {"map": "broadcast_map_to_kv_tensors", "unmap": "broadcast_unmap_from_kv_tensors"}[deed]
    monkeypatch.setattr(
        tp_ipc_util, name, lambda size, offsets, pp_rank=0, group_id=0: orders.append((size, offsets, pp_rank, group_id))
    )
    made = KVCacheManager(16, 16, PAGE // 256, LAYERS, world_size=2, pp_rank=1, group_id=1000)
    other = {"map": "unmap", "unmap": "map"}[deed]
    getattr(made.page_allocator, f"set_broadcast_{other}_callback")(lambda size, offsets: None)
    made.free(made.alloc(1))
    made.trim()
    assert orders == [(2, [0], 1, 1000)]


@pytest.mark.parametrize("prealloc", ["true", "false"])
def test_w7_an_idle_engine_obeys_limits_down_to_zero_and_back(python: Any, prealloc: str) -> None:
    said = python(
        """
import sys, threading, time
from kvcached import _runtime, vmm_ops
from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit
from kvcached.kv_cache_manager import KVCacheManager
vmm_ops.init_kvcached("cpu")
vmm_ops.create_kv_tensors(8 << 21 << 1, 1, "cpu", 2)
manager = KVCacheManager(8 * 16, 16, (2 << 20) // 256, 2)
manager.free(manager.alloc(128))
def until(ask):
    end = time.monotonic() + 30
    while not ask():
        assert time.monotonic() < end, manager.memory_limit_state()
        threading.Event().wait(0.005)
update_kv_cache_limit("idle", 0)
until(lambda: _runtime.region(0).mapped_pages == 0)
assert manager.alloc(1) is None
update_kv_cache_limit("idle", 8 << 23)
until(lambda: manager.alloc(16))
print("obeyed")
""",
        KVCACHED_PAGE_PREALLOC_ENABLED=prealloc,
        KVCACHED_IPC_NAME="idle",
    )
    assert said.stdout.splitlines()[-1:] == ["obeyed"], said.stdout + said.stderr


def test_w7_kvctl_and_revisions_are_one_order(manager: Any, eventually: Any) -> None:
    made = manager(8, 16)
    assert made.set_memory_limit(4 * BUNDLE, revision=5)["status"] == "applied"
    words = get_kv_cache_limit("contract")
    assert words is not None and words.total_size == 4 * BUNDLE
    update_kv_cache_limit("contract", 6 * BUNDLE)
    eventually(lambda: made.memory_limit_state()["limit_bytes"] == 6 * BUNDLE)
    assert made.memory_limit_state()["revision"] > 5
    assert made.set_memory_limit(BUNDLE, revision=5)["status"] == "stale"


def test_w8_a_name_that_a_living_pool_has_is_not_taken_from_it(manager: Any, python: Any) -> None:
    made = manager(8, 16)
    before = get_kv_cache_limit("contract")
    said = python(
        """
from kvcached import vmm_ops
from kvcached.kv_cache_manager import KVCacheManager
vmm_ops.init_kvcached("cpu")
vmm_ops.create_kv_tensors(8 << 21, 1, "cpu", 2)
print(KVCacheManager(2 * 16, 16, (2 << 20) // 256, 2).memory_limit_state()["pool_name"])
"""
    )
    assert said.stdout.startswith("contract") and said.stdout != "contract\n", said.stdout + said.stderr
    after = get_kv_cache_limit("contract")
    assert before is not None and after is not None and after.total_size == before.total_size
    assert made.memory_limit_state()["pool_name"] == "contract"


def test_w9_a_deleted_segment_comes_back_with_its_limit(manager: Any, eventually: Any) -> None:
    made = manager(8, 16)
    made.resize(4 * PAGE)
    assert delete_kv_cache_segment("contract")
    eventually(lambda: get_kv_cache_limit("contract") is not None)
    words = get_kv_cache_limit("contract")
    assert words is not None and words.total_size == 4 * BUNDLE


def test_w17_pages_that_cannot_be_unmapped_are_not_lost(tensors: Any) -> None:
    tensors(4)
    made = KVCacheManager(4 * 16, 16, PAGE // 256, LAYERS)
    stuck = True

    def unmap(size: int, offsets: list[int]) -> None:
        if stuck:
            raise OSError("the device is busy")

    made.page_allocator.set_broadcast_map_callback(lambda size, offsets: None)
    made.page_allocator.set_broadcast_unmap_callback(unmap)
    made.free(made.alloc(64))
    made.trim()
    stuck = False
    made.trim()
    blocks = made.alloc(64)
    assert blocks is not None and len(set(blocks)) == 64


def test_w18_a_double_free_is_named_and_changes_nothing(manager: Any) -> None:
    made = manager(4, 16)
    kept, freed = made.alloc(8), made.alloc(8)
    made.free(freed)
    for bad in ([*kept, freed[0]], [kept[0], kept[0]], [10_000], [-1]):
        with pytest.raises(ValueError):
            made.free(bad)
    with pytest.raises(NotLeased) as caught:
        made.free(freed[:1])
    assert caught.value.block == freed[0]
    made.free(kept)


def test_w19_waiting_for_tensors_is_bounded_and_the_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcached import _opening

    monkeypatch.setattr(_opening, "TENSOR_PATIENCE_S", 0.05)
    made = KVCacheManager(64, 16, PAGE // 256, LAYERS, world_size=2, reserve_null_block=True)
    with pytest.raises(RuntimeError, match=r"not all 2 workers.*w0\.sock"):
        made.alloc(1)
    with pytest.raises(RuntimeError):
        _ = made.null_block


def test_w21_a_stray_write_faults_instead_of_landing_elsewhere(python: Any) -> None:
    said = python(
        """
from kvcached import vmm_ops
vmm_ops.init_kvcached("cpu")
(tensor,) = vmm_ops.create_kv_tensors(8 << 21 << 1, 1, "cpu", 2)
vmm_ops.map_to_kv_tensors([0])
tensor[5] = 1
print("mapped", flush=True)
tensor[3 << 23] = 1
print("aliased")
"""
    )
    assert said.stdout == "mapped\n" and said.returncode < 0


def test_w24_operators_need_no_torch(python: Any) -> None:
    said = python("import sys; sys.modules['torch'] = None\nfrom kvcached.cli import kvctl\nsys.exit(kvctl.cmd_list())")
    assert said.returncode == 0, said.stderr


def test_callbacks_run_on_the_callers_thread_alone(tensors: Any) -> None:
    """Issue #371 there: the prealloc thread waits for the interpreter, which the caller holds while it waits for pages."""
    tensors(8)
    made = KVCacheManager(8 * 16, 16, PAGE // 256, LAYERS)
    threads = set()
    made.page_allocator.set_broadcast_map_callback(lambda size, offsets: threads.add(threading.current_thread()))
    made.page_allocator.set_broadcast_unmap_callback(lambda size, offsets: threads.add(threading.current_thread()))
    before = threading.active_count()
    for _ in range(20):
        made.free(made.alloc(100))
    made.trim()
    assert threads == {threading.current_thread()} and threading.active_count() == before
