"""A small threaded JSON server: keep-alive, streams, size limits, errors as vLLM words them."""

import json
import logging
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 1024 * 1024
IDLE_SECONDS = 75


class HttpError(Exception):
    """Answer with a status and a sentence; `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.param = param


class HangUpError(Exception):
    """Close the connection without an answer: nobody listens, or nobody shall hear."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold an answer; `body` is sent as JSON, or as it is when it is bytes."""

    body: Mapping[str, Any] | bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventStream:
    """Hold an answer that comes in parts, each sent at once as a server-sent event.

    `ended` is called after the last one, and when the client has left before.
    """

    events: Iterator[bytes]
    ended: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Hold one request: its body, whether the client still listens, its query and headers.

    `headers` has lower-case names.
    """

    body: bytes
    connected: Callable[[], bool]
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Return the body as an object; raise HttpError 400 when it is none."""
        try:
            parsed = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is not JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise HttpError(400, "the body must be a JSON object")
        return parsed


Route = Callable[[Exchange], Answer | EventStream]


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
            answer = Answer(problem(error), error.status, error.headers)
        except Exception:
            logger.exception("%s %s failed", self.command, self.path)
            answer = Answer(problem(HttpError(500, "the server failed; its log says why")), 500)
        if isinstance(answer, EventStream):
            self._send_stream(answer)
        else:
            self._send(answer)

    def _answer(self) -> Answer | EventStream:
        body = self._body()
        path, _, query = self.path.partition("?")
        route = self.server.routes.get((self.command, path))
        if route is None:
            known = any(known_path == path for _, known_path in self.server.routes)
            raise HttpError(405 if known else 404, f"no {self.command} {path} here")
        headers = {name.lower(): value for name, value in self.headers.items()}
        return route(Exchange(body, self._connected, dict(parse_qsl(query)), headers))

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
        # Not select(): it knows the first 1,024 descriptors alone.
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        if not poll.poll(0):
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

    def _send_stream(self, stream: EventStream) -> None:
        try:
            self._send_events(stream.events)
        except HangUpError:
            self.close_connection = True
        finally:
            stream.ended()

    def _send_events(self, events: Iterator[bytes]) -> None:
        """Send events as HTTP/1.1 chunks; an older client reads until the connection ends."""
        chunked = self.request_version == "HTTP/1.1"
        self.send_response(200)
        for name, value in self.server.extra_headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self.end_headers()
        for event in events:
            data = b"data: " + event + b"\n\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")


def problem(error: HttpError) -> dict[str, Any]:
    """Return the body that says what was wrong, in vLLM's form."""
    named = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
    kind = named.get(error.status) or HTTPStatus(error.status).phrase
    fields = {"message": str(error), "type": kind, "param": error.param, "code": error.status}
    return {"error": fields}
