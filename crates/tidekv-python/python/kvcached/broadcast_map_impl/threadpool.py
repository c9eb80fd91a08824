"""A thread for each worker, kept between broadcasts."""

import socket
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from kvcached.tp_ipc_util import get_worker_socket_path, recv_msg, send_msg


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="broadcast")


def _map_on(rank: int, offsets: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(get_worker_socket_path(rank))
        send_msg(sock, {"cmd": "map_to_kv_tensors", "offsets": offsets})
        answer = recv_msg(sock)
    if answer["status"] != "success":
        raise RuntimeError(f"Worker {rank} failed to map: {answer}")


def broadcast_map_to_kv_tensors_to_workers(tp_size: int, offsets: list[int]) -> None:
    for done in [_threads(tp_size).submit(_map_on, rank, offsets) for rank in range(tp_size)]:
        done.result()
