"""Rewards of turns by rules over the conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evaluators.base import Artefacts, InvalidSettings, Score
from evaluators.process import ProcessEvaluator

PROCESS = ProcessEvaluator()


def call(name: str, arguments: Any = None) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": text}}


def says(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": content}


TASK = ({"role": "system", "content": "Be good."}, {"role": "user", "content": "error: fix it"})
# A good call, a failing one, one that could not be read, and the end.
EPISODE = (
    *TASK,
    says("<think>a</think>", call("bash", {"command": "ls"})),
    tool("a.py\n[exit code: 0]"),
    says("x", call("bash", {"command": "false"}), call("search", {"q": "1"})),
    tool("[exit code: 1]"),
    tool("found"),
    says("x", call("unreadable")),
    tool("The call could not be read. Write it again."),
    says("<think>b</think> done"),
)


def score(
    rules: list[dict[str, Any]],
    messages: tuple[Any, ...] = EPISODE,
    turns: int = 4,
    **settings: Any,
) -> Score:
    """Score a conversation after checking the settings, as the child process does."""
    whole = {"rules": rules, **settings}
    PROCESS.validate(whole, {})
    return PROCESS.score(whole, {}, Artefacts(messages=messages, turns=turns))


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        ({"rule": "tool_error"}, [0.0, 0.5, 1.0, None]),
        ({"rule": "malformed"}, [0.0, 0.0, 1.0, 0.0]),
        ({"rule": "well_formed"}, [1.0, 1.0, 0.0, 1.0]),
        ({"rule": "calls"}, [1.0, 2.0, 1.0, 0.0]),
        ({"rule": "calls", "tool": "search"}, [0.0, 1.0, 0.0, 0.0]),
        ({"rule": "pattern", "pattern": "^<think>.*</think>"}, [1.0, 0.0, 0.0, 1.0]),
        ({"rule": "no_pattern", "pattern": "^<think>"}, [0.0, 1.0, 1.0, 0.0]),
        ({"rule": "must_call", "tool": "search"}, [None, None, None, 1.0]),
        ({"rule": "must_call", "tool": "bash", "count": 3}, [None, None, None, 0.0]),
        ({"rule": "turns"}, [None, None, None, 4.0]),
    ],
)
def test_what_each_rule_says_of_the_turns(rule: dict[str, Any], values: list[float | None]) -> None:
    result = score([rule])
    assert result.details["values"][rule["rule"]] == values
    assert result.turn_rewards == tuple(value or 0.0 for value in values)


@pytest.mark.parametrize(
    ("scalar", "reward"), [("sum", 0.5), ("mean", 0.125), ("last", 0.25), ("min", -0.25)]
)
def test_weights_and_the_scalar(scalar: str, reward: float) -> None:
    rules = [
        {"rule": "well_formed", "weight": 0.25},
        {"rule": "malformed", "weight": -0.25},
    ]
    result = score(rules, scalar=scalar)
    assert result.turn_rewards == (0.25, 0.25, -0.25, 0.25)
    assert result.reward == reward
    assert dict(result.rewards) == {"reward": reward, "well_formed": 3.0, "malformed": 1.0}


def test_the_scalar_is_cut_to_its_bounds() -> None:
    result = score([{"rule": "turns", "weight": -1}], scalar="sum", low=-2)
    assert (result.reward, result.details["before_cut"]) == (-2.0, -4.0)


def test_turns_that_the_conversation_no_longer_shows_have_no_reward() -> None:
    result = score([{"rule": "calls"}], turns=6)
    assert result.turn_rewards == (None, None, 1.0, 2.0, 1.0, 0.0)
    assert result.details["turns_not_shown"] == 2


def test_without_a_turn_there_is_nothing_to_reward() -> None:
    result = score([{"rule": "well_formed"}, {"rule": "turns"}], messages=TASK, turns=0)
    assert (result.reward, result.turn_rewards) == (0.0, ())


def test_two_rules_of_one_kind_have_names_of_their_own() -> None:
    rules = [
        {"rule": "must_call", "tool": "bash", "name": "used bash"},
        {"rule": "must_call", "tool": "search", "name": "searched", "weight": 0.5},
    ]
    assert score(rules, scalar="sum").reward == 1.5


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "tool_calls": [None]},
        {
            "role": "assistant",
            "content": 5,
            "tool_calls": [{"function": {"arguments": "[" * 9999}}],
        },
    ],
)
def test_messages_of_any_shape_are_read(message: dict[str, Any]) -> None:
    rules = [{"rule": "malformed"}, {"rule": "tool_error"}, {"rule": "pattern", "pattern": "a"}]
    assert len(score(rules, messages=(message, tool("x")), turns=1).turn_rewards) == 1


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({}, "rules"),
        ({"rules": []}, "rules"),
        ({"rules": [1]}, "object"),
        ({"rules": [{"rule": "good"}]}, "rule"),
        ({"rules": [{"rule": "calls", "pattern": "a"}]}, "pattern"),
        ({"rules": [{"rule": "pattern"}]}, "pattern"),
        ({"rules": [{"rule": "pattern", "pattern": "("}]}, "wrong"),
        ({"rules": [{"rule": "must_call"}]}, "tool"),
        ({"rules": [{"rule": "must_call", "tool": "a", "count": 0}]}, "count"),
        ({"rules": [{"rule": "turns"}, {"rule": "turns"}]}, "taken"),
        ({"rules": [{"rule": "turns", "name": "reward"}]}, "taken"),
        ({"rules": [{"rule": "turns", "weight": "1"}]}, "weight"),
        ({"rules": [{"rule": "turns"}], "scalar": "max"}, "scalar"),
        ({"rules": [{"rule": "turns"}], "low": 1, "high": 0}, "low"),
        ({"rules": [{"rule": "turns"}], "error_pattern": "["}, "error_pattern"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidSettings, match=word):
        PROCESS.validate(settings, {})
