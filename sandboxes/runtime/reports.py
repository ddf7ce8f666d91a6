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
    """Collect reports as they come and keep the newest whole one."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._newest = b""

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
        if not self._newest:
            return None
        return Report(*self._newest.decode("utf-8", "replace").split("\0")[1:8])

    def _take(self) -> None:
        end = self._bytes.rfind(b"\0\x1eE")
        if end < 0:
            return
        token = self._bytes[end + 3 : self._bytes.find(b"\0", end + 3)]
        begin = self._bytes.rfind(b"\x1eB" + token + b"\0", 0, end)
        if begin >= 0:
            self._newest = bytes(self._bytes[begin:end])
        del self._bytes[: end + 3 + len(token) + 1]
