"""How a manager or a page allocator comes by its pool.

| where the tensors are                     | pool                                                     |
|-------------------------------------------|----------------------------------------------------------|
| in this process                           | native, over their region                                |
| with workers (``world_size`` above 1, or a scheduler process of vLLM) | native, over a fleet         |
| wherever, with a broadcast callback set   | ``CallbackPool``: pages are mapped by Python             |

Tensors are often made after the manager, so a ``PoolSlot`` stands for the pool until it can be opened. Waiting for them
is bounded, and what goes wrong in the background is raised by the next call instead of being swallowed.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidekv import _native

from kvcached import _runtime
from kvcached._callback_pool import Callback, CallbackPool
from kvcached.utils import DEFAULT_IPC_NAME, IPC_NAME_MAX, KVCachedConfigError, get_kvcached_logger

logger = get_kvcached_logger()

TENSOR_PATIENCE_S = 10.0
"""How long tensors may come after their manager."""
_LOOK_S = 0.01
_RANKS_SUFFIX = "-ranks"


@dataclass(frozen=True)
class Plan:
    """What a pool is to be, in kvcached's numbers: bytes are those of one layer and one of K and V."""

    block_bytes: int
    block_count: int
    num_layers: int
    num_kv_buffers: int
    page_size: int
    contiguous: bool
    world_size: int
    pp_rank: int
    group: int
    name: str | None
    null_block: bool
    map_ahead: bool

    def __post_init__(self) -> None:
        for name in ("block_bytes", "num_layers", "num_kv_buffers", "page_size", "world_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.block_bytes > self.page_size:
            raise _runtime.config_error_for_block(self.block_bytes, self.page_size)
        if self.pages < 1:
            raise KVCachedConfigError(
                f"{self.block_count} blocks of {self.block_bytes} bytes do not fill one page of {self.page_size}: give at "
                f"least {-(-self.page_size // self.block_bytes)} blocks, or a smaller KVCACHED_PAGE_SIZE_MB"
            )

    @property
    def buffers(self) -> int:
        return self.num_layers * self.num_kv_buffers

    @property
    def pages(self) -> int:
        return self.block_count * self.block_bytes // self.page_size

    @property
    def limit(self) -> int:
        """What kvcached writes to the segment at the start."""
        return self.block_count * self.block_bytes * self.buffers

    @property
    def base_name(self) -> str:
        return self.name or DEFAULT_IPC_NAME

    def layout(self) -> _native.Layout:
        return _native.Layout.raw(
            self.buffers,
            self.block_bytes,
            layout="interleaved" if self.contiguous else "per-layer",
            chunk_bytes=self.page_size,
        )

    def pool_arguments(self) -> dict[str, Any]:
        return {
            "name": self.base_name,
            "group": self.group,
            "limit": self.limit,
            "null_block": self.null_block,
            # Nothing is mapped ahead, and one emptied page is kept against flapping.
            "reserve": None if self.map_ahead else (0, 1),
        }


def open_here(plan: Plan, region: _native.Region) -> _native.Pool:
    """Over the tensors of this process."""
    found = (region.chunk_bytes, region.chunks, region.contiguous)
    if found != (plan.page_size, plan.buffers, plan.contiguous):
        raise KVCachedConfigError(
            f"the tensors of group {plan.group} have pages of {found[0]} bytes for {found[1]} layers and buffers "
            f"(contiguous: {found[2]}), but the manager was asked for {plan.page_size} bytes and {plan.buffers} "
            f"(contiguous: {plan.contiguous}): give both the same num_layers, num_kv_buffers and layout"
        )
    pages = min(plan.pages, region.page_count)
    return _native.Pool(plan.layout(), region=region, pages=pages, **plan.pool_arguments())


def open_on_workers(plan: Plan, given_up: threading.Event | None = None) -> _native.Pool:
    """Over the tensors of ``world_size`` workers, which may still be starting; until nobody waits for it any more."""
    from kvcached import tp_ipc_util

    until = time.monotonic() + TENSOR_PATIENCE_S
    while not tp_ipc_util.ask_to_serve_group(plan.world_size, plan.pp_rank, plan.group):
        if time.monotonic() >= until or (given_up is not None and given_up.is_set()):
            raise RuntimeError(
                f"not all {plan.world_size} workers have created the tensors of group {plan.group} within "
                f"{TENSOR_PATIENCE_S:.0f} s: in every worker call init_kvcached(is_worker=True), then create_kv_tensors (or "
                f"alloc_kv_cache); they are looked for at {tp_ipc_util.get_worker_socket_path(0, plan.pp_rank)}"
            )
        time.sleep(_LOOK_S)
    fleet = _fleets.get(plan)
    return _native.Pool(plan.layout(), fleet=fleet, pages=plan.pages, **plan.pool_arguments())


def open_with_callbacks(plan: Plan, callbacks: dict[str, Callback]) -> CallbackPool:
    """Over pages that Python maps. The direction without a callback goes where it would go without any."""
    arguments = plan.pool_arguments()
    del arguments["reserve"]
    return CallbackPool(
        plan.layout(),
        plan.pages,
        world_size=plan.world_size,
        map_pages=callbacks.get("map") or _default_callback(plan, "map"),
        unmap_pages=callbacks.get("unmap") or _default_callback(plan, "unmap"),
        **arguments,
    )


def check_callback(callback: object) -> None:
    if not callable(callback):
        raise TypeError(f"a broadcast callback is called with (world_size, offsets): {callback!r} cannot be called")


def _default_callback(plan: Plan, which: str) -> Callback:
    from kvcached import tp_ipc_util, vmm_ops

    def call(world_size: int, offsets: list[int]) -> None:
        if world_size > 1:
            is_map = which == "map"
            send = tp_ipc_util.broadcast_map_to_kv_tensors if is_map else tp_ipc_util.broadcast_unmap_from_kv_tensors
            send(world_size, offsets, pp_rank=plan.pp_rank, group_id=plan.group)
        else:
            do = vmm_ops.map_to_kv_tensors if which == "map" else vmm_ops.unmap_from_kv_tensors
            do(offsets, group_id=plan.group)

    return call


def ranks_name(pool: str, pp_rank: int) -> str:
    """The name that a stage's native workers and their scheduler meet under. kvcached's own path, ``w<rank>.sock``, is
    taken by the listener for messages (``tp_ipc_util``)."""
    suffix = _RANKS_SUFFIX if pp_rank == 0 else f"-pp{pp_rank}{_RANKS_SUFFIX}"
    return pool[: IPC_NAME_MAX - len(suffix)] + suffix


class _Fleets:
    """One connection to each set of workers: a worker obeys one scheduler, which may have several groups on it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], _native.Fleet] = {}

    def get(self, plan: Plan) -> _native.Fleet:
        key = (ranks_name(plan.base_name, plan.pp_rank), plan.world_size)
        with self._lock:
            fleet = self._open.get(key)
            if fleet is None:
                fleet = _native.Fleet(key[0], [plan.world_size], start_timeout=TENSOR_PATIENCE_S)
                self._open[key] = fleet
                _runtime.close_at_stop(lambda: self._forget(key))
            return fleet

    def _forget(self, key: tuple[str, int]) -> None:
        with self._lock:
            fleet = self._open.pop(key, None)
        if fleet is not None:
            fleet.close()


_fleets = _Fleets()


def scheduler_uses_workers() -> bool:
    """vLLM's scheduler process: it was initialized, and not as a worker."""
    interfaces = sys.modules.get("kvcached.integration.vllm.interfaces")
    return interfaces is not None and bool(interfaces.should_use_worker_ipc())


class PoolSlot:
    """A manager's pool, or the promise of one. ``try_alloc`` and ``free`` are the pool's own once it is open."""

    def __init__(self, plan: Plan, own_ranks: bool) -> None:
        self.plan = plan
        # Whether every rank has a manager of its own, as in SGLang: each then serves its own tensors only.
        self._own_ranks = own_ranks
        self._callbacks: dict[str, Callback] = {}
        self._use_worker_ipc: bool | None = None
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._pool: _native.Pool | CallbackPool | None = None
        self._failure: BaseException | None = None
        self._gone = False

    def start(self) -> None:
        """Opens the pool now where its tensors are here, else in the background."""
        region = _runtime.find_region(self.plan.group)
        if region is not None and not self._on_workers():
            self._settle(open_here(self.plan, region))
        else:
            threading.Thread(target=self._open_later, name="kvcached-open", daemon=True).start()

    def _on_workers(self) -> bool:
        if self._use_worker_ipc is not None:
            return self._use_worker_ipc
        return self.plan.world_size > 1 and not self._own_ranks

    def _open_later(self) -> None:
        try:
            self._settle(self._await_tensors())
        except Exception as error:
            with self._lock:
                if not self._settled.is_set():  # Else callbacks have taken over, or the manager is gone.
                    logger.error("the pool of group %d could not be opened: %s", self.plan.group, error)
                    self._failure = error
                    self._settled.set()

    def _await_tensors(self) -> _native.Pool:
        if self._on_workers():
            return open_on_workers(self.plan, self._settled)
        until = time.monotonic() + TENSOR_PATIENCE_S
        while not self._settled.is_set():
            # Tensors made here come first; a scheduler of vLLM may have them in a worker instead, even with one rank.
            region = _runtime.await_region(self.plan.group, min(until, time.monotonic() + _LOOK_S))
            if region is not None:
                return open_here(self.plan, region)
            if scheduler_uses_workers() and _is_served(self.plan):
                return open_on_workers(self.plan)
            if time.monotonic() >= until:
                break
        raise RuntimeError(
            f"KV tensors of group {self.plan.group} were not created within {TENSOR_PATIENCE_S:.0f} s after their manager: "
            "call create_kv_tensors (or alloc_kv_cache) with this group_id, then make the manager again"
        )

    def _settle(self, pool: _native.Pool | CallbackPool) -> None:
        with self._lock:
            if self._gone or self._settled.is_set():
                pool.close()
                return
            self._put(pool)
        _runtime.close_at_stop(_weak_close(self))

    def _put(self, pool: _native.Pool | CallbackPool) -> None:
        self._pool = pool
        self.try_alloc = pool.try_alloc  # type: ignore[method-assign]
        self.free = pool.free  # type: ignore[method-assign]
        self._settled.set()

    def peek(self) -> _native.Pool | CallbackPool | None:
        """The pool, where it is open."""
        return self._pool

    def get(self) -> _native.Pool | CallbackPool:
        """The pool; waits for it, and raises what stood in its way."""
        self._settled.wait(2 * TENSOR_PATIENCE_S)
        if self._pool is None:
            raise self._failure or RuntimeError("the pool is not open yet: its workers are slow to start, try again")
        return self._pool

    def try_alloc(self, count: int) -> list[int] | None:
        return self.get().try_alloc(count)

    def free(self, blocks: Sequence[int]) -> None:
        self.get().free(blocks)

    def set_callback(self, which: str, callback: Callback) -> None:
        """From now on Python maps. Only while nothing is in use: what is mapped already is another's."""
        check_callback(callback)
        with self._lock:
            if self._pool is not None:
                if self._pool.snapshot()["allocated_blocks"]:
                    raise RuntimeError("blocks are in use: set the callbacks before the first one is allocated")
                self._pool.close()
            self._callbacks[which] = callback
            self._failure = None
            self._put(open_with_callbacks(self.plan, self._callbacks))

    def set_use_worker_ipc(self, use_worker_ipc: bool) -> None:
        """Whether the tensors are the workers'. To be said before the pool is open."""
        with self._lock:
            if self._pool is not None and use_worker_ipc != self._on_workers():
                raise RuntimeError("the pool is open already: say where the tensors are before they exist")
            self._use_worker_ipc = use_worker_ipc

    def close(self) -> None:
        with self._lock:
            self._gone = True
            self._settled.set()
            pool = self._pool
            if pool is None:
                self._failure = self._failure or RuntimeError("the manager was closed before its tensors existed")
        if pool is not None:
            pool.close()


def _weak_close(slot: PoolSlot) -> Any:
    """Closes the pool of a slot that still lives."""
    reference = weakref.ref(slot)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    return close


def _is_served(plan: Plan) -> bool:
    """Whether a worker has the place of rank 0 and has the group's tensors."""
    from kvcached import tp_ipc_util

    return tp_ipc_util.ask_to_serve_group(plan.world_size, plan.pp_rank, plan.group)
