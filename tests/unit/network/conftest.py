"""A proxy and servers behind it on real sockets; nothing of a test outlives it."""

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from sandboxes.network.allow_list import Pattern, parse_pattern
from sandboxes.network.proxy import AllowListProxy
from tests.unit.network.servers import HOST, Serve, Web


def open_sockets() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(entry.readlink()))
    return {each for each in found if each.startswith("socket:")}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail when a thread or a socket of the test outlives it."""
    threads, sockets = set(threading.enumerate()), open_sockets()
    yield
    while left := set(threading.enumerate()) - threads:
        for thread in left:
            with suppress(RuntimeError):  # it is only being started: the next look joins it
                thread.join(timeout=30)
            assert not thread.is_alive(), thread
    if open_sockets() - sockets:
        gc.collect()  # what nobody closed warns now, which is an error
    # Threads of earlier tests may just be trying to reach a store that is gone.
    end = time.monotonic() + 10
    while open_sockets() - sockets and time.monotonic() < end:
        time.sleep(0.02)
    assert open_sockets() - sockets == set()


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[Serve], int]]:
    """Return how to start a TCP server that treats each connection by a function; its port."""
    with ExitStack() as stack:

        def start(treat: Serve) -> int:
            server = stack.enter_context(socket.create_server((HOST, 0), backlog=256))

            def one(connection: socket.socket) -> None:
                with connection, suppress(ConnectionError, BrokenPipeError):
                    connection.settimeout(60)
                    treat(connection)

            def accept() -> None:
                with suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        threading.Thread(target=one, args=(connection,)).start()

            thread = threading.Thread(target=accept)
            thread.start()
            stack.callback(thread.join)
            stack.callback(lambda: server.shutdown(socket.SHUT_RDWR))
            return int(server.getsockname()[1])

        yield start


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    server = socket.create_server((HOST, 0), backlog=256)
    with closing(server):
        yield server


@pytest.fixture
def proxied(listening: socket.socket) -> Iterator[Callable[..., AllowListProxy]]:
    """Return how to start a proxy for some entries."""
    with ExitStack() as stack:

        def start(*entries: str | Pattern) -> AllowListProxy:
            read = [each if isinstance(each, Pattern) else parse_pattern(each) for each in entries]
            return stack.enter_context(AllowListProxy(listening, read))

        yield start
