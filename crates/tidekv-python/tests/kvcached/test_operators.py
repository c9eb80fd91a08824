"""Segments, commands, registry, control and snapshots: what operators and exporters see."""

from __future__ import annotations

import gc
import json
import os
import struct
import threading
from dataclasses import fields
from typing import Any

import pytest
from kvcached import control, observability, pool_registry
from kvcached.cli import kvctl, kvtop
from kvcached.cli.utils import (
    MemInfoStruct,
    RwLockedShm,
    _format_size,
    delete_kv_cache_segment,
    get_ipc_name,
    get_ipc_path,
    get_kv_cache_limit,
    init_kv_cache_limit,
    update_kv_cache_limit,
)
from kvcached.mem_info_tracker import MemInfoTracker

PAGE = 2 << 20
BUNDLE = PAGE * 2 * 2


@pytest.fixture
def segment() -> Any:
    init_kv_cache_limit("by-hand", 1 << 30)
    yield "by-hand"
    delete_kv_cache_segment("by-hand")


def test_a_segment_is_24_bytes_of_three_native_integers(segment: str) -> None:
    path = get_ipc_path(segment)
    with open(path, "rb") as file:
        data = file.read()
    assert data == struct.pack("=3q", 1 << 30, 0, 0)
    assert MemInfoStruct.SHM_SIZE == 24 == os.path.getsize(path)
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_a_pools_segment_is_the_same_24_bytes(manager: Any) -> None:
    made = manager(8, 16)
    path = get_ipc_path("contract")
    with open(path, "rb") as file:
        total, used, prealloc = struct.unpack("=3q", file.read())
    assert (total, used) == (8 * BUNDLE, 0) and prealloc >= 0
    assert made.alloc(16) is not None


def test_names_and_paths() -> None:
    assert get_ipc_path("x") == os.path.join(os.environ["KVCACHED_RUNTIME_DIR"], "x")
    assert get_ipc_path("/a/b") == "/a/b" and get_ipc_name("/a/b") == "b"


def test_a_buffer_is_read_and_written_in_place() -> None:
    buffer = bytearray(24)
    MemInfoStruct(1, 2, 3).write_to_buffer(buffer)
    assert MemInfoStruct.from_buffer(buffer) == MemInfoStruct(1, 2, 3)


def test_a_locked_segment_is_written_at_the_end_of_the_context(segment: str) -> None:
    with RwLockedShm(segment, 24, RwLockedShm.WLOCK) as buffer:
        info = MemInfoStruct.from_buffer(buffer)
        info.used_size = 7
        info.write_to_buffer(buffer)
    with RwLockedShm(segment, 24, RwLockedShm.RLOCK) as buffer:
        assert MemInfoStruct.from_buffer(buffer) == MemInfoStruct(1 << 30, 7, 0)
    with pytest.raises(RuntimeError), RwLockedShm(segment, 24, RwLockedShm.WLOCK) as buffer:
        MemInfoStruct(0, 0, 0).write_to_buffer(buffer)
        raise RuntimeError("half-way")
    assert get_kv_cache_limit(segment) == MemInfoStruct(1 << 30, 7, 0)


def test_a_writer_waits_for_a_reader(segment: str) -> None:
    written = threading.Event()

    def write() -> None:
        with RwLockedShm(segment, 24, RwLockedShm.WLOCK):
            written.set()

    with RwLockedShm(segment, 24, RwLockedShm.RLOCK):
        writer = threading.Thread(target=write)
        writer.start()
        assert not written.wait(0.05)
    assert written.wait(30)
    writer.join()


def test_a_file_that_is_cut_short_is_an_error_and_not_a_signal(segment: str) -> None:
    os.truncate(get_ipc_path(segment), 5)
    with pytest.raises(ValueError, match="it is none"), RwLockedShm(segment, 24, RwLockedShm.RLOCK):
        pass
    assert get_kv_cache_limit(segment) is None
    os.unlink(get_ipc_path(segment))


def test_a_missing_segment_is_none() -> None:
    assert get_kv_cache_limit("nobody") is None and update_kv_cache_limit("nobody", 1) is None
    assert delete_kv_cache_segment("nobody") is False
    with pytest.raises(FileNotFoundError), RwLockedShm("nobody", 24, RwLockedShm.RLOCK):
        pass


