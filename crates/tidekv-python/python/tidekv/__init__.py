"""Elastic KV-cache memory for LLM serving.

    import tidekv

    layout = tidekv.Layout.heads(layers=32, kv_heads=8, head_size=128, dtype="bfloat16")
    with tidekv.Pool(layout, name="llama", device="cuda:0") as pool:
        kv = pool.tensors()                 # one (K, V) of torch tensors for each layer, no copy
        blocks = pool.alloc(16)             # kernel ids: memory is mapped when it is needed
        kv[0].key[blocks[0]] = ...
        pool.free(blocks, step=7)           # given back once step 7 is over
        pool.step_completed(7)

`docs/python.md` is the guide; `tidekv.errors` has every exception.
"""

from tidekv._native import (
    STRATEGIES,
    Arena,
    Batch,
    BlockTable,
    Fleet,
    FleetGroup,
    Geometry,
    LayerView,
    Layout,
    Region,
    View,
    Worker,
    __version__,
)
from tidekv._pool import KV, Pool
from tidekv.errors import (
    BadArgument,
    Closed,
    FileProblem,
    Forked,
    MapFailed,
    NeverFits,
    NotLeased,
    OutOfMemory,
    PoolExhausted,
    StaleHandle,
    TidekvError,
    Unavailable,
    Unmapped,
    WorkerFailed,
)

__all__ = [
    "KV",
    "STRATEGIES",
    "Arena",
    "BadArgument",
    "Batch",
    "BlockTable",
    "Closed",
    "FileProblem",
    "Fleet",
    "FleetGroup",
    "Forked",
    "Geometry",
    "LayerView",
    "Layout",
    "MapFailed",
    "NeverFits",
    "NotLeased",
    "OutOfMemory",
    "Pool",
    "PoolExhausted",
    "Region",
    "StaleHandle",
    "TidekvError",
    "Unavailable",
    "Unmapped",
    "View",
    "Worker",
    "WorkerFailed",
    "__version__",
]
