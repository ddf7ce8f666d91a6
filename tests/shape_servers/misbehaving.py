"""An HTTP server that answers with whatever bytes a test gives it."""

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO


@dataclass(frozen=True)
class Asked:
    """One request as it came; `send` writes raw bytes, `gone` waits for the client to leave."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    send: Callable[[bytes], None]
    gone: Callable[[float], bool]
    reset: Callable[[], None]


Behave = Callable[[Asked], None]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def shutdown_request(self, request: Any) -> None:
        """Close at once: a shutdown first would end the stream in order."""
        self.close_request(request)


class RawServer:
    """Serve `behave` on a free port; keeps every request. A context manager."""

    def __init__(self, behave: Behave) -> None:
        self.behave = behave
        self.asked: list[Asked] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                asked = Asked(
                    self.command,
                    self.path,
                    {name.lower(): value for name, value in self.headers.items()},
                    json.loads(self.rfile.read(size) or b"{}"),
                    self._send,
                    self._gone,
                    self._reset,
                )
                outer.asked.append(asked)
                self.close_connection = True
                with suppress(OSError):
                    outer.behave(asked)

            do_GET = do_POST  # noqa: N815

            def _send(self, data: bytes) -> None:
                stream: BinaryIO = self.wfile  # type: ignore[assignment]
                stream.write(data)
                stream.flush()

            def _gone(self, seconds: float) -> bool:
                self.connection.settimeout(seconds)
                try:
                    return not self.connection.recv(1)
                except TimeoutError:
                    return False
                except OSError:
                    return True

            def _reset(self) -> None:
                # Closed like this, what was not read yet is discarded: the peer sees a reset.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}
        )

    @property
    def url(self) -> str:
        """Return the address."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "RawServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def whole(status: int, body: bytes | dict[str, Any], **headers: str) -> bytes:
    """Return a whole answer. Header names: `_` stands for `-`."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
STREAM_TAIL = b"0\r\n\r\n"


def event(body: dict[str, Any] | bytes) -> bytes:
    """Return one chunk that holds one server-sent event."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    data = b"data: " + content + b"\n\n"
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
