"""The IPython tool: limits, observations, what the first one says."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollouts.tools.base import (
    InvalidArguments,
    InvalidToolSettings,
    ToolContext,
    ToolUnavailable,
)
from rollouts.tools.ipython import FRESH, NO_IPYTHON, RESTARTED, IPythonTool, describe
from rollouts.tools.registry import build_tools
from rollouts.tools.sandbox import EpisodeSandbox
from sandboxes.runtime.exceptions import PythonFailed, SandboxGone
from sandboxes.runtime.fake import Answer, FakeRuntime
from sandboxes.runtime.protocol import SandboxSpec
from sandboxes.runtime.sessions import PythonResult

PNG = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + (640).to_bytes(4, "big") + (480).to_bytes(4, "big")


@dataclass
class ScriptedPython:
    """Stand for sandbox and interpreter; answer each cell with one result."""

    answer: PythonResult | Exception
    kind: str = "ipython"
    resumed: bool = False
    fault: Exception | None = None
    asked: list[tuple[str, float, int]] = field(default_factory=list)
    cancelled: Callable[[], bool] | None = None

    def python(self) -> ScriptedPython:
        if self.fault is not None:
            raise self.fault
        return self

    def run(
        self,
        code: Any,
        *,
        timeout_seconds: float,
        output_bytes: int,
        cancelled: Callable[[], bool] | None = None,
    ) -> Any:
        self.cancelled = cancelled
        self.asked.append((code, timeout_seconds, output_bytes))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None:
        raise AssertionError("closing is not the tool's work")


def result(output: str = "", **values: Any) -> PythonResult:
    """Return a cell's result with the usual rest."""
    return PythonResult(output=output, duration_seconds=0.5, **values)


def context(sandbox: Any, seconds: float = 100) -> ToolContext:
    """Return a context with that sandbox."""
    return ToolContext(sandbox=sandbox, timeout_seconds=seconds)


def test_code_runs_in_the_interpreter_and_is_reported() -> None:
    python = ScriptedPython(result("2\n", images=(("image/png", PNG),)))
    tool = IPythonTool(timeout_seconds=5, output_bytes=999)
    given = context(python)
    observed = tool.call({"code": "1 + 1"}, given)
    assert observed.content == "2\n[image 1: PNG, 640x480, 24 bytes]"
    assert observed.data == {
        "kind": "ipython",
        "failed": False,
        "duration_seconds": 0.5,
        "truncated": False,
        "timed_out": False,
        "cancelled": False,
        "interpreter_restarted": False,
        "images": [{"mime_type": "image/png", "base64": base64.b64encode(PNG).decode()}],
    }
    assert python.asked == [("1 + 1", 5, 999)]
    assert python.cancelled is given.cancelled


@pytest.mark.parametrize(
    ("own", "asked", "left", "used"),
    [(60, None, 100, 60), (60, 7, 100, 7), (60, 90, 100, 60), (60, 7, 3, 3)],
)
def test_the_smallest_time_limit_holds(
    own: float, asked: float | None, left: float, used: float
) -> None:
    python = ScriptedPython(result())
    arguments: dict[str, Any] = {"code": "1", "timeout_seconds": asked}
    if asked is None:
        del arguments["timeout_seconds"]
    IPythonTool(timeout_seconds=own).call(arguments, context(python, left))
    assert python.asked[0][1] == used


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (result(), "(no output)"),
        (result("x\n\n"), "x"),
        (result("x\n", error="Traceback\nE: y\n"), "x\nTraceback\nE: y"),
        (result(error="E: y"), "E: y"),
        (
            result(images=(("image/jpeg", b"\xff\xd8\xff"), ("image/png", b"\x89PNG"))),
            "[image 1: JPEG, 3 bytes]\n[image 2: PNG, 4 bytes]",
        ),
        (
            result("a", truncated=True),
            "a\n[output truncated: only the beginning and the end, 99 bytes together, are shown; "
            "print less, or write it to a file]",
        ),
        (
            result("a", timed_out=True, restarted=True),
            "a\n[timed out: the code was interrupted after 2.5 seconds; run something shorter, or "
            f"start it as a background process]\n{RESTARTED}",
        ),
        (
            result(cancelled=True),
            "(no output)\n[cancelled: the code was interrupted before it finished]",
        ),
    ],
)
def test_observations_say_what_to_know(cell: PythonResult, text: str) -> None:
    assert describe(cell, timeout_seconds=2.5, output_bytes=99) == text


