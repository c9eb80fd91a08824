"""The frame in which an engine is changed: found, tried, and told in one line what came of it.

A change that fails is not swallowed: with ``ENABLE_KVCACHED`` on, an engine that would quietly run without elastic memory
is stopped at start-up by one error that names every change which failed and why.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from kvcached.utils import KVCachedConfigError, get_kvcached_logger

__all__ = ["BasePatch", "PatchFailed", "PatchManager", "enable_kvcached", "log_patch_results"]

logger = get_kvcached_logger()


def enable_kvcached() -> bool:
    """``ENABLE_KVCACHED`` as it is now: ``true`` or ``1``."""
    return os.environ.get("ENABLE_KVCACHED", "false").lower() in ("true", "1")


class PatchFailed(RuntimeError):
    """Changes to an engine that were asked for and could not be made."""

    def __init__(self, library: str, failures: dict[str, str]) -> None:
        self.library = library
        self.failures = failures
        each = "; ".join(f"{name}: {why}" for name, why in failures.items())
        super().__init__(
            f"{library} cannot be given elastic memory: {each}. Unset ENABLE_KVCACHED to run it without, or install a "
            "version that is supported"
        )


class BasePatch(ABC):
    """One change to one module of an engine."""

    library: str | None = None
    target_module: str | None = None
    target_class: str | None = None
    patch_name: str | None = None

    def __init__(self) -> None:
        self.patch_name = self.patch_name or type(self).__name__
        self.logger = logger

    @abstractmethod
    def apply(self, target_module: ModuleType) -> bool:
        """Makes the change; True where it was made."""

    def can_apply(self, target_module: ModuleType) -> bool:
        """Whether the module has what the change is about."""
        return self.target_class is None or hasattr(target_module, self.target_class)

    def _get_target_class(self, target_module: ModuleType) -> Any:
        if self.target_class is None:
            raise ValueError(f"{self.patch_name} names no target_class")
        return getattr(target_module, self.target_class, None)

    def _marker(self, patch_marker: str | None) -> str:
        return patch_marker or f"__kvcached_patched_{self.patch_name}__"

    def _is_already_patched(self, obj: Any, patch_marker: str | None = None) -> bool:
        return getattr(obj, self._marker(patch_marker), False) is True

    def _mark_as_patched(self, obj: Any, patch_marker: str | None = None) -> None:
        setattr(obj, self._marker(patch_marker), True)


class PatchManager:
    """The changes for one engine."""

    def __init__(self, library_name: str) -> None:
        self.library_name = library_name
        self.patches: list[BasePatch] = []

    def register_patch(self, patch: BasePatch) -> None:
        if patch.library != self.library_name:
            raise ValueError(f"{patch.patch_name} is for {patch.library}, not for {self.library_name}")
        self.patches.append(patch)

    def register_patches(self, patches: Iterable[BasePatch]) -> None:
        for patch in patches:
            self.register_patch(patch)

    def apply_all_patches(self) -> dict[str, bool]:
        """Tries all of them and says which were made. ``PatchFailed`` where one was not and ``ENABLE_KVCACHED`` is on."""
        failures: dict[str, str] = {}
        for patch in self.patches:
            try:
                why = self._apply(patch)
            except KVCachedConfigError:
                raise
            except Exception as error:
                logger.exception("%s: %s", self.library_name, patch.patch_name)
                why = f"{type(error).__name__}: {error}"
            if why is not None:
                failures[str(patch.patch_name)] = why
        results = {str(patch.patch_name): str(patch.patch_name) not in failures for patch in self.patches}
        log_patch_results(self.library_name, results)
        if failures and enable_kvcached():
            raise PatchFailed(self.library_name, failures)
        return results

    @staticmethod
    def _apply(patch: BasePatch) -> str | None:
        """Why it was not applied, or None."""
        if patch.target_module is None:
            return "it names no target_module"
        module = importlib.import_module(patch.target_module)
        if not patch.can_apply(module):
            return f"{patch.target_module} has no {patch.target_class}"
        return None if patch.apply(module) else "it was not made"


def log_patch_results(library_name: str, results: dict[str, bool]) -> None:
    """One line for what was made, one for what was not."""
    for made, level, words in ((True, logger.info, "patched"), (False, logger.warning, "not patched")):
        names = [name for name, success in results.items() if success is made]
        if names:
            level("%s %s: %s", library_name, words, ", ".join(names))
