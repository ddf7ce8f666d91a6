"""What PostgreSQL or UTF-8 cannot hold is replaced before it is written."""

import json
from typing import Any

import pytest

from rollouts.text import MAX_DEPTH, clean_json, clean_text, whole_characters


def test_text_keeps_all_but_nul_and_half_of_a_surrogate_pair() -> None:
    assert clean_text("a\0b\ud800c\U0001f600") == "a\ufffdb?c\U0001f600"
    assert whole_characters("a\0b\ud800") == "a\0b?"


def test_numbers_that_are_not_finite_become_none() -> None:
    given = json.loads('{"a": [NaN, Infinity, -1e999, 1.5, 2, true, null]}')

    assert clean_json(given) == {"a": [None, None, None, 1.5, 2, True, None]}


@pytest.mark.parametrize(
    ("depth", "kept"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False), (900, False)]
)
def test_depth_is_bounded(depth: int, kept: bool) -> None:
    given: Any = json.loads("[" * depth + "]" * depth)

    cleaned = json.dumps(clean_json(given))

    assert cleaned == ("[" * depth + "]" * depth if kept else json.dumps(_bounded()))


def _bounded() -> Any:
    value: Any = "\ufffd"
    for _ in range(MAX_DEPTH):
        value = [value]
    return value
