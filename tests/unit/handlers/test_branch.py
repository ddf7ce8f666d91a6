"""One turn from a given point."""

from __future__ import annotations

from typing import Any

import pytest

from rollouts.handlers.base import InvalidAgentSettings
from rollouts.handlers.branch import BranchHandler
from tests.unit.handlers.episode_parts import ListJournal, Stage, assistant, user
from tests.unit.tools.scripted_shell import ScriptedShell, result

HANDLER = BranchHandler()
PREFIX = (user("fix it"), assistant("```bash\nls\n```"), user("a.py"))
BLOCK = "Read it.\n```bash\ncat a.py\n```"


def branch(text: str, **values: Any) -> Stage:
    """Return an episode that stands after one turn of another."""
    shell = ScriptedShell(answers={"cat a.py": result("1/0\n")})
    settings = {"style": "bash_block", **values.pop("settings", {})}
    return Stage([text], **{"messages": PREFIX, "shell": shell, "settings": settings, **values})


def test_one_turn_is_sampled_and_carried_out() -> None:
    stage = branch(BLOCK)
    ended = HANDLER.run(stage.context)
    assert (ended.stop_reason, ended.turns, ended.answer) == ("finished", 1, "cat a.py")
    assert ended.messages == (*PREFIX, assistant(BLOCK), user("1/0\n[exit code: 0]"))
    (segment,) = stage.trace.as_dict()
    assert segment["prompt_ids"] == stage.model.prompts[0]
    assert segment["response_mask"] == [1] * (len(BLOCK) + 1)


def test_the_action_is_only_said_where_it_should_not_be_carried_out() -> None:
    stage = branch(BLOCK, settings={"execute": "no"})
    ended = HANDLER.run(stage.context)
    assert (ended.stop_reason, ended.answer, ended.tool_calls) == ("finished", "cat a.py", 0)
    assert stage.shell is not None
    assert stage.shell.commands == []


def test_calls_are_answered_as_json() -> None:
    stage = branch(
        '|look|bash {"command": "cat a.py"}', settings={"style": "tools", "execute": "no"}
    )
    ended = HANDLER.run(stage.context)
    assert ended.answer == '[{"name": "bash", "arguments": {"command": "cat a.py"}}]'


@pytest.mark.parametrize("text", ["no block", "```bash\nls\n```\n```bash\nls\n```"])
def test_a_malformed_action_ends_it(text: str) -> None:
    ended = HANDLER.run(branch(text).context)
    assert (ended.stop_reason, ended.turns, ended.malformed_actions) == ("malformed_action", 1, 1)


def test_a_task_without_a_prefix_begins_with_its_prompt() -> None:
    ended = HANDLER.run(branch(BLOCK, messages=(), system_prompt="s").context)
    assert ended.messages[:2] == ({"role": "system", "content": "s"}, user("do it"))


def test_the_environments_system_prompt_stands_before_a_prefix_without_one() -> None:
    ended = HANDLER.run(branch(BLOCK, system_prompt="s").context)
    assert ended.messages[:2] == ({"role": "system", "content": "s"}, PREFIX[0])


@pytest.mark.parametrize("messages", [(user("a"), assistant("b")), ({"role": "x"},), ("text",)])
def test_a_prefix_that_cannot_be_sampled_from_is_named(messages: Any) -> None:
    stage = branch(BLOCK, messages=messages)
    with pytest.raises(InvalidAgentSettings, match="the task's messages: "):
        HANDLER.run(stage.context)
    assert stage.model.prompts == []


def test_a_branch_that_was_carried_out_is_not_sampled_twice() -> None:
    first = branch(BLOCK)
    expected = HANDLER.run(first.context)
    again = branch("", journal=ListJournal(turns=first.journal.turns))
    ended = HANDLER.run(again.context)
    assert (ended.answer, ended.tool_calls) == (expected.answer, 1)
    assert ended.messages == expected.messages
    assert again.model.prompts == []


@pytest.mark.parametrize(
    ("style", "shown"), [("tools", True), ("bash_block", False), ("answer", False)]
)
def test_only_the_style_with_calls_shows_tools(style: str, shown: bool) -> None:
    assert HANDLER.shows_tools({"style": style}) is shown
    assert HANDLER.shows_tools({}) is True
