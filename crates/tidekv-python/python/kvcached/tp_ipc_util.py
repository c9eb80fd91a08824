"""A scheduler and the workers of its ranks, by messages: kvcached's functions, names and socket paths.

    scheduler                                         worker of rank r
      broadcast_map_to_kv_tensors(n, offsets)           start_worker_listener_thread(r)
        {"cmd": "map_to_kv_tensors", ...}  ----------->   <folder>/w<r>.sock, one thread
        {"status": "success"}              <-----------   map_to_kv_tensors(offsets)

A broadcast reaches all ranks at once and waits for all of them, until one deadline. It is done by all or by none: where
one rank refuses, those that had mapped unmap again, and the error names the rank. A rank that comes to a map order after the deadline
finds the scheduler gone and does nothing; one that was mapping meanwhile finds nobody to tell, and unmaps again. What is to be unmapped
is unmapped however late.

A ``KVCacheManager`` sends one such message, ``serve_group``, and goes on over the native fleet: the worker's pages are
then mapped by a native thread, with no interpreter on the way, reserved in its device's ledger, in two phases, and given
back when the scheduler dies. The other orders are for strategies and engines that send their own. What those map is not
reserved in the ledger, so neighbours see it as use outside the pools; a group is mapped by one or the other, not by both.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import selectors
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from tidekv import TidekvError, _native

from kvcached import _messages, _opening, _runtime, vmm_ops
from kvcached.utils import DEFAULT_IPC_NAME, get_kvcached_logger

__all__ = [
    "IPC_TIMEOUT_S",
    "Message",
    "SOCKET_DIR",
    "broadcast_kv_tensors_created",
    "broadcast_map_to_kv_tensors",
    "broadcast_unmap_from_kv_tensors",
    "get_worker_socket_path",
    "recv_msg",
    "send_msg",
    "start_worker_listener_thread",
    "stop_worker_listener_threads",
]

logger = get_kvcached_logger()

Message = dict[str, Any]
SOCKET_DIR: str = os.path.join(
    os.environ.get("KVCACHED_RUNTIME_DIR") or "/tmp",
    f"kvcached-tp-{DEFAULT_IPC_NAME}-{uuid.uuid5(uuid.NAMESPACE_DNS, DEFAULT_IPC_NAME).hex[:8]}",
)
IPC_TIMEOUT_S: float = _native.ipc_timeout() or 0.0
"""Bound on one exchange in seconds, KVCACHED_IPC_TIMEOUT; 0 or less for none."""
# What a socket's address has room for, its final zero included.
_PATH_BYTES_MAX = 108
_STOP_PATIENCE_S = 5.0
# How long a peer that has connected may take to send its order. Others wait meanwhile.
_ORDER_PATIENCE_S = 5.0


def get_worker_socket_path(rank: int, pp_rank: int = 0) -> str:
    """``<folder>/w<rank>.sock``, in ``pp<n>`` for later pipeline stages."""
    folder = SOCKET_DIR if pp_rank == 0 else os.path.join(SOCKET_DIR, f"pp{pp_rank}")
    path = os.path.join(folder, f"w{rank}.sock")
    if len(os.fsencode(path)) >= _PATH_BYTES_MAX:
        raise RuntimeError(
            f"the socket path {path} has {len(os.fsencode(path))} bytes and the kernel takes {_PATH_BYTES_MAX - 1}: choose a "
            "shorter KVCACHED_IPC_NAME or KVCACHED_RUNTIME_DIR"
        )
    return path


def send_msg(sock: socket.socket, msg: Message) -> None:
    """Sends one message, made of what JSON has."""
    _messages.send(sock, msg)


def recv_msg(sock: socket.socket) -> Message:
    """Receives one message. Bytes that are none, or of another version, are an error and run no code."""
    message = _messages.receive(sock)
    if not isinstance(message, dict):
        raise _messages.BadMessage(f"a message is a dict, and the peer sent {type(message).__name__}")
    return message


# ---- the scheduler's side


def broadcast_map_to_kv_tensors(tp_size: int, offsets: Sequence[int], pp_rank: int = 0, group_id: int = 0) -> None:
    """Maps on all ranks or on none."""
    exchange = _Exchange("map_to_kv_tensors", tp_size, pp_rank, group_id, list(offsets))
    failures = exchange.run()
    if failures:
        _Exchange("unmap_from_kv_tensors", tp_size, pp_rank, group_id, list(offsets)).run(only=exchange.done)
        raise RuntimeError(f"Worker {failures[0][0]} failed to map: {failures[0][1]}")


def broadcast_unmap_from_kv_tensors(tp_size: int, offsets: Sequence[int], pp_rank: int = 0, group_id: int = 0) -> None:
    """Unmaps on all ranks. One that fails does not keep the others from it, and is named."""
    failures = _Exchange("unmap_from_kv_tensors", tp_size, pp_rank, group_id, list(offsets)).run()
    if failures:
        raise RuntimeError(f"Worker {failures[0][0]} failed to unmap: {failures[0][1]}")


def broadcast_kv_tensors_created(tp_size: int, pp_rank: int = 0, group_id: int = 0) -> bool:
    """Whether every rank has the group's tensors."""
    exchange = _Exchange("kv_tensors_created", tp_size, pp_rank, group_id)
    failures = exchange.run()
    if failures:
        raise RuntimeError(f"Worker {failures[0][0]} failed to check KV tensors created: {failures[0][1]}")
    return all(answer.get("created") is True for answer in exchange.done.values())


