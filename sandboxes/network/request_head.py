"""The head of one HTTP/1 request: read strictly, and written anew for the server behind."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import dataclass

from sandboxes.network.streams import say_last

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0

# A server that reads a lone line feed as a line's end would see other requests than we do, so no
# control character passes but the tab within a header (RFC 9112, 2.2; RFC 9110, 5.5).
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_LINE = re.compile(rb"(%s) ([^\x00-\x20\x7f]*) (HTTP/1\.[01])" % _TOKEN)
_HEADER = re.compile(rb"(%s):([^\x00-\x08\x0a-\x1f\x7f]*)" % _TOKEN)
_NOT_PASSED = frozenset(
    {b"host", b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization"}
)
_STATUS = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway", 503: "Service Unavailable"}


@dataclass(frozen=True, kw_only=True)
class Head:
    """Hold a request's first line and its headers as (name in lower case, line as it came)."""

    method: str
    target: str
    version: str
    headers: tuple[tuple[bytes, bytes], ...]

    def values(self, name: bytes) -> list[bytes]:
        """Return what a header says, once for each time that it is there."""
        return [line.partition(b":")[2].strip() for each, line in self.headers if each == name]

    def for_server(self, *, host: str, target: str) -> bytes:
        """Return the head as a server gets it: for that host, and for this one request only."""
        # The host is the address's, whatever the client's header says (RFC 9112, 3.2.2).
        first = f"{self.method} {target} {self.version}\r\nHost: {host}".encode("latin-1")
        kept = [line for name, line in self.headers if name not in _NOT_PASSED]
        return b"\r\n".join([first, b"Connection: close", *kept, b"", b""])


def read_head(client: socket.socket) -> tuple[Head | None, bytes]:
    """Read up to the empty line; returns the head, None when it is none, and what came after.

    Raises TimeoutError when it does not come in time.
    """
    data = b""
    deadline = time.monotonic() + HEAD_SECONDS
    while b"\r\n\r\n" not in data:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the head did not come in time")
        client.settimeout(left)
        more = client.recv(8192)
        if not more or len(data) > MAX_HEAD_BYTES:
            return None, b""
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return _parse(head), rest


def refuse(client: socket.socket, status: int, why: str) -> None:
    """Answer with a sentence, after which the connection ends."""
    body = f"{why}\n".encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    say_last(client, head.encode() + body)


def _parse(head: bytes) -> Head | None:
    line, *headers = head.split(b"\r\n")
    first = _LINE.fullmatch(line)
    named = [_HEADER.fullmatch(each) for each in headers]
    if first is None or None in named:
        return None
    method, target, version = (word.decode("latin-1") for word in first.groups())
    return Head(
        method=method,
        target=target,
        version=version,
        headers=tuple((each[1].lower(), each[0]) for each in named if each is not None),
    )
