"""The agent of docs/agents.md, taken from the page, registered and run."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from rollouts.handlers.drive import drive
from rollouts.handlers.registry import BUILT_IN, HandlerRegistry
from tests.unit.handlers.episode_parts import ListJournal, Stage, assistant, user

PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
QUESTION = user("Is that right? Give your final answer.")


def block(language: str) -> str:
    """Return the page's only block in this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)
    return str(found)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HandlerRegistry:
    """Return a registry in a place where the page's package is installed."""
    (tmp_path / "second_look.py").write_text(block("python"))
    info = tmp_path / "second_look-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: second-look\nVersion: 1.0\n")
    heading, line = block("toml").splitlines()
    assert heading == '[project.entry-points."prorl.agents"]'
    (info / "entry_points.txt").write_text(f"[prorl.agents]\n{line.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "second_look", raising=False)
    return HandlerRegistry()


def test_the_agent_of_the_page_runs(registry: HandlerRegistry) -> None:
    stage = Stage(["7", "No, 8"], shell=None)
    ended = drive(registry["second_look"], stage.context)
    assert (ended.stop_reason, ended.answer, ended.turns) == ("finished", "No, 8", 2)
    assert ended.messages == (user("do it"), assistant("7"), QUESTION, assistant("No, 8"))
    assert registry.faults == ()


@pytest.mark.parametrize(("done", "is_observed"), [(1, False), (1, True), (2, False)])
def test_the_agent_of_the_page_goes_on(
    registry: HandlerRegistry, done: int, is_observed: bool
) -> None:
    whole = Stage(["7", "No, 8"], shell=None)
    expected = drive(registry["second_look"], whole.context)
    turns = whole.journal.turns[:done]
    if not is_observed:
        turns[-1] = dataclasses.replace(turns[-1], messages=None)
    stage = Stage([*["7", "No, 8"][done:]], shell=None, journal=ListJournal(turns=turns))
    ended = drive(registry["second_look"], stage.context)
    assert (ended.answer, ended.messages) == (expected.answer, expected.messages)
    assert stage.trace.as_dict() == whole.trace.as_dict()


def test_the_page_names_every_built_in_agent() -> None:
    for handler in BUILT_IN:
        assert f"\n| `{handler.name}` |" in PAGE
