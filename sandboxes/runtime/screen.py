"""Terminal output as text: what a reader of the terminal would see at the end."""

from __future__ import annotations

import re

from wcwidth import wcwidth

# Erasing within a line; then CSI, OSC (ended by BEL or ST), other string sequences, and two-byte
# escapes; ECMA-48.
_ESCAPES = re.compile(
    r"\x1b\[(?P<erase>[02]?)K|\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[PX^_][^\x1b]*\x1b\\|\x1b[ -/]*[0-~]"
)
_RETURNS = re.compile(r"\r+\n")
# Stand for the two ways of erasing while lines are drawn: code points that no text may hold.
_TO_END, _WHOLE = "\ufdd0", "\ufdd1"


def printable(data: bytes) -> str:
    """Decode terminal output: escapes go, CRLF becomes LF, bad UTF-8 is replaced.

    A line drawn over itself (carriage returns of a progress bar, backspaces of a spinner) keeps
    its last state, column by column.
    """
    text = data.decode("utf-8", "replace")
    if text.isprintable():
        return text
    if "\x1b" in text:
        text = _ESCAPES.sub(_without, text)
    if "\r" in text:
        text = _RETURNS.sub("\n", text)
    if "\r" in text or "\b" in text:
        text = "\n".join(_draw(line) for line in text.split("\n"))
    return text.replace(_TO_END, "").replace(_WHOLE, "")


def _without(found: re.Match[str]) -> str:
    erase = found["erase"]
    if erase is None:
        return ""
    return _WHOLE if erase == "2" else _TO_END


def _draw(line: str) -> str:
    if "\r" not in line and "\b" not in line:
        return line
    cells: list[str] = []  # one per column; a wide character is followed by an empty one
    column = 0
    for character in line:
        if character == "\r":
            column = 0
        elif character == "\b":
            column = max(0, column - 1)
        elif character == _TO_END:
            del cells[column:]
        elif character == _WHOLE:
            cells.clear()
        else:
            column = _put(cells, column, character)
    return "".join(cells)


def _put(cells: list[str], column: int, character: str) -> int:
    """Draw one character; returns the column after it."""
    width = wcwidth(character)
    if width == 0 and column > 0:  # combines with what is before it
        before = column - 1
        while before > 0 and cells[before] == "":
            before -= 1
        cells[before] += character
        return column
    width = max(1, width)
    end = column + width
    cells += [" "] * (end - len(cells))
    if cells[column] == "" and column > 0:
        cells[column - 1] = " "  # the other half of a wide character does not stay
    if end < len(cells) and cells[end] == "":
        cells[end] = " "
    cells[column:end] = [character] + [""] * (width - 1)
    return end
