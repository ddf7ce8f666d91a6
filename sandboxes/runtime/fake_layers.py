"""The layers of the fake runtime: files in memory, with the promises of those on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sandboxes.runtime.exceptions import LayerMissing, SandboxCancelled, StartTimeout
from sandboxes.runtime.layers import reference_of
from sandboxes.runtime.layout import PREPARED
from sandboxes.runtime.sessions import Cancelled

Files = dict[str, tuple[bytes, int]]

_POLL_SECONDS = 0.01


@dataclass
class _Layer:
    files: Files
    below: tuple[str, ...]
    used: int
    image: str


class FakeLayers:
    """Keep layers by reference; `in_use` names those that sandboxes lie upon."""

    def __init__(self, in_use: Callable[[], set[str]]) -> None:
        self._in_use = in_use
        self._layers: dict[str, _Layer] = {}
        self._held: set[str] = set()
        self._clock = 0
        self._lock = threading.RLock()

    def keep(self, reference: str, files: Files, below: tuple[str, ...], *, image: str = "") -> str:
        """Keep a layer; a prepared one that is there already stays."""
        with self._lock:
            self._layers.setdefault(reference, _Layer(dict(files), below, self._tick(), image))
            return reference

    def image(self, reference: str) -> str:
        """Return the image that a layer was written on; raises LayerMissing."""
        with self._lock:
            if reference not in self._layers:
                raise LayerMissing(f"no layer {reference} on this node")
            return self._layers[reference].image

    def merged(self, references: tuple[str, ...]) -> Files:
        """Return the files of some layers, topmost first; raises LayerMissing."""
        with self._lock:
            found: Files = {}
            for reference in reversed(references):
                if reference not in self._layers:
                    raise LayerMissing(f"no layer {reference} on this node")
                found |= self._layers[reference].files
            return found

    def discard(self, reference: str) -> None:
        """Forget a layer."""
        with self._lock:
            self._layers.pop(reference, None)

    def frozen(self) -> list[str]:
        """Return the references, the prepared ones excepted, sorted."""
        with self._lock:
            return sorted(name for name in self._layers if not name.startswith(PREPARED))

    def find(self, key: str) -> str | None:
        """Return the prepared layer of a key, and note its use."""
        with self._lock:
            layer = self._layers.get(reference_of(key))
            if layer is None:
                return None
            layer.used = self._tick()
            return reference_of(key)

    def size(self) -> int:
        """Return the bytes in the prepared layers."""
        with self._lock:
            return sum(self._bytes(name) for name in self._layers if name.startswith(PREPARED))

    def evict(self, keep_bytes: int) -> int:
        """Forget unused prepared layers, oldest use first, until the rest takes `keep_bytes`."""
        with self._lock:
            used = self._in_use().union(*(layer.below for layer in self._layers.values()))
            order = sorted(self._layers, key=lambda name: self._layers[name].used)
            evicted = 0
            for name in order:
                if self.size() <= keep_bytes:
                    break
                if name.startswith(PREPARED) and name not in used:
                    del self._layers[name]
                    evicted += 1
            return evicted

    @contextmanager
    def hold(
        self, key: str, *, timeout_seconds: float, cancelled: Cancelled | None
    ) -> Iterator[None]:
        """Be the only holder of a key; raises StartTimeout, SandboxCancelled."""
        deadline = time.monotonic() + timeout_seconds
        while not self._take(key):
            if cancelled is not None and cancelled():
                raise SandboxCancelled("cancelled while another prepared the layer")
            if time.monotonic() > deadline:
                raise StartTimeout(f"the layer was not prepared within {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._held.discard(key)

    def _take(self, key: str) -> bool:
        with self._lock:
            if key in self._held:
                return False
            self._held.add(key)
            return True

    def _bytes(self, name: str) -> int:
        return sum(len(data) for data, _ in self._layers[name].files.values())

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
