"""A scheduler and its workers: paths, messages, broadcasts that all ranks do or none, and what foreign bytes come to."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kvcached import _messages, _runtime, tp_ipc_util, vmm_ops
from kvcached.tp_ipc_util import (
    broadcast_kv_tensors_created,
    broadcast_map_to_kv_tensors,
    broadcast_unmap_from_kv_tensors,
    get_worker_socket_path,
    recv_msg,
    send_msg,
    start_worker_listener_thread,
)

PAGE = 2 << 20
LAYERS = 2
BUNDLE = PAGE * LAYERS * 2


# ---- paths


def test_the_socket_path_is_kvcacheds() -> None:
    digits = uuid.uuid5(uuid.NAMESPACE_DNS, "contract").hex[:8]
    folder = f"{os.environ['KVCACHED_RUNTIME_DIR']}/kvcached-tp-contract-{digits}"
    assert tp_ipc_util.SOCKET_DIR == folder
    assert get_worker_socket_path(3) == f"{folder}/w3.sock"
    assert get_worker_socket_path(1, 2) == f"{folder}/pp2/w1.sock"


def test_without_a_runtime_folder_sockets_are_in_tmp(python: Any) -> None:
    said = python("from kvcached.tp_ipc_util import SOCKET_DIR; print(SOCKET_DIR)", KVCACHED_RUNTIME_DIR=None)
    assert said.stdout.startswith("/tmp/kvcached-tp-contract-"), said.stderr


def test_a_path_that_the_kernel_will_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp_ipc_util, "SOCKET_DIR", "/tmp/" + "x" * 120)
    with pytest.raises(RuntimeError, match="shorter KVCACHED_IPC_NAME"):
        get_worker_socket_path(0)


# ---- messages


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        yield first, second


@pytest.mark.parametrize("message", [{}, {"cmd": "x", "offsets": list(range(5000))}, {"a": {"b": [1.5, None, True, "ü"]}}])
def test_messages_arrive_as_they_were_sent(pair: Any, message: dict[str, Any]) -> None:
    sender = threading.Thread(target=send_msg, args=(pair[0], message))
    sender.start()
    assert recv_msg(pair[1]) == message
    sender.join()


class Bomb:
    """What a pickle could do to whoever loads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.path.join(os.environ["KVCACHED_RUNTIME_DIR"], "exploded"),)


def test_w15_a_pickle_is_never_loaded(pair: Any) -> None:
    body = pickle.dumps({"cmd": Bomb()})
    pair[0].sendall(len(body).to_bytes(4, "big") + body)
    with pytest.raises(_messages.BadMessage, match="never read"):
        recv_msg(pair[1])
    assert not os.path.exists(os.path.join(os.environ["KVCACHED_RUNTIME_DIR"], "exploded"))


def test_w15_a_length_above_the_bound_is_refused_before_it_is_read(pair: Any) -> None:
    pair[0].sendall(_messages.MAGIC + (0xFFFFFFFF).to_bytes(4, "big"))
    with pytest.raises(_messages.BadMessage, match="above the bound"):
        recv_msg(pair[1])


def test_w15_bytes_may_come_one_by_one(pair: Any) -> None:
    class Collect:
        data = b""

        def sendall(self, data: bytes) -> None:
            self.data += data

    collected: Any = Collect()
    _messages.send(collected, {"cmd": "slow"})

    def drip() -> None:
        for byte in collected.data:
            pair[0].send(bytes([byte]))

    sender = threading.Thread(target=drip)
    sender.start()
    assert recv_msg(pair[1]) == {"cmd": "slow"}
    sender.join()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"version": 1}', b"[" * 100_000, b"\xff"])
def test_bytes_that_are_no_message_are_an_error(pair: Any, body: bytes) -> None:
    def send() -> None:
        with contextlib.suppress(OSError):
            pair[0].sendall(_messages.MAGIC + len(body).to_bytes(4, "big") + body)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(_messages.BadMessage):
        recv_msg(pair[1])
    sender.join()


def test_what_json_has_not_is_refused_when_sent(pair: Any) -> None:
    with pytest.raises(TypeError, match="unpickle"):
        send_msg(pair[0], {"what": object()})


def test_a_peer_that_leaves_is_an_error(pair: Any) -> None:
    pair[0].close()
    with pytest.raises(ConnectionError):
        recv_msg(pair[1])


