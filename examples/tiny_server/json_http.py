"""A small threaded JSON server: keep-alive, size limits, errors as vLLM words them."""

import json
import logging
import select
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 1024 * 1024
IDLE_SECONDS = 75


class HttpError(Exception):
    """Answer with a status and a sentence."""

    def __init__(self, status: int, message: str, *, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


class HangUpError(Exception):
    """Close the connection without an answer: nobody listens, or nobody shall hear."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold an answer; `body` is sent as JSON, or as it is when it is bytes."""

    body: Mapping[str, Any] | bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Hold one request: its body and whether the client still listens."""

    body: bytes
    connected: Callable[[], bool]

    def json(self) -> dict[str, Any]:
        """Return the body as an object; raise HttpError 400 when it is none."""
        try:
            parsed = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise HttpError(400, "the body must be a JSON object")
        return parsed


Route = Callable[[Exchange], Answer]


class JsonServer(ThreadingHTTPServer):
    """Serve `routes`, keyed by method and path, one thread per connection."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(
        self,
        address: tuple[str, int],
        routes: Mapping[tuple[str, str], Route],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(address, _Handler)
        self.routes = dict(routes)
        self.extra_headers = dict(headers or {})

    @property
    def url(self) -> str:
        """Return the address that clients use."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what a connection ended with; a client that left is no error."""
        logger.debug("connection %s of %s ended", request, client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = IDLE_SECONDS
    server: JsonServer

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _serve(self) -> None:
        try:
            answer = self._answer()
        except HangUpError:
            self.close_connection = True
            return
        except HttpError as error:
            answer = _problem(error.status, str(error), error.headers)
        except Exception:
            logger.exception("%s %s failed", self.command, self.path)
            answer = _problem(500, "the server failed; its log says why", {})
        self._send(answer)

    def _answer(self) -> Answer:
        body = self._body()
        path = self.path.partition("?")[0]
        route = self.server.routes.get((self.command, path))
        if route is None:
            known = any(known_path == path for _, known_path in self.server.routes)
            raise HttpError(405 if known else 404, f"no {self.command} {path} here")
        return route(Exchange(body, self._connected))

    def _body(self) -> bytes:
        try:
            length = int(self.headers.get("Content-Length") or 0)
        except ValueError as error:
            self.close_connection = True
            raise HttpError(400, "Content-Length is not a number") from error
        if self.headers.get("Transfer-Encoding") or not 0 <= length <= MAX_BODY_BYTES:
            self.close_connection = True
            raise HttpError(413, f"send a Content-Length of at most {MAX_BODY_BYTES}")
        return self.rfile.read(length)

    def _connected(self) -> bool:
        ready, _, _ = select.select([self.connection], [], [], 0)
        if not ready:
            return True
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _send(self, answer: Answer) -> None:
        raw = answer.body
        payload = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
        self.send_response(answer.status)
        for name, value in {**self.server.extra_headers, **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def _problem(status: int, message: str, headers: Mapping[str, str]) -> Answer:
    kind = "NotFoundError" if status == 404 else "BadRequestError" if status < 500 else "Error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return Answer({"error": error}, status, headers)
