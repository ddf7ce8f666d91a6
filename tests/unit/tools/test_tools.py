"""The tools: arguments, limits, observations."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from referencing.exceptions import Unresolvable

from rollouts.tools.base import (
    InvalidArguments,
    InvalidToolSettings,
    ToolContext,
    ToolResult,
    ToolUnavailable,
    UnknownTool,
)
from rollouts.tools.bash import BashTool, describe
from rollouts.tools.host import HostAccess
from rollouts.tools.registry import TOOLS, build_tools
from rollouts.tools.submit import SubmitTool
from sandboxes.runtime.exceptions import SandboxGone
from sandboxes.runtime.sessions import CommandResult
from tests.unit.tools.scripted_shell import ScriptedShell, result


def test_bash_runs_in_the_shell_and_reports() -> None:
    shell = ScriptedShell(answers={"ls": result("a\nb\n")})
    context = ToolContext(shell=shell, timeout_seconds=100)
    assert BashTool(timeout_seconds=5, output_bytes=999).call({"command": "ls"}, context) == (
        ToolResult(
            content="a\nb\n[exit code: 0]",
            data={
                "exit_code": 0,
                "cwd": "/app",
                "duration_seconds": 0.5,
                "truncated": False,
                "timed_out": False,
                "cancelled": False,
                "shell_restarted": False,
                "running": False,
            },
        )
    )
    assert (shell.commands, shell.limits) == (["ls"], [(5, 999)])
    assert shell.idles == [(None, False)]


def test_bash_leaves_an_interactive_program_to_be_typed_at() -> None:
    waiting = result("name? ", None, running=True, idle=True)
    shell = ScriptedShell(answers={"./ask": waiting, "Ada\n": result("hello Ada\n")})
    context = ToolContext(shell=shell, timeout_seconds=100)
    tool = BashTool(idle_seconds=0.5)

    asked = tool.call({"command": "./ask", "interactive": True}, context)
    answered = tool.call({"input": "Ada\n"}, context)

    assert asked.content == (
        "name? \n[still running: answer it with input, wait with input of a newline, or end it "
        "with input C-c; a new command ends it first]"
    )
    assert (asked.data["running"], asked.data["exit_code"]) == (True, None)
    assert answered.content == "hello Ada\n[exit code: 0]"
    assert (shell.typed, shell.idles) == (["Ada\n"], [(0.5, True), (0.5, True)])


@pytest.mark.parametrize(
    ("typed", "key"), [("C-c", "\x03"), ("C-d", "\x04"), ("C-z", "\x1a"), ("C-c\n", "C-c\n")]
)
def test_bash_takes_spelt_keys_as_meant(typed: str, key: str) -> None:
    shell = ScriptedShell()
    BashTool().call({"input": typed}, ToolContext(shell=shell, timeout_seconds=1))
    assert shell.typed == [key]


@pytest.mark.parametrize(
    ("own", "asked", "left", "used"),
    [(60, None, 100, 60), (60, 7, 100, 7), (60, 90, 100, 60), (60, 7, 3, 3)],
)
def test_bash_takes_the_smallest_time_limit(
    own: float, asked: float | None, left: float, used: float
) -> None:
    shell = ScriptedShell()
    arguments: dict[str, Any] = {"command": "ls"}
    if asked is not None:
        arguments["timeout_seconds"] = asked
    BashTool(timeout_seconds=own).call(arguments, ToolContext(shell=shell, timeout_seconds=left))
    assert shell.limits[0][0] == used


@pytest.mark.parametrize(
    ("command_result", "text"),
    [
        (result(), "(no output)\n[exit code: 0]"),
        (result("x\n\n", 3), "x\n[exit code: 3]"),
        (
            result("head … tail", 0, truncated=True),
            "head … tail\n[output truncated: only the beginning and the end, 99 bytes together, "
            "are shown; narrow it with head, tail or grep, or write it to a file]\n[exit code: 0]",
        ),
        (
            result("so far", None, timed_out=True),
            "so far\n[timed out: the command was ended after 2.5 seconds; run something shorter, "
            "or put it in the background with &]",
        ),
        (
            result("", None, cancelled=True),
            "(no output)\n[cancelled: the command was ended before it finished]",
        ),
        (
            result("", 1, shell_restarted=True),
            "(no output)\n[the shell ended and a new one took its place: directory, exported "
            "variables, functions, aliases and shell options were kept; other variables, traps and "
            "background jobs were lost]\n[exit code: 1]",
        ),
        (
            result("x", None, idle=True),
            "x\n[silent for too long: the command was ended]",
        ),
        (
            result("", None),
            "(no output)\n[exit code: unknown, the command did not end by itself]",
        ),
    ],
)
def test_observations_say_what_to_know(command_result: CommandResult, text: str) -> None:
    assert describe(command_result, timeout_seconds=2.5, output_bytes=99) == text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "exactly one of them"),
        ({"command": "ls", "input": "x"}, "exactly one of them"),
        ({"input": "x", "interactive": True}, "interactive belongs to command"),
        ({"input": ""}, "at input"),
        ({"input": "a\ud800b"}, "Unicode"),
        ({"command": "ls", "interactive": "yes"}, "at interactive"),
        ({"command": ""}, "at command"),
        ({"command": "  \n"}, "empty"),
        ({"command": ["ls"]}, "at command"),
        ({"command": "ls", "cwd": "/"}, "cwd"),
        ({"command": "ls", "timeout_seconds": 0}, "at timeout_seconds"),
        ({"command": "ls", "timeout_seconds": "1"}, "at timeout_seconds"),
        ({"command": "a\0b"}, "NUL"),
        ({"command": "a\ud800b"}, "Unicode"),
        ({"command": "x" * 100_001}, "at command"),
    ],
)
def test_bash_refuses_wrong_arguments_before_the_shell(
    arguments: dict[str, Any], word: str
) -> None:
    shell = ScriptedShell()
    with pytest.raises(InvalidArguments, match=word) as caught:
        BashTool().call(arguments, ToolContext(shell=shell, timeout_seconds=1))
    assert (shell.commands, shell.typed) == ([], [])
    assert len(str(caught.value)) < 1000


def test_bash_without_a_sandbox_is_ours_to_mend() -> None:
    with pytest.raises(ToolUnavailable):
        BashTool().call({"command": "ls"}, ToolContext(timeout_seconds=1))


def test_faults_of_the_sandbox_pass_through() -> None:
    fault = SandboxGone("gone")
    shell = ScriptedShell(answers={"ls": fault})
    with pytest.raises(SandboxGone) as caught:
        BashTool().call({"command": "ls"}, ToolContext(shell=shell, timeout_seconds=1))
    assert caught.value is fault


@pytest.mark.parametrize("answer", [None, "", "42"])
def test_submit_finishes(answer: str | None) -> None:
    context = ToolContext(timeout_seconds=1)
    expected = ToolResult(content="Submitted.", finished=True, answer=answer)
    assert SubmitTool().call({"answer": answer}, context) == expected


def test_submit_needs_no_answer_and_refuses_other_things() -> None:
    context = ToolContext(timeout_seconds=1)
    assert SubmitTool().call({}, context).answer is None
    for arguments in ({"answer": 42}, {"text": "42"}):
        with pytest.raises(InvalidArguments):
            SubmitTool().call(arguments, context)


def test_the_registry_makes_what_is_listed() -> None:
    tools = build_tools(["submit", "bash"], {"bash": {"timeout_seconds": 5, "output_bytes": 1000}})
    assert list(tools) == ["submit", "bash"]
    bash = tools["bash"]
    assert isinstance(bash, BashTool)
    assert (bash.timeout_seconds, bash.output_bytes) == (5.0, 1000)
    for name in TOOLS:
        tool = build_tools([name], host=HostAccess(search_url="http://search:8080"))[name]
        jsonschema.Draft202012Validator.check_schema(tool.parameters)
        assert tool.schema()["function"]["name"] == tool.name == name


def test_the_registry_refuses_what_it_does_not_know() -> None:
    known = "bash, editor, ipython, submit, think, web_search"
    with pytest.raises(UnknownTool, match=f"'browser'; known are {known}"):
        build_tools(["browser"])
    for settings in (
        {"bash": {"timeout_seconds": 0}},
        {"bash": {"timeout_seconds": True}},
        {"bash": {"idle_seconds": 0}},
        {"bash": {"output_bytes": 1}},
        {"bash": {"output_bytes": 1e4}},
        {"bash": {"shell": "zsh"}},
        {"submit": {"answer": "x"}},
    ):
        with pytest.raises(InvalidToolSettings):
            build_tools(["bash", "submit"], settings)


def test_a_description_and_the_budget_bound_each_tool() -> None:
    settings = {
        "bash": {"timeout_seconds": 5, "description": "Run."},
        "web_search": {"timeout_seconds": 900},
    }
    host = HostAccess(search_url="http://search:8080")
    tools = build_tools(["bash", "ipython", "web_search"], settings, host=host, call_seconds=100)

    assert [tool.timeout_seconds for tool in tools.values()] == [5, 100, 100]  # type: ignore[attr-defined]
    assert tools["bash"].schema()["function"]["description"] == "Run."
    assert BashTool.description.startswith("Run a command in a bash shell")
    with pytest.raises(InvalidToolSettings, match="bash: description must be a text"):
        build_tools(["bash"], {"bash": {"description": " "}})


def test_a_schema_s_references_lead_nowhere_outside() -> None:
    tool = SubmitTool()
    tool.parameters = {"$ref": "http://127.0.0.1:9/schema.json"}
    with pytest.raises(Unresolvable):
        tool.check({})
