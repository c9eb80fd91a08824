"""Tensors over address space: bytes, offsets, and everything that must not half-happen."""

from __future__ import annotations

from typing import Any

import pytest
from kvcached import vmm_ops
from tidekv import TidekvError

PAGE = 2 << 20
LAYERS = 2


def offset(page: int, contiguous: bool) -> int:
    return page * PAGE * LAYERS * 2 if contiguous else page * PAGE


def test_one_tensor_or_one_for_each_layer(tensors: Any, contiguous: bool) -> None:
    made = tensors(4, contiguous)
    assert len(made) == (1 if contiguous else LAYERS)
    assert sum(tensor.nbytes for tensor in made) == 4 * PAGE * LAYERS * 2


@pytest.mark.parametrize(("size", "name"), [(1, "int8"), (2, "int16"), (4, "int32"), (8, "int64")])
def test_the_type_follows_from_the_size(size: int, name: str) -> None:
    vmm_ops.init_kvcached("cpu")
    (tensor,) = vmm_ops.create_kv_tensors(2 * PAGE, size, "cpu", 1)
    assert str(tensor.dtype).removeprefix("torch.") == name
    assert tensor.shape == (2 * PAGE // size,)


def test_bytes_survive_in_mapped_pages_and_are_blank_after_a_remap(tensors: Any, contiguous: bool) -> None:
    made = tensors(4, contiguous)
    places = [offset(page, contiguous) for page in (1, 3)]
    assert vmm_ops.map_to_kv_tensors(places) is True
    for number, tensor in enumerate(made):
        for place in places:
            # The last byte of a page's part in this tensor, and the first of it.
            tensor[place], tensor[place + PAGE - 1] = 10 + number, 20 + number
    for number, tensor in enumerate(made):
        for place in places:
            assert (int(tensor[place]), int(tensor[place + PAGE - 1])) == (10 + number, 20 + number)
    assert vmm_ops.unmap_from_kv_tensors(places[:1]) is True
    assert vmm_ops.map_to_kv_tensors(places[:1]) is True
    assert int(made[0][places[0]]) == 0
    assert int(made[0][places[1]]) == 10


def test_values_of_a_layer_lie_behind_its_keys(tensors: Any) -> None:
    pages = 3
    (first, second) = tensors(pages, contiguous=False)
    vmm_ops.map_to_kv_tensors([offset(1, False)])
    for tensor in (first, second):
        tensor[PAGE] = 1  # K of page 1
        tensor[pages * PAGE + PAGE] = 2  # V of page 1
        assert int(tensor[PAGE]) == 1


def test_a_batch_is_mapped_whole_or_not_at_all(tensors: Any, contiguous: bool) -> None:
    from kvcached import _runtime

    tensors(4, contiguous)
    vmm_ops.map_to_kv_tensors([offset(2, contiguous)])
    with pytest.raises(TidekvError):
        vmm_ops.map_to_kv_tensors([offset(0, contiguous), offset(2, contiguous)])
    region = _runtime.region(0)
    assert [region.is_mapped(page) for page in range(4)] == [False, False, True, False]


@pytest.mark.parametrize("bad", [-1, 1, PAGE // 2, 400 * PAGE])
def test_offsets_between_or_outside_pages_are_refused(tensors: Any, bad: int) -> None:
    tensors(4)
    with pytest.raises(ValueError):
        vmm_ops.map_to_kv_tensors([bad])


def test_groups_are_apart(tensors: Any) -> None:
    tensors(2, group=0)
    tensors(2, group=7)
    assert vmm_ops.kv_tensors_created() and vmm_ops.kv_tensors_created(7) and not vmm_ops.kv_tensors_created(1)
    vmm_ops.map_to_kv_tensors([0], group_id=7)
    vmm_ops.map_to_kv_tensors([0])
    vmm_ops.unmap_from_kv_tensors([0], group_id=7)
    with pytest.raises(TidekvError):
        vmm_ops.unmap_from_kv_tensors([0], group_id=7)


def test_a_unified_pool_has_one_buffer(contiguous: bool) -> None:
    from kvcached import _runtime

    vmm_ops.init_kvcached("cpu", PAGE, contiguous)
    vmm_ops.create_kv_tensors(4 * PAGE, 1, "cpu", LAYERS, num_kv_buffers=2, unified_pool=True)
    assert (_runtime.region(0).chunks, _runtime.region(0).page_count) == (LAYERS, 4)


def test_out_of_memory_is_an_exception_and_the_process_lives(python: Any) -> None:
    said = python(
        """
from kvcached import vmm_ops
from kvcached.kv_cache_manager import KVCacheManager
vmm_ops.init_kvcached("cpu")
vmm_ops.create_kv_tensors(64 << 21 << 1, 1, "cpu", 2)
manager = KVCacheManager(64 * 16, 16, (2 << 20) // 16 // 16, 2)
held = []
while (blocks := manager.alloc(16)) is not None:
    held.append(blocks)
print(len(held), manager.alloc(16))
manager.free(held.pop())
print(len(manager.alloc(16)))
""",
        KVCACHED_HOST_BUDGET="32M",
        KVCACHED_PAGE_PREALLOC_ENABLED="false",
    )
    assert said.stdout == "4 None\n16\n", said.stdout + said.stderr


def test_without_torch_tensors_on_a_gpu_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from kvcached import _runtime

    class OnGpu:
        device = "cuda:0"

        def view(self, *_: Any, **__: Any) -> None: ...

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="install torch"):
        _runtime.tensor(OnGpu(), 2, 0, 4)  # type: ignore[arg-type]
