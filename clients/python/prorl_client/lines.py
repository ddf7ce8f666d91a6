"""Lines out of chunks of bytes: only a line feed ends one, unlike `str.splitlines`."""

from __future__ import annotations


class LineBuffer:
    """Collect chunks and give back the lines that are complete, without their ends."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that this chunk completes."""
        if b"\n" not in chunk:
            self._rest += chunk
            return []
        first, *others = chunk.split(b"\n")
        self._rest += first
        lines = [bytes(self._rest), *others[:-1]]
        self._rest = bytearray(others[-1])
        return [line[:-1] if line.endswith(b"\r") else line for line in lines]

    def rest(self) -> bytes:
        """Return what came after the last line feed."""
        return bytes(self._rest)
