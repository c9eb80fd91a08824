"""The scheduler's side: as many of vLLM's blocks as there is memory for, page by page.

    vLLM's scheduler thread                        tidekv
    -----------------------                        ------
    a request is to be admitted ---- grow --->     Pool.try_alloc -> ledger of every rank -> mapped on all of them, or none
    a step is planned -------------- pay ---->     Pool.reclaim_requested: limits, neighbours
                      -------------- say ---->     Pool.set_evictable: what a neighbour that waits may have
    a step is over ----------------- fence -->     Pool.step_completed: what was freed before it may be unmapped

One block of the tidekv pool is one page of vLLM's blocks. Pages are mapped on every rank before their blocks leave the
balloon, on the calling thread: the answer of the fleet is the acknowledgement. Pages that are given back carry the step that
was planned last; they lose their memory when all ranks have finished it and their devices are idle.

**What is only kept** (free blocks, with a prefix or without, that no running request is about to take) is said to the pool, and
through it to the ranks, whose neighbours may ask for it also where the engine holds no more than its share (docs/decisions/0019). How
many pages that would empty is known only by a look at every block, so the number is arithmetic until somebody asks: then a
look decides, what it found is said, and the next look is not before it costs less than a fiftieth of the time. No request is
preempted for that part; while somebody asks, prefixes are evicted rather than memory added.

**When no request lives** vLLM calls nobody, but limits and neighbours do not wait. A thread of ours then does what the steps
do otherwise. It touches vLLM's block pool only while no request lives and no block is in use, under a lock that the first new
request takes (`request_came`, before vLLM looks at the pool), so that the pool has one owner at any time. Resetting vLLM's prefix
cache at that very moment may be answered as if a request were running; asked again it succeeds.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Mapping
from typing import Any

import tidekv
from tidekv import _native

from kvcached.integration.vllm.balloon import Balloon, PageFigures
from kvcached.integration.vllm.demand import Demand
from kvcached.integration.vllm.pages import PageMap
from kvcached.integration.vllm.settings import Settings
from kvcached.utils import KVCachedConfigError, get_kvcached_logger

__all__ = ["ElasticBlocks"]

logger = get_kvcached_logger()

_CONNECT_S = 60.0
"""How long workers may take to serve after vLLM says that they are there."""
_STOP_S = 5.0
_IDLE_LOOK_S = 0.25
_IDLE_REST_S = 0.02
_LOOK_EVERY_S = 0.1
"""Neighbours of the ranks are heard of as often. A look that takes long is followed by a longer pause."""
_LOOK_PAUSE = 50
"""How many times longer than a look the pause behind it is."""


class ElasticBlocks:
    """vLLM's block pool, of which only what has memory is given out."""

    def __init__(self, block_pool: Any, pages: PageMap, settings: Settings, demand: Demand, cached_blocks: int | None) -> None:
        self._settings = settings
        self._pages = pages
        self._demand = demand
        self._cached_blocks = cached_blocks
        self._lock = threading.RLock()
        self._balloon = Balloon(block_pool, pages)
        if self._balloon.in_use:
            raise KVCachedConfigError(
                f"{self._balloon.in_use} blocks of vLLM are in use before the scheduler starts: name this connector first in "
                "the list of connectors"
            )
        self._fleet: _native.Fleet | None = None
        self._pool: _native.Pool | None = None
        self._step = 0
        # What the ranks have been told that they may touch, and what has changed since.
        self._told: set[int] = set()
        self._came: set[int] = set()
        self._went: set[int] = set()
        self._surplus_at = 0.0
        self._restless = False
        self._owes = False
        self._is_asked = False
        self._look_at = 0.0
        self._unused = 0
        self._evictable = 0
        self._rejoins = 0
        self._last_trouble: str | None = None
        self._stopping = threading.Event()
        self._idler = threading.Thread(target=self._tend_when_idle, name="kvcached-idle", daemon=True)

    # ---- life

    def connect(self) -> None:
        """Opens the pool on all workers, with the page of the null block and those that are wanted at the start."""
        with self._lock:
            if self._pool is not None:
                return
            settings = self._settings
            try:
                self._fleet = _native.Fleet(settings.ranks_name, settings.stages, start_timeout=_CONNECT_S)
            except tidekv.TidekvError as error:
                raise KVCachedConfigError(
                    f"not all workers serve their KV cache after {_CONNECT_S:.0f} s: {error}. With several connectors name this "
                    "one first in the list"
                ) from error
            self._pool = _native.Pool(
                _native.Layout.raw(1, self._pages.page_bytes, chunk_bytes=self._pages.page_bytes),
                fleet=self._fleet,
                pages=self._pages.pages,
                name=settings.name,
                null_block=True,
                wait=_CONNECT_S,
            )
            self._balloon.put_in([0])
            self._came.add(0)
            wanted = self._pages.pages if settings.start_pages is None else settings.start_pages
            self._lease(wanted - 1)
            self._idler.start()
            logger.info(
                "pool %s: %d blocks of vLLM on %d pages of %s, %d with memory",
                self._pool.name,
                self._pages.blocks,
                self._pages.pages,
                _native.format_size(self._pages.page_bytes),
                self._balloon.pages_in,
            )

    def close(self) -> None:
        """Gives everything back. May be called twice."""
        self._stopping.set()
        if self._idler.ident is not None and self._idler is not threading.current_thread():
            self._idler.join(_STOP_S)
        with self._lock:
            pool, self._pool = self._pool, None
            fleet, self._fleet = self._fleet, None
        if pool is not None:
            pool.close()
        if fleet is not None:
            fleet.close()

    @property
    def pool(self) -> _native.Pool | None:
        return self._pool

    @property
    def balloon(self) -> Balloon:
        return self._balloon

    # ---- what vLLM's scheduler tells

    def request_came(self, request: Any) -> None:
        """From now on the block pool is the scheduler's alone."""
        with self._lock:
            self._demand.begin(request)
            self._notice_rejoins()

    def request_gone(self, request_id: str) -> None:
        with self._lock:
            self._demand.end(request_id)
            self._restless = True

    def admitting(self, request: Any, cached_tokens: int) -> None:
        """The scheduler is about to ask for blocks for it, and found so many of its tokens cached."""
        with self._lock:
            self._demand.begin(request)
            self._grow(self._demand.to_admit(request, cached_tokens))

    def admitted(self, request: Any) -> None:
        with self._lock:
            self._demand.admitted(request)

    def plan_step(self, scheduled: Mapping[str, int]) -> tuple[int, list[int], list[int]]:
        """The step's number, the pages that came and those that went since the last one; then makes ready for the next."""
        with self._lock:
            self._step += 1
            came, went = self._take_news()
            self._notice_rejoins()
            need = self._demand.after_step(scheduled)
            # One block more for each request, for the time that neighbours take to give back what was lent to them.
            wanted = need + self._demand.alive
            self._pay(wanted)
            self._grow(need)
            self._restless = self._restless or bool(scheduled)
            self._give_back_surplus(need)
            self._say_evictable(wanted)
            return self._step, came, went

    def steps_done(self, step: int) -> None:
        """All ranks have finished this step and those before it. vLLM has freed the blocks of requests that ended with it: those
        of leaving pages are taken before it gives them out again."""
        with self._lock:
            if self._pool is None:
                return
            self._pool.step_completed(step)
            if self._balloon.leaving:
                self._free(self._balloon.take_out())

    # ---- memory comes

    def _grow(self, blocks: int) -> None:
        """Makes sure of so many free blocks that hold no cached prefix, as far as there is memory for them. While neighbours
        wait, blocks with a prefix will do."""
        if self._owes:
            return
        free = self._balloon.free if self._is_asked else self._balloon.free_before_cached(blocks)
        lacking = blocks - free
        if lacking > 0:
            self._lease(min(self._pages.pages_for(lacking), self._pages.pages - self._balloon.pages_in))

    def _lease(self, pages: int) -> None:
        """Takes so many pages, or as many as there are."""
        pool = self._pool
        while pool is not None and pages > 0:
            try:
                found = pool.try_alloc(pages)
            except tidekv.TidekvError as error:
                self._tell(error)
                return
            if found is not None:
                self._last_trouble = None
                self._balloon.put_in(found)
                self._came.update(found)
                self._went.difference_update(found)
                return
            pages = min(pages // 2, pool.available())

    def _tell(self, error: tidekv.TidekvError) -> None:
        """A rank that is missing is no reason to stop: requests wait until it is back or vLLM gives up."""
        text = str(error)
        if text != self._last_trouble:
            self._last_trouble = text
            logger.warning("no memory could be added: %s", text)

    # ---- memory goes

    def _pay(self, wanted: int) -> None:
        """Frees what the ledger asks for: pages with nothing in them, then cached prefixes, as far as `wanted` blocks stay free.
        What is firm takes those as well, then whatever is used least, as soon as it is free. vLLM preempts requests that find
        no block meanwhile, and that frees more."""
        pool, balloon = self._pool, self._balloon
        if pool is None:
            return
        self._free(balloon.take_out())
        # What was just freed is not asked for any more.
        request = pool.reclaim_requested()
        owed, firm = request["pages"], request["firm_pages"]
        stuck = sorted(balloon.leaving)
        balloon.keep(stuck[firm:])
        if firm or (owed and time.monotonic() >= self._look_at):
            stuck = stuck[:firm]
            spare = self._pages_to_spare(wanted)
            cheapest = self._look()
            unused = min(owed, self._unused, max(firm, spare))
            # Pages that are empty by now go instead of those that somebody still uses.
            in_use = max(0, firm - unused)
            balloon.keep(stuck[in_use:])
            balloon.start_leaving(figures.page for figures in cheapest[: unused + max(0, in_use - len(stuck))])
            self._unused -= unused
            self._free(balloon.take_out())
        self._owes, self._is_asked = firm > 0, owed > 0

    def _look(self) -> list[PageFigures]:
        """Every page that may be taken, cheapest first. Notes how many of them nobody uses."""
        began = time.monotonic()
        figures = self._balloon.figures()
        now = time.monotonic()
        self._look_at = now + max(_LOOK_EVERY_S, (now - began) * _LOOK_PAUSE)
        self._unused = sum(found.used == 0 for found in figures)
        return figures

    def _pages_to_spare(self, wanted: int) -> int:
        """How many pages could go at the most: those that are kept from the start stay, and room for what is in use and for
        `wanted` blocks more, as if that lay together."""
        balloon = self._balloon
        kept = self._pages.pages if self._settings.start_pages is None else self._settings.start_pages
        # The null block has its page too.
        kept = max(kept, self._pages.pages_at_least(1 + balloon.in_use + wanted))
        return max(0, balloon.pages_in - len(balloon.leaving) - kept)

    def _say_evictable(self, wanted: int) -> None:
        """Says how many pages a neighbour that waits may have. What a look has found holds until the next one."""
        evictable = self._pages_to_spare(wanted)
        if time.monotonic() < self._look_at:
            evictable = min(evictable, self._unused)
        if evictable != self._evictable and self._pool is not None:
            self._evictable = evictable
            self._pool.set_evictable(evictable)

    def _give_back_surplus(self, need: int) -> None:
        """Now and then gives back pages that nobody uses, and cached prefixes beyond what may be kept."""
        now = time.monotonic()
        if self._settings.start_pages is None or not self._restless or now < self._surplus_at:
            return
        self._surplus_at = now + self._settings.keep_seconds
        self._restless = self._demand.alive > 0
        figures = [found for found in self._balloon.figures() if found.used == 0]
        empty = [found for found in figures if found.cached == 0]
        kept = self._pages.pages_for(need) if need > 0 else 0
        chosen = empty[: max(0, len(empty) - kept)]
        if self._cached_blocks is not None:
            excess = sum(found.cached for found in figures) - self._cached_blocks
            for found in figures:
                if excess > 0 and found.cached:
                    excess -= found.cached
                    chosen.append(found)
        spare = self._balloon.pages_in - max(1, self._settings.start_pages)
        self._balloon.start_leaving(found.page for found in chosen[: max(0, spare)])
        self._free(self._balloon.take_out())

    def _free(self, pages: list[int]) -> None:
        if pages and self._pool is not None:
            self._pool.free(pages, step=self._step)
            # A page that no order has named yet may lose its memory before the next one: the ranks never hear of it.
            self._came.difference_update(pages)
            self._went.update(self._told.intersection(pages))

    def _take_news(self) -> tuple[list[int], list[int]]:
        """The pages that came and those that went since this was asked last. No page is in both."""
        came, went = sorted(self._came), sorted(self._went)
        self._told = (self._told | self._came) - self._went
        self._came, self._went = set(), set()
        return came, went

    def _notice_rejoins(self) -> None:
        """A worker that was started again has its pages, and nothing in them."""
        if self._fleet is None:
            return
        rejoins = sum(rank["rejoins"] for rank in self._fleet.status())
        if rejoins != self._rejoins:
            logger.warning("a worker came back without its KV cache: cached prefixes are dropped")
            self._rejoins = rejoins
            self._balloon.forget_contents()

    # ---- when nobody calls

    def _tend_when_idle(self) -> None:
        pool = self._pool
        if pool is None:
            return
        poll = select.poll()
        poll.register(pool.reclaim_fileno(), select.POLLIN)
        while not self._stopping.is_set():
            poll.poll(_IDLE_LOOK_S * 1000)
            with self._lock:
                if self._pool is None:
                    return
                if not self._demand.alive and not self._balloon.in_use:
                    self._pay(0)
                    self._give_back_surplus(0)
                    self._say_evictable(0)
            # A request that a busy scheduler will hear of, or that nobody can meet, must not keep this thread busy.
            self._stopping.wait(_IDLE_REST_S)