def test_a_long_traceback_is_cut_in_its_middle() -> None:
    text = describe(result(error="a" * 500 + "b"), timeout_seconds=1, output_bytes=100)
    first, gap, last, note = text.split("\n")
    assert (first, gap, last) == ("a" * 50, "[... 401 bytes left out ...]", "a" * 49 + "b")
    assert note.startswith("[output truncated")


@pytest.mark.parametrize(
    ("kind", "resumed", "notes"),
    [
        ("ipython", False, []),
        ("python", False, [NO_IPYTHON]),
        ("ipython", True, [FRESH]),
        ("python", True, [FRESH, NO_IPYTHON]),
    ],
)
def test_the_first_observation_says_what_the_interpreter_lacks(
    kind: str, resumed: bool, notes: list[str]
) -> None:
    python = ScriptedPython(result("x"), kind=kind, resumed=resumed)
    tool = IPythonTool()
    first, second = (tool.call({"code": "x"}, context(python)).content for _ in range(2))
    assert first == "\n".join([*notes, "x"])
    assert second == "x"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({}, "'code' is a required property"),
        ({"code": ""}, "at code"),
        ({"code": " \n"}, "empty"),
        ({"code": ["1"]}, "at code"),
        ({"code": "1", "cell": 2}, "cell"),
        ({"code": "1", "timeout_seconds": 0}, "at timeout_seconds"),
        ({"code": "a\0b"}, "NUL"),
        ({"code": "a\ud800b"}, "Unicode"),
        ({"code": "x" * 1_000_001}, "at code"),
    ],
)
def test_wrong_arguments_do_not_reach_the_interpreter(arguments: dict[str, Any], word: str) -> None:
    python = ScriptedPython(result())
    with pytest.raises(InvalidArguments, match=word) as caught:
        IPythonTool().call(arguments, context(python))
    assert python.asked == []
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "sandbox",
    [
        None,
        ScriptedPython(result(), fault=PythonFailed("no python3")),
        ScriptedPython(PythonFailed("no python3 any more")),
    ],
)
def test_a_missing_interpreter_is_ours_to_mend(sandbox: ScriptedPython | None) -> None:
    with pytest.raises(ToolUnavailable, match=r"needs a sandbox|has no interpreter: no python3"):
        IPythonTool().call({"code": "1"}, context(sandbox))


@pytest.mark.parametrize(
    "settings",
    [{"timeout_seconds": 0}, {"timeout_seconds": "1"}, {"output_bytes": 1}, {"kernel": "x"}],
)
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidToolSettings):
        build_tools(["ipython"], {"ipython": settings})


def test_settings_are_taken() -> None:
    settings = {"timeout_seconds": 5, "output_bytes": 1000}
    tool = build_tools(["ipython"], {"ipython": settings})["ipython"]
    assert isinstance(tool, IPythonTool)
    assert (tool.timeout_seconds, tool.output_bytes) == (5.0, 1000)


def test_faults_of_the_sandbox_pass_through() -> None:
    fault = SandboxGone("gone")
    with pytest.raises(SandboxGone) as caught:
        IPythonTool().call({"code": "1"}, context(ScriptedPython(fault)))
    assert caught.value is fault


def test_the_interpreter_is_opened_at_first_use_once_and_closed_at_the_end() -> None:
    runtime = FakeRuntime("t-", lambda _sandbox, code, _stdin: Answer(output=f"ran {code}\n"))
    handle = runtime.start(SandboxSpec(name="t-1", image="any"), timeout_seconds=1)
    sandbox = EpisodeSandbox(runtime, handle)
    sandbox.close()
    assert runtime.calls == [("start", "t-1")]
    tool = IPythonTool()
    for code in ("1", "2"):
        assert tool.call({"code": code}, context(sandbox)).content == f"ran {code}"
    opened = [call for call in runtime.calls if call[0] == "open_python"]
    assert opened == [("open_python", "t-1")]
    sandbox.close()
    sandbox.close()
