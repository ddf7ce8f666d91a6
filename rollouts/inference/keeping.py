"""Look after what this process holds: all of it together, from one thread."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Keeper(Generic[T]):
    """Call `work` with all that is held, every `period_seconds` while anything is. Thread-safe.

    Hundreds of requests renew their leases so in one step, and what they ask meanwhile is
    answered from memory: a slow store or database delays this thread alone.
    """

    def __init__(
        self, name: str, work: Callable[[list[T]], None], *, period_seconds: float
    ) -> None:
        self._name = name
        self._work = work
        self._period_seconds = period_seconds
        self._changed = threading.Condition()
        self._held: dict[int, T] = {}
        self._pid = 0
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def keeping(self, thing: T) -> Iterator[T]:
        """Look after a thing inside."""
        self.hold(thing)
        try:
            yield thing
        finally:
            self.drop(thing)

    def hold(self, thing: T) -> None:
        """Look after a thing until it is dropped, for the first time after one period."""
        with self._changed:
            if self._pid != os.getpid():
                # A fork took the things along, not the thread.
                self._pid, self._thread = os.getpid(), None
                self._held.clear()
            self._held[id(thing)] = thing
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def drop(self, thing: T) -> None:
        """Look after it no longer; what is under way for it may still end. Idempotent."""
        with self._changed:
            self._held.pop(id(thing), None)

    def look_after_now(self) -> None:
        """Do one round now, in this thread."""
        with self._changed:
            held = list(self._held.values())
        if held:
            self._work(held)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._period_seconds)
                if not self._held:
                    self._thread = None
                    return
            try:
                self.look_after_now()
            except Exception:
                # Without this thread everything that the process holds would lapse.
                logger.exception("%s goes on after an error", self._name)