def test_two_versions_in_one_instance_are_named(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_messages, "__version__", "9.9.9")
    send_msg(pair[0], {"cmd": "x"})
    monkeypatch.undo()
    with pytest.raises(_messages.VersionMismatch, match="one version") as caught:
        recv_msg(pair[1])
    assert caught.value.theirs == "9.9.9"


# ---- one worker in this process


def test_a_worker_maps_what_it_is_told(tensors: Any) -> None:
    tensors(4)
    start_worker_listener_thread(0)
    assert broadcast_kv_tensors_created(1) is True and broadcast_kv_tensors_created(1, group_id=3) is False
    broadcast_map_to_kv_tensors(1, [0, 2 * BUNDLE])
    region = _runtime.region(0)
    assert [region.is_mapped(page) for page in range(4)] == [True, False, True, False]
    broadcast_unmap_from_kv_tensors(1, [0, 2 * BUNDLE])
    assert region.mapped_pages == 0


def exchange(message: Any, raw: bytes | None = None) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        sock.connect(get_worker_socket_path(0))
        sock.sendall(raw) if raw is not None else send_msg(sock, message)
        return recv_msg(sock)


def test_a_worker_answers_everything_and_lives(tensors: Any) -> None:
    tensors(4)
    start_worker_listener_thread(0)
    assert exchange({"cmd": "dance"}) == {"status": "error", "message": "Unknown command"}
    for bad in ([1, 2], {"cmd": "map_to_kv_tensors"}, {"cmd": "map_to_kv_tensors", "offsets": ["0"]},
                {"cmd": "map_to_kv_tensors", "offsets": [True]}, {"cmd": "map_to_kv_tensors", "offsets": [7]},
                {"cmd": "map_to_kv_tensors", "offsets": [0], "group_id": 9}):
        assert exchange(bad)["status"] == "error", bad
    assert exchange(None, raw=b"\x00\x00\x00\x05junk")["status"] == "error"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(get_worker_socket_path(0))
    assert exchange({"cmd": "map_to_kv_tensors", "offsets": [0]}) == {"status": "success"}
    # W3: mapped already is not success.
    assert exchange({"cmd": "map_to_kv_tensors", "offsets": [0]})["status"] == "error"


def test_a_peer_that_has_left_is_seen_before_its_bytes_are_read(pair: Any) -> None:
    pair[1].settimeout(30)
    assert not _messages.has_left(pair[1])
    send_msg(pair[0], {"cmd": "x"})
    assert recv_msg(pair[1]) == {"cmd": "x"} and not _messages.has_left(pair[1])
    assert pair[1].gettimeout() == 30
    pair[0].close()
    assert _messages.has_left(pair[1])


def gate(monkeypatch: pytest.MonkeyPatch, before: bool) -> tuple[threading.Event, threading.Event]:
    """Stops the listener before or after it has obeyed its first order: the event that it is there, and the one that lets it go on."""
    reached, go_on = threading.Event(), threading.Event()
    real = vmm_ops.kv_tensors_created if before else vmm_ops.map_to_kv_tensors

    def held(*arguments: Any, **more: Any) -> bool:
        done = real(*arguments, **more)
        reached.set()
        assert go_on.wait(60)
        return bool(done)

    monkeypatch.setattr(vmm_ops, real.__name__, held)
    return reached, go_on


@pytest.mark.parametrize("is_busy_before", [True, False])
def test_a_rank_that_was_given_up_maps_nothing(
    tensors: Any, monkeypatch: pytest.MonkeyPatch, is_busy_before: bool
) -> None:
    """Busy with something else when the order came, or with the order itself."""
    tensors(4)
    start_worker_listener_thread(0)
    with monkeypatch.context() as patch:
        reached, go_on = gate(patch, is_busy_before)
        other = threading.Thread(target=broadcast_kv_tensors_created, args=(1,))
        if is_busy_before:
            other.start()
            assert reached.wait(60)
        patch.setattr(tp_ipc_util, "IPC_TIMEOUT_S", 0.2)
        with pytest.raises(RuntimeError, match="did not answer map_to_kv_tensors within 0.2s"):
            broadcast_map_to_kv_tensors(1, [0])
        assert reached.wait(60)
        go_on.set()
        if is_busy_before:
            other.join(60)
    # One order after the other: when this one is answered, those before it are over.
    assert broadcast_kv_tensors_created(1)
    assert _runtime.region(0).mapped_pages == 0
    broadcast_map_to_kv_tensors(1, [0])
    assert _runtime.region(0).is_mapped(0)


