"""What an engine that is installed offers, and what becomes of it, in one line.

    vllm 0.32.0: usable: connector from a module, memory of the KV cache, live block pool, ...
    vllm 0.30.0: refused: it is older than 0.31.0: a KV connector may not ... Install vllm>=0.31.0, or unset ENABLE_KVCACHED

A *point* is one place of an engine that an adapter stands on. Points are looked for, not assumed from a version, and a
version is refused as a whole when one is missing: half an adapter is worse than none.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvcached.integration.versions import SUPPORT, Support, installed
from kvcached.utils import KVCachedConfigError

__all__ = ["Capability", "EngineRefused", "Outcome", "Point", "examine", "look"]

Outcome = Literal["usable", "used", "refused", "absent"]


class EngineRefused(KVCachedConfigError):
    """An engine that was to get elastic memory and cannot. Nothing in it has been changed."""

    def __init__(self, capability: Capability) -> None:
        self.capability = capability
        super().__init__(capability.line())


@dataclass(frozen=True)
class Point:
    """One place of an engine, and whether it is there."""

    name: str
    """What it is for, in the words of the report."""
    where: str
    """`module:attribute`, as the engine spells it."""
    missing: str | None = None
    """Why it cannot be used; None where it can."""


@dataclass(frozen=True)
class Capability:
    """The report on one engine."""

    engine: str
    version: str | None
    outcome: Outcome
    points: tuple[Point, ...] = ()
    reason: str | None = None
    """Why it is refused; or, where it is usable, what else is to be known."""
    advice: str | None = None
    """What to install, to add to the command line or to set."""

    @property
    def usable(self) -> bool:
        return self.outcome in ("usable", "used")

    def line(self) -> str:
        """The report as people read it."""
        head = f"{self.engine} {self.version}" if self.version else self.engine
        found = ", ".join(point.name for point in self.points if point.missing is None)
        told = {"absent": "not installed", "refused": "refused"}.get(self.outcome, f"{self.outcome}: {found}")
        parts = [f"{head}: {told}"]
        if self.reason:
            parts.append(("; " if self.usable else ": ") + self.reason)
        if self.advice:
            parts.append(f". {self.advice}")
        return "".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The same for programs."""
        support = SUPPORT[self.engine]
        return {**asdict(self), "usable": self.usable, "tested": list(support.tested), "line": self.line()}

    def used(self, note: str | None = None) -> Capability:
        """The report once the adapter is in."""
        return Capability(self.engine, self.version, "used", self.points, note or self.reason, self.advice)

    def require(self) -> Capability:
        """Itself where the engine can be used, else `EngineRefused`."""
        if not self.usable:
            raise EngineRefused(self)
        return self


def look(name: str, where: str) -> Point:
    """Whether `module:attribute.attribute` is there."""
    module_name, _, path = where.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        # An engine's module may raise anything while it is imported, and then the point is as good as missing.
        said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        return Point(name, where, f"{module_name} cannot be imported: {said}")
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            return Point(name, where, f"{where} is not there")
        found = getattr(found, attribute)
    return Point(name, where)


def examine(engine: str, version: str | None = None) -> Capability:
    """Looks at the engine that is installed. Imports parts of it, starts nothing and changes nothing."""
    support = SUPPORT[engine]
    version = version or installed(engine)
    if version is None:
        return Capability(engine, None, "absent", advice=f"Install {engine}>={support.oldest},<={support.newest}")
    if support.is_too_old(version):
        reason = f"it is older than {support.oldest}: {support.lacking}"
        return Capability(engine, version, "refused", reason=reason, advice=_install(support))
    points: Sequence[Point] = importlib.import_module(support.probe).points()
    lacking = [f"{point.name} ({point.missing})" for point in points if point.missing is not None]
    if lacking:
        return Capability(engine, version, "refused", tuple(points), f"it lacks {', '.join(lacking)}", _install(support))
    note = f"not tested with this version, the newest that is: {support.newest}" if support.is_untested(version) else None
    return Capability(engine, version, "usable", tuple(points), note)


def _install(support: Support) -> str:
    span = f"=={support.newest}" if support.oldest == support.newest else f">={support.oldest},<={support.newest}"
    return f"Install {support.engine}{span}, or unset ENABLE_KVCACHED to run it with its own memory"
