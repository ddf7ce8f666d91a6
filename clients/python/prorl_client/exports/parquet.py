"""One segment a row, with its trajectory's description, for data frames and data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from prorl_client.errors import MissingExtra
from prorl_client.exports.base import Export
from prorl_client.trajectories import Segment, Trajectory

ROWS_AT_ONCE = 256
TOKENS_AT_ONCE = 4_000_000
TEXTS = ("rollout", "group", "task", "task_ref", "environment", "outcome", "stop_reason")
OBJECTS = ("rewards", "timings", "messages", "tools", "metadata")
ARRAYS = {
    "prompt_ids": "int32",
    "response_ids": "int32",
    "response_mask": "uint8",
    "response_logprobs": "float32",
    "policy_versions": "int64",
}


class ParquetExport(Export):
    """A Parquet file; a trajectory without segments is one row without tokens."""

    needs_messages = True

    def open(self) -> None:
        """Begin to write. Raises MissingExtra."""
        try:
            import pyarrow  # type: ignore[import-untyped, unused-ignore]
            from pyarrow import parquet
        except ImportError as fault:
            raise MissingExtra("Install pyarrow: pip install 'prorl-client[arrow]'.") from fault
        self._pyarrow: Any = pyarrow
        self._schema = _schema(pyarrow)
        self._file = parquet.ParquetWriter(self.partial, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def add(self, trajectory: Trajectory) -> None:
        """Write its segments."""
        for row in _rows(trajectory):
            self._rows.append(row)
            self._tokens += len(row["response_ids"] if row["response_ids"] is not None else ())
        if len(self._rows) >= ROWS_AT_ONCE or self._tokens >= TOKENS_AT_ONCE:
            self._flush()

    def finish(self) -> None:
        """Write what is left and close the file."""
        try:
            self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        columns = [
            self._pyarrow.array([row[field.name] for row in self._rows], type=field.type)
            for field in self._schema
        ]
        if self._rows:
            table = self._pyarrow.Table.from_arrays(columns, schema=self._schema)
            self._file.write_table(table)
        self._rows, self._tokens = [], 0


def _rows(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    common = {name: getattr(trajectory, name) for name in (*TEXTS, "sample", "reward", "trainable")}
    for name in OBJECTS:
        value = getattr(trajectory, name)
        common[name] = None if value is None else json.dumps(value, ensure_ascii=False)
    for each in trajectory.segments or (None,):
        yield {**common, **_tokens(each)}


def _tokens(segment: Segment | None) -> dict[str, Any]:
    names = ("id", "parent", "fork_reason", "logprob_mode", *ARRAYS)
    found = {name: None if segment is None else getattr(segment, name) for name in names}
    found["segment"] = found.pop("id")
    return found


def _schema(pyarrow: Any) -> Any:
    text = pyarrow.string()
    return pyarrow.schema(
        [
            *((name, text) for name in TEXTS),
            ("sample", pyarrow.int32()),
            ("reward", pyarrow.float64()),
            ("trainable", pyarrow.bool_()),
            *((name, text) for name in OBJECTS),
            ("segment", pyarrow.int32()),
            ("parent", pyarrow.int32()),
            ("fork_reason", text),
            ("logprob_mode", text),
            *((name, pyarrow.list_(getattr(pyarrow, kind)())) for name, kind in ARRAYS.items()),
        ]
    )
