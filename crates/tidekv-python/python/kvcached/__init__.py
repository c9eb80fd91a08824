"""kvcached's Python surface on tidekv: the same names, signatures, defaults, exceptions and environment variables.

    kvcached.vmm_ops (also kvcached._C)    tensors whose pages are mapped and unmapped; page allocators
    kvcached.kv_cache_manager              blocks for an engine's scheduler
    kvcached.integration.*.interfaces      the two above, as vLLM and SGLang call them
    kvcached.tp_ipc_util                   a scheduler and its workers
    kvcached.cli, control, observability   operators

torch is imported when a tensor is asked for, and not before. What is better and what differs: docs/python-migration.md.
"""

from __future__ import annotations

import importlib.metadata
import warnings

from tidekv import __version__

__all__ = ["__version__"]

_DISTRIBUTION = "tidekv"
_OTHER = "kvcached"


def _warn_of_the_other() -> None:
    """Two distributions own a package of this name: whichever was installed last has overwritten files of the other."""
    try:
        other = importlib.metadata.version(_OTHER)
    except importlib.metadata.PackageNotFoundError:
        return
    warnings.warn(
        f"two distributions provide the package 'kvcached': {_DISTRIBUTION} {__version__}, which is active "
        f"({__file__}), and {_OTHER} {other}. Keep one of them: 'pip uninstall {_OTHER}', then 'pip install "
        f"--force-reinstall --no-deps {_DISTRIBUTION}', since the two share files; or use separate environments.",
        RuntimeWarning,
        stacklevel=3,
    )


_warn_of_the_other()