def test_a_limit_is_written_with_kvcacheds_words(segment: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = update_kv_cache_limit(segment, 512 << 20)
    assert found is not None and found.total_size == 512 << 20
    assert capsys.readouterr().out == "Updated kv cache limit for by-hand to 512.00 MB (536870912 bytes)\n"
    with pytest.raises(ValueError):
        update_kv_cache_limit(segment, -1)


def test_sizes_as_people_read_them() -> None:
    assert [_format_size(size) for size in (0, 1023, 1 << 10, 1 << 30, 3 << 50)] == [
        "0.00 B", "1023.00 B", "1.00 KB", "1.00 GB", "3072.00 TB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("1k", 1 << 10), ("2KB", 2 << 10), ("1.5g", 3 << 29), ("3Mb", 3 << 20), ("7b", 7)]
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert kvctl._parse_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "lots", "1X"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        kvctl._parse_size(text)


def test_commands_answer_with_exit_codes(segment: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert kvctl.cmd_list(json_out=True) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [pool["limit_bytes"] for pool in listed if pool["ipc"] == segment] == [1 << 30]
    assert kvctl.cmd_limit(segment, "256M") == 0
    assert get_kv_cache_limit(segment) == MemInfoStruct(256 << 20, 0, 0)
    assert kvctl.cmd_limit(segment, "lots") == 2
    assert kvctl.cmd_limit("nobody", "1G") == 1
    assert segment in kvtop._detect_kvcache_ipc_names()
    assert kvctl.cmd_delete(segment) == 0 and kvctl.cmd_delete(segment) == 1


def test_w24_help_works(python: Any) -> None:
    said = python("import sys; sys.argv[1:] = ['--help']; from kvcached.cli import kvctl; sys.exit(kvctl.main())")
    assert said.returncode == 0 and "limit-percent" in said.stdout


def test_a_tracker_keeps_a_segment_for_as_long_as_it_lives() -> None:
    tracker = MemInfoTracker(8 * BUNDLE, group_id=2)
    assert tracker.ipc_name == "contract_g2"
    assert tracker.check_and_get_resize_target(2 * PAGE, 2) == 8 * PAGE
    assert tracker.check_and_get_resize_target(8 * PAGE, 2) is None
    tracker.update_memory_usage(5, 6)
    assert get_kv_cache_limit("contract_g2") == MemInfoStruct(8 * BUNDLE, 5, 6)
    update_kv_cache_limit("contract_g2", 2 * BUNDLE)
    assert tracker.check_and_get_resize_target(8 * PAGE, 2) == 2 * PAGE
    del tracker
    gc.collect()
    assert get_kv_cache_limit("contract_g2") is None


# ---- registry, control, snapshots


def test_the_registry_keeps_nothing_alive() -> None:
    class Manager:
        pass

    first, second = Manager(), Manager()
    pool_registry.register_kv_cache_pool(first, integration="vllm")
    pool_registry.register_kv_cache_pool(second)
    assert pool_registry.get_registered_kv_cache_pools() == [(first, "vllm"), (second, None)]
    assert pool_registry.get_registered_kv_cache_pools(integration="vllm") == [(first, "vllm")]
    del first
    gc.collect()
    assert pool_registry.get_registered_kv_cache_pools() == [(second, None)]
    pool_registry.clear_registered_kv_cache_pools(integration="vllm")
    assert len(pool_registry.get_registered_kv_cache_pools()) == 1
    pool_registry.clear_registered_kv_cache_pools()
    assert pool_registry.get_registered_kv_cache_pools() == []


def test_an_instances_limit_is_split_by_size(manager: Any, eventually: Any) -> None:
    large, small = manager(6, 16, pool_name="a"), manager(2, 16, group=1, pool_name="b")
    for made in (large, small):
        pool_registry.register_kv_cache_pool(made)
    answer = control.set_instance_memory_limit(4 * BUNDLE, revision=1)
    assert [pool["limit_bytes"] for pool in answer["pools"]] == [3 * BUNDLE, BUNDLE]
    assert (answer["status"], answer["effective_limit_bytes"]) == ("applied", 4 * BUNDLE)
    assert control.set_instance_memory_limit(8 * BUNDLE, revision=0)["status"] == "stale"
    assert control.set_instance_memory_limit(8 * BUNDLE, revision=1)["status"] == "conflict"
    eventually(lambda: large.alloc(48))
    eventually(lambda: small.alloc(16))
    answer = control.set_instance_memory_limit(2 * BUNDLE, revision=2)
    assert answer["status"] == "deferred" and answer["reason"] == "inuse_capacity_above_limit"


def test_without_pools_a_limit_is_unavailable() -> None:
    answer = control.set_instance_memory_limit(1, revision=1)
    assert (answer["status"], answer["reason"], answer["pools"]) == ("unavailable", "no_registered_kv_cache_pool", [])
    for bad in ({"limit_bytes": -1, "revision": 1}, {"limit_bytes": 1, "revision": -1}):
        with pytest.raises(ValueError):
            control.set_instance_memory_limit(**bad)


def test_snapshots_have_kvcacheds_fields(manager: Any, eventually: Any) -> None:
    assert observability.SCHEMA_VERSION == "kvcached.observability.v1"
    assert len(fields(observability.RuntimeSnapshot)) == 9 and len(fields(observability.KVCachePoolSnapshot)) == 29
    made = manager(8, 16, reserve_null_block=True, pool_name="p")
    pool_registry.register_kv_cache_pool(made, integration="vllm")
    blocks = made.alloc(20)
    eventually(lambda: made.available_size() == 107)
    (now,) = observability.get_registered_kv_cache_pool_snapshots(integration="vllm")
    assert (now.pool_name, now.integration, now.total_blocks) == ("p", "vllm", 128)
    assert now.available_blocks <= 107 and now.allocated_blocks in (20, 21) and now.inuse_pages == 2
    assert now.mapped_bytes == 2 * BUNDLE and now.virtual_total_bytes == 8 * BUNDLE
    assert now.total_pages == 8 == now.free_pages + now.inuse_pages
    assert now.resize_target_bytes == -1 and now.shrink_target_blocks is None and not now.in_shrink
    assert json.loads(json.dumps(made.observability_snapshot_dict()))["pool_type"] == "kv_cache"
    made.free(blocks)
    capabilities = observability.get_capabilities()
    assert capabilities["pool_snapshot_fields"][0] == "schema_version" and capabilities["features"]["read_only"]
