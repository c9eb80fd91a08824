"""Giving the engines that are installed elastic memory, where the switches ask for it.

Engines call their plugin by themselves (``tidekv_plugins``); this is the same by hand, under kvcached's name.
"""

from __future__ import annotations

import importlib
import os

import tidekv_plugins

from kvcached.integration.patch_base import PatchManager
from kvcached.integration.versions import SUPPORT, installed
from kvcached.utils import get_kvcached_logger

__all__ = ["autopatch_all"]

logger = get_kvcached_logger()

ENGINES: dict[str, PatchManager] = {}
"""Changes of one's own to an engine, made after ours."""


def autopatch_all() -> dict[str, dict[str, bool]]:
    """Puts the adapters into the engines that are installed: engine -> change -> made.

    Does nothing unless ``ENABLE_KVCACHED`` is on; ``KVCACHED_AUTOPATCH=1`` without it is told so. An engine whose version
    cannot be used is one error that says why: it would run with its own memory.
    """
    if not tidekv_plugins.is_wanted():
        if os.environ.get("KVCACHED_AUTOPATCH", "false").strip().lower() in ("true", "1"):
            logger.warning("KVCACHED_AUTOPATCH is on and ENABLE_KVCACHED is not: engines run with their own memory")
        return {}
    done: dict[str, dict[str, bool]] = {}
    for engine in SUPPORT:
        if installed(engine) is None:
            continue
        importlib.import_module(f"kvcached.integration.{engine}.plugin").register()
        done[engine] = {"plugin": True}
        if engine in ENGINES:
            done[engine].update(ENGINES[engine].apply_all_patches())
    return done
