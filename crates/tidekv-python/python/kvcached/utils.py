"""What the environment says, read once at import, and the few helpers that engines share.

The names and defaults are kvcached's. A variable that is malformed is a ``ValueError`` here, at import, where the
operator still looks; the same variables are read again by the native pool, which names them alike.

Nothing here imports torch: ``kvctl`` and a scheduler without a GPU need these values too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import sys
from typing import Any, TypeVar
from collections.abc import Callable

from tidekv import _native

__all__ = [
    "CONTIGUOUS_LAYOUT",
    "DEFAULT_IPC_NAME",
    "GPU_UTILIZATION",
    "IPC_NAME_MAX",
    "KVCachePoolExhausted",
    "KVCachedConfigError",
    "MAX_CACHED_BLOCKS",
    "MAX_CACHED_TOKENS",
    "MAX_RESERVED_PAGES",
    "MIN_RESERVED_PAGES",
    "PAGE_PREALLOC_ENABLED",
    "PAGE_SIZE",
    "SANITY_CHECK",
    "SHM_DIR",
    "align_to",
    "align_up_to_page",
    "get_kvcached_logger",
    "normalize_gpu_device",
]

T = TypeVar("T")

_MIB = 1 << 20
_GRANULARITY_MIB = 2
IPC_NAME_MAX = 64
"""Longest name of a pool; what is longer is cut."""


class KVCachedConfigError(RuntimeError):
    """A setting that only the operator can change, such as pages too small for a block. The message names it."""


class KVCachePoolExhausted(ValueError):
    """There is too little memory now. Not a fault: preempt, wait or try again later."""


def _variable(name: str, default: T, parse: Callable[[str], T], wanted: str) -> T:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not {wanted}; unset it for the default, {default!r}") from None


def _truth(text: str) -> bool:
    try:
        return {"true": True, "1": True, "yes": True, "on": True,
                "false": False, "0": False, "no": False, "off": False}[text.lower()]
    except KeyError:
        raise ValueError(text) from None


def _page_size(text: str) -> int:
    mib = int(text)
    if mib <= 0 or mib % _GRANULARITY_MIB:
        raise ValueError(text)
    return mib * _MIB


def _part(text: str) -> float:
    part = float(text)
    if not 0.0 < part <= 1.0:
        raise ValueError(text)
    return part


def _runs_rocm() -> bool:
    """Whether torch is a ROCm build, without importing it (that takes seconds and may open a device)."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return bool(getattr(getattr(torch, "version", None), "hip", None))
    try:
        return "rocm" in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def _sanitise(name: str) -> str:
    """A name as files may have it: everything but ASCII letters, digits, ``_`` and ``-`` becomes ``-``."""
    kept = (letter if letter.isascii() and (letter.isalnum() or letter in "_-") else "-" for letter in name)
    return "".join(kept)[:IPC_NAME_MAX]


def _engine_tag() -> str:
    """The engine that runs in this process, or else the one that is installed."""
    for package, tag in (("vllm", "vLLM"), ("sglang", "SGLang")):
        if package in sys.modules:
            return tag
    for package, tag in (("vllm", "vLLM"), ("sglang", "SGLang")):
        if importlib.util.find_spec(package) is not None:
            return tag
    return "proc"


def _default_ipc_name() -> str:
    """Every process of one instance must arrive at the same name, so nothing is probed and nothing is counted up here.

    A name that a living pool of another instance has is found by the native pool, which holds a lock for it.
    """
    explicit = os.environ.get("KVCACHED_IPC_NAME", "")
    return _sanitise(explicit) if explicit else f"kvcached_{_engine_tag()}_{os.getpgid(0)}"


PAGE_SIZE: int = _variable("KVCACHED_PAGE_SIZE_MB", 2 * _MIB, _page_size, "a positive multiple of 2 (MiB)")
"""Bytes of a page for one layer and one of K and V."""
GPU_UTILIZATION: float = _variable("KVCACHED_GPU_UTILIZATION", 0.95, _part, "a number above 0 and at most 1")
PAGE_PREALLOC_ENABLED: bool = _variable("KVCACHED_PAGE_PREALLOC_ENABLED", True, _truth, "true or false")
MIN_RESERVED_PAGES: int = _variable("KVCACHED_MIN_RESERVED_PAGES", 5, int, "a number of pages")
MAX_RESERVED_PAGES: int = _variable("KVCACHED_MAX_RESERVED_PAGES", 10, int, "a number of pages")
MAX_CACHED_BLOCKS: int = _variable("KVCACHED_MAX_CACHED_BLOCKS", 1000, int, "a number of blocks")
MAX_CACHED_TOKENS: int = _variable(
    "KVCACHED_MAX_CACHED_TOKENS", _native.DEFAULT_MAX_CACHED_TOKENS, int, "a number of tokens"
)
SANITY_CHECK: bool = _variable("KVCACHED_SANITY_CHECK", False, _truth, "true or false")
CONTIGUOUS_LAYOUT: bool = _variable("KVCACHED_CONTIGUOUS_LAYOUT", not _runs_rocm(), _truth, "true or false")
DEFAULT_IPC_NAME: str = _default_ipc_name()
SHM_DIR: str = os.environ.get("KVCACHED_RUNTIME_DIR") or "/dev/shm"
"""Folder of the segments."""


def align_to(x: int, a: int) -> int:
    """The least multiple of ``a`` that is not below ``x``."""
    return -(-x // a) * a


def align_up_to_page(n_cells: int, cell_size: int) -> int:
    """Cells rounded up to whole pages."""
    per_page = PAGE_SIZE // cell_size
    if per_page == 0:
        raise KVCachedConfigError(
            f"a cell of {cell_size} bytes does not fit into a page of {PAGE_SIZE}: set KVCACHED_PAGE_SIZE_MB to at "
            f"least {align_to(cell_size, _GRANULARITY_MIB * _MIB) // _MIB}"
        )
    return align_to(n_cells, per_page)


def normalize_gpu_device(device: Any) -> str:
    """``hip:1`` is ``cuda:1`` to torch; everything else stays as it is."""
    name = str(device)
    return "cuda" + name[3:] if name.lower().startswith("hip") else name


class _Coloured(logging.Formatter):
    """Colours what stands before the message."""

    def __init__(self, form: str, colour: str) -> None:
        super().__init__(form)
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        head, bracket, rest = super().format(record).partition("] ")
        return f"{self._colour}{head}{bracket}\033[0m{rest}" if bracket else head


def get_kvcached_logger(name: str = "kvcached") -> logging.Logger:
    """The package's logger, with its own handler: engines configure the root logger as they like."""
    logger = logging.getLogger(name)
    if logger.handlers:
        return logger
    level = logging.getLevelName(os.environ.get("KVCACHED_LOG_LEVEL", "INFO").upper())
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
    handler = logging.StreamHandler()
    form = f"[{name}][%(levelname)s][%(asctime)s][%(filename)s:%(lineno)d] %(message)s"
    colour = os.environ.get("KVCACHED_LOG_COLOR_CODE", "\033[36m")
    if handler.stream.isatty() and _variable("KVCACHED_LOG_COLOR", True, _truth, "true or false"):
        handler.setFormatter(_Coloured(form, colour))
    else:
        handler.setFormatter(logging.Formatter(form))
    logger.addHandler(handler)
    logger.propagate = False
    return logger
