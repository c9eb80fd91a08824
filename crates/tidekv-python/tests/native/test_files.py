"""Arenas, segments, names and tools: what needs no pool."""

from __future__ import annotations

import struct
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import tidekv
from tidekv import Arena, Layout, Pool, _native


def test_blocks_of_an_arena_cross_processes() -> None:
    numpy = pytest.importorskip("numpy")
    arena = Arena("crossed", segment_bytes=1 << 20, limit_bytes=4 << 20)
    block = arena.alloc(10_000)
    assert arena.nbytes(block) >= 10_000
    arena.write(block, b"hello", offset=100)
    numpy.from_dlpack(arena.view(block))[105:111] = list(b" world")
    arena.share(block)
    script = (
        "import sys, tidekv\n"
        "arena, block = tidekv.Arena('crossed', create=False), int(sys.argv[1])\n"
        "arena.retain(block)\n"
        "sys.stdout.buffer.write(arena.read(block, 100, 11))\n"
        "arena.write(block, b'seen', 100)\n"
        "arena.release(block)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(block)], capture_output=True, timeout=120)
    assert done.stdout == b"hello world", done.stderr.decode()
    assert arena.read(block, 100, 4) == b"seen"
    arena.free(block)
    for stale in (arena.free, arena.read, arena.view):
        with pytest.raises(tidekv.StaleHandle) as caught:
            stale(block)
        assert caught.value.handle == block
    assert arena.verify()["problems"] == 0 and arena.verify()["live_blocks"] == 0
    arena.close()
    assert Arena.names() == ["crossed"] and Arena.unlink("crossed") and not Arena.unlink("crossed")


def test_arenas_refuse_with_reasons() -> None:
    with pytest.raises(tidekv.FileProblem, match="no arena"):
        Arena("absent", create=False)
    with pytest.raises(tidekv.BadArgument):
        Arena("no/such/name")
    with pytest.raises(tidekv.BadArgument):
        Arena("odd", segment_bytes=12345)
    arena = Arena("small", segment_bytes=1 << 20, limit_bytes=1 << 20)
    with pytest.raises(tidekv.BadArgument, match="larger segments"):
        arena.alloc(2 << 20)
    blocks = [arena.alloc(1 << 19)]
    with pytest.raises(tidekv.OutOfMemory) as caught:
        while True:
            blocks.append(arena.alloc(1 << 19))
    assert caught.value.needed_bytes == 1 << 19 and isinstance(caught.value, MemoryError)
    with pytest.raises(tidekv.BadArgument):
        arena.read(blocks[0], 0, 1 << 40)
    with pytest.raises(tidekv.StaleHandle):
        arena.free(0)
    arena.close()
    with pytest.raises(tidekv.Closed):
        arena.alloc(1)
    Arena.unlink("small")


def test_a_segment_has_kvcacheds_bytes(runtime_dir: Path) -> None:
    _native.segment_create("plain", 5 << 30)
    path = Path(_native.segment_path("plain"))
    assert path == runtime_dir / "plain" and path.read_bytes() == struct.pack("3q", 5 << 30, 0, 0)
    _native.segment_set_usage("plain", 7, 9)
    assert _native.segment_read("plain") == (5 << 30, 7, 9) == _native.segment_read(str(path))
    assert _native.segment_set_limit("plain", 6 << 30)
    assert struct.unpack("3q", path.read_bytes()) == (6 << 30, 7, 9)
    assert _native.segment_names() == ["plain"] and not _native.segment_owned("plain")
    assert not _native.segment_set_limit("absent", 1) and _native.segment_read("absent") is None
    assert _native.segment_delete("plain") and not _native.segment_delete("plain")
    for wrong in ("", "../up", "a b"):
        with pytest.raises(tidekv.BadArgument):
            _native.segment_read(wrong)


def test_a_pools_own_segment_is_its_own() -> None:
    layout = Layout.heads(2, 2, 32, chunk_bytes=16384)
    with Pool(layout, device="cpu", pages=4, name="own") as pool:
        for write in [lambda: _native.segment_create("own", 1), lambda: _native.segment_set_usage("own", 1, 1)]:
            with pytest.raises(tidekv.FileProblem, match="alive"):
                write()
        page = pool.geometry.page_bytes
        assert _native.segment_set_limit("own", 2 * page)
        # Said in the ledger, so the next order from inside is a later one.
        assert pool.resize(3 * page)["revision"] >= 2


def test_names_are_kvcacheds() -> None:
    assert _native.sanitise_name("my pool/1") == "my-pool-1"
    assert len(_native.sanitise_name("x" * 100)) == 64
    assert _native.default_pool_name("vLLM").startswith("kvcached_vLLM_")
    digits = uuid.uuid5(uuid.NAMESPACE_DNS, "llama").hex[:8]
    assert _native.socket_path("llama", 3, stage=2, socket_root="/x") == f"/x/kvcached-tp-llama-{digits}/pp2/w3.sock"
    assert _native.socket_dir("llama", socket_root="/x") == f"/x/kvcached-tp-llama-{digits}"
    with pytest.raises(tidekv.FileProblem, match="107"):
        _native.socket_path("x" * 64, 0, socket_root="/" + "y" * 60)


def test_small_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _native.parse_size("1.5GiB") == 3 << 29
    with pytest.raises(tidekv.BadArgument):
        _native.parse_size("lots")
    assert _native.group_by_page([0, 5, 1, 4], 1024, 4096) == {0: [0, 1], 1: [5, 4]}
    monkeypatch.setenv("KVCACHED_IPC_TIMEOUT", "2.5")
    assert _native.ipc_timeout() == 2.5
    monkeypatch.setenv("KVCACHED_IPC_TIMEOUT", "0")
    assert _native.ipc_timeout() is None
    free, total = _native.device_memory("cpu")
    assert 0 < free <= total
    assert _native.STRATEGIES[0] == "seq" and tidekv.__version__


def tool(*words: str) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).parent / words[0]
    return subprocess.run([str(script), *words[1:]], capture_output=True, text=True, timeout=300)


def test_the_tools_are_the_rust_tools() -> None:
    assert tool("kvctl", "list").stdout.strip() == "No active KVCached segments found."
    layout = Layout.heads(2, 2, 32, chunk_bytes=16384)
    with Pool(layout, device="cpu", pages=4, name="listed") as pool:
        assert "listed" in tool("kvctl", "list").stdout
        # The prompt starts kvctl once more for every line.
        shell = subprocess.run([str(Path(sys.executable).parent / "kvctl"), "shell"], input="list --json\n",
                               capture_output=True, text=True, timeout=300)
        assert '"listed"' in shell.stdout, shell.stderr
        assert tool("kvctl", "limit", "listed", str(pool.geometry.page_bytes)).returncode == 0
    assert tool("kvctl", "limit", "absent", "1G").returncode == 1
    assert tool("kvctl", "limit", "absent").returncode == 2
    assert tool("kvtop", "--help").returncode == 0
    assert _native.run_tool("kvctl", ["limit", "absent", "1G"]) == 1
    with pytest.raises(tidekv.BadArgument):
        _native.run_tool("kvmade-up", [])  # type: ignore[arg-type]


def test_kvbench_starts_its_own_workers() -> None:
    done = tool("kvbench", "tp-ipc", "--quick", "--noop", "--backend", "host", "--tp-size", "2", "--iters", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert '"map_us"' in done.stdout
