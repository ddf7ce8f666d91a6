"""What a tool is: a JSON schema for the policy and one call that answers with an observation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import jsonschema
from referencing import Registry

if TYPE_CHECKING:
    from sandboxes.runtime.protocol import ExecResult
    from sandboxes.runtime.sessions import PythonSession, ShellSession


class InvalidArguments(Exception):
    """Say what is wrong with a tool call's arguments, in words the policy can act on."""

    code: ClassVar[str] = "tool.invalid_arguments"


class ToolUnavailable(Exception):
    """Say that a tool lacks what it works with, such as a shell: ours to mend, not the policy's."""

    code: ClassVar[str] = "tool.unavailable"


class UnknownTool(Exception):
    """Say that no tool has this name."""

    code: ClassVar[str] = "tool.unknown"


class InvalidToolSettings(Exception):
    """Say which setting of a tool is wrong and what it should be."""

    code: ClassVar[str] = "tool.settings_invalid"


class SandboxAccess(Protocol):
    """Reach the episode's sandbox beside its shell: programs, and a Python interpreter."""

    @property
    def resumed(self) -> bool:
        """Tell whether another worker began this episode: what it held in memory is gone."""
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_seconds: float,
        output_bytes: int,
        cancelled: Callable[[], bool] | None = None,
    ) -> ExecResult:
        """Run one program in `/`; see `Runtime.exec`."""
        ...

    def python(self) -> PythonSession:
        """Return the episode's interpreter, opened at first use; raises as `open_python`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ToolContext:
    """Hold what a call may use: the episode's shell and sandbox, the seconds left, the cancel flag.

    Both are None for episodes without a sandbox.
    """

    shell: ShellSession | None = None
    sandbox: SandboxAccess | None = None
    timeout_seconds: float
    cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """Hold one observation; `finished` ends the episode with `answer`; `data` is JSON."""

    content: str
    finished: bool = False
    answer: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


class Tool(ABC):
    """Offer one action to the policy."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise `InvalidArguments` when the arguments do not fit the tool's JSON schema."""
        # An empty registry: a schema's references lead nowhere outside of it.
        validator = jsonschema.Draft202012Validator(self.parameters, registry=Registry())
        error = jsonschema.exceptions.best_match(validator.iter_errors(dict(arguments)))
        if error is not None:
            where = "/".join(str(part) for part in error.absolute_path)
            place = f" at {where}" if where else ""
            raise InvalidArguments(
                f"The arguments of {self.name} are wrong{place}: {error.message[:500]}"
            )

    @abstractmethod
    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Run one checked call.

        Raises `InvalidArguments` for what the policy did wrong; faults of the sandbox pass
        through untouched.
        """

    def count_made(self, arguments: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Count a checked call that an earlier worker of the episode made; nothing here."""
        return

    def close(self) -> None:
        """Let go of what the tool holds outside of the sandbox, at the episode's end; idempotent.

        Nothing is raised: an episode that is over cannot fail any more.
        """
        return

    def schema(self) -> dict[str, Any]:
        """Return the tool in the function form that chat templates and trainers expect."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }
