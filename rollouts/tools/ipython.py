"""Run code in the episode's persistent Python interpreter."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollouts.tools.base import InvalidArguments, Tool, ToolContext, ToolResult, ToolUnavailable
from sandboxes.runtime.exceptions import PythonFailed
from sandboxes.runtime.streams import HeadTail

if TYPE_CHECKING:
    from sandboxes.runtime.sessions import PythonResult, PythonSession

MAX_CODE_CHARACTERS = 1_000_000

NO_IPYTHON = (
    "[IPython is not installed here: this is plain Python, which shows the value of a last "
    "expression, and knows no %magic and no !command]"
)
FRESH = (
    "[this interpreter is new: another machine took over, and names and imports of earlier "
    "calls are gone; files are still there]"
)
RESTARTED = (
    "[the interpreter ended and an empty one took its place: names and imports are gone, files "
    "are still there]"
)


class IPythonTool(Tool):
    """Offer one Python interpreter that stays open: names survive from call to call.

    Made anew for each episode: its first observation says what the interpreter lacks. A call
    gets `timeout_seconds` or the smaller time the policy asks for, and never more than the episode
    has left; output and traceback carry `output_bytes` each at most. Images are in the result's
    data, as {"mime_type", "base64"} under "images".
    """

    name = "ipython"
    description = (
        "Run Python code in an IPython interpreter that stays open: names and imports survive "
        "from call to call. You see what is printed, the value of a last expression, tracebacks "
        "and figures. Top-level await, %magic and !command work; input() does not."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "code": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_CODE_CHARACTERS,
                "description": "The code, of one or more lines.",
            },
            "timeout_seconds": {
                "type": "number",
                "exclusiveMinimum": 0,
                "description": "Seconds after which the code is interrupted.",
            },
        },
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(self, *, timeout_seconds: float = 60.0, output_bytes: int = 16_384) -> None:
        self.timeout_seconds = timeout_seconds
        self.output_bytes = output_bytes
        self._introduced = False

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Run the code.

        Raises `ToolUnavailable` without a sandbox or a Python in it, faults of the sandbox.
        """
        self.check(arguments)
        code = _runnable(arguments["code"])
        if context.sandbox is None:
            raise ToolUnavailable("the ipython tool needs a sandbox, and this rollout has none")
        limit = min(
            self.timeout_seconds,
            arguments.get("timeout_seconds", self.timeout_seconds),
            context.timeout_seconds,
        )
        try:
            session = context.sandbox.python()
            result = session.run(
                code,
                timeout_seconds=limit,
                output_bytes=self.output_bytes,
                cancelled=context.cancelled,
            )
        except PythonFailed as fault:
            raise ToolUnavailable(f"the ipython tool has no interpreter: {fault}") from fault
        content = describe(result, timeout_seconds=limit, output_bytes=self.output_bytes)
        notes = self._introduce(session, resumed=context.sandbox.resumed)
        return ToolResult(
            content="\n".join([*notes, content]),
            data={
                "kind": session.kind,
                "failed": bool(result.error),
                "duration_seconds": result.duration_seconds,
                "truncated": result.truncated,
                "timed_out": result.timed_out,
                "cancelled": result.cancelled,
                "interpreter_restarted": result.restarted,
                "images": [
                    {"mime_type": mime, "base64": base64.b64encode(data).decode()}
                    for mime, data in result.images
                ],
            },
        )

    def _introduce(self, session: PythonSession, *, resumed: bool) -> list[str]:
        """Return what the first observation has to say about the interpreter."""
        if self._introduced:
            return []
        self._introduced = True
        notes = [FRESH] if resumed else []
        return notes if session.kind == "ipython" else [*notes, NO_IPYTHON]


def describe(result: PythonResult, *, timeout_seconds: float, output_bytes: int) -> str:
    """Return the observation: output, traceback, then one bracketed line for each thing to know."""
    error = HeadTail(output_bytes)
    error.feed(result.error.rstrip("\n").encode("utf-8", "replace"))
    shown = [result.output.rstrip("\n"), error.joined().decode("utf-8", "replace")]
    lines = [text for text in shown if text]
    for number, (mime, data) in enumerate(result.images, start=1):
        lines.append(f"[image {number}: {_describe_image(mime, data)}]")
    lines = lines or ["(no output)"]
    if result.truncated or error.truncated:
        lines.append(
            f"[output truncated: only the beginning and the end, {output_bytes} bytes together, "
            "are shown; print less, or write it to a file]"
        )
    if result.timed_out:
        lines.append(
            f"[timed out: the code was interrupted after {timeout_seconds:g} seconds; run "
            "something shorter, or start it as a background process]"
        )
    if result.cancelled:
        lines.append("[cancelled: the code was interrupted before it finished]")
    if result.restarted:
        lines.append(RESTARTED)
    return "\n".join(lines)


def _describe_image(mime: str, data: bytes) -> str:
    size = ""
    if mime == "image/png" and len(data) >= 24:  # IHDR comes first: width and height
        width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        size = f"{width}x{height}, "
    return f"{mime.removeprefix('image/').upper()}, {size}{len(data)} bytes"


def _runnable(code: str) -> str:
    if not code.strip():
        raise InvalidArguments("The code is empty.")
    if "\0" in code:
        raise InvalidArguments("The code holds a NUL character; write '\\0' as an escape.")
    try:
        code.encode()
    except UnicodeEncodeError as error:
        raise InvalidArguments("The code is not valid Unicode text.") from error
    return code
