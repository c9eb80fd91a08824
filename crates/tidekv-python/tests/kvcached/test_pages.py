"""InternalPage against the dullest model, PageAllocator over real pages, and both under callbacks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from kvcached.vmm_ops import InternalPage, PageAllocator
from tidekv import NotLeased

PAGE = 2 << 20
LAYERS = 2

MIB = 1 << 20


def allocator(pages: int = 8, **kwargs: Any) -> PageAllocator:
    """Without prealloc, so that the pool's own thread has no page in its hands that a test asks for or counts."""
    return PageAllocator(LAYERS, pages * PAGE, PAGE, **{"enable_page_prealloc": False, **kwargs})


# ---- InternalPage


@pytest.mark.parametrize("block", [1, 7, 4096, 100_000, PAGE // 16, PAGE // 3, PAGE])
def test_blocks_that_straddle_pages_belong_to_none(block: int) -> None:
    for page in range(5):
        first, end = InternalPage.get_block_range(page, PAGE, block)
        inside = {number for number in (first - 1, first, end - 1, end)
                  if page * PAGE <= number * block and (number + 1) * block <= (page + 1) * PAGE}
        assert inside == {first, end - 1}
    assert InternalPage.get_num_blocks(PAGE, block) == PAGE // block


@pytest.mark.parametrize("seed", range(20))
def test_a_page_is_a_set_of_free_blocks(seed: int) -> None:
    rng = random.Random(seed)
    page_id, block = rng.randrange(9), rng.choice([PAGE // 16, PAGE // 7, 300_000])
    page = InternalPage(page_id, PAGE)
    page.init(block)
    every = set(range(*InternalPage.get_block_range(page_id, PAGE, block)))
    free, held = set(every), []
    for _ in range(200):
        if rng.random() < 0.5:
            count = rng.randrange(len(every) + 2)
            if count > len(free):
                with pytest.raises(RuntimeError, match="Not enough free blocks in page"):
                    page.alloc(count)
            else:
                taken = page.alloc(count)
                assert len(set(taken)) == count and set(taken) <= free
                free -= set(taken)
                held += taken
        elif held:
            given = rng.sample(held, rng.randrange(1, len(held) + 1))
            page.free_batch(given)
            free |= set(given)
            held = [block_id for block_id in held if block_id not in given]
        assert set(page.get_free_blocks()) == free
        assert (page.num_free_blocks(), page.empty(), page.full()) == (len(free), free == every, not free)


def test_pages_are_read_only_where_kvcacheds_are() -> None:
    page = InternalPage(3, PAGE)
    assert (page.page_id, page.page_size) == (3, PAGE)
    with pytest.raises(AttributeError):
        page.page_id = 4  # type: ignore[misc]


# ---- PageAllocator over tensors of this process


def test_pages_are_mapped_when_allocated(tensors: Any, contiguous: bool) -> None:
    from kvcached import _runtime

    tensors(8, contiguous)
    pages = allocator(contiguous_layout=contiguous)
    taken = [pages.alloc_page() for _ in range(3)]
    assert len({page.page_id for page in taken}) == 3
    assert all(isinstance(page, InternalPage) and page.page_size == PAGE for page in taken)
    assert all(_runtime.region(0).is_mapped(page.page_id) for page in taken)
    state = pages.get_page_state()
    assert (state["total_pages"], state["inuse_pages"], state["free_pages"]) == (8, 3, 5)
    pages.free_pages([page.page_id for page in taken])
    pages.trim()
    assert _runtime.region(0).mapped_pages == 0
    assert pages.get_num_inuse_pages() == pages.get_num_reserved_pages() == 0


def test_the_last_page_and_one_more(tensors: Any) -> None:
    tensors(3)
    pages = allocator(3)
    taken = [pages.alloc_page().page_id for _ in range(3)]
    with pytest.raises(RuntimeError, match="No free pages left"):
        pages.alloc_page()
    pages.free_page(taken[1])
    assert pages.alloc_page().page_id == taken[1]


def test_counts_before_there_are_tensors() -> None:
    pages = allocator(8)
    assert pages.get_num_total_pages() == pages.get_num_free_pages() == pages.get_avail_physical_pages() == 8
    assert pages.get_num_inuse_pages() == pages.get_num_reserved_pages() == 0
    with pytest.raises(RuntimeError, match="create_kv_tensors"):
        pages.resize(PAGE)


def test_resize_is_in_bytes_of_one_layers_buffer(tensors: Any) -> None:
    tensors(8)
    pages = allocator()
    assert pages.get_resize_target() == -1 and pages.check_and_get_resize_target(8 * PAGE) == -1
    assert pages.resize(4 * PAGE) is True
    assert (pages.get_num_total_pages(), pages.get_resize_target()) == (4, 4 * PAGE)
    assert pages.check_and_get_resize_target(8 * PAGE) == 4 * PAGE
    taken = [pages.alloc_page().page_id for _ in range(4)]
    assert pages.resize(2 * PAGE) is False
    pages.free_pages(taken)
    assert pages.resize(8 * PAGE) is True
    assert pages.get_num_free_pages() == 8


def test_blocks_are_grouped_by_page() -> None:
    pages = allocator()
    block = PAGE // 4
    assert [pages.get_page_id(number, block) for number in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert pages.group_indices_by_page([0, 5, 1, 11, 4], block) == {0: [0, 1], 1: [5, 4], 2: [11]}


@pytest.mark.parametrize("by_callbacks", [False, True])
def test_an_allocator_that_is_dropped_gives_its_pages_back(tensors: Any, by_callbacks: bool) -> None:
    """It is the only one of its group: the next one needs the place."""
    import gc

    from kvcached import _runtime
    from kvcached.cli.utils import get_kv_cache_limit

    tensors(4)
    region = _runtime.region(0)
    for _ in range(3):
        made = allocator(4, ipc_name="dropped")
        if by_callbacks:
            made.set_broadcast_map_callback(lambda size, offsets: None)
        assert len({made.alloc_page().page_id for _ in range(4)}) == 4
        assert get_kv_cache_limit("dropped") is not None
        del made
        gc.collect()
        assert get_kv_cache_limit("dropped") is None
        assert by_callbacks or region.mapped_pages == 0


# ---- under callbacks


class Recorder:
    """Stands for workers: which offsets have memory, and which calls fail."""

    def __init__(self) -> None:
        self.mapped: set[int] = set()
        self.fail_map = self.fail_unmap = False
        self.threads: set[int] = set()

    def map(self, world_size: int, offsets: list[int]) -> None:
        import threading

        self.threads.add(threading.get_ident())
        if self.fail_map:
            raise OSError("rank 1 is gone")
        assert world_size == 2 and not self.mapped & set(offsets)
        self.mapped |= set(offsets)

    def unmap(self, world_size: int, offsets: list[int]) -> None:
        if self.fail_unmap:
            raise OSError("rank 1 is gone")
        assert world_size == 2 and set(offsets) <= self.mapped
        self.mapped -= set(offsets)


def with_callbacks(pages: int = 8, **kwargs: Any) -> tuple[PageAllocator, Recorder]:
    made, workers = allocator(pages, world_size=2, ipc_name="callbacks", **kwargs), Recorder()
    made.set_broadcast_map_callback(workers.map)
    made.set_broadcast_unmap_callback(workers.unmap)
    return made, workers


@pytest.mark.parametrize("seed", range(10))
def test_callbacks_map_what_is_in_use_and_nothing_twice(seed: int) -> None:
    import threading

    from kvcached.utils import MAX_RESERVED_PAGES

    rng = random.Random(seed)
    pages, workers = with_callbacks(24)
    unit = PAGE * LAYERS * 2
    held: list[int] = []
    for _ in range(120):
        if rng.random() < 0.55 and len(held) < 24:
            page = pages.alloc_page().page_id
            assert page not in held
            held.append(page)
        elif held:
            given = rng.sample(held, rng.randrange(1, len(held) + 1))
            pages.free_pages(given)
            held = [page for page in held if page not in given]
        assert {page * unit for page in held} <= workers.mapped
        state = pages.get_page_state()
        assert state["inuse_pages"] == len(held)
        assert len(workers.mapped) == state["inuse_pages"] + state["reserved_pages"]
        assert state["reserved_pages"] <= MAX_RESERVED_PAGES
    assert workers.threads <= {threading.get_ident()}
    pages.free_pages(held)
    pages.trim()
    assert not workers.mapped


def test_a_callback_that_raises_changes_nothing() -> None:
    pages, workers = with_callbacks(4)
    workers.fail_map = True
    for _ in range(6):
        with pytest.raises(RuntimeError, match=r"Failed to map page \d+: rank 1 is gone"):
            pages.alloc_page()
    assert pages.get_page_state()["free_pages"] == 4
    workers.fail_map = False
    assert len({pages.alloc_page().page_id for _ in range(4)}) == 4


def test_callbacks_cannot_be_changed_under_pages_in_use() -> None:
    pages, workers = with_callbacks(4)
    pages.alloc_page()
    with pytest.raises(RuntimeError, match="in use"):
        pages.set_broadcast_map_callback(workers.map)
    with pytest.raises(TypeError, match="cannot be called"):
        pages.set_broadcast_map_callback(None)  # type: ignore[arg-type]


def test_a_limit_written_by_an_operator_is_carried_out_at_the_next_call() -> None:
    from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit

    pages, workers = with_callbacks(8)
    bundle = PAGE * LAYERS * 2
    taken = [pages.alloc_page().page_id for _ in range(6)]
    words = get_kv_cache_limit("callbacks")
    assert words is not None and (words.total_size, words.used_size) == (8 * bundle, 6 * bundle)
    update_kv_cache_limit("callbacks", 3 * bundle)
    pages.free_pages(taken[3:])
    assert len(workers.mapped) == 3
    with pytest.raises(RuntimeError, match="No free pages left"):
        pages.alloc_page()
    update_kv_cache_limit("callbacks", 8 * bundle)
    pages.alloc_page()


def test_a_segment_that_an_operator_deletes_costs_no_block_and_comes_back() -> None:
    from kvcached.cli.utils import delete_kv_cache_segment, get_kv_cache_limit

    pages, _ = with_callbacks(8)
    bundle = PAGE * LAYERS * 2
    taken = [pages.alloc_page().page_id]
    assert pages.resize(6 * PAGE)
    for act in (lambda: taken.append(pages.alloc_page().page_id), lambda: pages.free_page(taken.pop(0)), pages.trim):
        assert delete_kv_cache_segment("callbacks")
        act()
        words = get_kv_cache_limit("callbacks")
        assert words is not None and (words.total_size, words.used_size) == (6 * bundle, len(taken) * bundle)
    assert delete_kv_cache_segment("callbacks") and pages.resize(5 * PAGE)
    words = get_kv_cache_limit("callbacks")
    assert words is not None and words.total_size == 5 * bundle
    pages.free_pages(taken)
    assert pages.get_page_state()["inuse_pages"] == 0


def test_a_segment_that_cannot_be_written_is_late_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcached.cli.utils import get_kv_cache_limit
    from tidekv import FileProblem, _native

    def refuse(*_: Any) -> None:
        raise FileProblem("the lock is held")

    pages, workers = with_callbacks(8)
    pages.alloc_page()
    with monkeypatch.context() as patch:
        for name in ("segment_read", "segment_create", "segment_set_usage", "segment_set_limit"):
            patch.setattr(_native, name, refuse)
        pages.free_page(pages.alloc_page().page_id)
        pages.alloc_page()
        assert pages.resize(8 * PAGE) and pages.get_page_state()["inuse_pages"] == len(workers.mapped) == 2
    pages.trim()
    words = get_kv_cache_limit("callbacks")
    assert words is not None and words.used_size == 2 * PAGE * LAYERS * 2


def test_a_pool_that_is_closed_shows_itself_no_more() -> None:
    from kvcached import _opening
    from kvcached.cli.utils import get_kv_cache_limit

    pages, workers = with_callbacks(8)
    pages.alloc_page()
    (pool,) = [pages._open()]
    assert isinstance(pool, _opening.CallbackPool)
    pool.close()
    assert not workers.mapped and get_kv_cache_limit("callbacks") is None
    pages.resize(6 * PAGE)
    pages.get_page_state()
    pages.get_avail_physical_pages()
    assert pool.limit_state() and get_kv_cache_limit("callbacks") is None


def test_a_forked_child_that_ends_unmaps_nothing() -> None:
    import gc
    import os

    from kvcached.cli.utils import get_kv_cache_limit

    pages, workers = with_callbacks(8)
    pages.alloc_page()
    before = set(workers.mapped)
    child = os.fork()
    if child == 0:
        # What the callbacks do here they would do to the workers of the parent.
        del pages
        gc.collect()
        os._exit(0 if workers.mapped == before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get_kv_cache_limit("callbacks") is not None


def test_freeing_twice_is_found() -> None:
    pages, _ = with_callbacks(4)
    page = pages.alloc_page().page_id
    pages.free_page(page)
    with pytest.raises(NotLeased) as caught:
        pages.free_page(page)
    assert caught.value.block == page
