"""The balloon: blocks of vLLM's live pool that have no memory, held so that nobody gets them.

    BlockPool of vLLM (all blocks there are addresses for)
    +--------------------+------------------+----------------------------------+
    | used by requests   | free, or cached  | held by the balloon: no memory   |
    +--------------------+------------------+----------------------------------+
      <------ pages with memory ----------->  <------- pages without --------->

Blocks are taken as vLLM takes blocks for a prefix that was found (`touch`), after what is cached in them was evicted
(`evict_blocks`), and given back as a request gives them back (`free_blocks`): nothing of vLLM is replaced. `num_gpu_blocks`
of the pool is kept at what has memory, so that vLLM's own figure of usage and its resetting of the prefix cache stay right.

| page    | its blocks                                   | its memory            |
|---------|----------------------------------------------|-----------------------|
| out     | held                                         | none                  |
| in      | vLLM's                                       | mapped on every rank  |
| leaving | free ones are held, others when they are freed | mapped until all are  |

Not safe for threads: whoever calls it owns the block pool at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcached.integration.vllm.pages import PageMap

__all__ = ["Balloon", "PageFigures"]


@dataclass(frozen=True)
class PageFigures:
    """What stands in the way of taking a page, cheapest first when sorted."""

    used: int
    """Blocks that requests use."""
    cached: int
    """Free blocks with a prefix in them."""
    newest: int
    """Where the youngest of those stands in the order of eviction; 0 goes first."""
    page: int

    @property
    def key(self) -> tuple[int, int, int, int]:
        return self.used, self.cached, self.newest, self.page


class Balloon:
    """Which blocks are held, and why. `pages` that are in have memory; block 0 is vLLM's null block and always in."""

    def __init__(self, block_pool: Any, pages: PageMap) -> None:
        self.pages = pages
        self._pool = block_pool
        self._blocks: Sequence[Any] = block_pool.blocks
        self._total = len(self._blocks)
        self._in: set[int] = set()
        self._leaving: set[int] = set()
        self._held = bytearray(self._total)
        self._held_count = 0
        self._take(block for block in self._blocks if not block.is_null)

    # ---- what there is

    @property
    def held(self) -> int:
        """Blocks without memory, and those that wait for their page to be free."""
        return self._held_count

    @property
    def pages_in(self) -> int:
        """Pages with memory, those that are leaving included."""
        return len(self._in)

    @property
    def leaving(self) -> frozenset[int]:
        return frozenset(self._leaving)

    @property
    def free(self) -> int:
        """Blocks that vLLM may give to requests now."""
        return int(self._pool.get_num_free_blocks())

    @property
    def in_use(self) -> int:
        """Blocks that somebody but vLLM's free list and this balloon has; the null block is nobody's."""
        return self._total - 1 - self.free - self._held_count

    def has_memory(self, block: int) -> bool:
        return all(page in self._in for page in self.pages.pages_of(block))

    def free_before_cached(self, wanted: int) -> int:
        """How many of the next `wanted` blocks that vLLM would hand out have nothing cached in them."""
        count, block = 0, self._pool.free_block_queue.fake_free_list_head.next_free_block
        while count < wanted and block is not None and block.next_free_block is not None:
            if block.block_hash is not None:
                break
            count, block = count + 1, block.next_free_block
        return count

    # ---- pages come

    def put_in(self, pages: Iterable[int]) -> None:
        """These pages have memory on every rank: blocks that are now whole go to vLLM."""
        fresh = set(pages)
        self._in |= fresh
        self._release(fresh)

    def keep(self, pages: Iterable[int]) -> None:
        """These are not to leave after all."""
        kept = self._leaving.intersection(pages)
        self._leaving -= kept
        self._release(kept)

    # ---- pages go

    def figures(self) -> list[PageFigures]:
        """Every page that may be taken, cheapest first: nothing in it, then least cached and oldest, then least used."""
        place: dict[int, int] = {}
        for index, block in enumerate(self._pool.free_block_queue.get_all_free_blocks()):
            if block.block_hash is not None:
                place[block.block_id] = index
        watched = getattr(self._pool, "_reuse_watchers", {})
        found = []
        for page in self._in - self._leaving:
            members = self.pages.blocks_of(page)
            if members.start == 0:
                continue
            used = cached = newest = 0
            for block_id in members:
                if block_id in place:
                    cached, newest = cached + 1, max(newest, place[block_id])
                elif not self._held[block_id] and (self._blocks[block_id].ref_cnt or block_id in watched):
                    used += 1
            found.append(PageFigures(used, cached, newest, page))
        return sorted(found, key=lambda figures: figures.key)

    def start_leaving(self, pages: Iterable[int]) -> None:
        """No block of these pages is given out or found by its prefix any more."""
        chosen = self._in.intersection(pages)
        self._leaving |= chosen
        for page in chosen:
            self._take_free(page)

    def take_out(self) -> list[int]:
        """The leaving pages that nobody uses any more: they are out now, and their memory may go."""
        gone = []
        for page in sorted(self._leaving):
            self._take_free(page)
            if all(self._held[block] for block in self.pages.blocks_of(page)):
                gone.append(page)
        self._leaving.difference_update(gone)
        self._in.difference_update(gone)
        return gone

    def forget_contents(self) -> None:
        """What was computed into the blocks is lost: no prefix may be found any more."""
        self._evict(self._blocks)

    # ---- blocks

    def _evict(self, blocks: Iterable[Any]) -> None:
        cached = {block.block_id for block in blocks if block.block_hash is not None}
        if cached:
            self._pool.evict_blocks(cached)

    def _take_free(self, page: int) -> None:
        members = [self._blocks[block] for block in self.pages.blocks_of(page)]
        # Also of blocks in use: a prefix that new requests keep finding would keep its page for ever.
        self._evict(members)
        self._take(members)

    def _take(self, blocks: Iterable[Any]) -> None:
        watched = getattr(self._pool, "_reuse_watchers", {})
        free = [
            block
            for block in blocks
            if not (self._held[block.block_id] or block.ref_cnt or block.is_null or block.block_id in watched)
        ]
        if not free:
            return
        self._evict(free)
        self._pool.touch(free)
        for block in free:
            self._held[block.block_id] = 1
        self._count(len(free))

    def _release(self, pages: Iterable[int]) -> None:
        """Gives vLLM the held blocks of these pages that lie on pages with memory alone."""
        whole = self._in - self._leaving
        ids = {
            block
            for page in pages
            for block in self.pages.blocks_of(page)
            if self._held[block] and all(other in whole for other in self.pages.pages_of(block))
        }
        if not ids:
            return
        self._pool.free_blocks([self._blocks[block] for block in sorted(ids)])
        for block in ids:
            self._held[block] = 0
        self._count(-len(ids))

    def _count(self, more: int) -> None:
        self._held_count += more
        # vLLM derives its usage from this, and refuses to reset the prefix cache while blocks are "used".
        self._pool.num_gpu_blocks = self._total - self._held_count
