"""Agents by name: the built-in ones, and plug-ins that work or do not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollouts.handlers.base import UnknownHandler
from rollouts.handlers.registry import HandlerRegistry, get_handler

BUILT_IN = ["bash_block", "branch", "command_line", "single_turn", "tools"]
MODULE = """
from rollouts.handlers.single_turn import SingleTurnHandler

class Good(SingleTurnHandler):
    name = "good"

class Taken(SingleTurnHandler):
    name = "tools"

class Nameless(SingleTurnHandler):
    name = ""

class Failing(SingleTurnHandler):
    def __init__(self):
        raise RuntimeError("no licence")

instance = Good()
"""


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on the path with a module of plug-ins, not yet installed."""
    (tmp_path / "some_agents.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_agents", raising=False)
    return tmp_path


def install(folder: Path, *points: str) -> None:
    """Make the folder a distribution with these entry points."""
    info = folder / "some_agents-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-agents\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[prorl.agents]\n" + "\n".join(points) + "\n")


def test_the_built_in_agents_are_there_by_name() -> None:
    registry = HandlerRegistry()
    assert (sorted(registry), registry.faults) == (BUILT_IN, ())
    assert {name: registry[name].needs_sandbox for name in registry} == {
        name: name != "single_turn" for name in BUILT_IN
    }


def test_an_unknown_agent_is_told_with_the_known_ones() -> None:
    with pytest.raises(UnknownHandler, match="'react'; known are bash_block, branch") as caught:
        get_handler("react")
    assert caught.value.code == "agent.unknown_handler"


def test_an_installed_plug_in_is_found_by_its_entry_point(plug_ins: Path) -> None:
    install(plug_ins, "good = some_agents:Good")
    registry = HandlerRegistry()
    assert sorted(registry) == sorted([*BUILT_IN, "good"])
    assert registry["good"].description == "One answer to the instruction, without tools."


def test_a_plug_in_is_found_by_the_setting(plug_ins: Path) -> None:
    assert plug_ins.is_dir()
    registry = HandlerRegistry()
    registry.configure(["some_agents.instance"])
    assert "good" in registry
    registry.configure([])
    assert "good" not in registry


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("some_agents.Taken", "the name 'tools' is taken by the service"),
        ("some_agents.Nameless", "its name is '', not a str"),
        ("some_agents.Failing", "RuntimeError: no licence"),
        ("some_agents.Missing", "AttributeError: module 'some_agents' has no attribute 'Missing'"),
        ("no_such_module.Agent", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("some_agents.MODULE", "AttributeError"),
        ("plain", "ValueError: Empty module name"),
        ("some_agents.SingleTurnHandler", "the name 'single_turn' is taken by the service"),
    ],
)
def test_a_broken_plug_in_is_named_and_takes_nothing_with_it(
    plug_ins: Path, path: str, reason: str
) -> None:
    assert plug_ins.is_dir()
    registry = HandlerRegistry()
    registry.configure([path, "some_agents.Good"])
    assert sorted(registry) == sorted([*BUILT_IN, "good"])
    (fault,) = registry.faults
    assert fault.startswith(f"setting AGENT_HANDLERS, {path}: ")
    assert reason in fault


def test_of_two_plug_ins_of_one_name_the_first_stays(plug_ins: Path) -> None:
    install(plug_ins, "first = some_agents:Good", "second = some_agents:instance")
    registry = HandlerRegistry()
    assert "good" in registry
    assert registry.faults == (
        "entry point second = some_agents:instance: the name 'good' is taken by "
        "entry point first = some_agents:Good",
    )
