"""Everything the library can answer instead of doing what it was asked.

Each class has fields for programs and one sentence for people; `transient` says whether the same call can succeed later
without the caller changing anything.

    TidekvError(RuntimeError)
      PoolExhausted                too little memory now: a miss for the scheduler, not a fault
      NeverFits        ValueError  more than the pool can ever give
      NotLeased        ValueError  freed something else than a leased block; nothing was freed
      Unmapped         ValueError  a checked access to a block without memory
      BadArgument      ValueError  sizes, names or settings that make no sense together
      OutOfMemory      MemoryError the device has too little, and nobody can be asked to give back
      MapFailed                    the driver refused for another reason; the batch was undone
      Unavailable                  a back-end that cannot be used on this machine
      WorkerFailed                 a rank refused, is late, lost or excluded
      FileProblem                  a ledger, segment, socket or arena file that cannot be used
      StaleHandle      ValueError  a handle of an arena whose block is gone
      Closed                       used after close
      Forked                       used in a child of the process that made it
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "BadArgument",
    "Closed",
    "FileProblem",
    "Forked",
    "MapFailed",
    "NeverFits",
    "NotLeased",
    "OutOfMemory",
    "PoolExhausted",
    "StaleHandle",
    "TidekvError",
    "Unavailable",
    "Unmapped",
    "WorkerFailed",
]


class TidekvError(RuntimeError):
    """What all of them are."""

    transient: bool = False

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        vars(self).update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between processes with their fields, unlike what raised them.
        return _rebuild, (type(self), str(self), dict(vars(self)))


def _rebuild(kind: type[TidekvError], message: str, fields: dict[str, Any]) -> TidekvError:
    return kind(message, **fields)


class PoolExhausted(TidekvError):
    """Limit, shared budget or device leave too little now. What is missing was posted as demand."""

    transient = True
    needed: int
    """Blocks that were asked for."""
    available: int
    """Blocks that could have been had."""
    shortage: str
    """What is short: `limit`, `budget`, `device` or `rank` of a pool; `batch` for ids that were lent to a batch."""
    needed_bytes: int | None = None
    grantable_bytes: int | None = None
    stage: int | None = None
    rank: int | None = None


class NeverFits(TidekvError, ValueError):
    """More blocks than the pool has, even when nothing is in use."""

    needed: int
    pool_blocks: int


class NotLeased(TidekvError, ValueError):
    """A block that is not leased: freed twice, never allocated, or outside the pool. Nothing was freed."""

    block: int


class Unmapped(TidekvError, ValueError):
    """The bytes asked for have no memory: the block is not leased, or its page was given back."""

    offset: int
    end: int
    block: int | None = None


class BadArgument(TidekvError, ValueError):
    """Sizes, names or settings that make no sense; the message says what to change."""


class OutOfMemory(TidekvError, MemoryError):
    """The system below has too little memory."""

    transient = True
    needed_bytes: int
    free_bytes: int | None = None


class MapFailed(TidekvError):
    """Pages were not mapped or not given back, or one stayed in the middle of another call and nothing was copied. A batch that
    failed to map is as it was before."""

    page: int | None = None
    stuck: int = 0
    """Pages that hold memory which the driver would not take back: counted, and tried again."""


class Unavailable(TidekvError):
    """A device or an option that this machine does not have."""


class WorkerFailed(TidekvError):
    """One rank stood in the way; nothing is mapped on any of them."""

    stage: int | None = None
    rank: int | None = None
    fault: str
    """`refused`, `timed-out`, `late`, `lost`, `rejoining`, `excluded`, or `order` for an order that makes no sense."""
    reason: str


class FileProblem(TidekvError):
    """A shared file or socket that cannot be used."""

    path: str | None = None


class StaleHandle(TidekvError, ValueError):
    """An arena's handle that leads nowhere: freed, damaged, or another arena's."""

    handle: int


class Closed(TidekvError):
    """The object was closed: make a new one."""


class Forked(TidekvError):
    """The object belongs to the process that made it: make a new one in the child."""
