"""Blocks between an elastic pool and an allocator of SGLang.

        pool  --lease-->  hand  --alloc-->  requests, radix tree
         ^                  ^                       |
         |                  '---- needed now ---- returns <-- free
         '------------------ at a safe point -------'

A *block* is one page of SGLang (`page_size` tokens of all layers); a *page* is what the pool maps. Blocks in the hand are leased:
they have memory, and no neighbour can take it. SGLang's allocators give out of the hand and of nothing else, so between "it
fits" and the allocation nothing can come in between. What a scheduler counts on is bigger (`available`): it includes what the
ledger would grant at the moment. Before it acts on that, it has the blocks put into the hand (`fill`), and learns there that a
neighbour was faster, where it can still decide otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidekv import Closed, Forked, TidekvError
from tidekv.errors import NeverFits, PoolExhausted

from kvcached.integration.sglang.returns import Returns
from kvcached.utils import get_kvcached_logger

if TYPE_CHECKING:
    from tidekv import Pool

    from kvcached.integration.sglang.ranks import Ranks

__all__ = ["Slots"]

logger = get_kvcached_logger()


class Slots:
    """The blocks of one allocator, at most `capacity` at once: a pool is made of whole pages and may have a few more."""

    def __init__(self, pool: Pool, capacity: int, ranks: Ranks) -> None:
        self.pool = pool
        self.capacity = capacity
        self.ranks = ranks
        self.hand: list[int] = []
        """Leased, in the order in which they will be given out."""
        self.returns = Returns()
        self.over_limit = 0
        """Pages in use beyond the limit at the latest safe point, on the rank that has most of them."""
        self._leased = 0
        """All blocks that are ours: in the hand, given out, or on their way back."""
        self._spare = 0
        """In step: what all ranks can have beside the hand, returns included, as agreed and counted on since."""
        self._reach = 0
        self._evictable = 0
        self._told = ""

    # ---- what there is

    @property
    def given_out(self) -> int:
        """Blocks that requests and the radix tree have."""
        return self._leased - len(self.hand) - self.returns.count

    def available(self) -> int:
        """Blocks that could be given out now, the same on all ranks."""
        if self.over_limit:
            beside = self.returns.count
        elif self.ranks.in_step:
            beside = self._spare
        else:
            beside = self.returns.count + self.pool.available()
        return min(self.capacity - self.given_out, len(self.hand) + beside)

    def has_more_in_reach(self) -> bool:
        """Whether more blocks could be given out in all than when this was asked last: an operator or a neighbour has let us have
        more. What we free ourselves does not count."""
        before, self._reach = self._reach, self.given_out + self.available()
        return self._reach > before

    # ---- taking and giving

    def fill(self, count: int) -> bool:
        """Makes sure that at least `count` blocks are in the hand, on all ranks or on none. A miss is posted as demand."""
        short = count - len(self.hand)
        if short <= 0:
            return True
        if count > self.capacity - self.given_out:
            return False
        returned = self.returns.take(short)
        for wanted in self._helpings(short):
            leased = self._lease(wanted - len(returned))
            if leased is None and self.returns.count:
                # What is on the way may be enough: only now is it worth waiting for.
                returned += self.returns.take(wanted - len(returned), wait=True)
                leased = self._lease(wanted - len(returned))
            if self.ranks.every(leased is not None):
                self.hand += returned + (leased or [])
                self._spare = max(0, self._spare - wanted)
                return True
            if leased:
                self._free(leased)
        self.returns.put_back(returned)
        return False

    def give_out(self, count: int) -> None:
        """The first `count` blocks of the hand are the engine's now."""
        del self.hand[:count]

    def take_back(self, ids: Any) -> None:
        """The engine has done with these blocks, a tensor of ids."""
        before = self.returns.count
        self.returns.put(ids)
        self._spare += self.returns.count - before

    def keep_returned(self) -> int:
        """Puts what was freed into the hand instead of giving it back: nobody else can have it in between. Says how much."""
        ids = self.returns.take(wait=True)
        self.hand += ids
        self._spare = max(0, self._spare - len(ids))
        return len(ids)

    # ---- at safe points

    def settle(self, *, empty_hand: bool) -> int:
        """Gives back what nobody uses and agrees with the other ranks on what there is. Says how many pages are asked for, on
        the rank of which most are."""
        self.give_back(empty_hand=empty_hand)
        owed = self.pool.reclaim_requested()["pages"]
        self._spare, owed = self.ranks.least_and_most(self.returns.count + self.pool.available(), owed)
        self.over_limit = self.pages_over_limit() if owed or self.over_limit else 0
        return owed

    def give_back(self, *, empty_hand: bool, wait: bool = False) -> None:
        """Everything that has arrived, and with `empty_hand` also what was leased and not given out."""
        ids = self.returns.take(wait=wait)
        if empty_hand and self.hand:
            ids += self.hand
            self._spare += len(self.hand)
            self.hand = []
        if ids:
            self._free(ids)

    def say_evictable(self, blocks: int) -> None:
        """So many of the blocks that were given out are only kept in case: a neighbour that waits may ask for them."""
        if blocks != self._evictable:
            self._evictable = blocks
            self.pool.set_evictable(blocks)

    def pages_in_use(self) -> int:
        return int(self.pool.snapshot()["inuse_pages"])

    def pages_over_limit(self) -> int:
        """Pages that must become empty before the limit holds, on the rank that has most of them."""
        snapshot = self.pool.snapshot()
        over = max(0, snapshot["inuse_pages"] - snapshot["limit_pages"])
        return self.ranks.least_and_most(0, over)[1]

    def clear(self) -> None:
        """Ends every lease: the engine starts from nothing."""
        self.returns.clear()
        self.hand = []
        self._leased = 0
        self.pool.clear()
        self._spare = self.ranks.least_and_most(self.pool.available(), 0)[0]

    # ---- the pool

    def _helpings(self, short: int) -> list[int]:
        """How much to try to lease, in this order. Rather whole pages than parts, where they can be had: what is mapped costs
        nothing more, and the next allocations find it in the hand."""
        per_page = self.pool.geometry.blocks_per_page
        generous = min(-(-short // per_page) * per_page, self.capacity - self.given_out - len(self.hand))
        room = self._spare if self.ranks.in_step else self.pool.available()
        return [generous, short] if short < generous <= room and not self.over_limit else [short]

    def _lease(self, count: int) -> list[int] | None:
        """All of them or None."""
        if count <= 0:
            return []
        ids = self._try_alloc(count)
        if ids is not None:
            self._leased += len(ids)
        return ids

    def _try_alloc(self, count: int) -> list[int] | None:
        try:
            return self.pool.try_alloc(count)
        except (Closed, Forked):
            raise
        except TidekvError as error:
            # The driver or a shared file: for a scheduler a miss like any other. It is told once.
            if not isinstance(error, (PoolExhausted, NeverFits)) and str(error) != self._told:
                self._told = str(error)
                logger.warning("no memory for %d blocks of pool '%s': %s", count, self.pool.name, error)
            return None

    def _free(self, ids: list[int]) -> None:
        # No step is named, so the pool synchronises the device before it unmaps: a batch in flight may still read.
        self.pool.free(ids)
        self._leased -= len(ids)
