"""The versions of engines that there are adapters for: the one place that names them.

A version below `oldest` lacks points that the adapter stands on, and is refused. One above `newest` is probed for them, and the
report says that nobody has tested it: engines move faster than we release.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from kvcached.integration.version_utils import VersionRange

__all__ = ["SUPPORT", "Support", "installed"]


@dataclass(frozen=True)
class Support:
    """What is known of one engine."""

    engine: str
    """Its distribution's name."""
    tested: tuple[str, ...]
    """What `scripts/test-integration` runs, oldest first."""
    lacking: str
    """What versions before the oldest lack."""
    probe: str
    """The module that looks for the points: its `points()` gives a list of `Point`."""

    @property
    def oldest(self) -> str:
        return self.tested[0]

    @property
    def newest(self) -> str:
        return self.tested[-1]

    def is_too_old(self, version: str) -> bool:
        return not VersionRange(f">={self.oldest}").contains(version)

    def is_untested(self, version: str) -> bool:
        return VersionRange(f">{self.newest}").contains(version)


SUPPORT: dict[str, Support] = {
    "vllm": Support(
        engine="vllm",
        tested=("0.31.0", "0.32.0"),
        lacking="a KV connector may not supply the memory of the KV cache there",
        probe="kvcached.integration.vllm.probe",
    ),
    "sglang": Support(
        engine="sglang",
        tested=("0.5.22", "0.5.23"),
        lacking="a platform may not supply KV pools by their kind there",
        probe="kvcached.integration.sglang.probe",
    ),
}


def installed(engine: str) -> str | None:
    """The version that is installed, without importing the engine; None where there is none."""
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return None
