"""Find a command's end in what its shell prints: a marker nobody can guess.

A marker is `RS token : code : directory RS token RS` (RS is 0x1e). The token is made of digits
only, so that no mode of a terminal (upper case, for one) changes it on its way. The code is 0 to
255: what has another there is output.
"""

from __future__ import annotations

import os
import re

from sandboxes.runtime.screen import printable
from sandboxes.runtime.streams import HeadTail

TOKEN_DIGITS = 20

_RS = b"\x1e"
_CODE = rb"(?:[01]?\d?\d|2[0-4]\d|25[0-5])"
_CODES = frozenset(str(code).encode() for code in range(256))
_STALE = re.compile(rb"\x1e\d{20}:" + _CODE + rb":[^\x1e]*\x1e\d{20}\x1e")
# A marker holds a directory (PATH_MAX is 4096): what is longer than this is no marker.
_MARK_BYTES = 4096 + 64


def new_token() -> str:
    """Return a token for one command."""
    return f"{int.from_bytes(os.urandom(8)):0{TOKEN_DIGITS}d}"


class Capture:
    """Collect a command's output and find its marker.

    `code` and `cwd` are what the marker said; `code` is None until it arrives. Markers of earlier
    commands, late answers to a recovery, are left out of the text.
    """

    def __init__(self, token: str, limit: int, *, held: bytes = b"") -> None:
        # Plain searches: to compile a pattern for each command would double a builtin's time.
        self._begin = _RS + token.encode() + b":"
        self._end = _RS + token.encode() + _RS
        self._kept = HeadTail(limit)
        self.held = held  # may be the beginning of a marker
        self.code: int | None = None
        self.cwd = ""

    def feed(self, data: bytes) -> bool:
        """Take bytes; returns whether the marker arrived."""
        if not self.held and _RS not in data:
            self._kept.feed(data)
            return False
        data = self.held + data
        start = data.find(self._begin)
        while start >= 0 and (end := data.find(self._end, start)) >= 0:
            code, _, cwd = data[start + len(self._begin) : end].partition(b":")
            if code in _CODES:
                self.code = int(code)
                self.cwd = cwd.decode("utf-8", "replace")
                if start:
                    self._kept.feed(_STALE.sub(b"", data[:start]))
                self.held = b""
                return True
            start = data.find(self._begin, start + 1)
        data = _STALE.sub(b"", data)
        cut = data.find(_RS, max(0, len(data) - _MARK_BYTES))
        self._kept.feed(data if cut < 0 else data[:cut])
        self.held = b"" if cut < 0 else data[cut:]
        return False

    def add(self, data: bytes) -> None:
        """Take bytes that this command's marker is not in."""
        self._kept.feed(_STALE.sub(b"", data))

    def text(self, *, hold: bool = False) -> tuple[str, bool]:
        """Return the printable output and whether its middle is missing.

        With `hold` the possible beginning of a marker stays in `held`, for the next capture.
        """
        if self.held and not hold:
            self._kept.feed(self.held)
            self.held = b""
        return printable(self._kept.joined()), self._kept.truncated
