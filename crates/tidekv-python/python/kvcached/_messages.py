"""Messages between processes of one instance: JSON in frames, never pickle.

    magic  "KVM\\x01"    4 bytes     a peer that speaks kvcached's pickle is recognised, and refused, by its first bytes
    length               4 bytes     big-endian, at most LENGTH_MAX
    body                 JSON        {"version": the sender's, "body": the message}

Reading can run no code, allocates no more than the bound, and gives up at a deadline. Both sides must be the same
version: a message that means something else there is worse than none.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from typing import Any

from tidekv import TidekvError, __version__

MAGIC = b"KVM\x01"
LENGTH_MAX = 16 << 20
_HEAD = struct.Struct(">4sI")


class BadMessage(TidekvError, ValueError):
    """Bytes that are no message of ours. The connection is of no use any more."""


class VersionMismatch(TidekvError):
    """Two versions in one instance."""

    ours: str
    theirs: str


def send(sock: socket.socket, message: Any) -> None:
    try:
        text = json.dumps({"version": __version__, "body": message}, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a message is made of dict, list, str, int, float, bool and None, so that nobody has to unpickle it: {error}"
        ) from None
    body = text.encode()
    if len(body) > LENGTH_MAX:
        raise BadMessage(f"a message of {len(body)} bytes is above the bound of {LENGTH_MAX}: send the offsets in parts")
    sock.sendall(_HEAD.pack(MAGIC, len(body)) + body)


def receive(sock: socket.socket, until: float | None = None) -> Any:
    """One message. ``TimeoutError`` at the deadline (of ``time.monotonic``), ``ConnectionError`` where the peer left."""
    magic, length = _HEAD.unpack(_read(sock, _HEAD.size, until))
    if magic != MAGIC:
        raise BadMessage(
            f"the peer sent {magic!r} where a message begins with {MAGIC!r}: it runs another kvcached, whose pickled "
            "messages are never read. Install the same distribution in all processes of the instance"
        )
    if length > LENGTH_MAX:
        raise BadMessage(f"the peer announced a message of {length} bytes, above the bound of {LENGTH_MAX}")
    try:
        envelope = json.loads(_read(sock, length, until))
        theirs, message = envelope["version"], envelope["body"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadMessage(f"the peer's message cannot be read: {error}") from None
    if theirs != __version__:
        raise VersionMismatch(
            f"the peer runs version {theirs} and this process {__version__}: restart all processes of the instance with "
            "one version",
            ours=__version__,
            theirs=str(theirs),
        )
    return message


def _read(sock: socket.socket, count: int, until: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("the deadline has passed")
            sock.settimeout(left)
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError(f"the peer closed the connection after {len(parts)} of {count} bytes")
        parts += part
    return bytes(parts)


def has_left(sock: socket.socket) -> bool:
    """Whether the peer has closed the connection. What it sent before stays to be read."""
    patience = sock.gettimeout()
    try:
        # With a timeout Python would wait for bytes first, whatever the flags say.
        sock.setblocking(False)
        return sock.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        sock.settimeout(patience)


def check_peer(sock: socket.socket) -> None:
    """Refuses peers that run as somebody else. The kernel says who they are, not they themselves."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid not in (os.geteuid(), 0):
        raise PermissionError(f"a process of user {uid} is on the socket of user {os.geteuid()}: nothing is done for it")
