"""A pool's segment from Python: 24 bytes, three native 64-bit integers (docs/formats/pool-segment.md).

    0 total_size     the limit, written by operators
    8 used_size      written by the pool
    16 prealloc_size written by the pool

The file is read and written whole under ``flock`` and never mapped: touching a mapping of a file that somebody cut
short would end the process.
"""

from __future__ import annotations

import fcntl
import os
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

from tidekv import TidekvError, _native

from kvcached.utils import SHM_DIR

__all__ = [
    "MemInfoStruct",
    "RwLockedShm",
    "delete_kv_cache_segment",
    "get_ipc_name",
    "get_ipc_path",
    "get_kv_cache_limit",
    "get_total_gpu_memory",
    "init_kv_cache_limit",
    "update_kv_cache_limit",
]

_WORDS = struct.Struct("=3q")
_UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclass
class MemInfoStruct:
    """The three words."""

    total_size: int
    used_size: int
    prealloc_size: int

    SHM_SIZE: ClassVar[int] = _WORDS.size
    N_FIELDS: ClassVar[int] = 3

    @classmethod
    def from_buffer(cls, buf: Any) -> MemInfoStruct:
        """Reads anything with a buffer of 24 bytes: a mapping, a bytearray, what ``RwLockedShm`` gives."""
        return cls(*_WORDS.unpack_from(buf))

    def write_to_buffer(self, buf: Any) -> None:
        _WORDS.pack_into(buf, 0, self.total_size, self.used_size, self.prealloc_size)


def get_ipc_path(ipc_name: str) -> str:
    """Where a pool's segment is; a name that begins with ``/`` is a path already."""
    return ipc_name if ipc_name.startswith("/") else os.path.join(SHM_DIR, ipc_name)


def get_ipc_name(ipc_path: str) -> str:
    return os.path.basename(ipc_path)


class RwLockedShm:
    """A segment's bytes under its lock, as a context. What is written to them goes to the file at the end."""

    RLOCK: ClassVar[int] = fcntl.LOCK_SH
    WLOCK: ClassVar[int] = fcntl.LOCK_EX

    def __init__(self, file_path: str, size: int, lock_type: int) -> None:
        self.file_path = get_ipc_path(file_path)
        self.size = size
        self.lock_type = lock_type

    def __enter__(self) -> bytearray:
        """The bytes. With ``WLOCK`` a file that is missing or short is made; with ``RLOCK`` that is an error."""
        writes = self.lock_type == self.WLOCK
        flags = (os.O_RDWR | os.O_CREAT) if writes else os.O_RDONLY
        self._fd = os.open(self.file_path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(self._fd, self.lock_type)
            found = os.pread(self._fd, self.size, 0)
            if len(found) < self.size and not writes:
                raise ValueError(f"{self.file_path} has {len(found)} bytes, and a segment has {self.size}: it is none")
        except BaseException:
            os.close(self._fd)
            raise
        self._before = found.ljust(self.size, b"\0")
        self._bytes = bytearray(self._before)
        return self._bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self.lock_type == self.WLOCK:
                os.pwrite(self._fd, self._bytes, 0)
        finally:
            os.close(self._fd)


def init_kv_cache_limit(ipc_name: str, kv_cache_limit: int) -> MemInfoStruct:
    """Makes a segment with this limit and nothing used. One that belongs to a living pool is left alone: an error."""
    _native.segment_create(ipc_name, kv_cache_limit)
    return MemInfoStruct(kv_cache_limit, 0, 0)


def get_kv_cache_limit(ipc_name: str) -> MemInfoStruct | None:
    """The three words, or None where there is no such segment. Takes no lock: 24 bytes are read in one piece."""
    try:
        fd = os.open(get_ipc_path(ipc_name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        found = os.pread(fd, MemInfoStruct.SHM_SIZE, 0)
    finally:
        os.close(fd)
    return MemInfoStruct.from_buffer(found) if len(found) == MemInfoStruct.SHM_SIZE else None


def update_kv_cache_limit(ipc_name: str, kv_cache_limit: int) -> MemInfoStruct | None:
    """Sets a limit as ``kvctl limit`` does, with a revision in the ledger; None where there is no such segment."""
    if kv_cache_limit < 0:
        raise ValueError(f"a limit of {kv_cache_limit} bytes: give what the pool may hold, 0 for nothing")
    before = get_kv_cache_limit(ipc_name)
    if before is None or not _native.segment_set_limit(ipc_name, kv_cache_limit):
        return None
    if before.used_size > kv_cache_limit:
        print(f"No enough free space to decrease for the new kv_cache_limit for {ipc_name}")
    print(f"Updated kv cache limit for {ipc_name} to {_format_size(kv_cache_limit)} ({kv_cache_limit} bytes)")
    return get_kv_cache_limit(ipc_name)


def delete_kv_cache_segment(ipc_name: str) -> bool:
    """Removes a segment; False where there is none. A living pool makes its own again, with its limit."""
    return _native.segment_delete(ipc_name)


def get_total_gpu_memory() -> int:
    """Bytes of the first GPU, asked without making a context on it; 0 where there is none."""
    try:
        return _native.device_memory("cuda:0")[1]
    except TidekvError:
        return 0


def _format_size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} {_UNITS[-1]}"
