"""Servers on loopback for the tests of the sandbox network, and clients that talk with them."""

import hashlib
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HOST = "127.0.0.1"
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"

Serve = Callable[[socket.socket], None]


class Handler(BaseHTTPRequestHandler):
    """Answer with what was asked, and the body's digest."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.requestline, dict(self.headers)))  # type: ignore[attr-defined]
        answer = f"{self.path} {hashlib.sha256(body).hexdigest()}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Web(ThreadingHTTPServer):
    """A web server that remembers requests: (line, headers)."""

    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__((HOST, 0), Handler)
        self.seen: list[tuple[str, dict[str, str]]] = []

    @property
    def place(self) -> str:
        return f"{HOST}:{self.server_port}"


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


def answer_at_the_end(connection: socket.socket) -> None:
    """Read all that comes, then say how much it was and its digest."""
    digest, size = hashlib.sha256(), 0
    while data := connection.recv(65536):
        digest.update(data)
        size += len(data)
    connection.sendall(f"{size} {digest.hexdigest()}".encode())


def connect(listening: socket.socket) -> socket.socket:
    return socket.create_connection(listening.getsockname(), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while data := connection.recv(65536):
        parts.append(data)
    return b"".join(parts)


def talk(listening: socket.socket, data: bytes) -> bytes:
    """Send and return all that comes back."""
    with connect(listening) as client:
        client.sendall(data)
        return read_all(client)


def tunnel(listening: socket.socket, place: str) -> socket.socket:
    client = connect(listening)
    client.sendall(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1)
    assert head == ESTABLISHED
    return client


def refusal(status: str, why: str) -> bytes:
    body = f"{why}\n".encode()
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body
