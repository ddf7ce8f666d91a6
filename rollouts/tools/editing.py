"""Text edits that leave every other byte as it was; nothing here touches a file.

Lines end with "\\n", as `cat -n` and `sed` count them; a "\\r" before it belongs to the line's end.
"""

from __future__ import annotations

import bisect
import codecs
import difflib
import heapq
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_MATCHES = 50
LINE_CHARACTERS = 2000

_MARKS = (  # the longer ones first: UTF-32's begins as UTF-16's does
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_SNIPPET_LINES = 4
_SHOWN_LINES = 20
_NEAR_LINES = 10_000
_NEAR_CHARACTERS = 200
_NEAR_TRIES = 20
_LIKENESS = 0.6
_NUMBERED = re.compile(r"^[ ]*\d+\t", re.MULTILINE)


class EditRefused(Exception):
    """Say why an edit is not made, in words the policy can act on."""


class BinaryContent(Exception):
    """Say that bytes are no text."""


@dataclass(frozen=True)
class Document:
    """Hold a decoded file; `encode` gives back the bytes it came from."""

    text: str
    encoding: str = "utf-8"
    mark: bytes = b""

    def encode(self) -> bytes:
        """Return the file's bytes; raises EditRefused for what its encoding has not."""
        try:
            return self.mark + self.text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise EditRefused(
                f"The file is encoded as {self.encoding}, which has no "
                f"{error.object[error.start]!r}; leave that character out, or convert the file "
                "first."
            ) from error


@dataclass(frozen=True)
class Edit:
    """Hold an edited text and which of its lines changed, counted from 1, ends included."""

    text: str
    first: int
    last: int


def decode(data: bytes) -> Document:
    """Return a file's text: by its byte-order mark, else UTF-8, else Latin-1.

    Raises BinaryContent for what holds NUL and no mark that explains it.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                found = Document(data[len(mark) :].decode(encoding), encoding, mark)
            except UnicodeDecodeError:
                continue
            if "\0" not in found.text:
                return found
    if b"\0" in data:
        raise BinaryContent
    try:
        return Document(data.decode("utf-8"))
    except UnicodeDecodeError:
        return Document(data.decode("latin-1"), "latin-1")


def split_lines(text: str) -> list[str]:
    """Return the lines with their ends; the last may have none."""
    lines = text.split("\n")
    last = lines.pop()
    return [*(line + "\n" for line in lines), *([last] if last else [])]


def count_lines(text: str) -> int:
    """Return how many lines there are, an unfinished one included."""
    return text.count("\n") + (not text.endswith("\n") and bool(text))


def line_ends(text: str) -> str:
    """Return "crlf", "lf", "mixed", or "" without any line end."""
    crlf = text.count("\r\n")
    lf = text.count("\n") - crlf
    return "mixed" if crlf and lf else "crlf" if crlf else "lf" if lf else ""


def replace_once(text: str, old: str, new: str) -> Edit:
    """Replace the only occurrence of `old`; raises EditRefused unless there is exactly one.

    A "\\n" of `old` also matches "\\r\\n", and those of `new` then become what the place uses;
    where `old` or `new` has a "\\r" itself, both are taken as they are.
    """
    if not old:
        raise EditRefused("old_str is empty; use insert to add text.")
    literal = "\r" in old or "\r" in new
    starts = _find(text, old, literal=literal)
    if not starts:
        raise EditRefused(_explain_missing(text, old))
    if len(starts) > 1:
        lines = ", ".join(str(text.count("\n", 0, start) + 1) for start, _ in starts)
        more = " and more" if len(starts) == MOST_MATCHES else ""
        raise EditRefused(
            f"old_str occurs {len(starts)} times{more}, in lines {lines}: nothing was changed. "
            "Add lines around it, so that it occurs once."
        )
    start, end = starts[0]
    if not literal and _end_near(text, start, end) == "\r\n":
        new = new.replace("\n", "\r\n")
    if text[start:end] == new:
        raise EditRefused("new_str is what stands there already: nothing was changed.")
    first = text.count("\n", 0, start) + 1
    return Edit(text[:start] + new + text[end:], first, first + new.count("\n"))


def insert_after(text: str, line: int, new: str) -> Edit:
    """Insert whole lines after a line, 0 for the top; raises EditRefused for no such line.

    The lines get the ends that are used there. A last line without an end stays the last one
    to have none: the text goes after an end of its own.
    """
    lines = split_lines(text)
    if not 0 <= line <= len(lines):
        raise EditRefused(
            f"insert_line is {line}, and the file has {len(lines)} lines; it must be 0 (the top) "
            f"to {len(lines)} (the end)."
        )
    head = "".join(lines[:line])
    end = _end_near(text, max(0, len(head) - 2), len(head))
    block = new.replace("\r\n", "\n").removesuffix("\n").replace("\n", end)
    unfinished = line == len(lines) and bool(text) and not text.endswith("\n")
    edited = head + end + block if unfinished else head + block + end + text[len(head) :]
    return Edit(edited, line + 1, line + 1 + block.count("\n"))


def number_lines(lines: Iterable[str], first: int) -> list[str]:
    """Return the lines as `cat -n` shows them, without ends, over-long ones cut."""
    shown = []
    for number, line in enumerate(lines, start=first):
        text = line.removesuffix("\n").removesuffix("\r")
        if len(text) > LINE_CHARACTERS:
            text = f"{text[:LINE_CHARACTERS]} [... {len(text) - LINE_CHARACTERS} characters more]"
        shown.append(f"{number:6}\t{text}")
    return shown


def snippet(edit: Edit) -> list[str]:
    """Return the changed lines and some around them, numbered."""
    lines = split_lines(edit.text)
    first = max(1, edit.first - _SNIPPET_LINES)
    return number_lines(lines[first - 1 : edit.last + _SNIPPET_LINES], first)


def _find(text: str, old: str, *, literal: bool) -> list[tuple[int, int]]:
    """Return where `old` stands, overlapping places included, MOST_MATCHES at most."""
    parts = [old] if literal else old.split("\n")
    pattern = re.compile(r"(?:\r\n|(?<!\r)\n)".join(re.escape(part) for part in parts))
    found: list[tuple[int, int]] = []
    match = pattern.search(text)
    while match and len(found) < MOST_MATCHES:
        found.append(match.span())
        match = pattern.search(text, match.start() + 1)
    return found


def _end_near(text: str, start: int, end: int) -> str:
    """Return the line end inside a place, else the next one after it, else the one before."""
    at = text.find("\n", start, end)
    if at < 0:
        at = text.find("\n", end)
    if at < 0:
        at = text.rfind("\n", 0, start)
    return "\r\n" if at > 0 and text[at - 1] == "\r" else "\n"


def _explain_missing(text: str, old: str) -> str:
    lead = "old_str does not occur in the file: nothing was changed."
    unnumbered = _NUMBERED.sub("", old)
    if unnumbered != old and _find(text, unnumbered, literal=False):
        return f"{lead} It holds the line numbers of view; leave them out."
    lines = [line.removesuffix("\n").removesuffix("\r") for line in split_lines(text)]
    wanted = old.replace("\r\n", "\n").strip("\n").split("\n")
    place = _find_spaced(lines, old)
    if place is not None:
        shown = "\n".join(number_lines(lines[place.start : place.stop], place.start + 1))
        return (
            f"{lead} It would match from line {place.start + 1} on but for whitespace (spaces, "
            f"tabs, line breaks). The file has:\n{shown}"
        )
    near = _find_near(lines, wanted)
    if near is None:
        return f"{lead} No line is like it; look at the file with view."
    shown = "\n".join(number_lines([lines[near]], near + 1))
    return f"{lead} The line most like it is:\n{shown}"


def _find_spaced(lines: Sequence[str], old: str) -> range | None:
    """Return the lines in which `old` stands when whitespace is left out of both."""
    key = "".join(old.split())
    packed = ["".join(line.split()) for line in lines]
    at = "".join(packed).find(key)
    if not key or at < 0:
        return None
    ends = list(itertools.accumulate(len(line) for line in packed))
    first = bisect.bisect_right(ends, at)
    last = bisect.bisect_left(ends, at + len(key))
    return range(first, min(last + 1, first + _SHOWN_LINES))


def _find_near(lines: Sequence[str], wanted: Sequence[str]) -> int | None:
    """Return the index of the line most like the first line that has something in it."""
    target = next((line for line in wanted if line.strip()), "")[:_NEAR_CHARACTERS]
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(target)

    def compare(index: int, *, quick: bool) -> float:
        matcher.set_seq1(lines[index][:_NEAR_CHARACTERS])
        if matcher.real_quick_ratio() < _LIKENESS:
            return 0.0
        return matcher.quick_ratio() if quick else matcher.ratio()

    # The exact ratio is slow, and who wrote the file may mean it to be: only a few get it.
    indices = range(min(len(lines), _NEAR_LINES))
    likely = heapq.nlargest(_NEAR_TRIES, indices, key=lambda index: compare(index, quick=True))
    best = max(likely, key=lambda index: compare(index, quick=False), default=None)
    return best if best is not None and compare(best, quick=False) >= _LIKENESS else None
