"""Changing engines when they are imported, where ``KVCACHED_AUTOPATCH`` asks for it."""

from __future__ import annotations

import importlib.metadata
import os

from kvcached.integration.patch_base import PatchManager, enable_kvcached
from kvcached.utils import KVCachedConfigError, get_kvcached_logger

__all__ = ["autopatch_all"]

logger = get_kvcached_logger()

ENGINES: dict[str, PatchManager] = {}
"""What there is for each engine. An adapter registers its changes here."""


def autopatch_all() -> dict[str, dict[str, bool]]:
    """Applies what is registered to the engines that are installed: engine -> change -> made.

    Does nothing without ``KVCACHED_AUTOPATCH``. An engine that is installed and has no adapter is named; with
    ``ENABLE_KVCACHED`` on that is an error, because it would run with its own memory.
    """
    if os.environ.get("KVCACHED_AUTOPATCH", "false").lower() not in ("true", "1"):
        return {}
    done: dict[str, dict[str, bool]] = {}
    for engine in ("vllm", "sglang"):
        try:
            version = importlib.metadata.version(engine)
        except importlib.metadata.PackageNotFoundError:
            continue
        manager = ENGINES.get(engine)
        if manager is not None:
            done[engine] = manager.apply_all_patches()
            continue
        message = f"{engine} {version} is installed and this version has no adapter for it: it runs with its own memory"
        if enable_kvcached():
            raise KVCachedConfigError(f"{message}. Unset ENABLE_KVCACHED to accept that, or call kvcached.integration yourself")
        logger.warning("%s", message)
    return done
