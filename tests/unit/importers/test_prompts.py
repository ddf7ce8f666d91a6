"""Prompts that data sets hold: nothing of them is lost, and what cannot be shown is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.importers.base import TaskRejected
from rollouts.importers.prompts import read_prompt

USER = {"role": "user", "content": "1 + 1?"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("prompt", "instruction", "messages"),
    [
        ("1 + 1?", "1 + 1?", ()),
        ([USER], "1 + 1?", ()),
        ([SYSTEM, USER], "1 + 1?", (SYSTEM, USER)),
        ([{"role": "developer", "content": "Be brief."}, USER], "1 + 1?", (SYSTEM, USER)),
        ([{"role": "system", "content": ""}, USER], "1 + 1?", ()),
        (
            [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]}],
            "a",
            (),
        ),
        (
            [USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}],
            "sure?",
            (USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "sure?"}),
        ),
    ],
)
def test_a_prompt_is_an_instruction_and_what_stands_before(
    prompt: Any, instruction: str, messages: Any
) -> None:
    assert read_prompt(prompt, "prompt") == (instruction, messages)


def test_items_of_the_responses_api_become_turns() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    more = {"id": "d", "type": "function", "function": {"name": "pwd", "arguments": "{}"}}
    items = [
        USER,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c", "name": "ls", "arguments": "{}"},
        {"type": "function_call", "call_id": "d", "name": "pwd", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "d", "output": "/app"},
        {"type": "function_call_output", "call_id": "c", "output": "a.py"},
    ]

    instruction, messages = read_prompt(items, "input")

    assert instruction == "1 + 1?"
    assert messages == (
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call, more],
        },
        {"role": "tool", "tool_call_id": "d", "content": "/app", "name": "pwd"},
        {"role": "tool", "tool_call_id": "c", "content": "a.py", "name": "ls"},
    )


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (" ", "prompt is empty"),
        ([], "prompt is empty"),
        (None, "prompt is empty"),
        ({"role": "user"}, "prompt is empty"),
        (["text"], "prompt, item 0 is no message"),
        ([SYSTEM], "the last message is the system's"),
        ([USER, USER], "the role is user; here stands assistant"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "holds image_url; agents here"),
        ([{"role": "user", "content": None}], "item 0 has no text"),
        ([{"type": "web_search_call"}], "is a web_search_call"),
        ([{"role": "user", "content": " "}], "no words of the user"),
        ([{"role": "robot", "content": "x"}], "has no role of"),
        ([USER, {"type": "function_call", "call_id": "c", "name": "x", "arguments": "["}], "JSON"),
    ],
)
def test_what_cannot_be_shown_is_refused(prompt: Any, reason: str) -> None:
    with pytest.raises(TaskRejected, match=reason):
        read_prompt(prompt, "prompt")
