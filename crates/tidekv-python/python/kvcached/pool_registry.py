"""Which pools live in this process, for those who look at or limit all of them. Being listed keeps nothing alive."""

from __future__ import annotations

import threading
import weakref
from typing import Any

__all__ = ["clear_registered_kv_cache_pools", "get_registered_kv_cache_pools", "register_kv_cache_pool"]

# Managers compare by identity, so a dictionary of weak references forgets each of them by itself.
_integration_of: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def register_kv_cache_pool(manager: Any, *, integration: str | None = None) -> None:
    """Lists a manager under the engine that made it. A second time replaces the engine."""
    with _lock:
        _integration_of[manager] = integration


def clear_registered_kv_cache_pools(*, integration: str | None = None) -> None:
    """Forgets all managers, or those of one engine."""
    with _lock:
        for manager in list(_integration_of):
            if integration in (None, _integration_of[manager]):
                del _integration_of[manager]


def get_registered_kv_cache_pools(*, integration: str | None = None) -> list[tuple[Any, str | None]]:
    """The managers that still live, with their engines."""
    with _lock:
        listed = list(_integration_of.items())
    return [(manager, engine) for manager, engine in listed if integration in (None, engine)]
