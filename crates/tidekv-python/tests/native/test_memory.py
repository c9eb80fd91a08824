"""Tensors over a reservation: no copies, lifetimes, and what is refused. numpy stands for every DLPack consumer."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import tidekv
from tidekv import Layout, Pool, Region

numpy = pytest.importorskip("numpy")

PAGE = 1 << 16


def resident_file_bytes() -> int:
    """Memory behind this process's memory files, as the kernel counts it."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:tidekv" in str(link.readlink()):
                total += link.stat().st_blocks * 512
        except OSError:
            continue
    return total


def is_address_taken(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return True
    return False


def test_a_view_is_the_memory_itself() -> None:
    region = Region("cpu", pages=8, chunk_bytes=PAGE)
    region.map([2])
    array = numpy.from_dlpack(region.view("int32", (PAGE // 4,), offset=2 * PAGE))
    assert array.ctypes.data == region.base_address + 2 * PAGE and array.flags.writeable
    array[:] = 7
    assert region.read(2 * PAGE, 8) == b"\7\0\0\0\7\0\0\0"
    region.write(2 * PAGE, b"\1\0\0\0")
    assert array[0] == 1


def test_memory_comes_and_goes_under_a_tensor_that_stays() -> None:
    before = resident_file_bytes()
    region = Region("cpu", pages=16, chunk_bytes=PAGE)
    array = numpy.from_dlpack(region.view("uint8", (region.nbytes,)))
    for turn in range(3):
        region.map([1, 5])
        array[PAGE : 2 * PAGE] = turn + 1
        assert resident_file_bytes() - before == 2 * PAGE
        region.unmap([1, 5])
        assert resident_file_bytes() == before
        region.map([1])
        assert not array[PAGE : 2 * PAGE].any(), "new memory is blank"
        region.unmap([1])


def test_addresses_outlive_the_region_and_the_pool_but_memory_does_not() -> None:
    before = resident_file_bytes()
    layout = Layout.heads(2, 2, 32, dtype="float32", block_tokens=4, chunk_bytes=PAGE)
    pool = Pool(layout, device="cpu", pages=4, name="outlived")
    block = pool.alloc(1)[0]
    arrays = pool.arrays()
    arrays[0].key[block] = 1.0
    address = arrays[1].value.ctypes.data
    pool.close()
    assert is_address_taken(address), "nobody else may get addresses that a tensor still knows"
    assert resident_file_bytes() == before, "the memory is back, tensors or not"
    del arrays, pool
    gc.collect()
    assert not is_address_taken(address)


@pytest.mark.parametrize("max_version", [None, (0, 8), (1, 0), (1, 3)])
def test_capsules_that_nobody_takes_give_back_what_they_keep(max_version: Any) -> None:
    region = Region("cpu", pages=2, chunk_bytes=PAGE)
    address = region.base_address
    capsule = region.view("uint8", (PAGE,)).__dlpack__(max_version=max_version)
    wanted = "dltensor_versioned" if max_version and max_version[0] >= 1 else "dltensor"
    ctypes.pythonapi.PyCapsule_GetName.restype = ctypes.c_char_p
    ctypes.pythonapi.PyCapsule_GetName.argtypes = [ctypes.py_object]
    assert ctypes.pythonapi.PyCapsule_GetName(capsule) == wanted.encode()
    del region
    gc.collect()
    assert is_address_taken(address)
    del capsule
    gc.collect()
    assert not is_address_taken(address)


def test_the_last_tensor_may_end_on_another_thread() -> None:
    region = Region("cpu", pages=2, chunk_bytes=PAGE)
    address = region.base_address
    kept = [numpy.from_dlpack(region.view("uint8", (PAGE,)))]
    del region
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert not is_address_taken(address)


def test_the_old_capsule_is_read_only_in_numpy_and_the_new_one_is_not() -> None:
    region = Region("cpu", pages=1, chunk_bytes=PAGE)

    class Old:
        def __init__(self, view: tidekv.View) -> None:
            self.view = view

        def __dlpack__(self, **_: Any) -> Any:
            return self.view.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.view.__dlpack_device__()

    view = region.view("uint8", (16,))
    assert view.__dlpack_device__() == (1, 0)
    assert not numpy.from_dlpack(Old(view)).flags.writeable
    assert numpy.from_dlpack(view).flags.writeable


def test_copies_and_other_devices_are_refused() -> None:
    view = Region("cpu", pages=1, chunk_bytes=PAGE).view("uint8", (16,))
    with pytest.raises(BufferError, match="without copying"):
        view.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="not moved"):
        view.__dlpack__(dl_device=(2, 0))


def test_views_cannot_leave_the_region() -> None:
    region = Region("cpu", pages=2, chunk_bytes=PAGE)
    for shape, more in [((2 * PAGE + 1,), {}), ((2,), {"offset": 2 * PAGE - 1}), ((2,), {"strides": (2 * PAGE,)}),
                        ((-1,), {}), ((1 << 62, 1 << 62), {})]:
        with pytest.raises(tidekv.BadArgument):
            region.view("uint8", shape, **more)
    with pytest.raises(tidekv.BadArgument, match="aligned"):
        region.view("int64", (1,), offset=4)
    strided = numpy.from_dlpack(region.view("int16", (3, 2), offset=8, strides=(10, 3)))
    assert strided.strides == (20, 6)


def test_a_checked_access_to_an_unmapped_block_is_an_error() -> None:
    layout = Layout.heads(2, 2, 32, dtype="float32", block_tokens=4, chunk_bytes=PAGE)
    with Pool(layout, device="cpu", pages=4, name="checked", reserve=(0, 1)) as pool:
        block = pool.alloc(1)[0]
        pool.block_view(block, 1, True)[...] = 2.5
        assert numpy.frombuffer(pool.read_block(block, 1, True), "float32").tolist() == [2.5] * (4 * 2 * 32)
        pool.free([block])
        pool.trim()
        for touch in [lambda: pool.block_view(block, 1), lambda: pool.read_block(block, 0),
                      lambda: pool.write_block(block, 0, False, bytes(4 * 2 * 32 * 4))]:
            with pytest.raises(tidekv.Unmapped) as caught:
                touch()
            assert caught.value.block == block and caught.value.end > caught.value.offset
        with pytest.raises(tidekv.BadArgument, match="whole block"):
            pool.write_block(block, 0, False, b"short")


def test_an_unchecked_access_ends_the_process_as_documented() -> None:
    """Not a feature: the documentation says so, and this holds it to its word."""
    script = """
        import numpy, tidekv
        region = tidekv.Region("cpu", pages=1, chunk_bytes=65536)
        numpy.from_dlpack(region.view("uint8", (1,)))[0] = 1
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=60)
    assert done.returncode == -11


def test_reads_of_unmapped_pages_are_zeros_where_asked_for() -> None:
    region = Region("cpu", pages=2, chunk_bytes=PAGE, unmapped_reads="zeros")
    assert not numpy.from_dlpack(region.view("uint8", (2 * PAGE,))).any()


@pytest.mark.parametrize("layout", ["slab", "per-layer", "interleaved"])
@pytest.mark.parametrize("kind", ["mha", "gqa", "mla", "bf16", "fp8"])
def test_every_block_of_every_layer_keeps_what_was_written_to_it(layout: str, kind: str) -> None:
    """Arrays against a dictionary, over blocks that are freed, trimmed and mapped again."""
    chunk = None if layout == "slab" else PAGE
    common: dict[str, Any] = {"layout": layout, "chunk_bytes": chunk, "block_tokens": 4}
    made = {
        "mha": lambda: Layout.heads(3, 4, 16, dtype="float32", **common),
        "gqa": lambda: Layout.heads(3, 2, 24, value_size=16, dtype="float16", **common),
        "mla": lambda: Layout.latent(3, 72, dtype="float16", **common),
        "bf16": lambda: Layout.heads(2, 2, 32, dtype="bfloat16", **common),
        "fp8": lambda: Layout.heads(2, 2, 32, dtype="float8_e4m3fn", **common),
    }[kind]()
    with Pool(made, device="cpu", pages=2, name="kept") as pool:
        for _ in range(2):
            blocks = pool.alloc(min(40, pool.geometry.block_count))
            arrays = pool.arrays()
            model: dict[tuple[int, int, int], int] = {}
            for number, (block, layer) in enumerate((b, la) for b in blocks for la in range(made.layers)):
                for side, array in enumerate(arrays[layer]):
                    if array is not None:
                        model[block, layer, side] = (number * 2 + side) % 101 + 1
                        array[block] = model[block, layer, side]
            for (block, layer, side), wanted in model.items():
                array = list(arrays[layer])[side]
                assert (array[block] == wanted).all()
                copied = numpy.frombuffer(pool.read_block(block, layer, bool(side)), array.dtype)
                assert (copied == wanted).all()
            assert arrays[0].key.dtype.name == {"bf16": "uint16", "fp8": "uint8", "mha": "float32"}.get(kind, "float16")
            assert (arrays[0].value is None) == (kind == "mla")
            pool.free(blocks)
            pool.trim()
