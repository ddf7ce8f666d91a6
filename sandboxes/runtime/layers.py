"""Prepared layers of a node: found by key, built by one at a time, evicted when unused."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from sandboxes.runtime.exceptions import LayerMissing, SandboxCancelled, StartTimeout
from sandboxes.runtime.layout import PREPARED, Layout, read_record
from sandboxes.runtime.locks import try_lock
from sandboxes.runtime.sessions import Cancelled

# A layer that was just looked up may be about to carry a sandbox that is not there yet.
GRACE_SECONDS = 300.0
_POLL_SECONDS = 0.05


def reference_of(key: str) -> str:
    """Return the reference of the prepared layer of a key."""
    return PREPARED + hashlib.sha256(key.encode()).hexdigest()[:32]


class LayerStore:
    """Look after the prepared layers below one root.

    `evict` deletes one by reference unless it is used by then, and tells whether it did.
    """

    def __init__(self, layout: Layout, evict: Callable[[str], bool]) -> None:
        self._layout = layout
        self._evict = evict

    def find(self, key: str) -> str | None:
        """Return the layer's reference when it is there, and note its use."""
        reference = reference_of(key)
        folder = self._layout.layer(reference)
        try:
            os.utime(folder)
        except OSError:
            return None
        return reference if (folder / "layer.json").exists() else None

    def image(self, reference: str) -> str:
        """Return the image that a layer was written on; raises LayerMissing."""
        record = read_record(self._layout.layer(reference) / "layer.json")
        if record is None:
            raise LayerMissing(f"no layer {reference} on this node")
        return str(record.get("image", ""))

    @contextmanager
    def hold(
        self, key: str, *, timeout_seconds: float, cancelled: Cancelled | None
    ) -> Iterator[None]:
        """Hold the key's lock, which ends with the process too; see `Runtime.hold_layer`."""
        path = self._layout.root / "locks" / f"{reference_of(key)}.lock"
        deadline = time.monotonic() + timeout_seconds
        while (descriptor := try_lock(path)) is None:
            if cancelled is not None and cancelled():
                raise SandboxCancelled("cancelled while another prepared the layer")
            if time.monotonic() > deadline:
                raise StartTimeout(f"the layer was not prepared within {timeout_seconds:g} s")
            time.sleep(_POLL_SECONDS)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def evict(self, *, keep_bytes: int) -> int:
        """Delete unused prepared layers, oldest use first, until the rest takes `keep_bytes`."""
        used = used_layers(self._layout)
        layers = []
        total = 0
        for reference in self._layout.prepared():
            folder = self._layout.layer(reference)
            with suppress(OSError):
                size = int((read_record(folder / "layer.json") or {}).get("bytes", 0))
                total += size
                layers.append((folder.stat().st_mtime, reference, size))
        evicted = 0
        for last_used, reference, size in sorted(layers):
            if total <= keep_bytes:
                break
            if reference in used or time.time() - last_used < GRACE_SECONDS:
                continue
            if self._evict(reference):
                total -= size
                evicted += 1
        return evicted

    def size(self) -> int:
        """Return the bytes that the prepared layers took when they were made."""
        records = (
            read_record(self._layout.layer(reference) / "layer.json")
            for reference in self._layout.prepared()
        )
        return sum(int(record.get("bytes", 0)) for record in records if record is not None)


def used_layers(layout: Layout) -> set[str]:
    """Return the references that instances and other layers lie upon."""
    found: set[str] = set()
    for record in _records(layout):
        found.update(str(reference) for reference in record.get("layers") or ())
    return found


def _records(layout: Layout) -> Iterator[dict[str, Any]]:
    for folder, name in (("instances", "record.json"), ("layers", "layer.json")):
        for path in (layout.root / folder).glob(f"*/{name}"):
            record = read_record(path)
            if record is not None:
                yield record
