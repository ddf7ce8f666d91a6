"""Serve answers in the shape of vLLM or SGLang, checked by their own protocol classes.

`python -m tests.shape_servers vllm FOLDER`. A process of its own: stand-ins take the place of torch
and of the rest of the package. What is sampled is made up; the shapes are not.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from tests.shape_servers.packages import PACKAGES
from tests.shape_servers.stand_ins import install


class Shape(Protocol):
    """What a shape server answers with; every reply went through the package's own classes."""

    def get(self, path: str) -> dict[str, Any] | None:
        """Answer a GET."""
        ...

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any] | list[str]]:
        """Answer a POST with a body, or with the events of a stream."""
        ...


def handler(shape: Shape) -> type[BaseHTTPRequestHandler]:
    """Return the HTTP side of a shape."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = shape.get(self.path)
            self._send(404 if body is None else 200, body or {"detail": "Not Found"})

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            status, body = shape.post(self.path, json.loads(self.rfile.read(size) or b"{}"))
            if isinstance(body, dict):
                self._send(status, body)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for text in [*body, "[DONE]"]:
                data = f"data: {text}\n\n".encode()
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        def _send(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def main(name: str, folder: str) -> None:
    """Serve until killed; print the address first."""
    package = PACKAGES[name]
    install(package.roots, Path(folder))
    shape: Shape
    if name == "vllm":
        from tests.shape_servers.vllm_shape import VllmShape

        shape = VllmShape()
    else:
        from tests.shape_servers.sglang_shape import SglangShape

        shape = SglangShape()
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler(shape))
    http.daemon_threads = True
    print(f"{name} shape at http://127.0.0.1:{http.server_address[1]}", flush=True)
    http.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
