"""Relay a sandbox's connections to one of several addresses outside."""

from __future__ import annotations

import socket
from collections.abc import Callable

from sandboxes.network.streams import IDLE_SECONDS, Listener, say_last

CONNECT_SECONDS = 10.0
Address = tuple[str, int]

_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
    b"no model server can be reached now\n"
)


class Relay(Listener):
    """Connect each client with the address that `choose` gives for it, None where there is none.

    Bytes pass as they are; a client that nobody can serve gets an HTTP 503.
    """

    def __init__(self, server: socket.socket, choose: Callable[[], Address | None]) -> None:
        super().__init__(server, "model-relay")
        self._choose = choose

    def serve(self, client: socket.socket) -> None:
        """Connect one client."""
        address = self._choose()
        try:
            if address is None:
                raise ConnectionRefusedError("no address")
            upstream = socket.create_connection(address, timeout=CONNECT_SECONDS)
        except OSError:
            say_last(client, _UNAVAILABLE)
            return
        upstream.settimeout(IDLE_SECONDS)
        self.splice(client, upstream)
