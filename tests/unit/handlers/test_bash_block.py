"""The agent with one fenced command a turn."""

from __future__ import annotations

import pytest

from rollouts.handlers.base import Action
from rollouts.handlers.bash_block import BashBlockHandler
from rollouts.handlers.dialects import CUT_BLOCK, MANY_BLOCKS, NO_BLOCK, Turn, read_block
from rollouts.inference.parsed import ParsedTurn
from tests.unit.handlers.episode_parts import Stage, user
from tests.unit.tools.scripted_shell import ScriptedShell, result


def read(text: str, *, complete: bool = True) -> Action:
    """Read a turn of this text."""
    return read_block(
        Turn(text=lambda: text, parsed=lambda: ParsedTurn(content=text), complete=complete)
    )


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("Look:\n```bash\nls -a\npwd\n```\nThen I see.", "command", "ls -a\npwd"),
        ("```sh\nls\n```", "command", "ls"),
        ("```bash\nsubmit\n```", "submit", None),
        ("```bash\nsubmit 42 apples\n```", "submit", "42 apples"),
        ("```bash\nsubmit\nls\n```", "command", "submit\nls"),
        ("```python\nprint()\n```\n```bash\npython a.py\n```", "command", "python a.py"),
        ("ls", "malformed", NO_BLOCK),
        ("```bash\n\n```", "malformed", NO_BLOCK),
        ("```bash\nls\n```\n```bash\npwd\n```", "malformed", MANY_BLOCKS.format(count=2)),
    ],
)
def test_reading(text: str, kind: str, said: str | None) -> None:
    action = read(text)
    assert (action.kind, action.text) == (kind, said)


def test_a_block_that_was_cut_is_not_run_and_a_closed_one_is() -> None:
    assert read("```bash\nrm -rf /tm", complete=False).text == CUT_BLOCK
    assert read("```bash\nls\n```\nand th", complete=False).text == "ls"


def test_an_episode() -> None:
    shell = ScriptedShell(answers={"ls": result("a\n")})
    stage = Stage(["Hm.", "```bash\nls\n```", "Done.\n```bash\nsubmit a\n```"], shell=shell)
    ended = BashBlockHandler().run(stage.context)
    assert (ended.stop_reason, ended.answer, ended.malformed_actions) == ("finished", "a", 1)
    assert ended.messages[2] == user(NO_BLOCK)
    assert ended.messages[4] == user("a\n[exit code: 0]")
    assert shell.commands == ["ls"]


def test_a_turn_that_says_the_same_over_and_over_ends_the_episode() -> None:
    loop = "so I look at it once more and then " * 40 + "\n```bash\nls\n```"
    stage = Stage([loop], budget={"turn_tokens": 5000})
    ended = BashBlockHandler().run(stage.context)
    assert (ended.stop_reason, ended.tool_calls) == ("repetition", 0)
    stage = Stage([loop, "```bash\nsubmit\n```"], budget={"turn_tokens": 5000})
    stage.settings = {"max_text_repeats": 0}
    assert BashBlockHandler().run(stage.context).stop_reason == "finished"
