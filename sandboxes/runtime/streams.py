"""Bounded capture of output: the head and the tail stay, the middle is counted."""

from __future__ import annotations

from collections import deque

from sandboxes.runtime.screen import printable

__all__ = ["HeadTail", "printable"]


class HeadTail:
    """Keep the first and last `limit` / 2 bytes of a stream; memory stays near `limit`."""

    def __init__(self, limit: int) -> None:
        self._head_limit = max(limit, 2) // 2
        self._tail_limit = max(limit, 2) - self._head_limit
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.dropped = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= self._tail_limit:
            first = self._tail.popleft()
            self._tail_bytes -= len(first)
            self.dropped += len(first)

    @property
    def truncated(self) -> bool:
        """Tell whether bytes are missing between head and tail."""
        return self.dropped > 0 or self._tail_bytes > self._tail_limit

    def parts(self) -> tuple[bytes, int, bytes]:
        """Return the head, the number of bytes left out, and the tail."""
        tail = b"".join(self._tail)
        extra = max(0, len(tail) - self._tail_limit)
        return bytes(self._head), self.dropped + extra, tail[extra:]

    def joined(self) -> bytes:
        """Return head and tail with a line between them that says what is missing."""
        head, missing, tail = self.parts()
        if not missing:
            return head + tail
        return head + f"\n[... {missing} bytes left out ...]\n".encode() + tail
