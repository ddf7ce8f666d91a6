"""Read the rows of a file one after the other, in bounded memory and from any row on."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import ijson
import pyarrow as pa
import pyarrow.parquet as pq

MAX_ROW_BYTES = 10_000_000
PARQUET_BATCH = 64
_BOM = b"\xef\xbb\xbf"
_CHUNK = 1024 * 1024


class UnreadableSource(Exception):
    """Say that a file is none that rows are read from; the message says what to do."""

    code: ClassVar[str] = "import.source_unreadable"


@dataclass(frozen=True, kw_only=True)
class Position:
    """Say where reading goes on: `offset` in bytes (lines) or rows, `number` of rows before."""

    offset: int = 0
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    """Hold one row, or the reason why there is none; `after` is where the next one begins."""

    number: int
    after: Position
    value: Mapping[str, Any] | None = None
    reason: str = ""
    raw: str = ""


def file_kind(path: Path) -> str:
    """Return `parquet`, `array` or `lines` by what a file begins with.

    Raises `UnreadableSource` for compressed files and what is no text, OSError.
    """
    with path.open("rb") as stream:
        head = stream.read(4096)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")):
        raise UnreadableSource(f"{path.name} is compressed; unpack it first")
    text = head.removeprefix(_BOM).lstrip()
    if head.startswith((b"PK\x03\x04", b"ARROW1")) or (b"\0" in head and text[:1] not in b"{["):
        raise UnreadableSource(f"{path.name} is neither JSON nor parquet; convert it to one")
    return "array" if text.startswith(b"[") and not _is_line(text) else "lines"


def _is_line(text: bytes) -> bool:
    """Tell whether what begins with `[` is one whole line of JSON among others."""
    line, newline, rest = text.partition(b"\n")
    try:
        return bool(newline and rest.strip()) and isinstance(json.loads(line), list)
    except (ValueError, RecursionError):
        return False


def read_rows(path: Path, start: Position | None = None) -> Iterator[Row]:
    """Yield the rows of a JSON Lines, JSON or parquet file; a bad one never hides the others.

    Raises `UnreadableSource` and OSError.
    """
    begin = start or Position()
    kind = file_kind(path)
    if kind == "parquet":
        yield from _parquet(path, begin)
    elif kind == "array":
        yield from _array(path, begin)
    else:
        with path.open("rb") as stream:
            yield from _lines(stream, begin)


def _lines(stream: IO[bytes], start: Position) -> Iterator[Row]:
    stream.seek(start.offset)
    number = start.number
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        too_long = len(line) > MAX_ROW_BYTES
        while line and not line.endswith(b"\n") and too_long:
            rest = stream.readline(_CHUNK)
            if not rest or rest.endswith(b"\n"):
                break
        after = Position(offset=stream.tell(), number=number)
        if too_long:
            reason = f"the line has more than {MAX_ROW_BYTES} bytes; shorten it"
            yield Row(number=number, after=after, reason=reason, raw=shown(line))
        elif line.strip():
            value, reason = parse_line(line.removeprefix(_BOM) if number == 1 else line)
            raw = shown(line)
            yield Row(number=number, after=after, value=value, reason=reason, raw=raw)


def parse_line(line: bytes) -> tuple[Mapping[str, Any] | None, str]:
    """Return the object of a line, or None and why there is none."""
    try:
        value = json.loads(line)
    except UnicodeDecodeError as fault:
        return None, f"the line is not UTF-8 text (byte {fault.start}); save it as UTF-8"
    except (ValueError, RecursionError) as fault:
        return None, f"the line is not JSON: {fault}; mend it"
    if not isinstance(value, dict):
        return None, "the line is not a JSON object"
    return value, ""


def _array(path: Path, start: Position) -> Iterator[Row]:
    number = 0
    with path.open("rb") as stream:
        if stream.read(len(_BOM)) != _BOM:
            stream.seek(0)
        items = ijson.items(stream, "item", use_float=True)
        while True:
            try:
                item = next(items)
            except StopIteration:
                return
            except (ijson.JSONError, UnicodeDecodeError, OverflowError, RecursionError) as fault:
                reason = f"the file is not JSON from here on: {str(fault)[:300]}; mend it"
                yield from _broken_end(number + 1, start, reason)
                return
            number += 1
            if number > start.number:
                yield _row(number, item)


def _parquet(path: Path, start: Position) -> Iterator[Row]:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as fault:
        raise UnreadableSource(f"{path.name} is not whole parquet: {fault}") from fault
    with file:
        before = 0
        groups: list[int] = []
        for index in range(file.metadata.num_row_groups):
            rows = file.metadata.row_group(index).num_rows
            if not groups and before + rows <= start.number:
                before += rows
            else:
                groups.append(index)
        number = before
        try:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH, row_groups=groups):
                for item in batch.to_pylist():
                    number += 1
                    if number > start.number:
                        yield _row(number, plain(item))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as fault:
            reason = f"the file cannot be read from here on: {str(fault)[:300]}; write it again"
            yield from _broken_end(number + 1, start, reason)


def _broken_end(number: int, start: Position, reason: str) -> Iterator[Row]:
    if number > start.number:
        yield Row(number=number, after=Position(offset=number, number=number), reason=reason)


def _row(number: int, item: Any) -> Row:
    after = Position(offset=number, number=number)
    if not isinstance(item, dict):
        return Row(
            number=number, after=after, reason="the row is not an object", raw=shown(repr(item))
        )
    try:
        text = json.dumps(item, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as fault:
        reason = f"the row is not JSON: {fault}; use texts, numbers, lists and objects"
        return Row(number=number, after=after, reason=reason, raw=shown(repr(item)))
    if len(text) > MAX_ROW_BYTES:
        reason = f"the row has more than {MAX_ROW_BYTES} bytes; shorten it"
        return Row(number=number, after=after, reason=reason, raw=shown(text))
    return Row(number=number, after=after, value=item, raw=shown(text))


def plain(value: Any) -> Any:
    """Return a parquet value as JSON: times as ISO text, a missing number (NaN) as null."""
    match value:
        case dict():
            return {str(name): plain(each) for name, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case float() if math.isnan(value):
            return None
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return float(value)
    return value


RAW_CHARACTERS = 16_000


def shown(line: bytes | str) -> str:
    """Return what is kept of a refused row: at most 16,000 characters, as the database takes."""
    text = line if isinstance(line, str) else line[: 4 * RAW_CHARACTERS].decode(errors="replace")
    text = text[:RAW_CHARACTERS].encode(errors="replace").decode()
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").rstrip("\r\n")


def source_total(path: Path) -> int | None:
    """Return what a position's offset ends at: bytes, rows or folders; None: nobody knows."""
    if path.is_dir():
        return sum(entry.is_dir() and not entry.name.startswith(".") for entry in path.iterdir())
    kind = file_kind(path)
    if kind == "parquet":
        try:
            return int(pq.read_metadata(path).num_rows)
        except (pa.ArrowException, OSError) as fault:
            raise UnreadableSource(f"{path.name} is not whole parquet: {fault}") from fault
    return path.stat().st_size if kind == "lines" else None
