"""Accept connections on a sandbox's socket and copy bytes between two sockets."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from typing import Self

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
CONNECT_SECONDS = 10.0
IDLE_SECONDS = 600.0
ACCEPT_AGAIN_SECONDS = 0.1
LINGER_SECONDS = 5.0
LINGER_BYTES = 1024 * 1024
_CHUNK = 65536


class Listener:
    """Serve each connection on a thread of its own until `close`; a context manager.

    At most `MAX_CONNECTIONS` at once: the next ones wait in the socket's queue.
    """

    def __init__(self, server: socket.socket, name: str) -> None:
        self._server = server
        self._name = name
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop accepting and end every connection; their threads end by themselves soon after."""
        with self._lock:
            self._closing.set()
            connections = list(self._open)
        for each in (self._server, *connections):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        # Who accepts may wait for a slot, and a thread in a name's lookup frees its own late.
        self._slots.release()
        self._thread.join()
        self._server.close()

    def serve(self, client: socket.socket) -> None:
        """Answer one connection, which is closed afterwards."""
        raise NotImplementedError

    def splice(
        self,
        client: socket.socket,
        upstream: socket.socket,
        *,
        to_client: bytes = b"",
        to_upstream: bytes = b"",
        more_to_upstream: int | None = None,
        half_open: bool = False,
    ) -> None:
        """Copy both ways until the upstream ended, or nothing moved for a while.

        What is given is sent first. Of what the client sends later, `more_to_upstream` bytes pass,
        or all. With `half_open` a client may go on sending to an upstream that has said all.
        Closes `upstream`, whatever happens.
        """
        if not self._remember(upstream):
            upstream.close()
            return
        try:
            client.sendall(to_client)
            upstream.sendall(to_upstream)
            moves = _Moves()
            back = threading.Thread(
                target=_answer, args=(upstream, client, moves, half_open), daemon=True
            )
            back.start()
            _copy(client, upstream, moves, limit=more_to_upstream)
            back.join()
        finally:
            self._forget(upstream)

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                client, _ = self._server.accept()
            except OSError as fault:
                self._slots.release()
                if self._closing.is_set():
                    return
                # Such as no descriptor being free: it passes.
                logger.warning("%s: no connection could be accepted: %s", self._name, fault)
                self._closing.wait(ACCEPT_AGAIN_SECONDS)
                continue
            client.settimeout(IDLE_SECONDS)
            if not self._remember(client):
                client.close()
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            self.serve(client)
        except OSError as fault:
            logger.debug("%s: a connection ended: %s", self._name, fault)
        finally:
            self._forget(client)
            self._slots.release()

    def _remember(self, connection: socket.socket) -> bool:
        with self._lock:
            if not self._closing.is_set():
                self._open.add(connection)
            return not self._closing.is_set()

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)
        connection.close()


def say_last(client: socket.socket, answer: bytes) -> None:
    """Send an answer after which the connection ends.

    What the client still sends is read for a while: closing before that would reset the connection,
    and the answer would be lost with it.
    """
    client.sendall(answer)
    client.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + LINGER_SECONDS
    left = LINGER_BYTES
    while left > 0 and (seconds := deadline - time.monotonic()) > 0:
        client.settimeout(seconds)
        data = client.recv(_CHUNK)
        if not data:
            return
        left -= len(data)


class _Moves:
    """Hold when a byte of a connection moved last, in either direction."""

    def __init__(self) -> None:
        self.note()

    def note(self) -> None:
        self._last = time.monotonic()

    def idle(self, seconds: float) -> bool:
        return time.monotonic() - self._last >= seconds


def _answer(upstream: socket.socket, client: socket.socket, moves: _Moves, half_open: bool) -> None:
    """Copy what the upstream says; then the client's own direction ends too, unless it may not."""
    _copy(upstream, client, moves)
    if not half_open:
        with suppress(OSError):
            client.shutdown(socket.SHUT_RD)


def _copy(
    source: socket.socket, target: socket.socket, moves: _Moves, limit: int | None = None
) -> None:
    """Copy until the end of one direction, and pass the end on; what exceeds a limit is dropped."""
    with suppress(OSError):
        while True:
            try:
                data = source.recv(_CHUNK)
            except TimeoutError:
                # A long download is no silence, though the client says nothing meanwhile.
                if moves.idle(source.gettimeout() or 0):
                    break
                continue
            if not data:
                break
            moves.note()
            if limit is not None:
                data = data[:limit]
                limit -= len(data)
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
