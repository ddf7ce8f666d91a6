"""What an agent handler is given, what it answers and what it writes down on the way."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from rollouts.inference.parsed import ToolCall

if TYPE_CHECKING:
    from rollouts.handlers.episode import Episode
    from rollouts.inference.protocol import ChatAnswer, Generation, SamplingParams
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
    POLICY_LAG = "policy_lag"
    SANDBOX_LIMIT = "sandbox_limit"


class AgentFault(Exception):
    """Say why an episode cannot go on for a reason that is not the policy's."""

    code: ClassVar[str] = "agent.fault"


class UnknownHandler(AgentFault):
    """Say that no handler has this name."""

    code = "agent.unknown_handler"


class InvalidAgentSettings(AgentFault):
    """Say which handler setting is wrong and what it should be."""

    code = "agent.settings_invalid"


class InvalidHandler(AgentFault):
    """Say why a plug-in cannot be an agent handler."""

    code = "agent.handler_invalid"


class AgentCancelled(AgentFault):
    """Say that the episode ended because its rollout was cancelled."""

    code = "agent.cancelled"


class PolicyLagExceeded(AgentFault):
    """Say that the next token would span more policy versions than the experiment allows.

    Raised by `generate` before a turn: the episode ends with `policy_lag` and is scored.
    """

    code = "agent.policy_lag"


class CommandInterrupted(AgentFault):
    """Say that the last worker died while a command ran, so its effect is not known."""

    code = "agent.command_interrupted"


@dataclass(frozen=True, kw_only=True)
class Action:
    """Hold what one sampled turn was understood to be.

    `text` is the command, the submitted answer, the plain answer or the complaint about a
    malformed turn, by kind; None is a submission without an answer. `calls` belong to the kind
    `calls`, in the order of the turn. `message` is the turn as it stands in the conversation,
    None when that is only its text. `counted_tokens` is what a text-only server said it sampled.
    """

    kind: Literal["command", "submit", "answer", "malformed", "calls"]
    text: str | None
    calls: tuple[ToolCall, ...] = ()
    message: Message | None = None
    counted_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the action as JSON."""
        return {
            "kind": self.kind,
            "text": self.text,
            "calls": [call.as_dict() for call in self.calls],
            "message": self.message,
            "counted_tokens": self.counted_tokens,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Action:
        """Rebuild an action from its JSON, that of older releases included."""
        return cls(
            kind=data["kind"],
            text=data["text"],
            calls=tuple(ToolCall.from_dict(call) for call in data.get("calls", ())),
            message=data.get("message"),
            counted_tokens=data.get("counted_tokens", 0),
        )


@dataclass(frozen=True, kw_only=True)
class JournaledTurn:
    """Hold one turn as the journal kept it.

    `messages` are what was observed after it; None when the worker died before that was written.
    `called` are the results of its first calls that were written one by one before.
    `fork_reason` says why its prompt does not extend the one before, None where it does.
    """

    turn: int
    prompt_ids: tuple[int, ...]
    generation: Generation
    action: Action
    messages: tuple[Message, ...] | None = None
    called: tuple[Message, ...] = ()
    fork_reason: str | None = None


class Journal(Protocol):
    """Keep each turn before the next begins, so that another worker can go on from it."""

    def record_sampled(
        self,
        turn: int,
        generation: Generation,
        prompt_ids: Sequence[int],
        action: Action,
        *,
        fork_reason: str | None = None,
    ) -> None:
        """Write a sampled turn before its tool runs; `turn` counts from 0."""

    def record_called(
        self, turn: int, call: int, message: Message, shell_state: ShellState | None
    ) -> None:
        """Write the result of one of several calls of a turn before the next one runs."""

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


class Chat(Protocol):
    """Ask a text-only policy for one turn; infrastructure faults are raised."""

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> ChatAnswer:
        """Return the turn as text and tool calls; `abort` says that the agent's time ended."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Bound an episode.

    `max_tokens` bounds all sampled tokens of the episode, `turn_tokens` those of one turn,
    `context_tokens` prompt plus sampled tokens of one request. `deadline` is an instant of
    `AgentContext.clock` (monotonic seconds). `tool_seconds` bounds the time in tools of this
    process altogether, None leaves that to the deadline.
    """

    max_turns: int
    max_tokens: int
    turn_tokens: int
    context_tokens: int
    deadline: float
    tool_seconds: float | None = None


@dataclass
class Books:
    """Hold the episode that an agent keeps its books with, for who must end it from outside."""

    episode: Episode | None = None


@dataclass(frozen=True, kw_only=True)
class AgentContext:
    """Hold everything an episode may use; handlers reach nothing else.

    `trace` is empty: the handler rebuilds it from the journal. `shell` is open and, when the
    journal holds turns, restored; it and `sandbox` are None for handlers that need no sandbox.
    `sampling` is what `generate` sends, for the trace's record. `messages` is the conversation
    that the task begins with, empty for most tasks. With `chat` the policy gives text alone:
    there is no renderer, and the trace stays empty. `over_limit` names the limit (memory, disk)
    that ended the sandbox by the policy's own doing, None while it runs and for any other end.
    `mask` takes the values of secrets out of what tools say, which the policy reads and the
    trajectory keeps. `books` is `Episode`'s to fill.
    """

    instruction: str
    settings: Mapping[str, Any]
    system_prompt: str
    tools: Mapping[str, Tool]
    renderer: ConversationRenderer | None
    trace: Trace
    generate: Generate
    journal: Journal
    budget: Budget
    cancelled: Callable[[], bool]
    shell: ShellSession | None = None
    sandbox: SandboxAccess | None = None
    sampling: SamplingParams | None = None
    clock: Callable[[], float] = time.monotonic
    chat: Chat | None = None
    messages: Sequence[Message] = ()
    over_limit: Callable[[], str | None] = lambda: None
    mask: Callable[[str], str] = lambda text: text
    books: Books = field(default_factory=Books)


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """Hold how an episode ended; seconds and counts include the turns that were replayed.

    `tool_seconds` covers only tools that ran in this process. `tool_counts` are the calls of each
    tool, `tool_errors` those that could not be read, did not fit the tool's schema, or were
    refused by the tool; the last are not known of turns that were replayed. `over_limit` is the
    sandbox's limit that ended the episode with `sandbox_limit`.
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
    tool_counts: Mapping[str, int] = field(default_factory=dict)
    tool_errors: Mapping[str, int] = field(default_factory=dict)
    over_limit: str | None = None


