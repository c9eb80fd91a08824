"""Locks that do nothing, for engines that call from one thread.

kvcached's manager chooses between these and real ones by ``async_sched``. The pool below needs neither, since it may
be called from any thread; the names are kept for code that uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

__all__ = ["NoOpCondition", "NoOpLock"]


class NoOpLock:
    """A lock that is always free."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return True

    def release(self) -> None:
        pass

    def locked(self) -> bool:
        return False

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class NoOpCondition:
    """A condition that nobody can wait for: with one thread there is nobody to fulfil it."""

    def __init__(self, lock: NoOpLock | None = None) -> None:
        self._lock = lock if lock is not None else NoOpLock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        return bool(predicate())

    def notify(self, n: int = 1) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.__exit__(kind, error, trace)
