"""How much one prefill pass may admit.

SGLang's budget compares a request with what is available and evictable, now and for the tokens to come. The memory of its own
pool cannot go away in between; ours can, so a request is admitted when what it needs in this pass is in the hand, or in the tree
where only we can evict it. Where it is short, the attempt has posted the demand, and the request waits in the queue.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

__all__ = ["ElasticPrefillBudget"]


class ElasticPrefillBudget(PrefillBudget):
    """`current_offset` counts the tokens that this pass has promised and not allocated yet."""

    allocator: Any
    parked = False
    """A chunk waits for memory. SGLang counts chunks by the passes that admit somebody, so this pass must not."""

    def check_prefill(
        self, *, extend_input_len: int, total_tokens: int, chunk_limit: int | None, **rest: Any
    ) -> tuple[bool, int | None]:
        fits, limit = super().check_prefill(
            extend_input_len=extend_input_len, total_tokens=total_tokens, chunk_limit=chunk_limit, **rest
        )
        if not fits or self.parked:
            self._ask_for(total_tokens)
            return False, None
        now = extend_input_len if limit is None else min(extend_input_len, limit)
        return (True, limit) if self._covers(self._immediate(now)) else (False, None)

    def can_allocate_prefill(self, *, paged_input: int, **rest: Any) -> bool:
        if self.parked or not super().can_allocate_prefill(paged_input=paged_input, **rest):
            self._ask_for(paged_input)
            return False
        return self._covers(paged_input)

    def fit_chunk(self, *, extend_input_len: int, max_new_tokens: int, chunk_limit: int) -> int | None:
        """The next chunk of a prompt that is under way, shorter where memory is short. None lets it wait."""
        chunk = min(extend_input_len, chunk_limit)
        if self._covers(self._immediate(chunk)):
            return chunk_limit
        room = self.allocator.available_size() - int(self.current_offset) - self.page_size
        chunk = min(chunk, room) // self.page_size * self.page_size
        if chunk > 0 and self._covers(self._immediate(chunk)):
            return int(chunk)
        self.parked = True
        return None

    def _immediate(self, tokens: int) -> int:
        """What `reserve` will add to `current_offset` for so many tokens: whole pages, and one that they may begin in."""
        return int(self.ceil_paged_tokens(tokens)) + int(self.page_size)

    def _covers(self, tokens: int) -> bool:
        if self.allocator.slots.over_limit:
            return False
        return bool(self.allocator.is_covered(int(self.current_offset) + tokens, self.tree_cache))

    def _ask_for(self, tokens: int) -> None:
        """Neighbours give back what somebody asks for: what this request lacks beside what is promised to the others."""
        slots = self.allocator.slots
        addresses = (slots.capacity - slots.given_out) * self.page_size
        wanted = min(int(self.total_offset) + tokens, addresses)
        if not slots.over_limit and wanted > self.allocator.available_size():
            self.allocator.fill(wanted)
