"""A router of a few lines that keeps to the HTTP contract of the dashboard: the page, its events, and changes with a key.

What it shows is in `models`, `pools` and `devices`; a test changes them and the page hears of it within a moment.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

PAGE = Path(__file__).parents[2] / "src/router/dashboard"
FILES = {
    "/": ("index.html", "text/html"),
    "/app.css": ("app.css", "text/css"),
    **{f"/{name}": (name, "text/javascript") for name in ("app.js", "changes.js", "parts.js", "words.js")},
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
EVERY_SECONDS = 0.1
MIB = 1 << 20
KEY = "open sesame"


def model(name: str, **figures: object) -> dict:
    return {
        "name": name, "model": f"org/{name}", "engine": "kvserve", "endpoint": "http://127.0.0.1:1", "state": "ready", "pid": 11,
        "restarts": 0, "in_flight": 2, "queued": 0, "request_rate": 3.25, "ttft_ms": {"p50": 41.5, "p99": 180.0},
        "itl_ms": {"p50": 9.2, "p99": 21.0}, "idle_s": 4.0, "pool": f"kvcached_{name}", **figures,
    }  # fmt: skip


def pool(name: str, **figures: object) -> dict:
    return {
        "name": name, "device": "host", "pid": 12, "needed_bytes": 300 * MIB, "cached_bytes": 30 * MIB, "idle_bytes": 10 * MIB, "limit_bytes": 700 * MIB,
        "capacity_bytes": 700 * MIB, "share": 0.5, "weight": 1, "floor_bytes": 0, "demand_bytes": 0, "model": None, **figures,
    }  # fmt: skip


class Router:
    """See the module."""

    def __init__(self) -> None:
        self.models = [model("chat"), model("code", state="sleeping", ttft_ms={"p50": None, "p99": None})]
        self.pools = [pool("kvcached_chat", model="chat"), pool("kvcached_code", model="code", limit_bytes=None, needed_bytes=0)]
        self.devices = [
            {"name": "host", "total_bytes": 4096 * MIB, "used_bytes": 1400 * MIB, "pools_bytes": 380 * MIB, "others_bytes": 1020 * MIB, "free_bytes": 644 * MIB, "device_free_bytes": 2696 * MIB, "budget_bytes": 1024 * MIB}
        ]
        self.decisions: list[dict] = []
        self.is_up = True
        self.changed: list[tuple[str, object]] = []
        router = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                router.get(self)

            def do_POST(self) -> None:
                router.post(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.ended = threading.Event()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def status(self) -> dict:
        return {"version": "0.1.0", "uptime_s": 4000, "auth_required": True, "models": self.models, "devices": self.devices}

    def get(self, request: BaseHTTPRequestHandler) -> None:
        if request.path == "/api/events":
            self.stream(request)
        elif request.path in FILES:
            name, kind = FILES[request.path]
            answer(request, 200, (PAGE / name).read_bytes(), kind, {"Content-Security-Policy": POLICY})
        else:
            refuse(request, 404, "there is no such page")

    def stream(self, request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        if not self.is_up:
            return refuse(request, 503, "the router is shutting down")
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.end_headers()
        said = 0
        try:
            while self.is_up and not self.ended.wait(EVERY_SECONDS):
                events = [("status", self.status()), ("pools", {"pools": self.pools})]
                events += [("decision", decision) for decision in self.decisions[said:]]
                said = len(self.decisions)
                for kind, body in events:
                    request.wfile.write(f"event: {kind}\ndata: {json.dumps(body)}\n\n".encode())
                request.wfile.flush()
        except OSError:
            pass  # The page is gone.

    def post(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return refuse(request, 401, "this needs the key of this router: send Authorization: Bearer KEY")
        match [unquote(part) for part in request.path.strip("/").split("/")]:
            case ["api", "pools", name, what] if found := [pool for pool in self.pools if pool["name"] == name]:
                self.change(request, found[0], what, json.loads(body))
            case ["action", ("sleep" | "wakeup") as what, name] if found := [it for it in self.models if it["name"] == name]:
                found[0]["state"] = "sleeping" if what == "sleep" else "ready"
                self.changed.append((request.path, None))
                answer(request, 200, json.dumps({"model_name": name, "success": True, "message": "done"}).encode())
            case _:
                refuse(request, 404, f"there is no {request.path}")

    def change(self, request: BaseHTTPRequestHandler, pool: dict, what: str, body: dict) -> None:
        if what == "limit" and body["size"].endswith("M"):
            pool["limit_bytes"] = int(body["size"][:-1]) * MIB
        elif what == "share":
            pool["weight"] = body.get("weight", pool["weight"])
        else:
            return refuse(request, 422, f"{body} is not a size: write 512M or 2G")
        self.changed.append((request.path, body))
        answer(request, 200, b'{"ok": true}')


def answer(
    request: BaseHTTPRequestHandler, status: int, body: bytes, kind: str = "application/json", headers: dict | None = None
) -> None:
    request.send_response(status)
    for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)


def refuse(request: BaseHTTPRequestHandler, status: int, message: str) -> None:
    error = {"error": {"message": message, "type": "invalid_request_error", "code": "no"}}
    answer(request, status, json.dumps(error).encode())


@contextmanager
def running() -> Iterator[Router]:
    """A router that is up, and gone afterwards."""
    router = Router()
    thread = threading.Thread(target=router.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield router
    finally:
        router.ended.set()
        router.server.shutdown()
        thread.join()
        router.server.server_close()
