"""A chat server for judges that says what a test tells it, over real HTTP."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any], int], "tuple[int, dict[str, str], bytes]"]


def completion(text: str | None, *, finish_reason: str = "stop", tokens: int = 7) -> bytes:
    """Return a chat completion's body."""
    return json.dumps(
        {
            "id": "c",
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "finish_reason": finish_reason,
                }
            ],
            "usage": {"prompt_tokens": 100, "completion_tokens": tokens},
        }
    ).encode()


def says(text: str | None, **more: Any) -> Reply:
    """Answer every request with this text."""
    return lambda _body, _number: (200, {}, completion(text, **more))


class JudgeServer:
    """Hold what was asked; `reply` gets a request's body and number from 0."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"


def _handler(server: JudgeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            with server.lock:
                number = len(server.bodies)
                server.bodies.append(body)
                server.keys.append(self.headers.get("Authorization"))
            status, headers, data = server.reply(body, number)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the judge's client may have left
                self.wfile.write(data)

        def log_message(self, *_arguments: Any) -> None:
            """Say nothing."""

    return Handler


@contextmanager
def judge_server(reply: Reply) -> Iterator[JudgeServer]:
    """Serve in a thread until the block ends."""
    server = JudgeServer(reply)
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        thread.join(timeout=10)
        server.http.server_close()
