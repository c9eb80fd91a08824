"""Which versions of an engine a change is for."""

from __future__ import annotations

import importlib.metadata
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvcached.utils import get_kvcached_logger

__all__ = ["VersionAwarePatch", "VersionManager", "VersionRange", "version_range"]

logger = get_kvcached_logger()
Method = TypeVar("Method", bound=Callable[..., Any])

_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "": operator.eq,
}
_CONSTRAINT = re.compile(r"\s*(>=|<=|==|!=|>|<|)\s*(\S+)\s*")
_VERSION = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)(?:[-_.]?(?P<pre>a|b|c|rc|alpha|beta|pre|preview)[-_.]?(?P<pre_n>\d*))?"
    r"(?:(?:[-_.]?post[-_.]?|-)(?P<post>\d+))?(?:[-_.]?dev(?P<dev>\d*))?(?:\+[a-z0-9._-]+)?",
    re.IGNORECASE,
)
_LAST = 9  # After every letter of a pre-release.


def _key(version: str) -> tuple[Any, ...]:
    """What versions are ordered by: 1.0.dev1 < 1.0a1 < 1.0rc1 < 1.0 == 1.0.0 < 1.0.post1."""
    found = _VERSION.fullmatch(version.strip())
    if found is None:
        raise ValueError(f"{version!r} is not a version such as 0.9.1, 1.0rc1 or 0.5.2.post1")
    release = [int(part) for part in found["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    letter = (found["pre"] or "").lower()
    stage = {"a": 1, "alpha": 1, "b": 2, "beta": 2}.get(letter, 3) if letter else _LAST
    if found["dev"] is not None and not letter and found["post"] is None:
        stage = 0
    post = -1 if found["post"] is None else int(found["post"])
    dev = float("inf") if found["dev"] is None else int(found["dev"] or 0)
    return tuple(release), stage, int(found["pre_n"] or 0), post, dev


class VersionRange:
    """Constraints that must all hold, as in ``>=0.9.0,<0.11``. A malformed one is an error at once."""

    def __init__(self, range_spec: str) -> None:
        self.range_spec = range_spec
        self._bounds: list[tuple[Callable[[Any, Any], bool], tuple[Any, ...]]] = []
        for part in range_spec.split(","):
            found = _CONSTRAINT.fullmatch(part)
            if found is None:
                raise ValueError(f"{part!r} in {range_spec!r} is no constraint such as >=0.9.0 or <0.11")
            self._bounds.append((_COMPARE[found[1]], _key(found[2])))

    def contains(self, ver: str) -> bool:
        """Whether the version is in the range; a string that is no version is in none."""
        try:
            key = _key(ver)
        except ValueError as error:
            logger.warning("not in %s: %s", self.range_spec, error)
            return False
        return all(compare(key, bound) for compare, bound in self._bounds)

    def __str__(self) -> str:
        return self.range_spec


def version_range(range_spec: str) -> Callable[[Method], Method]:
    """Marks a method as meant for these versions. Several marks mean any of them."""
    parsed = VersionRange(range_spec)

    def mark(method: Method) -> Method:
        method._version_ranges = [*getattr(method, "_version_ranges", []), parsed]  # type: ignore[attr-defined]
        return method

    return mark


class VersionManager:
    """Finds installed versions, and what is meant for them. Nothing is imported for that."""

    def __init__(self) -> None:
        self._found: dict[str, str | None] = {}

    def detect_version(self, library_name: str, force_refresh: bool = False) -> str | None:
        if force_refresh or library_name not in self._found:
            try:
                self._found[library_name] = importlib.metadata.version(library_name)
            except importlib.metadata.PackageNotFoundError:
                self._found[library_name] = None
        return self._found[library_name]

    def is_method_applicable(self, method: Callable[..., Any], library_name: str, version_str: str) -> bool:
        """Whether a method is meant for this version. One without a mark is meant for all."""
        if getattr(method, "_library", library_name) != library_name:
            return False
        ranges: list[VersionRange] | None = getattr(method, "_version_ranges", None)
        return ranges is None or any(allowed.contains(version_str) for allowed in ranges)

    def get_applicable_methods(
        self, methods: Iterable[Callable[..., Any]], library_name: str, version_str: str
    ) -> list[Callable[..., Any]]:
        return [method for method in methods if self.is_method_applicable(method, library_name, version_str)]


class VersionAwarePatch:
    """For patches: which of their marked methods are meant for the engine that is installed."""

    library: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.version_manager = VersionManager()
        self.detected_version: str | None = None
        self.applicable_methods: list[Callable[..., Any]] | None = None

    def initialize_version_info(self) -> bool:
        """Looks at what is installed. False where the engine is not."""
        if self.library is None:
            raise TypeError(f"{type(self).__name__} names no library: set its class attribute 'library'")
        self.detected_version = self.version_manager.detect_version(self.library)
        if self.detected_version is None:
            return False
        marked = [getattr(self, name) for name in dir(type(self)) if hasattr(getattr(type(self), name), "_version_ranges")]
        self.applicable_methods = self.version_manager.get_applicable_methods(
            marked, self.library, self.detected_version
        )
        return True

    def is_version_supported(self) -> bool:
        return self.initialize_version_info() and bool(self.applicable_methods)
