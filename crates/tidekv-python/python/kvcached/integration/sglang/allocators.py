"""SGLang's allocators over an elastic pool.

Both are SGLang's own classes with another source of free slots: `free_pages`, the tensor that they give out of, is the hand of
`Slots`, filled from the pool just before an allocation and emptied into it when nobody needs it. All of SGLang's code that
decides which token goes where stays SGLang's.

| SGLang calls                             | here                                                                      |
|------------------------------------------|---------------------------------------------------------------------------|
| `available_size`                         | the hand, what was freed, and what limit, ledger and device would grant   |
| `create_prefill_budget`                  | a budget that has the memory before it admits (`budget.py`)               |
| `check_decode_capacity`                  | fills the hand for the step; False retracts a request                     |
| `alloc`, `alloc_extend`, `alloc_decode`  | out of the hand; None on a miss                                           |
| `free` and its variants                  | to `Returns`, and at the next safe point to the pool                      |
| `evict_to_free_tokens`                   | as much of the radix tree as is short, kept in the hand                   |

SGLang raises where an allocation fails that was checked before, so what a check promises is in the hand or in the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.utils import get_num_new_pages

from kvcached.integration.sglang.budget import ElasticPrefillBudget
from kvcached.integration.sglang.pools import ElasticPool
from kvcached.integration.sglang.slots import Slots
from kvcached.utils import KVCachedConfigError

__all__ = ["ElasticAllocator", "ElasticPagedAllocator", "ElasticTokenAllocator"]


class ElasticAllocator:
    """What both have in common. Comes before SGLang's class among the bases."""

    slots: Slots
    free_pages: torch.Tensor
    page_size: int
    device: str
    _counts_memory = True

    # ---- what there is

    def available_size(self) -> int:
        """Tokens that could be allocated now; for SGLang's checks of its own books, those that nobody holds."""
        blocks = self.slots.available() if self._counts_memory else self.slots.capacity - self.slots.given_out
        return blocks * self.page_size

    @contextmanager
    def counting_ids(self) -> Iterator[None]:
        """`available_size` as if memory were no matter, for books that must add up to the size of the address space."""
        self._counts_memory = False
        try:
            yield
        finally:
            self._counts_memory = True

    # ---- having memory before it is needed

    def fill(self, tokens: int) -> bool:
        """Has memory for so many tokens in the hand."""
        had = len(self.slots.hand)
        done = self.slots.fill(-(-tokens // self.page_size))
        self._show(had)
        return done

    def is_covered(self, tokens: int, tree_cache: Any) -> bool:
        """Whether an allocation of so many tokens cannot fail: they are in the hand, or the tree can be evicted for them."""
        if self.fill(tokens):
            return True
        return len(self.slots.hand) * self.page_size + evictable_tokens(tree_cache) >= tokens

    def evict_to_free_tokens(self, tree_cache: Any, num_tokens: int) -> bool:
        """Fills the hand, by evicting from the tree what the pool has too little. Evicted blocks stay in the hand: in the pool
        a neighbour could be faster."""
        if self.slots.over_limit:
            # Nothing is taken ahead of need then, and the tree was emptied at the safe point.
            return len(self.slots.hand) * self.page_size >= num_tokens
        return self._secure(tree_cache, num_tokens)

    def _secure(self, tree_cache: Any, tokens: int) -> bool:
        while not self.fill(tokens):
            missing = max(tokens - self.available_size(), self.page_size)
            if not evict(tree_cache, missing):
                return False
            had = len(self.slots.hand)
            self.slots.keep_returned()
            self._show(had)
        return True

    def check_decode_capacity(
        self, *, num_tokens: int, tree_cache: Any, requests: Any = None, spec_algorithm: Any = None
    ) -> bool:
        """Whether the next decode step has its memory. False makes SGLang retract a request and ask again."""
        if self.slots.over_limit:
            # An operator has lowered the limit below what is in use: requests go until it holds.
            self.slots.give_back(empty_hand=False, wait=True)
            self.slots.over_limit = self.slots.pages_over_limit()
            if self.slots.over_limit:
                return False
        return self._secure(tree_cache, num_tokens)

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> ElasticPrefillBudget:
        return ElasticPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    # ---- safe points

    def settle(self, *, idle: bool) -> int:
        """Gives back what nobody uses. Says how many pages of the pool are asked for."""
        had = len(self.slots.hand)
        owed = self.slots.settle(empty_hand=idle)
        if owed and self.slots.hand:
            self.slots.give_back(empty_hand=True)
        if len(self.slots.hand) != had:
            self.free_pages = self._no_ids()
        return owed

    def clear(self) -> None:
        """Ends every lease."""
        super().clear()  # type: ignore[misc]
        self.free_pages = self._no_ids()
        self.slots.clear()

    # ---- the hand as SGLang sees it

    def _no_ids(self) -> torch.Tensor:
        return torch.empty((0,), dtype=torch.int64, device=self.device)

    def _show(self, had: int) -> None:
        """Appends to the tensor what came into the hand since there were `had`."""
        fresh = self.slots.hand[had:]
        if fresh:
            more = torch.tensor(fresh, dtype=torch.int64).to(self.device, non_blocking=True)
            self.free_pages = torch.cat((self.free_pages, more))

    @contextmanager
    def _giving_out(self) -> Iterator[None]:
        """What SGLang's code takes off the tensor is out of the hand."""
        had = len(self.free_pages)
        yield
        self.slots.give_out(had - len(self.free_pages))


class ElasticTokenAllocator(ElasticAllocator, TokenToKVPoolAllocator):
    """Pages of one token."""

    def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool) -> None:
        self.slots = slots_of(kvcache, size)
        super().__init__(size, dtype, device, kvcache, need_sort)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not self.fill(need_size):
            return None
        with self._giving_out():
            return super().alloc(need_size)

    def free(self, free_index: torch.Tensor) -> None:
        if self.free_group is None and free_index.numel():
            self.slots.take_back(free_index)
        else:
            super().free(free_index)


class ElasticPagedAllocator(ElasticAllocator, PagedTokenToKVPoolAllocator):
    """Pages of several tokens."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool
    ) -> None:
        self.slots = slots_of(kvcache, size // page_size)
        super().__init__(size, page_size, dtype, device, kvcache, need_sort)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if not self.fill(need_size // self.page_size * self.page_size):
            return None
        with self._giving_out():
            return super().alloc(need_size)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if not self.fill(num_new_pages * self.page_size):
            return None
        with self._giving_out():
            return super().alloc_extend(
                prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages
            )

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, decode=True)
        if not self.fill(new_pages * self.page_size):
            return None
        with self._giving_out():
            return super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        # Where all of SGLang's ways to free end.
        for ids in page_ids:
            self.slots.take_back(ids)


def slots_of(kvcache: Any, blocks: int) -> Slots:
    """The blocks of an elastic pool; a sentence where SGLang has put another pool behind our allocator."""
    if not isinstance(kvcache, ElasticPool):
        raise KVCachedConfigError(
            f"SGLang keeps the KV cache of this model in a {type(kvcache).__name__}, which cannot be elastic: unset "
            "ENABLE_KVCACHED to run it with SGLang's own memory"
        )
    return kvcache.new_slots(blocks)


def evictable_tokens(tree_cache: Any) -> int:
    """What could be evicted from the tree."""
    if tree_cache is None or not tree_cache.supports_prefix_sharing():
        return 0
    return int(tree_cache.evictable_size())


def evict(tree_cache: Any, tokens: int) -> int:
    """Evicts at least so many tokens that nobody uses, least recently used first, as the tree decides. Says how many went."""
    if evictable_tokens(tree_cache) == 0:
        return 0
    return int(tree_cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)
