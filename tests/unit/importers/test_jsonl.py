"""Reading one task a line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.importers.base import RejectedTask, TaskRecord, TaskRejected
from rollouts.importers.jsonl import read_jsonl, read_plain_row
from rollouts.importers.options import ReadOptions

GOOD: dict[str, Any] = {"ref": "a", "instruction": "What is 1 + 1?", "answer": 2}


def read(tmp_path: Path, *lines: str | bytes, **options: Any) -> list[TaskRecord | RejectedTask]:
    """Write lines and read them."""
    path = tmp_path / "tasks.jsonl"
    data = [line.encode() if isinstance(line, str) else line for line in lines]
    path.write_bytes(b"\n".join(data))
    return list(read_jsonl(path, **options))


def test_a_line_is_a_task(tmp_path: Path) -> None:
    line = json.dumps({**GOOD, "metadata": {"level": 1}})
    assert read(tmp_path, "", line, "  ") == [
        TaskRecord(
            ref="a",
            instruction="What is 1 + 1?",
            evaluator="exact",
            evaluator_payload={"answer": 2},
            metadata={"level": 1},
        )
    ]


def test_a_line_may_bring_the_conversation_to_go_on_from(tmp_path: Path) -> None:
    calls = [{"id": "c0", "type": "function", "function": {"name": "bash", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c0", "content": "a.py"},
    ]
    plain, given = read(
        tmp_path, json.dumps(GOOD), json.dumps({**GOOD, "ref": "b", "messages": messages})
    )
    assert isinstance(plain, TaskRecord)
    assert isinstance(given, TaskRecord)
    assert given.messages == (
        messages[0],
        {**messages[1], "content": ""},
        {**messages[2], "name": "bash"},
    )
    assert given.content_hash != plain.content_hash == replace(plain, messages=()).content_hash


def test_a_line_may_name_its_evaluator(tmp_path: Path) -> None:
    own = {"evaluator": "regex", "evaluator_settings": {"pattern": "x"}}
    lines = [json.dumps(GOOD), json.dumps({**GOOD, **own, "ref": "b"})]
    read_records = read(tmp_path, *lines, evaluator_settings={"numeric": True})
    assert [
        (record.evaluator, record.evaluator_settings)
        for record in read_records
        if isinstance(record, TaskRecord)
    ] == [("exact", {"numeric": True}), ("regex", {"pattern": "x"})]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "the line is not JSON"),
        ("[" * 100_000, "the line is not JSON"),
        ("[]", "the line is not a JSON object"),
        (b"\xff", "the line is not UTF-8 text"),
        (json.dumps({**GOOD, "prompt": "x"}), "unknown field 'prompt'.*with a mapping"),
        (json.dumps({**GOOD, "ref": ""}), "'ref' must be a text"),
        (json.dumps({**GOOD, "ref": 3}), "'ref' must be a text"),
        (json.dumps({**GOOD, "ref": "x" * 201}), "'ref' has more than 200"),
        (json.dumps({**GOOD, "instruction": " "}), "'instruction' must be a text"),
        (json.dumps({**GOOD, "instruction": "a\0"}), "instruction holds a NUL"),
        ('{"ref": "a", "instruction": "b"}', "'answer' is missing"),
        ('{"ref": "a", "instruction": "\\ud800", "answer": 1}', "instruction: .*surrogates"),
        ('{"ref": "a", "instruction": "b", "answer": NaN}', "answer: Out of range"),
        (json.dumps({**GOOD, "answer": {}}), "'answer' is {}; it must be"),
        (json.dumps({**GOOD, "evaluator": "vibes"}), "no evaluator 'vibes'"),
        (json.dumps({**GOOD, "evaluator": "script"}), "needs test files"),
        (json.dumps({**GOOD, "evaluator": "regex"}), "pattern"),
        (json.dumps({**GOOD, "evaluator_settings": []}), "'evaluator_settings' must be an object"),
        (json.dumps({**GOOD, "metadata": 3}), "'metadata' must be an object"),
        (json.dumps({**GOOD, "messages": []}), "messages: messages must be a list"),
        (json.dumps({**GOOD, "messages": [{"role": "x"}]}), "messages: message 0 has no role"),
    ],
)
def test_a_bad_line_is_refused_and_hides_no_other(
    tmp_path: Path, line: str | bytes, reason: str
) -> None:
    good, refused = json.dumps(GOOD), tmp_path / "tasks.jsonl:2"
    first, bad, last = read(tmp_path, good, line, json.dumps({**GOOD, "ref": "z"}))
    assert isinstance(first, TaskRecord)
    assert isinstance(last, TaskRecord)
    assert isinstance(bad, RejectedTask)
    assert bad.path == refused
    assert re.search(reason, bad.reason), bad.reason


def test_a_line_that_is_too_long_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.importers.rows.MAX_ROW_BYTES", 200)
    monkeypatch.setattr("rollouts.importers.rows._CHUNK", 64)
    entries = read(tmp_path, json.dumps(GOOD), "x" * 1000, json.dumps({**GOOD, "ref": "z"}))
    assert [type(entry) for entry in entries] == [TaskRecord, RejectedTask, TaskRecord]


MAPPING = {"instruction": "question", "answer": "solution.final", "ref": "id"}
MAPPED = {"id": 7, "question": "1 + 1?", "solution": {"final": "2", "steps": "…"}, "level": "easy"}


def test_a_mapping_says_which_column_is_what_and_the_rest_is_kept_hidden() -> None:
    record = read_plain_row(MAPPED, ReadOptions(mapping=MAPPING))
    assert record == TaskRecord(
        ref="7",
        instruction="1 + 1?",
        evaluator="exact",
        evaluator_payload={"answer": "2"},
        source={"solution": MAPPED["solution"], "level": "easy"},
    )


def test_a_mapping_reads_a_prompt_of_messages_and_makes_a_reference() -> None:
    mapping = {"messages": "prompt", "answer": "a"}
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    record = read_plain_row({"prompt": prompt, "a": 2}, ReadOptions(mapping=mapping))
    again = read_plain_row({"a": 2, "prompt": prompt}, ReadOptions(mapping=mapping))
    assert (record.instruction, record.messages) == ("1 + 1?", tuple(prompt))
    assert record.ref == again.ref
    assert record.ref.startswith("row-")


def test_a_mapped_column_that_is_missing_refuses_the_row() -> None:
    with pytest.raises(TaskRejected, match="column 'question', mapped to 'instruction', is miss"):
        read_plain_row({"id": 1, "solution": {"final": 2}}, ReadOptions(mapping=MAPPING))
