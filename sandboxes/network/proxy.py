"""An HTTP proxy for one sandbox: CONNECT and plain requests, to listed hosts only."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from sandboxes.network.allow_list import Pattern, resolve, split_target
from sandboxes.network.relay import CONNECT_SECONDS
from sandboxes.network.streams import IDLE_SECONDS, Listener, say_last

PORT = 3128
MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
MAX_NAME = 253
MAX_REFUSED = 100  # names that are counted: what asks is not trusted to stop
_NOT_PASSED = (
    *(b"proxy-connection:", b"proxy-authorization:", b"connection:", b"keep-alive:"),
    b"host:",
)


def proxy_env(port: int = PORT) -> dict[str, str]:
    """Return the variables by which programs find the proxy."""
    url = f"http://127.0.0.1:{port}"
    names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    return {**dict.fromkeys(names, url), "no_proxy": "127.0.0.1,localhost"}


class AllowListProxy(Listener):
    """Serve one sandbox; `refused` counts what it asked for in vain, by host and port.

    Names are resolved out here. One request per connection: the answer is followed by its end.
    """

    def __init__(self, server: socket.socket, patterns: Sequence[Pattern]) -> None:
        super().__init__(server, "egress-proxy")
        self._patterns = tuple(patterns)
        self.refused: Counter[str] = Counter()
        self._counting = threading.Lock()

    def serve(self, client: socket.socket) -> None:
        """Answer one connection."""
        head, rest = _read_head(client)
        line, _, headers = head.partition(b"\r\n")
        words = line.decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            _refuse(client, 400, "this is an HTTP proxy: send an HTTP/1.1 request")
            return
        method, target, version = words
        if method == "CONNECT":
            self._tunnel(client, target, rest)
        else:
            self._forward(client, (method, target, version), headers, rest)

    def _tunnel(self, client: socket.socket, target: str, rest: bytes) -> None:
        upstream = self._connect(client, split_target(target, 443))
        if upstream is not None:
            established = b"HTTP/1.1 200 Connection established\r\n\r\n"
            self.splice(client, upstream, to_client=established, to_upstream=rest, half_open=True)

    def _forward(
        self, client: socket.socket, line: tuple[str, str, str], headers: bytes, rest: bytes
    ) -> None:
        method, target, version = line
        try:
            url = urlsplit(target)
        except ValueError:
            _refuse(client, 400, "the address cannot be understood")
            return
        if url.scheme != "http" or not url.netloc:
            _refuse(client, 400, "only http:// addresses and CONNECT are served")
            return
        place = url.netloc.rpartition("@")[2]
        upstream = self._connect(client, split_target(place, 80))
        if upstream is None:
            return
        kept = [each for each in headers.split(b"\r\n") if not each.lower().startswith(_NOT_PASSED)]
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        # The host is the address's, whatever the client's header says (RFC 9112, 3.2.2).
        first = f"{method} {path} {version}\r\nHost: {place}".encode("latin-1")
        request = b"\r\n".join([first, b"Connection: close", *filter(None, kept), b"", rest])
        self.splice(client, upstream, to_upstream=request)

    def _connect(
        self, client: socket.socket, target: tuple[str, int] | None
    ) -> socket.socket | None:
        """Connect with a listed host, or tell the client why not."""
        if target is None:
            _refuse(client, 400, "the address is not host:port")
            return None
        host, port = target
        try:
            addresses = resolve(self._patterns, host, port)
        except OSError as fault:
            _refuse(client, 502, f"{host} is not known: {fault}")
            return None
        if not addresses:
            self._count_refused(f"{host[:MAX_NAME]}:{port}")
            _refuse(client, 403, f"{host}:{port} is not among the hosts this sandbox may reach")
            return None
        for address in addresses:
            try:
                upstream = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
            except OSError as fault:
                why = fault
                continue
            client.settimeout(IDLE_SECONDS)
            upstream.settimeout(IDLE_SECONDS)
            return upstream
        _refuse(client, 502, f"{host}:{port} cannot be reached: {why}")
        return None

    def _count_refused(self, place: str) -> None:
        with self._counting:
            if place in self.refused or len(self.refused) < MAX_REFUSED:
                self.refused[place] += 1


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """Read up to the empty line; returns the head without it, and what came after."""
    data = b""
    deadline = time.monotonic() + HEAD_SECONDS
    while b"\r\n\r\n" not in data:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the head did not come in time")
        client.settimeout(left)
        more = client.recv(8192)
        if not more or len(data) > MAX_HEAD_BYTES:
            return b"", b""
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _refuse(client: socket.socket, status: int, why: str) -> None:
    names = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}
    body = f"{why}\n".encode("utf-8", "replace")
    head = (
        f"HTTP/1.1 {status} {names[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    say_last(client, head.encode() + body)
