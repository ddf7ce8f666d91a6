"""Rows of files: from any row on, in bounded memory, a bad one hiding no other."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollouts.importers.formats import detect_format
from rollouts.importers.options import InvalidOptions, ReadOptions
from rollouts.importers.rows import UnreadableSource, file_kind, read_rows, source_total

ROWS = [{"n": number, "text": "x" * number} for number in range(7)]


def as_lines(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\n".join(json.dumps(row).encode() for row in ROWS))


def as_array(path: Path) -> None:
    path.write_text("\n " + json.dumps(ROWS, indent=1))


def as_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=3)


WRITERS: dict[str, Callable[[Path], None]] = {
    "lines": as_lines,
    "array": as_array,
    "parquet": as_parquet,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_reading_goes_on_behind_any_row(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows"
    WRITERS[kind](path)
    assert file_kind(path) == kind
    found = list(read_rows(path))
    assert [row.value for row in found] == ROWS
    for place, row in enumerate(found):
        assert [each.value for each in read_rows(path, row.after)] == ROWS[place + 1 :]
    total = source_total(path)
    assert total == (None if kind == "array" else found[-1].after.offset)


def test_a_parquet_value_is_json_as_far_as_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    row = {"at": datetime.datetime(2024, 1, 2), "n": float("nan"), "list": [{"a": None}]}
    pq.write_table(pa.Table.from_pylist([row, {**row, "n": 1.5}]), path)
    assert [each.value for each in read_rows(path)] == [
        {"at": "2024-01-02T00:00:00", "n": None, "list": [{"a": None}]},
        {"at": "2024-01-02T00:00:00", "n": 1.5, "list": [{"a": None}]},
    ]
    pq.write_table(pa.table({"image": [b"\xff"]}), path)
    (image,) = read_rows(path)
    assert (image.value, "bytes" in image.reason) == (None, True)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('[{"a": 1}, 3, null, {"a": 2}]', [{"a": 1}, "no object", "no object", {"a": 2}]),
        ('[{"a": 1}, {"a": ]', [{"a": 1}, "not JSON from here"]),
        ('[{"a": 1}', [{"a": 1}, "not JSON from here"]),
        ("[]", []),
        ('{"a": 1}\n[1]\n{"a": 2}', [{"a": 1}, "no object", {"a": 2}]),
        ('[1]\n{"a": 2}', ["no object", {"a": 2}]),
        ('{"a": "\0"}\n{"a": 2}', ["not JSON", {"a": 2}]),
        ("", []),
    ],
)
def test_bad_rows_hide_no_others(tmp_path: Path, text: str, found: list[Any]) -> None:
    path = tmp_path / "rows"
    path.write_text(text)
    reasons = {"no object": "is not (an|a JSON) object", "not JSON": "is not JSON:"}
    rows = list(read_rows(path))
    assert [row.number for row in rows] == list(range(1, len(found) + 1))
    for row, wanted in zip(rows, found, strict=True):
        if isinstance(wanted, dict):
            assert row.value == wanted
        else:
            assert row.value is None
            assert re.search(reasons.get(wanted, wanted), row.reason), row.reason


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"responses_create_params": {}, "FAIL_TO_PASS": []}, "nemo_gym"),
        ({"FAIL_TO_PASS": [], "problem_statement": ""}, "swe"),
        ({"expected_output_json": "{}", "prompt": ""}, "swe"),
        ({"data_source": "", "prompt": [], "reward_model": {}}, "verl"),
        ({"instruction": "", "ref": "", "answer": 1}, "jsonl"),
    ],
)
def test_a_file_tells_its_format_by_its_first_sound_row(
    tmp_path: Path, row: dict[str, Any], name: str
) -> None:
    path = tmp_path / "rows"
    path.write_text(f"oops\n{json.dumps(row)}\n")
    assert detect_format(path, ReadOptions()) == name


def test_a_source_without_a_format_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_text('{"q": 1, "a": 2}')
    with pytest.raises(UnreadableSource, match=r"columns: a, q\); name the format, or map"):
        detect_format(path, ReadOptions())
    assert detect_format(path, ReadOptions(mapping={"instruction": "q"})) == "jsonl"
    with pytest.raises(UnreadableSource, match=r"holds no task folder \(it holds: rows\)"):
        detect_format(tmp_path, ReadOptions())


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"evaluators": "x"}, "unknown option 'evaluators'"),
        ({"mapping": ["a"]}, "must be a table"),
        ({"mapping": {"prompt": "a"}}, "map one of ref, instruction"),
        ({"data_sources": {"a": {}}}, "needs an 'evaluator'"),
        ({"data_sources": {"a": {"evaluator": "exact", "x": 1}}}, "'settings' only"),
        ({"data_sources": {"a": {"evaluator": "vibes"}}}, "no evaluator 'vibes'"),
        ({"tools": "all"}, "choose refuse or environment"),
        ({"image": 3}, "must be a text"),
    ],
)
def test_wrong_options_are_told(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidOptions, match=reason):
        ReadOptions.from_dict(given)
