"""What a shell says of itself after each command, read from a pipe of its own."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Report:
    """Hold what a shell says of itself after a command; texts as that shell prints them."""

    options: str = ""
    switches: str = ""  # bash: what `shopt` sets; others: empty
    exports: str = ""
    functions: str = ""
    exported_functions: str = ""
    aliases: str = ""
    traps: str = ""  # bash: what runs before each command

    @property
    def plain(self) -> bool:
        """Tell whether a simple command is what it looks like."""
        return not (self.functions or self.aliases or self.traps)


class Reports:
    """Collect reports as they come and keep the first and the newest whole one."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._first = self._newest = b""

    def feed(self, data: bytes) -> None:
        """Take bytes of the report stream; one of over 1 MiB is dropped."""
        self._bytes += data
        if len(self._bytes) > _MOST_BYTES:
            self._take()
            if len(self._bytes) > _MOST_BYTES:
                self._bytes.clear()

    def complete(self, token: str) -> bool:
        """Tell whether that command's report is there."""
        return self._bytes.endswith(f"\0\x1eE{token}\0".encode()) or self._newest.startswith(
            f"\x1eB{token}\0".encode()
        )

    def newest(self) -> Report | None:
        """Return the newest whole report, None before the first."""
        self._take()
        return _read(self._newest)

    def first(self) -> Report | None:
        """Return the first whole report, None before it."""
        self._take()
        return _read(self._first)

    def _take(self) -> None:
        if not self._first:
            self._first = self._cut(self._bytes.find(b"\0\x1eE"))
        end = self._bytes.rfind(b"\0\x1eE")
        if end >= 0 and self._bytes.find(b"\0", end + 3) < 0:  # it is not whole yet
            end = self._bytes.rfind(b"\0\x1eE", 0, end)
        if end < 0:
            return
        self._newest = self._cut(end) or self._newest
        del self._bytes[: self._bytes.find(b"\0", end + 3) + 1]

    def _cut(self, end: int) -> bytes:
        """Return the report that ends there, nothing where it has no beginning."""
        if end < 0 or self._bytes.find(b"\0", end + 3) < 0:
            return b""
        token = self._bytes[end + 3 : self._bytes.find(b"\0", end + 3)]
        begin = self._bytes.rfind(b"\x1eB" + token + b"\0", 0, end)
        return bytes(self._bytes[begin:end]) if begin >= 0 else b""


def _read(report: bytes) -> Report | None:
    return Report(*report.decode("utf-8", "replace").split("\0")[1:8]) if report else None
