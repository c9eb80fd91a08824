"""HF transformers on elastic memory.

    TideCache          for `model.generate(..., past_key_values=cache)`: the official Cache hook
    elastic_memory     for `model.generate_batch(...)` (continuous batching) while a `with` block runs
    install            the same for the rest of the process

Both keep K and V in a `tidekv.Pool`: memory is mapped as tokens come, given back as they go, counted in the device's
ledger and shown and limited by `kvctl` like every other pool. Importing this package needs torch and transformers;
importing `tidekv` does not.
"""

from __future__ import annotations

from .batching import ElasticMemory, UnsupportedTransformers, elastic_memory, install
from .cache import TideCache, UnsupportedModel
from .memory import PoolOptions

__all__ = [
    "ElasticMemory",
    "PoolOptions",
    "TideCache",
    "UnsupportedModel",
    "UnsupportedTransformers",
    "elastic_memory",
    "install",
]
