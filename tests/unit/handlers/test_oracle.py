"""The two agents of verifications: what they leave, and that nobody else can have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from rollouts.handlers.base import AgentCancelled, AgentContext, AgentResult, CommandInterrupted
from rollouts.handlers.drive import drive
from rollouts.handlers.noop import NoopHandler
from rollouts.handlers.oracle import OracleHandler
from rollouts.handlers.registry import HANDLERS
from sandboxes.runtime.protocol import ExecResult
from tests.unit.handlers.episode_parts import Stage

FILES = {"solve.sh": (b"make\n", 0o755), "data/in": (b"1", 0o644)}


class Sandbox:
    """A sandbox in memory: notes what ran, and answers as it is told."""

    resumed = False

    def __init__(self, *, begun: bool = False, **answer: Any) -> None:
        self.files: dict[str, tuple[bytes, int]] = {}
        self.ran: list[list[str]] = []
        self.begun = begun
        self.answer = answer

    def run(self, argv: Sequence[str], *, timeout_seconds: float, **_: Any) -> ExecResult:
        self.ran.append(list(argv))
        assert timeout_seconds > 0
        if argv[0] == "test":
            return result(exit_code=0 if self.begun else 1)
        return result(**{"stdout": b"built\n", "stderr": b"warned\n", **self.answer})

    def python(self) -> Any:
        raise AssertionError("no interpreter is needed")

    def write(self, files: Mapping[str, tuple[bytes, int]]) -> None:
        self.files.update(files)


def result(**values: Any) -> ExecResult:
    blank = {"exit_code": 0, "stdout": b"", "stderr": b"", "duration_seconds": 0.1}
    return ExecResult(**{**blank, **values})


def context(sandbox: Sandbox | None, **values: Any) -> AgentContext:
    stage = Stage([], shell=None)
    return dataclasses.replace(stage.context, sandbox=sandbox, **values)


def solve(
    sandbox: Sandbox | None, *, files: Any = FILES, answer: str | None = None, **values: Any
) -> AgentResult:
    write: Callable[..., None] | None = None if sandbox is None else sandbox.write
    handler = OracleHandler(files=files, answer=answer, write=write, workdir="/srv")
    return drive(handler, context(sandbox, **values))


def test_the_solution_is_put_in_and_run_in_the_working_directory() -> None:
    sandbox = Sandbox()

    ended = solve(sandbox)

    assert sandbox.files == {f"/solution/{path}": content for path, content in FILES.items()}
    assert sandbox.ran[-1][-2:] == ["/srv", "/solution/solve.sh"]
    assert (ended.stop_reason, ended.answer, ended.turns, ended.sampled_tokens) == (
        "finished",
        None,
        0,
        0,
    )
    assert [each["content"] for each in ended.messages] == [
        "do it",
        "bash /solution/solve.sh",
        "built\nwarned\n\n[exit code: 0]",
    ]


def test_an_answer_is_given_with_and_without_a_sandbox() -> None:
    without = solve(None, answer="42")
    both = solve(Sandbox(), answer="42")

    assert (without.answer, without.messages[-1]["content"], len(without.messages)) == (
        "42",
        "42",
        2,
    )
    assert (both.answer, len(both.messages)) == ("42", 4)


def test_a_solution_that_fails_or_is_late_is_graded_all_the_same() -> None:
    failed = solve(Sandbox(exit_code=3))
    late = solve(Sandbox(exit_code=None, timed_out=True))

    assert failed.messages[-1]["content"].endswith("[exit code: 3]")
    assert (failed.stop_reason, late.stop_reason) == ("finished", "agent_timeout")
    assert late.messages[-1]["content"].endswith("[not ended in time]")


def test_what_it_prints_is_masked() -> None:
    ended = solve(
        Sandbox(stdout=b"the key is 123456"), mask=lambda text: text.replace("123456", "*")
    )

    assert "the key is *" in ended.messages[-1]["content"]


def test_a_solution_is_not_begun_again_where_another_worker_died_over_it() -> None:
    sandbox = Sandbox(begun=True)

    with pytest.raises(CommandInterrupted):
        solve(sandbox)
    assert sandbox.files == {}


def test_a_cancelled_solution_is_no_result() -> None:
    with pytest.raises(AgentCancelled):
        solve(Sandbox(cancelled=True))


def test_files_without_a_script_run_nothing() -> None:
    sandbox = Sandbox()

    ended = solve(sandbox, files={"notes": (b"", 0o644)})

    assert (sandbox.ran, sandbox.files, len(ended.messages)) == ([], {}, 1)


def test_doing_nothing_leaves_nothing() -> None:
    ended = drive(NoopHandler(), context(None))

    assert (ended.stop_reason, ended.answer, ended.turns) == ("finished", None, 0)
    assert [each["role"] for each in ended.messages] == ["user"]


@pytest.mark.parametrize("name", ["oracle", "noop"])
def test_no_environment_can_name_them(name: str) -> None:
    assert name not in HANDLERS
