"""The compiled half of `tidekv`: what both packages, `tidekv` and `kvcached`, are written on.

    Layout ---- what a model keeps per token          Region ---- one address range, pages mapped and unmapped by hand
       |                                                |
    Geometry -- where every block's bytes are         View ------ a strided part of it: `__dlpack__`, no copy
       |
    Pool ------ elastic blocks: over a device, over a Region, or over the workers of a Fleet
    BlockTable  the same decisions without memory and without a thread, for those who map themselves
    Fleet, FleetGroup, Worker                         one scheduler, one worker for each rank
    Arena ----- blocks shared between processes       Batch ----- block tables and metadata of the next step

Rules that hold everywhere:

* Block ids are kernel ids: what attention kernels index a layer's view with.
* Sizes are bytes, times are seconds, devices are `cuda:N`, `cuda`, `cpu` or `auto` (a GPU where there is one).
* Whatever can wait releases the GIL; no thread of the library ever calls Python.
* Every refusal is a `tidekv.TidekvError` with fields; an argument that makes no sense is also a `ValueError`.
* Objects belong to the process that made them: after `fork` they raise `Forked`, and they cannot be pickled.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Literal, TypedDict, final

from typing_extensions import CapsuleType

__version__: Final[str]
DEFAULT_MAX_CACHED_TOKENS: Final[int]
"""KVCACHED_MAX_CACHED_TOKENS where it is not set"""
STRATEGIES: Final[tuple[str, ...]]
"""How a fleet sends its orders, simplest first: `seq`, `thread`, `async`, `ring`."""

LayoutName = Literal["slab", "per-layer", "interleaved"]
UnmappedReads = Literal["fault", "zeros"]

# ---- sizes and places ------------------------------------------------------------------------------------------

@final
class Layout:
    """What a group of layers keeps per token, and how that is arranged. Numbers only: no device, no memory."""

    @staticmethod
    def heads(
        layers: int,
        kv_heads: int,
        head_size: int,
        *,
        value_size: int | None = None,
        dtype: str = "bfloat16",
        block_tokens: int = 16,
        layout: LayoutName = "slab",
        chunk_bytes: int | None = None,
    ) -> Layout:
        """MHA, GQA and MQA: K and V for each KV head."""

    @staticmethod
    def latent(
        layers: int,
        size: int,
        *,
        dtype: str = "bfloat16",
        block_tokens: int = 16,
        layout: LayoutName = "slab",
        chunk_bytes: int | None = None,
    ) -> Layout:
        """MLA: one vector per token and layer."""

    @staticmethod
    def raw(
        buffers: int,
        block_bytes: int,
        *,
        layout: LayoutName = "interleaved",
        chunk_bytes: int | None = None,
    ) -> Layout:
        """Only bytes: `buffers` (layers times K and V) of `block_bytes` for each block. Its views are flat uint8."""

    @property
    def layers(self) -> int: ...
    @property
    def buffers_per_layer(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layout(self) -> LayoutName: ...
    @property
    def chunk_bytes(self) -> int | None: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers and buffers."""

    def geometry(
        self,
        *,
        pages: int | None = None,
        capacity: int | None = None,
        device: str = "cpu",
        granularity: int | None = None,
        env: bool = False,
    ) -> Geometry:
        """The addresses, for so many pages or as many as `capacity` bytes can back. Opens no device: `cuda` means 2 MiB. With
        `env` they are those of a `Pool`, which takes KVCACHED_PAGE_SIZE_MB where the layout says no `chunk_bytes`."""

    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...

@final
class LayerView:
    """One layer's K or V inside a reservation, as a tensor is made from it. Strides count elements."""

    @property
    def offset(self) -> int:
        """Bytes from the start of the reservation to id 0."""
    @property
    def shape(self) -> tuple[int, ...]:
        """`(ids, block_tokens, kv_heads, head_size)`; `(ids, block_tokens, size)` for MLA; `(ids, block_bytes)` for raw."""
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...