class AgentHandler(ABC):
    """Drive one episode; the policy's mistakes are results, infrastructure faults pass through."""

    name: ClassVar[str]
    description: ClassVar[str]
    needs_sandbox: ClassVar[bool]
    # Whether an episode goes on from its task's `messages`; others pay no heed to them.
    takes_messages: ClassVar[bool] = False

    @abstractmethod
    def validate(self, settings: Mapping[str, Any]) -> None:
        """Raise `InvalidAgentSettings` for the first setting that `run` could not work with."""

    @abstractmethod
    def run(self, context: AgentContext) -> AgentResult:
        """Run the episode to its end, going on after the last journaled turn if there is one.

        Raises `AgentCancelled` when the rollout is cancelled, `CommandInterrupted` when the
        journal ends in a command whose effect is unknown and the settings do not accept that.
        """

    def shows_tools(self, settings: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Tell whether the chat template gets the tools' schemas, for the admin's preview.

        `settings` are checked; not here.
        """
        return False

    def prepare(self, context: AgentContext) -> None:  # noqa: ARG002
        """Do what must be done before the first turn, or before an episode goes on; nothing here.

        It may run again after a worker died, so it must bear that.
        """
        return

    def conclude(self, context: AgentContext, result: AgentResult) -> AgentResult:  # noqa: ARG002
        """Return the episode's result, changed where the agent wants that."""
        return result

    def on_fault(self, context: AgentContext, fault: Exception) -> AgentResult | None:  # noqa: ARG002
        """Turn a fault into a result; None, as here, lets it pass to the service.

        It is not asked about cancelled rollouts, nor when the sandbox ended at its limit.
        """
        return None
