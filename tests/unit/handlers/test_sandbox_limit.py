"""A sandbox that ended at its limit: one end, whatever the agent and the tool were."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rollouts.handlers.base import (
    AgentContext,
    AgentHandler,
    AgentResult,
    CommandInterrupted,
    JournaledTurn,
    StopReason,
)
from rollouts.handlers.bash_block import BashBlockHandler
from rollouts.handlers.branch import BranchHandler
from rollouts.handlers.command_line import CommandLineHandler
from rollouts.handlers.drive import drive
from rollouts.handlers.native_tools import ToolsHandler
from rollouts.inference.exceptions import NoServer
from rollouts.tools.base import ToolUnavailable
from sandboxes.runtime.exceptions import (
    EnterFailed,
    PythonFailed,
    SandboxGone,
    ShellFailed,
)
from sandboxes.runtime.protocol import ExecResult
from sandboxes.runtime.sessions import PythonSession
from tests.unit.handlers.episode_parts import ListJournal, Stage, assistant, said, user
from tests.unit.tools.scripted_shell import ScriptedShell, result

MEMORY = SandboxGone("the sandbox no longer runs", limit="memory")
HANDLER = CommandLineHandler()
HOG = "eat"


def calls(*made: tuple[str, dict[str, Any]]) -> str:
    """Return a turn of tool calls as the renderer reads it."""
    return "|".join(["", "go", *(f"{name} {json.dumps(arguments)}" for name, arguments in made)])


def stage_of(texts: Sequence[str | Exception], fault: Exception = MEMORY, **parts: Any) -> Stage:
    """Return an episode whose shell ends with this fault at the command of a hog."""
    shell = ScriptedShell(answers={HOG: fault, "ls": result("a\n")})
    return Stage(list(texts), shell=shell, **parts)


def sampled(stage: Stage) -> list[int]:
    """Return the sampled tokens of the trace, in their order."""
    return [
        token
        for segment in stage.trace.as_dict()
        for token, mask in zip(segment["response_ids"], segment["response_mask"], strict=True)
        if mask
    ]


def tokens(*texts: str) -> list[int]:
    """Return what the scripted model samples for these texts."""
    return [token for text in texts for token in said(text).token_ids]


class NoSandbox:
    """Answer every way into the sandbox with the same fault."""

    resumed = False

    def __init__(self, fault: Exception) -> None:
        self._fault = fault

    def run(self, *_words: Any, **_bounds: Any) -> ExecResult:
        raise self._fault

    def python(self) -> PythonSession:
        raise self._fault


@pytest.mark.parametrize(
    ("handler", "text", "tools"),
    [
        (CommandLineHandler(), HOG, ("bash", "submit")),
        (BashBlockHandler(), f"```bash\n{HOG}\n```", ("bash", "submit")),
        (ToolsHandler(), calls(("bash", {"command": HOG})), ("bash", "submit")),
        (ToolsHandler(), calls(("ipython", {"code": "1"})), ("ipython", "submit")),
        (ToolsHandler(), calls(("editor", {"command": "view", "path": "/a"})), ("editor",)),
        (BranchHandler(), calls(("bash", {"command": HOG})), ("bash", "submit")),
    ],
)
@pytest.mark.parametrize("limit", ["memory", "disk"])
def test_every_agent_and_tool_comes_to_the_same_end(
    handler: AgentHandler, text: str, tools: tuple[str, ...], limit: str
) -> None:
    gone = SandboxGone("the sandbox no longer runs", limit=limit)
    stage = stage_of([text], gone, tools=tools)
    context = dataclasses.replace(stage.context, sandbox=NoSandbox(gone))

    ended = drive(handler, context)

    assert (ended.stop_reason, ended.over_limit, ended.answer) == ("sandbox_limit", limit, None)
    assert (ended.turns, ended.sampled_tokens) == (1, len(tokens(text)))
    assert sampled(stage) == tokens(text)
    assert ended.messages[-1]["role"] == "assistant"


def test_all_turns_before_it_are_kept() -> None:
    stage = stage_of(["ls", HOG])

    ended = drive(HANDLER, stage.context)

    assert (ended.stop_reason, ended.turns, ended.tool_calls) == ("sandbox_limit", 2, 1)
    assert sampled(stage) == tokens("ls", HOG)
    assert ended.messages[:3] == (user("do it"), assistant("ls"), user("a\n[exit code: 0]"))
    assert ended.messages[3:] == (assistant(HOG),)


def test_what_the_calls_before_it_led_to_is_kept() -> None:
    text = calls(("bash", {"command": "ls"}), ("bash", {"command": HOG}))
    stage = stage_of([text])

    ended = drive(ToolsHandler(), stage.context)

    assert ended.stop_reason == "sandbox_limit"
    assert [message["role"] for message in ended.messages] == ["user", "assistant", "tool"]
    assert ended.messages[-1]["content"] == "a\n[exit code: 0]"


@pytest.mark.parametrize(
    "fault",
    [
        SandboxGone("the sandbox of this interpreter no longer runs"),
        EnterFailed("exit 137"),
        ShellFailed("no answer"),
        ToolUnavailable("no interpreter"),
    ],
)
def test_a_fault_that_does_not_tell_is_looked_into(fault: Exception) -> None:
    stage = stage_of([HOG], fault)
    context = dataclasses.replace(stage.context, over_limit=lambda: "disk")

    ended = drive(HANDLER, context)

    assert (ended.stop_reason, ended.over_limit) == ("sandbox_limit", "disk")
    assert sampled(stage) == tokens(HOG)


def test_an_interpreter_that_its_ended_sandbox_took_along_is_no_lack_of_the_image() -> None:
    stage = stage_of([calls(("ipython", {"code": "1"}))], tools=("ipython",))
    context = dataclasses.replace(
        stage.context,
        sandbox=NoSandbox(PythonFailed("python3 ended at its start")),
        over_limit=lambda: "memory",
    )

    assert drive(ToolsHandler(), context).stop_reason == "sandbox_limit"


@pytest.mark.parametrize("limit", ["lifetime", None])
def test_any_other_end_stays_the_services_fault(limit: str | None) -> None:
    gone = SandboxGone("the sandbox no longer runs", limit=limit)
    with pytest.raises(SandboxGone):
        drive(HANDLER, stage_of([HOG], gone).context)


def test_faults_of_inference_are_not_laid_at_the_policys_door() -> None:
    context = dataclasses.replace(stage_of([NoServer("none")]).context, over_limit=lambda: "disk")
    with pytest.raises(NoServer):
        drive(HANDLER, context)


class Plugin(AgentHandler):
    """An agent that keeps no books, and would call any fault a success."""

    name = "plugin"
    description = "for tests"
    needs_sandbox = True

    def __init__(self, act: Callable[[AgentContext], None]) -> None:
        self._act = act
        self.asked: list[Exception] = []

    def validate(self, settings: Any) -> None: ...

    def run(self, context: AgentContext) -> AgentResult:
        self._act(context)
        return AgentResult(stop_reason=StopReason.FINISHED, answer="fine")

    def on_fault(self, context: AgentContext, fault: Exception) -> AgentResult:  # noqa: ARG002
        self.asked.append(fault)
        return AgentResult(stop_reason=StopReason.FINISHED, answer="fine")


def run_a_hog(context: AgentContext) -> None:
    """Do what an agent may do with its shell."""
    assert context.shell is not None
    context.shell.run(HOG, timeout_seconds=1)


def test_an_agent_cannot_take_it_on() -> None:
    plugin = Plugin(run_a_hog)

    ended = drive(plugin, stage_of([]).context)

    assert (ended.stop_reason, ended.answer, plugin.asked) == ("sandbox_limit", None, [])


def journal_of(*texts: str, observed: int) -> ListJournal:
    """Return the journal of a worker that died after so many turns were observed."""
    whole = Stage([*texts, "submit"])
    HANDLER.run(whole.context)
    turns: list[JournaledTurn] = whole.journal.turns[: len(texts)]
    return ListJournal(
        turns=[
            turn if turn.turn < observed else dataclasses.replace(turn, messages=None)
            for turn in turns
        ]
    )


def test_tokens_of_a_worker_that_died_are_kept_where_the_agent_took_none_in() -> None:
    stage = stage_of([], journal=journal_of("ls", "pwd", observed=2))

    ended = drive(Plugin(run_a_hog), stage.context)

    assert (ended.turns, ended.sampled_tokens) == (2, len(tokens("ls", "pwd")))
    assert sampled(stage) == tokens("ls", "pwd")


@pytest.mark.parametrize("how", ["restart", "report"])
def test_a_hog_in_flight_when_its_worker_died_gets_no_second_try(how: str) -> None:
    stage = Stage([MEMORY], journal=journal_of("ls", HOG, observed=1))
    stage.settings = {"interrupted_command": how}
    context = dataclasses.replace(stage.context, over_limit=lambda: "memory")

    ended = drive(HANDLER, context)

    assert (ended.stop_reason, ended.turns) == ("sandbox_limit", 2)
    assert sampled(stage) == tokens("ls", HOG)


def test_a_command_in_flight_in_a_sandbox_that_runs_is_no_limit() -> None:
    stage = Stage([], journal=journal_of("ls", HOG, observed=1))
    with pytest.raises(CommandInterrupted):
        drive(HANDLER, stage.context)


def test_a_cancelled_rollout_is_cancelled_all_the_same() -> None:
    def cancel_and_fail(context: AgentContext) -> None:
        stage.is_cancelled = True
        raise MEMORY

    stage = stage_of([])
    with pytest.raises(SandboxGone):
        drive(Plugin(cancel_and_fail), stage.context)
