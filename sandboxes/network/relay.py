"""Relay a sandbox's requests to one of several model servers outside."""

from __future__ import annotations

import socket
from collections.abc import Callable

from sandboxes.network.request_head import Head, read_head, refuse
from sandboxes.network.streams import CONNECT_SECONDS, IDLE_SECONDS, Listener

Address = tuple[str, int]

# A model server's other calls load adapters, replace weights or put it to sleep.
PASSED = frozenset(
    {("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")}
)


class Relay(Listener):
    """Pass requests to the address that `choose` gives for each, None where there is none.

    Only those of `PASSED`, one per connection; answers pass as they come. A client that nobody can
    serve gets an HTTP 503.
    """

    def __init__(self, server: socket.socket, choose: Callable[[], Address | None]) -> None:
        super().__init__(server, "model-relay")
        self._choose = choose

    def serve(self, client: socket.socket) -> None:
        """Answer one connection."""
        head, rest = read_head(client)
        if head is None:
            refuse(client, 400, "this is a model server: send an HTTP/1.1 request")
            return
        if (head.method, head.target) not in PASSED:
            served = ", ".join(" ".join(each) for each in sorted(PASSED))
            refuse(client, 403, f"a sandbox may call these alone: {served}")
            return
        length = _body_length(head)
        if length is None:
            refuse(client, 400, "send the body whole, with one Content-Length")
            return
        address = self._choose()
        try:
            if address is None:
                raise ConnectionRefusedError("no address")
            upstream = socket.create_connection(address, timeout=CONNECT_SECONDS)
        except OSError:
            refuse(client, 503, "no model server can be reached now")
            return
        client.settimeout(IDLE_SECONDS)
        upstream.settimeout(IDLE_SECONDS)
        body = rest[:length]
        self.splice(
            client,
            upstream,
            to_upstream=head.for_server(host=_place(address), target=head.target) + body,
            more_to_upstream=length - len(body),
        )


def _body_length(head: Head) -> int | None:
    """Return how long the body is; None when it is not told so that all understand the same."""
    lengths = head.values(b"content-length")
    if head.values(b"transfer-encoding") or len(lengths) > 1:
        return None
    if not lengths:
        return 0
    digits = lengths[0]
    return int(digits) if digits.isdigit() and len(digits) <= 18 else None


def _place(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
