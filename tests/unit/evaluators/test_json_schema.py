"""Answers that must be JSON by a schema."""

from __future__ import annotations

from typing import Any

import pytest

from evaluators.base import Artefacts, InvalidSettings, Score
from evaluators.json_schema import JsonSchemaEvaluator

JSON = JsonSchemaEvaluator()
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string"}},
}
GOOD = '{"name": "ada", "age": 36, "tags": ["x", "y"]}'


def score(text: str | None, payload: dict[str, Any] | None = None, **settings: Any) -> Score:
    """Score a text after checking the settings, as the child process does."""
    whole = {"schema": SCHEMA, **(payload or {})}
    JSON.validate(settings, whole)
    return JSON.score(settings, whole, Artefacts(answer=text))


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f" \n{GOOD}\n",
        f"Here it is:\n```json\n{GOOD}\n```\nDone.",
        f"```\n{GOOD}\n```",
        f'First try:\n```json\n{{"name": 1}}\n```\nBetter:\n```json\n{GOOD}\n```',
        f"The answer is {GOOD} as asked.",
        f"<think>{{}}</think>{GOOD}",
        '{"name": "ada", "age": 36.0}',
    ],
)
def test_what_fits_the_schema(text: str) -> None:
    result = score(text)
    assert (result.reward, result.rewards["valid"], result.details["wrong"]) == (1.0, 1.0, "")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (None, "there is no answer"),
        ("", "there is no answer"),
        ("no JSON here", "there is no JSON"),
        ('{"name": "ada"', "there is no JSON"),
        ('{"name": "ada"}', "'age' is a required property"),
        ('{"name": "ada", "age": "36"}', "at /age: '36' is not of type 'integer'"),
        ('{"name": "Ada", "age": 36}', "at /name"),
        ('{"name": "ada", "age": -1}', "at /age"),
        ('{"name": "ada", "age": true}', "at /age"),
        ('{"name": "ada", "age": 1, "x": 2}', "x"),
        ('{"name": "ada", "age": 1, "tags": [1]}', "at /tags/0"),
        ('{"name": "ada", "age": NaN}', "NaN"),
        ('{"name": "ada", "age": 1, "age": 2}', "the same name twice"),
        ("[" * 100_000, "there is no JSON"),
        ("[" * 100 + "]" * 100, "nested deeper than 64"),
        ("1" * 10_000, "no JSON"),
        ('"\ud800"', "is not of type 'object'"),
    ],
)
def test_what_does_not(text: str | None, wrong: str) -> None:
    result = score(text)
    assert (result.reward, result.details["correct"]) == (0.0, False)
    assert wrong in result.details["wrong"]


@pytest.mark.parametrize(
    ("wanted", "text", "reward"),
    [
        ("bare", GOOD, 1.0),
        ("bare", f"```json\n{GOOD}\n```", 0.0),
        ("bare", f"It is {GOOD}", 0.0),
        ("fenced", GOOD, 0.0),
        ("fenced", f"```json\n{GOOD}\n```", 1.0),
        ("fenced", f"```python\n{GOOD}\n```", 0.0),
    ],
)
def test_the_format_says_where_it_stands(wanted: str, text: str, reward: float) -> None:
    assert score(text, format=wanted).reward == reward


@pytest.mark.parametrize(
    ("expected", "matched"),
    [
        ({"/age": 36}, [True]),
        ({"/age": 36.0, "/name": "ada"}, [True, True]),
        ({"/age": 36, "/name": "eve"}, [True, False]),
        ({"/tags/1": "y", "/tags/2": "z"}, [True, False]),
        ({"/tags": ["x", "y"]}, [True]),
        ({"/tags": ["y", "x"]}, [False]),
        ({"/none/at/all": None}, [False]),
        ({"": {"name": "ada", "age": 36, "tags": ["x", "y"]}}, [True]),
    ],
)
def test_expected_values_at_their_places(expected: dict[str, Any], matched: list[bool]) -> None:
    result = score(GOOD, {"expected": expected})
    assert (result.details["matched"], result.reward) == (matched, float(all(matched)))
    fraction = score(GOOD, {"expected": expected}, scalar="fraction")
    assert fraction.reward == sum(matched) / len(matched)


def test_the_whole_expected_value() -> None:
    assert score("[1, true]", {"schema": True, "answer": [1, True]}).reward == 1.0
    assert score("[1, 1]", {"schema": True, "answer": [1, True]}).reward == 0.0
    assert score("{}", {"schema": '{"type": "object"}'}).reward == 1.0


def test_names_in_a_pointer_are_unescaped() -> None:
    payload = {"schema": True, "expected": {"/a~1b/m~0n": 1}}
    assert score('{"a/b": {"m~n": 1}}', payload).reward == 1.0


def test_formats_are_checked_where_the_setting_says_so() -> None:
    payload = {"schema": {"type": "string", "format": "date"}}
    assert score('"31st of May"', payload).reward == 1.0
    assert score('"31st of May"', payload, formats=True).reward == 0.0
    assert score('"2026-05-31"', payload, formats=True).reward == 1.0


def test_a_catastrophic_pattern_costs_the_answer_that_set_it_off() -> None:
    payload = {"schema": {"type": "string", "pattern": "^(a+)+$"}}
    result = score('"' + "a" * 60 + 'b"', payload, seconds=0.3)
    assert (result.reward, result.details["parsed"]) == (0.0, True)
    assert result.details["wrong"] == "the answer took too much (time)"


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"$ref": "https://example.org/schema.json"}, "leads out of the schema"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "leads out of the schema"),
        ({"$ref": "other.json#/a"}, "leads out of the schema"),
        ({"type": "objekt"}, "the schema is wrong"),
        ({"pattern": "("}, "the schema is wrong at /pattern"),
        ("{", "no JSON"),
        ([], "must be an object"),
        (None, "must be an object"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema: Any, word: str) -> None:
    with pytest.raises(InvalidSettings, match=word):
        JSON.validate({}, {"schema": schema})


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"$ref": "#"}, "refers to itself without end"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
    ],
)
def test_a_schema_that_fails_on_every_answer_is_the_graders_fault(schema: Any, word: str) -> None:
    with pytest.raises(InvalidSettings, match=word):
        score('"x"', {"schema": schema})


def test_references_inside_of_the_schema_work() -> None:
    schema = {
        "$id": "https://example.org/tree",
        "type": "object",
        "properties": {"next": {"$ref": "https://example.org/tree"}},
        "additionalProperties": False,
    }
    assert score('{"next": {"next": {}}}', {"schema": schema}).reward == 1.0
    assert score('{"next": {"more": {}}}', {"schema": schema}).reward == 0.0


@pytest.mark.parametrize(
    ("settings", "payload", "word"),
    [
        ({"shema": {}}, {"schema": {}}, "shema"),
        ({}, {}, "'schema'"),
        ({"format": "yaml"}, {"schema": {}}, "format"),
        ({"formats": 1}, {"schema": {}}, "formats"),
        ({"seconds": 0}, {"schema": {}}, "seconds"),
        ({"scalar": "most"}, {"schema": {}}, "scalar"),
        ({}, {"schema": {}, "expected": {"a": 1}}, "pointers"),
        ({}, {"schema": {}, "expected": [1]}, "pointers"),
    ],
)
def test_a_wrong_setting_is_named(
    settings: dict[str, Any], payload: dict[str, Any], word: str
) -> None:
    with pytest.raises(InvalidSettings, match=word):
        JSON.validate(settings, payload)
