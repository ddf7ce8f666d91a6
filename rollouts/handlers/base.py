"""What an agent handler is given, what it answers and what it writes down on the way."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from rollouts.inference.protocol import Generation, SamplingParams
    from rollouts.inference.rendering import ConversationRenderer
    from rollouts.inference.trace import Trace
    from rollouts.tools.base import SandboxAccess, Tool
    from sandboxes.runtime.sessions import ShellSession, ShellState

Message = dict[str, Any]


class StopReason(StrEnum):
    """Name why an agent stopped; every one of them is a result that is scored."""

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    AGENT_TIMEOUT = "agent_timeout"
    MALFORMED_ACTION = "malformed_action"
    REPETITION = "repetition"


class AgentFault(Exception):
    """Say why an episode cannot go on for a reason that is not the policy's."""

    code: ClassVar[str] = "agent.fault"


class UnknownHandler(AgentFault):
    """Say that no handler has this name."""

    code = "agent.unknown_handler"


class InvalidAgentSettings(AgentFault):
    """Say which handler setting is wrong and what it should be."""

    code = "agent.settings_invalid"


class AgentCancelled(AgentFault):
    """Say that the episode ended because its rollout was cancelled."""

    code = "agent.cancelled"


class CommandInterrupted(AgentFault):
    """Say that the last worker died while a command ran, so its effect is not known."""

    code = "agent.command_interrupted"


@dataclass(frozen=True, kw_only=True)
class Action:
    """Hold what one sampled turn was understood to be.

    `text` is the command, the submitted answer, the plain answer or the complaint about a
    malformed turn, by kind; None is a submission without an answer.
    """

    kind: Literal["command", "submit", "answer", "malformed"]
    text: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the action as JSON."""
        return {"kind": self.kind, "text": self.text}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Action:
        """Rebuild an action from its JSON."""
        return cls(kind=data["kind"], text=data["text"])


@dataclass(frozen=True, kw_only=True)
class JournaledTurn:
    """Hold one turn as the journal kept it.

    `messages` are what was observed after it; None when the worker died before that was written.
    """

    turn: int
    prompt_ids: tuple[int, ...]
    generation: Generation
    action: Action
    messages: tuple[Message, ...] | None = None


class Journal(Protocol):
    """Keep each turn before the next begins, so that another worker can go on from it."""

    def record_sampled(
        self, turn: int, generation: Generation, prompt_ids: Sequence[int], action: Action
    ) -> None:
        """Write a sampled turn before its tool runs; `turn` counts from 0."""

    def record_observed(
        self, turn: int, messages: Sequence[Message], shell_state: ShellState | None
    ) -> None:
        """Write what the turn led to, and the shell's directory and variables after it."""

    def replay(self) -> Sequence[JournaledTurn]:
        """Return the turns written so far, in order; empty for a new episode."""


class Generate(Protocol):
    """Sample one turn; infrastructure faults are raised."""

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        """Return at most `max_tokens` sampled ids with their log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bound an episode.

    `max_tokens` bounds all sampled tokens of the episode, `turn_tokens` those of one turn,
    `context_tokens` prompt plus sampled tokens of one request. `deadline` is an instant of
    `AgentContext.clock` (monotonic seconds).
    """

    max_turns: int
    max_tokens: int
    turn_tokens: int
    context_tokens: int
    deadline: float


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """Hold everything an episode may use; handlers reach nothing else.

    `trace` is empty: the handler rebuilds it from the journal. `shell` is open and, when the
    journal holds turns, restored; it and `sandbox` are None for handlers that need no sandbox.
    `sampling` is what `generate` sends, for the trace's record.
    """

    instruction: str
    settings: Mapping[str, Any]
    system_prompt: str
    tools: Mapping[str, Tool]
    renderer: ConversationRenderer
    trace: Trace
    generate: Generate
    journal: Journal
    budget: Budget
    cancelled: Callable[[], bool]
    shell: ShellSession | None = None
    sandbox: SandboxAccess | None = None
    sampling: SamplingParams | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """Hold how an episode ended; seconds and counts include the turns that were replayed.

    `tool_seconds` covers only tools that ran in this process.
    """

    stop_reason: StopReason
    answer: str | None
    messages: tuple[Message, ...] = field(default_factory=tuple)
    turns: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    malformed_actions: int = 0
    inference_seconds: float = 0.0
    tool_seconds: float = 0.0


class AgentHandler(ABC):
    """Drive one episode; the policy's mistakes are results, infrastructure faults pass through."""

    name: ClassVar[str]
    description: ClassVar[str]
    needs_sandbox: ClassVar[bool]

    @abstractmethod
    def validate(self, settings: Mapping[str, Any]) -> None:
        """Raise `InvalidAgentSettings` for the first setting that `run` could not work with."""

    @abstractmethod
    def run(self, context: AgentContext) -> AgentResult:
        """Run the episode to its end, going on after the last journaled turn if there is one.

        Raises `AgentCancelled` when the rollout is cancelled, `CommandInterrupted` when the
        journal ends in a command whose effect is unknown and the settings do not accept that.
        """
