"""Files as JSON and the content hash."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.importers.base import (
    FileContent,
    InvalidEncodedFiles,
    TaskRecord,
    TaskRejected,
    decode_files,
    encode_files,
    json_copy,
)

names = st.from_regex(r"[a-z]{1,5}(/[a-z .]{1,4}[a-z])?", fullmatch=True)
contents = st.builds(FileContent, data=st.binary(max_size=50), mode=st.sampled_from([0o644, 0o755]))


@given(files=st.dictionaries(names, contents, max_size=5))
def test_files_survive_json(files: dict[str, FileContent]) -> None:
    assert decode_files(json_copy(encode_files(files), "files")) == files


@pytest.mark.parametrize(
    "encoded",
    [
        {"a": {"base64": "AA==", "mode": "644"}},
        {"a": {"base64": "AA==", "mode": True}},
        {"a": {"base64": "AA==", "mode": 0o10000}},
        {"a": {"base64": "A", "mode": 420}},
        {"a": {"base64": "@@@@", "mode": 420}},
        {"a": {"mode": 420}},
        {"a": "AA=="},
        {"/etc/passwd": {"base64": "", "mode": 420}},
        {"../a": {"base64": "", "mode": 420}},
        {"a/../../b": {"base64": "", "mode": 420}},
        {"": {"base64": "", "mode": 420}},
        {"a\0": {"base64": "", "mode": 420}},
    ],
)
def test_other_json_is_refused(encoded: dict[str, Any]) -> None:
    with pytest.raises(InvalidEncodedFiles):
        decode_files(encoded)


RECORD = TaskRecord(
    ref="a/b",
    instruction="Do it.",
    setup="true",
    files={"a": FileContent(data=b"1"), "b": FileContent(data=b"2")},
    evaluator="script",
    metadata={"x": 1, "y": 2},
)


def test_the_hash_is_the_same_everywhere() -> None:
    assert RECORD.content_hash == (
        "ba38bc6fabd0568942a235e95020b1cedd894ab57c604a2ad93909fa3828c1c7"
    )
    other_order = dataclasses.replace(
        RECORD,
        ref="c",
        files={"b": FileContent(data=b"2"), "a": FileContent(data=b"1")},
        metadata={"y": 2, "x": 1},
    )
    assert other_order.content_hash == RECORD.content_hash


@pytest.mark.parametrize(
    "change",
    [
        {"instruction": "Do it!"},
        {"setup": None},
        {"files": {"a": FileContent(data=b"1"), "b": FileContent(data=b"3")}},
        {"files": {"a": FileContent(data=b"1"), "b": FileContent(data=b"2", mode=0o755)}},
        {"tests": {"a": FileContent(data=b"1")}},
        {"solution": {"a": FileContent(data=b"1")}},
        {"agent_timeout_seconds": 1.0},
        {"verifier_timeout_seconds": 1.0},
        {"image": "x"},
        {"environment": {"cpus": 1}},
        {"evaluator": "exact"},
        {"evaluator_settings": {"strip": True}},
        {"evaluator_payload": {"answer": "1"}},
        {"metadata": {}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_hash_sees_every_change(change: dict[str, Any]) -> None:
    assert dataclasses.replace(RECORD, **change).content_hash != RECORD.content_hash


def test_json_copies_hold_what_a_database_holds() -> None:
    value = {"text": "\\u0000 spelt out, \\\\ and é", "list": [1, 2.5, None, True]}
    assert json_copy(value, "metadata") == value
    for bad in (float("nan"), "nul \0", "half \ud800", "\\\0", {1, 2}):
        with pytest.raises(TaskRejected, match="metadata"):
            json_copy({"value": bad}, "metadata")
