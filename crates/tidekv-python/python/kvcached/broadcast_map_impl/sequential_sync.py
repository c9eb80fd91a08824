"""One worker after the other: the sum of all answers' times."""

import socket

from kvcached.tp_ipc_util import get_worker_socket_path, recv_msg, send_msg


def broadcast_map_to_kv_tensors_to_workers(tp_size: int, offsets: list[int]) -> None:
    for rank in range(tp_size):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(get_worker_socket_path(rank))
            send_msg(sock, {"cmd": "map_to_kv_tensors", "offsets": offsets})
            answer = recv_msg(sock)
        if answer["status"] != "success":
            raise RuntimeError(f"Worker {rank} failed to map: {answer}")