def ask_to_serve_group(tp_size: int, pp_rank: int, group_id: int) -> bool:
    """Asks every rank to leave a group to its native worker. False where one has no tensors for it yet, or is not there."""
    exchange = _Exchange("serve_group", tp_size, pp_rank, group_id)
    failures = exchange.run()
    absent = {rank for rank, _ in failures if not exchange.reached(rank)}
    for rank, why in failures:
        if rank not in absent:
            raise RuntimeError(f"Worker {rank} failed to serve group {group_id}: {why}")
    return not absent and all(answer.get("created") is True for answer in exchange.done.values())


class _Exchange:
    """One order to all ranks of a stage, and their answers, on the calling thread."""

    def __init__(self, cmd: str, ranks: int, pp_rank: int, group: int, offsets: list[int] | None = None) -> None:
        self._order: Message = {"cmd": cmd, "group_id": group}
        if offsets is not None:
            self._order["offsets"] = offsets
        self._ranks = range(ranks)
        self._pp_rank = pp_rank
        self._timeout = IPC_TIMEOUT_S
        self._reached: set[int] = set()
        self.done: dict[int, Message] = {}

    def reached(self, rank: int) -> bool:
        """Whether anybody listened there."""
        return rank in self._reached

    def run(self, only: dict[int, Message] | None = None) -> list[tuple[int, str]]:
        """What went wrong, by rank; nothing for all well."""
        until = time.monotonic() + self._timeout if self._timeout > 0 else None
        failures: dict[int, str] = {}
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waiting:
            for rank in self._ranks if only is None else only:
                try:
                    sock = stack.enter_context(self._connect(rank))
                    self._reached.add(rank)
                    _messages.send(sock, self._order)
                    waiting.register(sock, selectors.EVENT_READ, rank)
                except (OSError, TidekvError) as error:
                    failures[rank] = f"{error} ({get_worker_socket_path(rank, self._pp_rank)})"
            while waiting.get_map():
                ready = waiting.select(None if until is None else max(0.0, until - time.monotonic()))
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    failure = self._take_answer(key.data, key.fileobj, until)
                    if failure is not None:
                        failures[key.data] = failure
                if not ready:
                    failures.update({key.data: self._silence(key.data) for key in waiting.get_map().values()})
                    break
        return sorted(failures.items())

    def _connect(self, rank: int) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if self._timeout > 0:
                sock.settimeout(self._timeout)
            sock.connect(get_worker_socket_path(rank, self._pp_rank))
            _messages.check_peer(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def _take_answer(self, rank: int, sock: Any, until: float | None) -> str | None:
        try:
            answer = _messages.receive(sock, until)
        except TimeoutError:
            return self._silence(rank)
        except (OSError, TidekvError) as error:
            return str(error)
        if not isinstance(answer, dict) or answer.get("status") != "success":
            return str(answer.get("message", answer)) if isinstance(answer, dict) else repr(answer)
        self.done[rank] = answer
        return None

    def _silence(self, rank: int) -> str:
        return (
            f"worker {rank} (pp_rank={self._pp_rank}) did not answer {self._order['cmd']} within {self._timeout}s "
            "(KVCACHED_IPC_TIMEOUT): it is stopped, busy or stuck; look at its log, or allow it more time"
        )


# ---- the worker's side


class _Listener:
    """A rank's socket, the thread that serves it, and the native worker that it starts on request."""

    def __init__(self, rank: int, pp_rank: int) -> None:
        self.place = (rank, pp_rank)
        self._path = get_worker_socket_path(rank, pp_rank)
        self._worker: _native.Worker | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind()
        except BaseException:
            self._socket.close()
            raise
        self._inode = os.stat(self._path).st_ino
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name=f"kvcached-listener-{rank}", daemon=True)
        self._thread.start()

    def _bind(self) -> None:
        folder = os.path.dirname(self._path)
        for path in sorted({SOCKET_DIR, folder}, key=len):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise PermissionError(
                    f"{path} is not a folder of our own that nobody else may enter: remove it, or choose another "
                    "KVCACHED_RUNTIME_DIR"
                )
        # Under the folder's lock, so that of two workers that want the place one finds the other living.
        lock = os.open(SOCKET_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
                probe.connect(self._path)
                raise RuntimeError(
                    f"a living worker has the place of rank {self.place[0]}, {self._path}: end it first, give each rank one "
                    "process, or give each instance its own KVCACHED_IPC_NAME"
                )
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._socket.bind(self._path)
            self._socket.listen()
        finally:
            os.close(lock)

    def leave_to_parent(self) -> None:
        """In a forked child: the socket is the parent's, which must not seem to live when only the child does."""
        for sock in (self._socket, self._wake, self._woken):
            sock.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._socket, selectors.EVENT_READ)
            waiting.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in waiting.select():
                    if key.fileobj is self._woken:
                        return
                    with contextlib.suppress(OSError):
                        connection, _ = self._socket.accept()
                        with connection:
                            self._serve_one(connection)

    def _serve_one(self, connection: socket.socket) -> None:
        """One order. Nothing that a peer sends ends the thread, and one that sends nothing holds it up only so long."""
        try:
            _messages.check_peer(connection)
            order = _messages.receive(connection, time.monotonic() + _ORDER_PATIENCE_S)
            is_map = isinstance(order, dict) and order.get("cmd") == "map_to_kv_tensors"
            if is_map and _messages.has_left(connection):
                # It has given us up, and counts on nothing having been mapped. What it wants unmapped is owed all the same.
                raise ConnectionError("the peer left before its order was obeyed")
            answer = self._obey(order)
        except (ConnectionError, TimeoutError):
            return  # Nobody is there to be answered.
        except Exception as error:
            logger.warning("rank %d (pp_rank=%d): %s", *self.place, error)
            answer = {"status": "error", "message": str(error)}
        try:
            _messages.send(connection, answer)
        except OSError:
            if answer["status"] == "success":
                self._undo(order)

    def _undo(self, order: Message) -> None:
        """Nobody knows that it was obeyed: pages that stayed mapped could never be mapped again."""
        if order["cmd"] == "map_to_kv_tensors":
            try:
                vmm_ops.unmap_from_kv_tensors(order["offsets"], group_id=int(order.get("group_id", 0)))
            except Exception as error:
                logger.warning("rank %d (pp_rank=%d): pages stay mapped that nobody counts: %s", *self.place, error)

    def _obey(self, order: Any) -> Message:
        if isinstance(order, dict) and order.get("cmd") == "serve_group":
            return {"status": "success", "created": self._serve_group(int(order.get("group_id", 0)))}
        return _obey(order)

    def _serve_group(self, group: int) -> bool:
        """Has the native worker map the group from now on. False where it has no tensors yet."""
        region = _runtime.find_region(group)
        if region is None:
            return False
        if self._worker is None:
            rank, pp_rank = self.place
            worker = _native.Worker(_opening.ranks_name(DEFAULT_IPC_NAME, pp_rank), rank)
            worker.start()
            self._worker = worker
        if group not in self._worker.groups():
            self._worker.add_group(group, region)
        return True

    def stop(self) -> bool:
        """Ends the thread and the worker. False where the thread is still busy with an order."""
        self._wake.send(b"x")
        self._thread.join(_STOP_PATIENCE_S)
        if self._thread.is_alive():
            return False
        for sock in (self._socket, self._wake, self._woken):
            sock.close()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)
        if self._worker is not None:
            self._worker.stop()
        for folder in (os.path.dirname(self._path), SOCKET_DIR):
            with contextlib.suppress(OSError):  # Other ranks are in it.
                os.rmdir(folder)
        return True


