"""An HTTP proxy for one sandbox: CONNECT and plain requests, to listed hosts only."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from sandboxes.network.allow_list import Pattern, resolve, split_target
from sandboxes.network.request_head import Head, read_head, refuse
from sandboxes.network.streams import CONNECT_SECONDS, IDLE_SECONDS, Listener

PORT = 3128
MAX_NAME = 253
MAX_REFUSED = 100  # names that are counted: what asks is not trusted to stop


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
        head, rest = read_head(client)
        if head is None:
            refuse(client, 400, "this is an HTTP proxy: send an HTTP/1.1 request")
        elif head.method == "CONNECT":
            self._tunnel(client, head.target, rest)
        else:
            self._forward(client, head, rest)

    def _tunnel(self, client: socket.socket, target: str, rest: bytes) -> None:
        upstream = self._connect(client, split_target(target, 443))
        if upstream is not None:
            established = b"HTTP/1.1 200 Connection established\r\n\r\n"
            self.splice(client, upstream, to_client=established, to_upstream=rest, half_open=True)

    def _forward(self, client: socket.socket, head: Head, rest: bytes) -> None:
        try:
            url = urlsplit(head.target)
        except ValueError:
            refuse(client, 400, "the address cannot be understood")
            return
        if url.scheme != "http" or not url.netloc:
            refuse(client, 400, "only http:// addresses and CONNECT are served")
            return
        place = url.netloc.rpartition("@")[2]
        upstream = self._connect(client, split_target(place, 80))
        if upstream is None:
            return
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        request = head.for_server(host=place, target=path) + rest
        self.splice(client, upstream, to_upstream=request)

    def _connect(
        self, client: socket.socket, target: tuple[str, int] | None
    ) -> socket.socket | None:
        """Connect with a listed host, or tell the client why not."""
        if target is None:
            refuse(client, 400, "the address is not host:port")
            return None
        host, port = target
        try:
            addresses = resolve(self._patterns, host, port)
        except OSError as fault:
            refuse(client, 502, f"{host} is not known: {fault}")
            return None
        if not addresses:
            self._count_refused(f"{host[:MAX_NAME]}:{port}")
            refuse(client, 403, f"{host}:{port} is not among the hosts this sandbox may reach")
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
        refuse(client, 502, f"{host}:{port} cannot be reached: {why}")
        return None

    def _count_refused(self, place: str) -> None:
        with self._counting:
            if place in self.refused or len(self.refused) < MAX_REFUSED:
                self.refused[place] += 1
