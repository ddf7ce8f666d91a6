"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDEST = 80


class Output:
    """Print results to standard output, and words about them to standard error."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def rows(self, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
        """Print a table, or an object a line."""
        if self.as_json:
            for row in rows:
                print(json.dumps(row, ensure_ascii=False))
            return
        table = [[cell(row.get(name)) for name in columns] for row in rows]
        if not table:
            self.say("None.")
            return
        head = [name.upper() for name in columns]
        widths = [max(map(len, column)) for column in zip(head, *table, strict=True)]
        for line in (head, *table):
            padded = (each.ljust(width) for each, width in zip(line, widths, strict=True))
            print("  ".join(padded).rstrip())

    def value(self, value: Any, text: str) -> None:
        """Print a value as JSON, or the text that says the same."""
        print(json.dumps(value, ensure_ascii=False) if self.as_json else text, flush=True)

    def say(self, text: str) -> None:
        """Tell people something that is no result."""
        print(block(text), file=sys.stderr, flush=True)


def cell(value: Any) -> str:
    """Return a value as one line of bounded width, without what a terminal would act on."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    shown = "".join(each if each.isprintable() else " " for each in text)
    return shown if len(shown) <= WIDEST else f"{shown[: WIDEST - 1]}…"


def block(text: str) -> str:
    """Return a text of several lines without control characters: it may come from a policy."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
