"""A real HTTP server in a thread that answers as a test says, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PREFIX = "/api/v1"


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: Any

    @property
    def key(self) -> str | None:
        """Its idempotency key."""
        return self.headers.get("idempotency-key")


@dataclass(frozen=True)
class Reply:
    """What is answered. `cut`: so many bytes of the body are sent, then the connection breaks."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"
    cut: int | None = None

    def content(self) -> bytes:
        """Return the body's bytes."""
        if isinstance(self.body, bytes):
            return self.body
        return b"" if self.body is None else json.dumps(self.body).encode()


BROKEN = Reply(cut=0)


def problem(status: int, code: str, detail: str = "No.", **more: Any) -> Reply:
    """Return a refusal as the service words it."""
    headers = {"Retry-After": str(more.pop("retry_after"))} if "retry_after" in more else {}
    body = {"type": f"urn:prorl:problem:{code}", "status": status, "code": code, "detail": detail}
    return Reply(status, {**body, **more}, headers, "application/problem+json")


def page(*rows: Any, following: str | None = None) -> Reply:
    """Return a page of a list."""
    return Reply(body={"next": following, "previous": None, "results": list(rows)})


Answerer = Callable[[Asked], Reply]


class Scripted:
    """The script: replies by method and path, each given once, the last one for ever."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.url = ""
        self._replies: dict[tuple[str, str], deque[Reply | Answerer]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)

    def on(self, method: str, path: str, *replies: Reply | Answerer) -> None:
        """Answer a call with these, one after the other."""
        with self._lock:
            self._replies[method, path] = deque(replies)

    def calls(self, method: str, path: str) -> list[Asked]:
        """Return what was asked of a call so far."""
        with self._lock:
            return [each for each in self.asked if (each.method, each.path) == (method, path)]

    def wait_for(self, method: str, path: str, count: int) -> list[Asked]:
        """Return what was asked of a call, once it was asked so often. Raises AssertionError."""
        wanted = (method, path)
        with self._came:
            came = self._came.wait_for(
                lambda: sum((each.method, each.path) == wanted for each in self.asked) >= count, 60
            )
        assert came, f"{method} {path} was not called {count} times"
        return self.calls(method, path)

    def reply(self, asked: Asked) -> Reply:
        """Remember a request and return its reply."""
        with self._came:
            self.asked.append(asked)
            replies = self._replies.get((asked.method, asked.path))
            found = None
            if replies:
                found = replies.popleft() if len(replies) > 1 else replies[0]
            self._came.notify_all()
        if found is None:
            return problem(404, "not_found", f"{asked.method} {asked.path} is not in the script.")
        return found(asked) if callable(found) else found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Scripted

    def do_GET(self) -> None:
        """Answer."""
        parts = urlsplit(self.path)
        size = int(self.headers.get("content-length") or 0)
        content = self.rfile.read(size)
        asked = Asked(
            method=self.command,
            path=parts.path.removeprefix(PREFIX),
            query=parse_qs(parts.query),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=json.loads(content) if content else None,
        )
        reply = self.script.reply(asked)
        body = reply.content()
        if reply.cut is not None:
            if reply.cut:
                self._head(reply, len(body))
                self.wfile.write(body[: reply.cut])
            self.close_connection = True
            return
        self._head(reply, len(body))
        self.wfile.write(body)

    do_POST = do_PATCH = do_DELETE = do_GET  # noqa: N815 - as http.server names them

    def _head(self, reply: Reply, size: int) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(size))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def scripted_service() -> Iterator[Scripted]:
    """Serve a script on a free port."""
    script = Scripted()
    handler = type("Handler", (_Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
