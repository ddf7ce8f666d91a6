"""Degenerate text."""

from __future__ import annotations

import pytest

from rollouts.handlers.repetition import is_degenerate, said_in


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c " * 4, True),
        ("a b c " * 3, False),
        ("x ".join(["a b c "] * 4), True),
        ("0 " * 100, False),
        ("", False),
        ("a b c d", False),
    ],
)
def test_one_run_of_words_again_and_again(text: str, expected: bool) -> None:
    assert is_degenerate(text, words=3, times=4) is expected


def test_zero_times_turns_it_off() -> None:
    assert is_degenerate("a b c " * 100, words=3, times=0) is False


def test_all_that_a_turn_holds_is_looked_at() -> None:
    message = {
        "role": "assistant",
        "content": "text",
        "reasoning_content": "thought",
        "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}],
    }
    assert said_in(message) == "thought\ntext\n{}"
    assert said_in({"role": "assistant", "content": None}) == ""
