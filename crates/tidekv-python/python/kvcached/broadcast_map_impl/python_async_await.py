"""All workers at once, on an event loop of its own for each broadcast."""

import asyncio
import socket
from typing import Any

from kvcached.tp_ipc_util import get_worker_socket_path, recv_msg, send_msg


def _exchange(rank: int, offsets: list[int]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(get_worker_socket_path(rank))
        send_msg(sock, {"cmd": "map_to_kv_tensors", "offsets": offsets})
        return recv_msg(sock)


async def broadcast_map_to_kv_tensors_to_workers(tp_size: int, offsets: list[int]) -> None:
    answers = await asyncio.gather(*(asyncio.to_thread(_exchange, rank, offsets) for rank in range(tp_size)))
    for rank, answer in enumerate(answers):
        if answer["status"] != "success":
            raise RuntimeError(f"Worker {rank} failed to map: {answer}")