@final
class Geometry:
    """Where every block's bytes are. Kernel ids are sparse in `slab`; elsewhere they skip blocks that straddle pages."""

    @property
    def layout(self) -> Layout: ...
    @property
    def page_count(self) -> int: ...
    @property
    def page_bytes(self) -> int:
        """What one page costs in memory, all layers together."""
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def blocks_per_page(self) -> int: ...
    @property
    def block_count(self) -> int: ...
    @property
    def id_count(self) -> int:
        """Kernel ids are below this."""
    @property
    def reservation_bytes(self) -> int: ...
    def kernel_id(self, index: int) -> int:
        """The id of the block with this dense index."""
    def block_index(self, block: int) -> int | None:
        """The dense index behind a kernel id; None where no block has it."""
    def page_of(self, block: int) -> int: ...
    def byte_offset(self, block: int, layer: int, value: bool = False) -> int: ...
    def view(self, layer: int, value: bool = False) -> LayerView: ...

# ---- memory ----------------------------------------------------------------------------------------------------

@final
class View:
    """A strided part of a reservation that `torch.from_dlpack` and `numpy.from_dlpack` take without copying.

    It, and every tensor made of it, keeps the address range alive. Bytes of pages that are not mapped must not be
    touched: a CPU gets SIGSEGV, a kernel an illegal address."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> str: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

@final
class Region:
    """One address range whose pages are mapped by hand: what `create_kv_tensors` makes.

    A page has `chunks` chunks (one for each layer and K or V) of `chunk_bytes`:

        contiguous      page p at p * chunks * chunk_bytes, one driver mapping
        not contiguous  chunk c of page p at (c * pages + p) * chunk_bytes, `chunks` driver mappings

    A Pool or a Worker opened over it reserves in the device's ledger before it maps. `map` called by hand does not:
    neighbours see that memory as use outside the pools."""

    def __init__(
        self,
        device: str,
        *,
        pages: int,
        chunk_bytes: int,
        chunks: int = 1,
        contiguous: bool = True,
        unmapped_reads: UnmappedReads = "fault",
    ) -> None: ...
    @property
    def device(self) -> str: ...
    @property
    def base_address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def page_count(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def chunks(self) -> int: ...
    @property
    def contiguous(self) -> bool: ...
    @property
    def mapped_pages(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def is_mapped(self, page: int) -> bool: ...
    def map(self, pages: Sequence[int]) -> None:
        """All of them or none."""
    def unmap(self, pages: Sequence[int], *, synchronise: bool = True) -> None:
        """Waits for the device first, unless told that it is done."""
    def page_of_offset(self, offset: int) -> int:
        """The page of one of kvcached's byte offsets: `page * page_bytes` contiguous, else `page * chunk_bytes`."""
    def offset_of_page(self, page: int) -> int: ...
    def view(
        self, dtype: str, shape: Sequence[int], *, offset: int = 0, strides: Sequence[int] | None = None
    ) -> View:
        """Any part of the range; strides count elements. Refused where it would leave the range."""
    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy out of one mapped page; `Unmapped` where there is none."""
    def write(self, offset: int, data: bytes) -> None: ...
    def close(self) -> None:
        """Unmaps everything. The addresses stay taken until the last tensor is gone. May be called twice."""

class LimitState(TypedDict):
    status: Literal["applied", "deferred", "stale", "conflict"]
    pool_name: str
    group_id: int
    limit_bytes: int
    effective_limit_bytes: int
    current_capacity_bytes: int
    revision: int
    mapped_bytes: int
    remaining_bytes: int
    overage_bytes: int
    reason: str | None

class Reclaim(TypedDict):
    """What the pool asks its engine to free at the moment."""

    bytes: int
    pages: int
    firm_pages: int
    """The part of `pages` that is owed even if running requests must make room. The rest is asked for only because the engine
    said that it could evict as much (`Pool.set_evictable`)."""
    revision: int

class PoolSnapshot(TypedDict):
    pool_name: str
    group_id: int
    block_tokens: int
    blocks_per_page: int
    page_bytes: int
    total_blocks: int
    available_blocks: int
    allocated_blocks: int
    reserved_blocks: int
    free_mapped_blocks: int
    virtual_bytes_per_layer: int
    virtual_bytes_total: int
    mapped_bytes: int
    needed_bytes: int
    cached_bytes: int
    idle_bytes: int
    used_bytes: int
    prealloc_bytes: int
    ledger_bytes: int
    witness_bytes: int | None
    total_pages: int
    free_pages: int
    inuse_pages: int
    reserved_pages: int
    mapping_pages: int
    leaving_pages: int
    refused_pages: int
    available_physical_pages: int
    limit_bytes: int
    limit_revision: int
    limit_pages: int
    in_shrink: bool
    shrink_target_blocks: int
    demand_bytes: int
    reclaim: Reclaim
    counters: dict[str, int]

class Pool:
    """An elastic pool of KV-cache blocks. All methods may be called from any thread."""

    def __init__(
        self,
        layout: Layout,
        *,
        name: str | None = None,
        device: str = "auto",
        pages: int | None = None,
        capacity: int | None = None,
        group: int = 0,
        limit: int | None = None,
        budget: int | None = None,
        utilization: float | None = None,
        floor: int = 0,
        ceiling: int | None = None,
        weight: int = 1,
        priority: int = 0,
        reserve: tuple[int, int] | None = None,
        decay: float = 2.0,
        wait: float = 0.0,
        null_block: bool = False,
        unmapped_reads: UnmappedReads = "fault",
        runtime_dir: str | None = None,
        region: Region | None = None,
        fleet: Fleet | None = None,
        stage: int | None = None,
        env: bool = True,
    ) -> None:
        """Over a device, or over `region` (same chunks as the layout gives), or over `fleet` (`stage` None for all).

        `pages` or `capacity` sizes the reservation (default: the device's memory); over a region, `pages` uses the first so
        many alone. With `env`, kvcached's
        variables fill in what is not given here. A name that a living pool has gets a number: see `name`.
        `reserve` is (least, most) idle pages to keep."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def device(self) -> str:
        """`cuda:N`, `cpu`, or `fleet`."""
    @property
    def geometry(self) -> Geometry: ...
    @property
    def region(self) -> Region | None:
        """The one that was given."""
    @property
    def null_block(self) -> int | None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def mapped_bytes(self) -> int: ...

    # blocks
    def alloc(self, count: int, *, wait: float | None = None) -> list[int]:
        """All or `PoolExhausted`. Waits up to `wait` for neighbours and frees (default: as opened)."""
    def try_alloc(self, count: int) -> list[int] | None:
        """kvcached's alloc: first what was set aside, then mapped memory, then growth; None on a miss, without waiting."""
    def free(self, blocks: Sequence[int], *, step: int | None = None) -> None:
        """All or `NotLeased`, which names the first that is not ours. Pages are unmapped once `step` is over; without
        one, after the device was synchronised."""
    def step_completed(self, step: int) -> None: ...
    def available(self) -> int: ...
    def reserve(self, count: int) -> None:
        """Sets blocks aside, or `PoolExhausted`."""
    def try_reserve(self, count: int) -> bool: ...
    def alloc_reserved(self, count: int) -> list[int]: ...
    def free_reserved(self) -> None: ...
    def reserved_blocks(self) -> list[int]:
        """The blocks that are set aside, in the order in which they go."""
    def reserved(self) -> int:
        """How many blocks are set aside."""
    def clear(self) -> int:
        """Ends every lease; says how many there were."""
    def occupancy(self, pages: Sequence[int]) -> list[int]: ...
    def pages_of(self, blocks: Sequence[int]) -> list[int]: ...

    # limits
    def trim(self) -> int: ...
    def resize(self, limit: int) -> LimitState: ...
    def set_limit(self, limit: int, *, revision: int) -> LimitState: ...
    def limit_state(self) -> LimitState: ...
    def set_evictable(self, blocks: int) -> None:
        """Says how many leased blocks are only kept in case: cached prefixes that no request uses. A neighbour that waits gets
        them, also where this pool holds no more than its share: the engine is asked to evict. Cheap; say it whenever it changes."""
    def reclaim_requested(self) -> Reclaim: ...
    def reclaim_fileno(self) -> int:
        """An eventfd that is readable while there is a request that nobody has looked at. Do not close it."""
    def snapshot(self) -> PoolSnapshot: ...

    # bytes
    def view(self, layer: int, value: bool = False, *, dtype: str | None = None) -> View:
        """One layer's K or V. `dtype` reads the same bytes as another type of the same size."""
    def read_block(self, block: int, layer: int, value: bool = False) -> bytes:
        """A checked copy: `Unmapped` where a view would fault."""
    def write_block(self, block: int, layer: int, value: bool, data: bytes) -> None: ...
    def is_mapped(self, block: int) -> bool: ...
    def close(self) -> None:
        """Gives everything back. Tensors keep their addresses, which fault from now on. May be called twice."""
    def __enter__(self) -> Pool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class BlockCounts(TypedDict):
    total_blocks: int
    free_blocks: int
    leased_blocks: int
    reserved_pages: int
    mapping_pages: int
    idle_pages: int
    inuse_pages: int
    draining_pages: int
    unmapping_pages: int
    limit_pages: int

@final
class BlockTable:
    """A pool's decisions without its memory: for those who map themselves, on their own thread.

        try_alloc(n) -> ids                                  from mapped pages
             | None
        claim(n) -> pages  -- map them --> mapped(pages)     then try_alloc again
                                       \\-> refused(pages)   nothing happened
        retire(n) -> pages -- unmap ----> unmapped(pages)
                                       \\-> unmap_failed(pages)
    """

    def __init__(self, geometry: Geometry, *, null_block: bool = False) -> None: ...
    @property
    def geometry(self) -> Geometry: ...
    @property
    def null_block(self) -> int | None: ...
    def try_alloc(self, count: int) -> list[int] | None: ...
    def claim(self, count: int) -> list[int] | None:
        """The pages that must be mapped before `count` blocks can be had ([] where none must); None past limit or end."""
    def mapped(self, pages: Sequence[int]) -> None: ...
    def refused(self, pages: Sequence[int]) -> None: ...
    def free(self, blocks: Sequence[int]) -> None: ...
    def retire(self, count: int) -> list[int]:
        """At most so many idle pages, the coldest, which the caller now unmaps behind its own fence."""
    def unmapped(self, pages: Sequence[int]) -> None: ...
    def unmap_failed(self, pages: Sequence[int]) -> None: ...
    def available(self) -> int: ...
    def set_limit(self, pages: int) -> None: ...
    def occupancy(self, pages: Sequence[int]) -> list[int]: ...
    def pages_of(self, blocks: Sequence[int]) -> list[int]: ...
    def counts(self) -> BlockCounts: ...
    def clear(self) -> int: ...

# ---- several processes -----------------------------------------------------------------------------------------

@final
class Worker:
    """One rank: it maps into its regions what its scheduler orders, on a thread of its own that needs no GIL."""

    def __init__(
        self,
        pool: str,
        rank: int,
        *,
        stage: int = 0,
        socket_root: str | None = None,
        runtime_dir: str | None = None,
        fence_timeout: float = 5.0,
    ) -> None:
        """Takes the rank's place: a living worker that has it is an error."""

    @property
    def socket_path(self) -> str: ...
    @property
    def running(self) -> bool: ...
    def add_group(
        self,
        group: int,
        region: Region,
        *,
        budget: int | None = None,
        utilization: float | None = None,
        floor: int = 0,
        ceiling: int | None = None,
        weight: int = 1,
        priority: int = 0,
    ) -> None:
        """Also while it runs."""
    def groups(self) -> list[int]: ...
    def start(self) -> None: ...
    def stop(self) -> None:
        """Gives every page back and leaves its place. May be called twice."""

class RankStatus(TypedDict):
    stage: int
    rank: int
    state: Literal["member", "late", "lost", "rejoining", "excluded"]
    reason: str | None
    instance: int
    rejoins: int

@final
class Fleet:
    """The workers of one model as one memory: connects to all of them and waits for those that have not started."""

    def __init__(
        self,
        pool: str,
        stages: Sequence[int],
        *,
        strategy: str = "ring",
        timeout: float | None = None,
        start_timeout: float = 60.0,
        rejoin_timeout: float = 60.0,
        socket_root: str | None = None,
    ) -> None:
        """`stages` has the ranks of each pipeline stage. `timeout` None: KVCACHED_IPC_TIMEOUT; 0: without bound."""

    def status(self) -> list[RankStatus]: ...
    def has_group(self, group: int, *, stage: int | None = None) -> bool:
        """Whether every rank has added this group."""
    def group(self, group: int, pages: int, *, stage: int | None = None) -> FleetGroup:
        """Takes a group to map by hand. A Pool on the fleet takes its own."""
    def held(self, group: int) -> dict[tuple[int, int], list[int]]:
        """(stage, rank) -> pages with memory, of a group that is taken."""
    def quarantined(self, group: int) -> int: ...
    def exclude(self, rank: int, *, stage: int = 0, reason: str = "excluded") -> None: ...
    def readmit(self, rank: int, *, stage: int = 0) -> None: ...
    def close(self) -> None: ...

@final
class FleetGroup:
    """Pages of one group on every rank: mapped on all of them or on none."""

    def map(self, pages: Sequence[int]) -> None: ...
    def unmap(self, pages: Sequence[int], *, step: int | None = None) -> None: ...
    def close(self) -> None: ...

@final
class Arena:
    """Memory that many processes allocate from, and hand to each other as 64-bit handles."""

    def __init__(
        self,
        name: str,
        *,
        create: bool = True,
        segment_bytes: int = 67108864,
        limit_bytes: int = 68719476736,
        grain_bytes: int = 4096,
        runtime_dir: str | None = None,
    ) -> None:
        """Attaches to the arena of this name; makes it where there is none, unless `create` is false."""

    @property
    def path(self) -> str: ...
    @property
    def segments(self) -> int: ...
    @property
    def segment_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...
    def alloc(self, nbytes: int, *, align: int | None = None) -> int: ...
    def free(self, handle: int) -> None: ...
    def share(self, handle: int) -> None:
        """From now on others may retain it."""
    def retain(self, handle: int) -> None: ...
    def release(self, handle: int) -> None: ...
    def nbytes(self, handle: int) -> int: ...
    def read(self, handle: int, offset: int = 0, nbytes: int | None = None) -> bytes: ...
    def write(self, handle: int, data: bytes, offset: int = 0) -> None: ...
    def view(self, handle: int, dtype: str = "uint8", shape: Sequence[int] | None = None) -> View:
        """In place, no copy. The memory stays mapped as long as the view; whose bytes they are is the caller's to know."""
    def verify(self) -> dict[str, int]: ...
    def close(self) -> None: ...
    @staticmethod
    def unlink(name: str, *, runtime_dir: str | None = None) -> bool: ...
    @staticmethod
    def names(*, runtime_dir: str | None = None) -> list[str]: ...

# ---- steps -----------------------------------------------------------------------------------------------------

class Step(TypedDict):
    """The arrays of one step, as FlashAttention-like kernels take them, and its numbers. Rows behind the batch are padding."""

    slot_mapping: View
    seq_lens: View
    context_lens: View
    query_start_loc: View
    seq_start_loc: View
    batch: int
    tokens: int
    max_query_len: int
    max_seq_len: int
    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int

@final
class Batch:
    """Which blocks the tokens of the next step live in. Sequences lie densely in rows; their blocks come, first in, first out, from
    ids that were lent. Arrays are new in every step: nothing changes under a kernel that still reads one."""

    def __init__(
        self, *, block_tokens: int, max_rows: int, max_row_tokens: int, max_step_tokens: int, max_ids: int
    ) -> None: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def max_rows(self) -> int: ...
    @property
    def free_blocks(self) -> int: ...
    def lend(self, blocks: Sequence[int]) -> None:
        """Ids for the rows to come: what `Pool.alloc` gave."""
    def withdraw(self, blocks: Sequence[int]) -> None:
        """Takes these ids out, if all of them are free."""
    def take_back(self, count: int) -> list[int]:
        """Up to so many free ids, for `Pool.free`."""
    def admit(self, sequence: int, tokens: int = 0, *, shared: Sequence[int] | None = None) -> int:
        """A row for a sequence that holds `tokens` already; its first blocks are `shared`. Gives the row."""
    def release(self, sequence: int) -> list[int]:
        """It is done: its own blocks serve the next one; gives shared ones that nobody has any more."""
    def remove(self, sequence: int) -> list[int]:
        """It is done: gives all blocks that nobody has any more, for `Pool.free`."""
    def preempt(self, sequence: int) -> tuple[int, list[int]]:
        """It will come back: tokens to compute again, and the blocks that it frees."""
    def truncate(self, sequence: int, tokens: int) -> None: ...
    def share(self, sequence: int, blocks: int) -> list[int]:
        """Its first full blocks may be read by others from now on: their ids, for `admit`."""
    def swap(self, one: int, other: int) -> None: ...
    def sequences(self) -> list[int]:
        """In the order of their rows."""
    def row_of(self, sequence: int) -> int | None: ...
    def blocks_of(self, sequence: int) -> list[int] | None: ...
    def step(self, query_lens: Sequence[int] | None = None, *, pad_rows: int = 0, pad_tokens: int = 0) -> Step:
        """So many tokens more for each row (None: one for every row), all or `PoolExhausted`."""
    def block_table(self) -> View:
        """`(rows, blocks of the longest)`, int32; -1 behind a row's blocks."""

# ---- small files and names -------------------------------------------------------------------------------------

def runtime_dir() -> str:
    """KVCACHED_RUNTIME_DIR, or /dev/shm."""
def sanitise_name(text: str) -> str:
    """As kvcached cleans KVCACHED_IPC_NAME."""
def default_pool_name(tag: str) -> str:
    """`kvcached_<tag>_<process group>`"""
def socket_dir(pool: str, *, socket_root: str | None = None) -> str: ...
def socket_path(pool: str, rank: int, *, stage: int = 0, socket_root: str | None = None) -> str: ...
def ipc_timeout() -> float | None:
    """KVCACHED_IPC_TIMEOUT in seconds; None for no bound."""
def segment_path(name: str, *, group: int = 0, runtime_dir: str | None = None) -> str:
    """A name that begins with `/` is a path already, as in kvcached."""
def segment_read(name: str, *, runtime_dir: str | None = None) -> tuple[int, int, int] | None:
    """(limit, used, prealloc); None where there is no segment."""
def segment_create(name: str, limit: int, *, runtime_dir: str | None = None) -> None:
    """Writes (limit, 0, 0) to a segment that no living pool owns, making it where it is not there."""
def segment_set_limit(name: str, limit: int, *, runtime_dir: str | None = None) -> bool:
    """What `kvctl limit` does, the ledger's revision included; False where there is no such segment."""
def segment_set_usage(name: str, used: int, prealloc: int, *, runtime_dir: str | None = None) -> None:
    """For segments made by `segment_create`; a pool writes its own."""
def segment_delete(name: str, *, runtime_dir: str | None = None) -> bool: ...
def segment_owned(name: str, *, runtime_dir: str | None = None) -> bool:
    """Whether a living pool of ours has it."""
def segment_names(*, runtime_dir: str | None = None) -> list[str]: ...
def device_memory(device: str = "auto") -> tuple[int, int]:
    """(free, total) bytes. GPUs are asked through NVML, so no context is made; a machine without one is an error."""
def device_count() -> int:
    """GPUs that CUDA shows this process; 0 without a driver."""
def parse_size(text: str) -> int:
    """`20G`, `1.5GiB`, `512mb`: as every tool here reads sizes."""
def format_size(size: int) -> str: ...
def group_by_page(blocks: Sequence[int], block_bytes: int, page_bytes: int) -> dict[int, list[int]]: ...
def run_tool(name: Literal["kvctl", "kvtop", "kvbench"], arguments: Sequence[str]) -> int:
    """Runs the command in this process, arguments without the program's name; gives its exit code."""

