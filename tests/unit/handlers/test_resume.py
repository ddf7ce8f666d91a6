"""Going on from a journal: the same tokens, the same counts, nothing run twice."""

from __future__ import annotations

import dataclasses

import pytest

from rollouts.handlers.base import CommandInterrupted
from rollouts.handlers.calls import INTERRUPTED
from rollouts.handlers.command_line import CommandLineHandler
from rollouts.handlers.single_turn import SingleTurnHandler
from tests.unit.handlers.episode_parts import ListJournal, Stage, assistant, user
from tests.unit.tools.scripted_shell import ScriptedShell, result

TEXTS: list[str | Exception] = ["ls", "", "pwd", "pwd", "submit done"]
HANDLER = CommandLineHandler()


def new_stage(texts: list[str | Exception], journal: ListJournal | None = None) -> Stage:
    """Return an episode that knows two commands."""
    shell = ScriptedShell(answers={"ls": result("a\n"), "pwd": result("/app\n")})
    return Stage(texts, shell=shell, journal=journal or ListJournal())


def journal_until(observed: int, *, sampled: int) -> ListJournal:
    """Return the journal of a worker that died after so many turns."""
    whole = new_stage(TEXTS)
    HANDLER.run(whole.context)
    turns = whole.journal.turns[:sampled]
    return ListJournal(
        turns=[
            turn if turn.turn < observed else dataclasses.replace(turn, messages=None)
            for turn in turns
        ]
    )


@pytest.mark.parametrize("done", range(5))
def test_a_resumed_episode_ends_as_the_whole_one_does(done: int) -> None:
    whole = new_stage(TEXTS)
    expected = HANDLER.run(whole.context)
    resumed = new_stage(TEXTS[done:], journal_until(done, sampled=done))
    ended = HANDLER.run(resumed.context)
    assert resumed.trace.as_dict() == whole.trace.as_dict()
    assert ended == dataclasses.replace(expected, inference_seconds=2.0 * done)
    assert resumed.model.prompts == whole.model.prompts[done:]
    assert len(resumed.renderer.rendered) == (0 if done else 1)
    assert resumed.shell is not None
    assert resumed.shell.commands == ["ls", "pwd", "pwd"][len([1 for t in TEXTS[:done] if t]) :]
    assert resumed.journal.turns == whole.journal.turns


def test_a_command_in_flight_goes_back_to_the_start_by_default() -> None:
    stage = new_stage([], journal_until(2, sampled=3))
    with pytest.raises(CommandInterrupted) as caught:
        HANDLER.run(stage.context)
    assert caught.value.code == "agent.command_interrupted"
    assert stage.shell is not None
    assert stage.shell.commands == []


def test_a_command_in_flight_can_be_reported_instead() -> None:
    stage = new_stage(["submit"], journal_until(2, sampled=3))
    stage.settings = {"interrupted_command": "report"}
    ended = HANDLER.run(stage.context)
    assert ended.messages[-3:] == (assistant("pwd"), user(INTERRUPTED), assistant("submit"))
    assert (ended.stop_reason, ended.tool_calls, ended.turns) == ("finished", 2, 4)
    assert stage.shell is not None
    assert stage.shell.commands == []
    assert stage.journal.turns[2].messages == (user(INTERRUPTED),)


def test_a_malformed_turn_that_was_not_answered_is_answered() -> None:
    whole = new_stage(TEXTS)
    expected = HANDLER.run(whole.context)
    stage = new_stage(TEXTS[2:], journal_until(1, sampled=2))
    assert HANDLER.run(stage.context).messages == expected.messages


def test_a_submission_in_the_journal_ends_without_a_model() -> None:
    stage = new_stage([], journal_until(4, sampled=5))
    ended = HANDLER.run(stage.context)
    assert (ended.stop_reason, ended.answer, stage.model.prompts) == ("finished", "done", [])


def test_limits_count_what_was_replayed() -> None:
    stage = new_stage(["pwd"], journal_until(3, sampled=3))
    stage.settings = {"max_repeats": 2}
    ended = HANDLER.run(stage.context)
    assert (ended.stop_reason, ended.turns, ended.tool_calls) == ("repetition", 4, 2)
    stage = new_stage([], journal_until(3, sampled=3))
    stage.budget = {"max_turns": 3}
    assert HANDLER.run(stage.context).stop_reason == "max_turns"


def test_a_single_turn_is_not_sampled_twice() -> None:
    first = Stage(["1 + 1 = 2"], shell=None)
    answered = SingleTurnHandler().run(first.context)
    again = Stage([], shell=None, journal=first.journal)
    ended = SingleTurnHandler().run(again.context)
    assert ended == dataclasses.replace(answered, inference_seconds=2.0)
    assert again.trace.as_dict() == first.trace.as_dict()