def test_what_is_to_be_unmapped_is_unmapped_however_late(tensors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no memory, and a page that stayed mapped could not be mapped again."""
    tensors(4)
    start_worker_listener_thread(0)
    broadcast_map_to_kv_tensors(1, [0])
    with monkeypatch.context() as patch:
        reached, go_on = gate(patch, True)
        other = threading.Thread(target=broadcast_kv_tensors_created, args=(1,))
        other.start()
        assert reached.wait(60)
        patch.setattr(tp_ipc_util, "IPC_TIMEOUT_S", 0.2)
        with pytest.raises(RuntimeError, match="did not answer unmap_from_kv_tensors within 0.2s"):
            broadcast_unmap_from_kv_tensors(1, [0])
        go_on.set()
        other.join(60)
    assert broadcast_kv_tensors_created(1)
    assert _runtime.region(0).mapped_pages == 0
    broadcast_map_to_kv_tensors(1, [0])


def test_a_rank_has_one_worker() -> None:
    start_worker_listener_thread(0)
    with pytest.raises(RuntimeError, match="living worker"):
        start_worker_listener_thread(0)


def test_the_socket_is_private_and_goes_with_its_worker() -> None:
    start_worker_listener_thread(0, 1)
    path = get_worker_socket_path(0, 1)
    assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0
    assert tp_ipc_util.stop_worker_listener_threads()
    assert not os.path.exists(path) and not os.path.exists(tp_ipc_util.SOCKET_DIR)


def test_a_dead_workers_socket_is_taken_over() -> None:
    os.mkdir(tp_ipc_util.SOCKET_DIR, 0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(get_worker_socket_path(0))
    start_worker_listener_thread(0)
    assert broadcast_kv_tensors_created(1) is False


def test_a_folder_that_others_may_enter_is_refused() -> None:
    os.mkdir(tp_ipc_util.SOCKET_DIR, 0o700)
    os.chmod(tp_ipc_util.SOCKET_DIR, 0o777)
    try:
        with pytest.raises(PermissionError, match="KVCACHED_RUNTIME_DIR"):
            start_worker_listener_thread(0)
    finally:
        os.rmdir(tp_ipc_util.SOCKET_DIR)


def test_peers_of_another_user_are_refused(pair: Any) -> None:
    class Foreign:
        """A socket whose peer, as the kernel says, runs as somebody else."""

        def getsockopt(self, *_: int) -> bytes:
            return struct.pack("3i", 1, os.geteuid() + 1, 1)

    _messages.check_peer(pair[0])
    with pytest.raises(PermissionError, match="nothing is done for it"):
        _messages.check_peer(Foreign())  # type: ignore[arg-type]


# ---- broadcasts against scripted workers


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Callable[..., list[Any]]]:
    """Workers that answer by a function of the order, and remember the orders; None for one that never answers."""
    threads: list[threading.Thread] = []
    servers: list[socket.socket] = []
    monkeypatch.setattr(tp_ipc_util, "get_worker_socket_path", lambda rank, pp_rank=0: str(tmp_path / f"w{rank}"))

    def start(*answers: Callable[[Any], Any] | None) -> list[list[Any]]:
        orders: list[list[Any]] = [[] for _ in answers]
        for rank, answer in enumerate(answers):
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.bind(str(tmp_path / f"w{rank}"))
            server.listen()
            servers.append(server)

            def serve(server: socket.socket = server, answer: Any = answer, seen: list[Any] = orders[rank]) -> None:
                held = []
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        held.append(connection)
                        seen.append(recv_msg(connection))
                        if answer is not None:
                            send_msg(connection, answer(seen[-1]))
                for connection in held:
                    connection.close()

            threads.append(threading.Thread(target=serve, daemon=True))
            threads[-1].start()
        return orders

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
    for thread in threads:
        thread.join(10)


def good(_: Any) -> dict[str, str]:
    return {"status": "success"}


def test_one_rank_that_refuses_undoes_the_others_and_is_named(scripted: Any) -> None:
    orders = scripted(good, lambda order: {"status": "error", "message": "no memory"}, good)
    with pytest.raises(RuntimeError, match="Worker 1 failed to map: no memory"):
        broadcast_map_to_kv_tensors(3, [0, PAGE], group_id=4)
    done = [[order["cmd"] for order in rank] for rank in orders]
    assert done == [["map_to_kv_tensors", "unmap_from_kv_tensors"], ["map_to_kv_tensors"],
                    ["map_to_kv_tensors", "unmap_from_kv_tensors"]]
    assert all(order["offsets"] == [0, PAGE] and order["group_id"] == 4 for rank in orders for order in rank)


def test_a_rank_that_does_not_answer_is_bounded_and_named(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp_ipc_util, "IPC_TIMEOUT_S", 0.2)
    orders = scripted(good, None)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"worker 1 \(pp_rank=0\) did not answer map_to_kv_tensors within 0.2s"):
        broadcast_map_to_kv_tensors(2, [0])
    assert time.monotonic() - began < 30
    assert [order["cmd"] for order in orders[0]] == ["map_to_kv_tensors", "unmap_from_kv_tensors"]


def test_a_rank_that_is_not_there_fails_at_once(scripted: Any) -> None:
    scripted(good)
    with pytest.raises(RuntimeError, match="Worker 1 failed to map"):
        broadcast_map_to_kv_tensors(2, [0])
    with pytest.raises(RuntimeError, match="Worker 1 failed to unmap"):
        broadcast_unmap_from_kv_tensors(2, [0])


# ---- real processes

WORKER = """
import sys
from kvcached import tp_ipc_util, vmm_ops
from kvcached.utils import PAGE_SIZE
vmm_ops.init_kvcached("cpu")
tp_ipc_util.start_worker_listener_thread(int(sys.argv[1]))
vmm_ops.create_kv_tensors(8 * PAGE_SIZE * 2, 1, "cpu", 2)
print("ready", flush=True)
sys.stdin.read()
vmm_ops.shutdown_kvcached()
"""


@pytest.fixture
def workers() -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, each a process."""
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(2):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", WORKER, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield processes
        for process in processes:
            if process.poll() is None:
                process.communicate(timeout=60)


def test_a_manager_with_workers_maps_on_all_of_them(workers: Any, eventually: Any) -> None:
    from kvcached import _opening
    from kvcached.kv_cache_manager import KVCacheManager

    with contextlib.ExitStack() as stack:
        manager = KVCacheManager(8 * 16, 16, PAGE // 256, LAYERS, world_size=2, reserve_null_block=True)
        blocks = manager.alloc(40)
        assert len(blocks) == 40 and 0 not in blocks
        stack.callback(_opening._fleets._forget, (_opening.ranks_name("contract", 0), 2))
        stack.callback(manager._slot.close)
        fleet = _opening._fleets.get(manager._slot.plan)
        held = fleet.held(0)
        assert set(held) == {(0, 0), (0, 1)} and held[0, 0] == held[0, 1]
        assert {block // 16 for block in [0, *blocks]} <= set(held[0, 0])
        manager.free(blocks)
        manager.trim()
        # The padding's page, and what is kept in reserve.
        eventually(lambda: len(fleet.held(0)[0, 1]) <= 2)
        # What the fleet maps, messages may not.
        with pytest.raises(RuntimeError, match="Worker 0 failed to map"):
            broadcast_map_to_kv_tensors(2, [BUNDLE])


def test_strategies_of_kvcacheds_benchmark_run_against_our_workers(workers: Any) -> None:
    from kvcached.bench_tp_ipc import get_broadcast_impl

    for name in ("seq", "thread", "async"):
        get_broadcast_impl(name)(2, [BUNDLE, 2 * BUNDLE])
        broadcast_unmap_from_kv_tensors(2, [BUNDLE, 2 * BUNDLE])


def test_a_killed_worker_is_named(workers: Any) -> None:
    workers[1].kill()
    workers[1].wait()
    try:
        with pytest.raises(RuntimeError, match="Worker 1 failed to map"):
            broadcast_map_to_kv_tensors(2, [0])
        broadcast_map_to_kv_tensors(1, [0])
    finally:
        os.unlink(get_worker_socket_path(1))


def test_vmm_ops_is_what_a_listener_calls() -> None:
    assert tp_ipc_util.vmm_ops is vmm_ops
