"""The agent that answers once."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.handlers.base import (
    Action,
    AgentCancelled,
    AgentResult,
    InvalidAgentSettings,
    StopReason,
)
from rollouts.handlers.single_turn import SingleTurnHandler
from rollouts.inference.exceptions import ContextFull
from tests.unit.handlers.episode_parts import Stage, assistant, user

HANDLER = SingleTurnHandler()


def test_the_text_is_the_answer() -> None:
    demonstration = [user("1 + 1?"), assistant("2")]
    stage = Stage(
        ["It is 4.\n"],
        shell=None,
        instruction="2 + 2?",
        settings={"demonstrations": [demonstration]},
    )
    assert HANDLER.run(stage.context) == AgentResult(
        stop_reason=StopReason.FINISHED,
        answer="It is 4.\n",
        messages=(*demonstration, user("2 + 2?"), assistant("It is 4.\n")),
        turns=1,
        sampled_tokens=10,
    )
    answer = Action(kind="answer", text="It is 4.\n")
    assert stage.journal.events == [("sampled", 0, answer)]
    assert stage.trace.sampled_tokens == 10


@pytest.mark.parametrize(
    ("budget", "reason", "answer"),
    [
        ({"turn_tokens": 3}, "max_tokens", "abc"),
        ({"max_tokens": 4}, "max_tokens", "abcd"),
        ({"context_tokens": 10}, "context_full", "ab"),
        ({"context_tokens": 8}, "context_full", None),
        ({"deadline": 0.0}, "agent_timeout", None),
        ({"max_turns": 0}, "max_turns", None),
    ],
)
def test_limits(budget: dict[str, Any], reason: str, answer: str | None) -> None:
    stopped = HANDLER.run(Stage(["abcdef"], shell=None, budget=budget).context)
    assert (stopped.stop_reason, stopped.answer) == (reason, answer)


def test_context_full_said_by_the_server() -> None:
    stopped = HANDLER.run(Stage([ContextFull("too long")], shell=None).context)
    assert (stopped.stop_reason, stopped.answer, stopped.turns) == ("context_full", None, 0)


def test_cancelled() -> None:
    with pytest.raises(AgentCancelled):
        HANDLER.run(Stage(["a"], shell=None, is_cancelled=True).context)


def test_settings_of_the_other_handler_are_refused() -> None:
    with pytest.raises(InvalidAgentSettings, match="max_repeats"):
        HANDLER.run(Stage(["a"], shell=None, settings={"max_repeats": 3}).context)
