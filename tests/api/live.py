"""A real ASGI server in a thread of the test, and a way to wait for a condition."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep

import uvicorn
from django.core.asgi import get_asgi_application

DEADLINE_SECONDS = 60.0


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition until it holds. Raises AssertionError at the deadline."""
    end = monotonic() + DEADLINE_SECONDS
    while not condition():
        assert monotonic() < end, f"not within {DEADLINE_SECONDS:g} s: {what}"
        sleep(0.01)


@contextmanager
def served() -> Iterator[str]:
    """Serve the application on a free port; give its base address."""
    config = uvicorn.Config(
        get_asgi_application(), host="127.0.0.1", port=0, lifespan="off", log_level="warning"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="asgi-server")
    thread.start()
    try:
        eventually(lambda: server.started, "the server listens")
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=DEADLINE_SECONDS)
        assert not thread.is_alive()
