"""A renderer, a model and a journal small enough to know every token of an episode by heart."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.handlers.base import Action, AgentContext, Budget, Chat, JournaledTurn, Message
from rollouts.inference.exceptions import CannotExtend
from rollouts.inference.parsed import ParsedTurn, ToolCall
from rollouts.inference.protocol import Generation
from rollouts.inference.trace import Trace
from rollouts.tools.registry import build_tools
from sandboxes.runtime.sessions import ShellState
from tests.unit.tools.scripted_shell import ScriptedShell

USER, ASSISTANT, SYSTEM, END = 1001, 1002, 1003, 1004
TOOL = 1005
ROLES = {"user": USER, "assistant": ASSISTANT, "system": SYSTEM, "tool": TOOL}
ODD = 2000  # ids from here on stand for the same letters: text that re-tokenises differently


class CharacterRenderer:
    """Render one id a character; sampled ids may use a second alphabet for the same text."""

    stop_token_ids = (END,)
    supports_tools = False

    def __init__(self) -> None:
        self.rendered: list[list[Message]] = []
        self.bridged: list[list[Message]] = []
        self.cannot_extend = False

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002
    ) -> list[int]:
        self.rendered.append([dict(message) for message in messages])
        return [token for message in messages for token in self._message(message)] + [ASSISTANT]

    def bridge(
        self,
        previous_ids: Sequence[int],
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002
    ) -> list[int]:
        if self.cannot_extend:
            raise CannotExtend("this template rewrites history")
        self.bridged.append([dict(message) for message in new_messages])
        closing = [] if previous_ids[-1] == END else [END]
        new = [token for message in new_messages for token in self._message(message)]
        return [*previous_ids, *closing, *new, ASSISTANT]

    def count(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> int:
        return len(self.render(messages, tools))

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,  # noqa: ARG002
    ) -> ParsedTurn:
        """Read `thought|content|name {json}|name {json}`; the thought may be missing."""
        text = self.decode(ids)
        if "|" not in text:
            return ParsedTurn(content=text)
        thought, content, *written = text.split("|")
        return ParsedTurn(content, thought or None, tuple(map(_call, range(99), written)))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(
            chr(token - ODD if token >= ODD else token)
            for token in ids
            if token not in {*ROLES.values(), END}
        )

    def _message(self, message: Mapping[str, Any]) -> list[int]:
        return [ROLES[message["role"]], *map(ord, message["content"]), END]


def _call(number: int, text: str) -> ToolCall:
    name, _, arguments = text.partition(" ")
    try:
        return ToolCall(f"c{number}", name, json.loads(arguments))
    except ValueError:
        return ToolCall(f"c{number}", name, None, "The arguments are no JSON.")


@dataclass
class ScriptedModel:
    """Say one text a turn; a text in a pair with a number is cut after that many tokens."""

    texts: list[str | Exception]
    prompts: list[list[int]] = field(default_factory=list)
    allowances: list[int] = field(default_factory=list)
    on_generate: Callable[[], None] = lambda: None

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        self.prompts.append(list(prompt_ids))
        self.allowances.append(max_tokens)
        self.on_generate()
        text = self.texts[len(self.prompts) - 1]
        if isinstance(text, Exception):
            raise text
        return said(text, max_tokens)


def said(text: str, max_tokens: int = 10_000) -> Generation:
    """Return what the model samples for a text: the odd alphabet, then the end of turn."""
    ids = [ODD + ord(character) for character in text] + [END]
    cut = ids[:max_tokens]
    return Generation(
        token_ids=tuple(cut),
        logprobs=tuple(-0.25 for _ in cut),
        finish_reason="stop" if len(cut) == len(ids) else "length",
        policy_version=7,
        server_id="s",
        seconds=2.0,
    )


@dataclass
class ListJournal:
    """Keep the journal in a list, with the order in which things happened."""

    turns: list[JournaledTurn] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)

    def record_sampled(
        self,
        turn: int,
        generation: Generation,
        prompt_ids: Sequence[int],
        action: Action,
        *,
        fork_reason: str | None = None,
    ) -> None:
        self.events.append(("sampled", turn, action))
        assert turn == len(self.turns)
        self.turns.append(
            JournaledTurn(
                turn=turn,
                prompt_ids=tuple(prompt_ids),
                generation=generation,
                action=Action.from_dict(json.loads(json.dumps(action.as_dict()))),
                fork_reason=fork_reason,
            )
        )

    def record_called(
        self, turn: int, call: int, message: Message, shell_state: ShellState | None
    ) -> None:
        self.events.append(("called", turn, call, shell_state.exports if shell_state else None))
        before = self.turns[turn]
        assert call == len(before.called)
        self.turns[turn] = dataclasses.replace(before, called=(*before.called, message))

    def record_observed(
        self, turn: int, messages: Sequence[Message], shell_state: ShellState | None
    ) -> None:
        self.events.append(("observed", turn, shell_state.exports if shell_state else None))
        self.turns[turn] = dataclasses.replace(self.turns[turn], messages=tuple(messages))

    def replay(self) -> Sequence[JournaledTurn]:
        return list(self.turns)


@dataclass
class Stage:
    """Hold one episode's parts and the context made of them."""

    texts: list[str | Exception]
    shell: ScriptedShell | None = field(default_factory=ScriptedShell)
    settings: dict[str, Any] = field(default_factory=dict)
    budget: dict[str, Any] = field(default_factory=dict)
    system_prompt: str = ""
    instruction: str = "do it"
    journal: ListJournal = field(default_factory=ListJournal)
    now: float = 0.0
    is_cancelled: bool = False
    renderer: CharacterRenderer = field(default_factory=CharacterRenderer)
    tools: tuple[str, ...] = ("bash", "submit")
    messages: tuple[Message, ...] = ()
    chat: Chat | None = None
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        self.model = ScriptedModel(self.texts)

    @property
    def context(self) -> AgentContext:
        limits = {
            "max_turns": 20,
            "max_tokens": 10_000,
            "turn_tokens": 200,
            "context_tokens": 10_000,
            "deadline": 100.0,
        }
        return AgentContext(
            instruction=self.instruction,
            settings=self.settings,
            system_prompt=self.system_prompt,
            tools=build_tools(self.tools),
            renderer=None if self.chat else self.renderer,
            trace=self.trace,
            generate=self.model,
            journal=self.journal,
            budget=Budget(**{**limits, **self.budget}),
            cancelled=lambda: self.is_cancelled,
            shell=self.shell,
            clock=lambda: self.now,
            chat=self.chat,
            messages=self.messages,
        )


def user(content: str) -> Message:
    """Return a user's message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Return an assistant's message."""
    return {"role": "assistant", "content": content}
