"""Wait in many threads for what one list in the store says: one of them listens for all."""

import threading
import time
from collections.abc import Callable

Receive = Callable[[float], list[str]]
"""Return the tokens that arrived, waiting at most so many seconds for the first."""


class Inbox:
    """Tell waiters that their token arrived. Thread-safe, without a thread of its own.

    A connection for each of hundreds of waiters, or a poll by each, would cost more than the
    requests: whichever waiter comes first listens, and hands that over when it leaves.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._events: dict[str, threading.Event] = {}
        self._arrived: set[str] = set()
        self._lock = threading.Lock()
        self._listening = threading.Lock()

    def __len__(self) -> int:
        return len(self._events)

    def join(self, token: str) -> None:
        """Begin to take note of what arrives for a token."""
        with self._lock:
            self._events.setdefault(token, threading.Event())

    def leave(self, token: str) -> None:
        """Forget a token. Idempotent."""
        with self._lock:
            self._events.pop(token, None)
            self._arrived.discard(token)

    def wait(self, token: str, seconds: float) -> bool:
        """Wait for a joined token, False when the time is over; raise what receive does."""
        deadline = time.monotonic() + seconds
        event = self._events[token]
        led = False
        try:
            while True:
                event.clear()
                left = deadline - time.monotonic()
                if token in self._arrived:
                    return True
                if left <= 0:
                    return False
                if self._listening.acquire(blocking=False):
                    led = True
                    try:
                        self._note(self._receive(left))
                    finally:
                        self._listening.release()
                else:
                    event.wait(left)
        finally:
            if led:
                self._wake_another(token)

    def _note(self, tokens: list[str]) -> None:
        with self._lock:
            for token in tokens:
                event = self._events.get(token)
                if event is not None:
                    self._arrived.add(token)
                    event.set()

    def _wake_another(self, token: str) -> None:
        """Let one of those who still wait listen next."""
        with self._lock:
            heirs = (
                event
                for other, event in self._events.items()
                if other != token and other not in self._arrived
            )
            heir = next(heirs, None)
        if heir is not None:
            heir.set()
