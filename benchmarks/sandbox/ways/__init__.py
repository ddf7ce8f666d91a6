"""The ways to run a command in a running sandbox, one module each."""

from __future__ import annotations

from typing import Protocol

CALL_SECONDS = 120.0
OUTPUT_BYTES = 4 * 1024 * 1024  # no way is helped by dropping output


class Way(Protocol):
    """Run commands one after the other and hand over their whole output."""

    def run(self, command: str) -> str | bytes:
        """Run a command to its end; returns what it printed."""
        ...

    def close(self) -> None:
        """End what the way keeps running."""
        ...


class WayBroken(Exception):
    """Say that a way did not do its work: its times would mean nothing."""