def _obey(order: Any) -> Message:
    command = order.get("cmd") if isinstance(order, dict) else None
    known: dict[str, Callable[..., bool]] = {
        "map_to_kv_tensors": vmm_ops.map_to_kv_tensors,
        "unmap_from_kv_tensors": vmm_ops.unmap_from_kv_tensors,
    }
    if command == "kv_tensors_created":
        return {"status": "success", "created": vmm_ops.kv_tensors_created(int(order.get("group_id", 0)))}
    if command not in known:
        return {"status": "error", "message": "Unknown command"}
    offsets = order.get("offsets")
    if not isinstance(offsets, list) or not all(type(offset) is int for offset in offsets):
        return {"status": "error", "message": f"offsets must be a list of integers, not {offsets!r:.80}"}
    if not known[command](offsets, group_id=int(order.get("group_id", 0))):
        return {"status": "error", "message": f"{command} was refused"}
    return {"status": "success"}


_listeners: list[_Listener] = []
_listeners_lock = threading.Lock()


def start_worker_listener_thread(rank: int, pp_rank: int = 0, device_index: int | None = None) -> None:
    """Makes this process the worker of a rank: from now on its tensors are mapped by the scheduler.

    ``device_index`` is what newer kvcached passes to have its thread on the right GPU; here a region knows its device.
    """
    with _listeners_lock:
        listener = _Listener(rank, pp_rank)
        _listeners.append(listener)
    _runtime.close_at_stop(lambda: _stop(listener))


def _stop(listener: _Listener) -> bool:
    with _listeners_lock:
        if listener not in _listeners:
            return True
        if not listener.stop():
            return False
        _listeners.remove(listener)
        return True


def _after_fork() -> None:
    global _listeners_lock
    _listeners_lock = threading.Lock()
    for listener in _listeners:
        listener.leave_to_parent()
    _listeners.clear()


os.register_at_fork(after_in_child=_after_fork)
# A worker that ends in order leaves no socket behind. One that is killed does, and `kvctl gc` removes it.
atexit.register(lambda: stop_worker_listener_threads())


def stop_worker_listener_threads() -> bool:
    """Ends all listeners of this process. False where one is still busy with an order: try again then."""
    return all([_stop(listener) for listener in list(_listeners)])
