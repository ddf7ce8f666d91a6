"""One event loop in a thread of its own: clients that are asynchronous, called by stage threads.

All episodes of a process share it, so an open session costs no thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

POLL_SECONDS = 0.05
CLEANUP_SECONDS = 10.0


class CallCancelled(Exception):
    """Say that the rollout was cancelled while a call waited."""


class Background:
    """Run coroutines for threads that wait; the thread is a daemon and lives with the process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever, name="host-tools", daemon=True)
        thread.start()

    def run(
        self,
        work: Coroutine[Any, Any, Result],
        *,
        timeout_seconds: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Wait for a coroutine; it is cancelled, and has ended, when this raises.

        Raises TimeoutError after `timeout_seconds`, `CallCancelled` when `cancelled` says so,
        else what the coroutine raises.
        """
        deadline = time.monotonic() + timeout_seconds
        ended: concurrent.futures.Future[asyncio.Task[Result]] = concurrent.futures.Future()
        started: list[asyncio.Task[Result]] = []

        def start() -> None:
            started.append(self.loop.create_task(work))
            started[0].add_done_callback(ended.set_result)

        self.loop.call_soon_threadsafe(start)
        while not concurrent.futures.wait([ended], timeout=POLL_SECONDS).done:
            stopped = cancelled()
            if stopped or time.monotonic() >= deadline:
                self.loop.call_soon_threadsafe(lambda: started[0].cancel())
                concurrent.futures.wait([ended], timeout=CLEANUP_SECONDS)
                if stopped:
                    raise CallCancelled
                raise TimeoutError(f"no answer within {timeout_seconds:g} seconds")
        return ended.result().result()


_lock = threading.Lock()
_background: Background | None = None


def background() -> Background:
    """Return this process's loop, started at first use; a forked child gets its own."""
    global _background
    with _lock:
        if _background is None or _background.pid != os.getpid():
            _background = Background()
        return _background
