"""Run an episode: sample a turn, read it, carry it out, until something ends it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollouts.handlers import calls
from rollouts.handlers.base import (
    Action,
    AgentContext,
    AgentResult,
    CommandInterrupted,
    InvalidAgentSettings,
    JournaledTurn,
    Message,
    StopReason,
)
from rollouts.handlers.dialects import Read, Turn, of_text_only
from rollouts.handlers.episode import Episode
from rollouts.handlers.limits import Limits
from rollouts.handlers.repetition import is_degenerate, said_in
from rollouts.inference.parsed import ToolCall
from rollouts.inference.protocol import Generation

MAX_CALLS = 16  # of one turn


class Loop:
    """Hold one episode's place.

    `read` says what a turn means; with `shows_tools` the template shows the tools' schemas.
    `one_turn` ends the episode after its first turn, which is carried out if `executes`.
    """

    def __init__(
        self,
        context: AgentContext,
        first: Sequence[Message],
        read: Read,
        limits: Limits,
        *,
        shows_tools: bool = False,
        max_calls: int = MAX_CALLS,
        one_turn: bool = False,
        executes: bool = True,
    ) -> None:
        self._context = context
        self._read = read
        self._limits = limits
        self._max_calls = max_calls
        self._one_turn = one_turn
        self._executes = executes
        self.episode = Episode(
            context,
            first,
            schemas=[tool.schema() for tool in context.tools.values()] if shows_tools else (),
            context_policy=limits.context_policy,
        )
        self._malformed_in_a_row = 0
        self._last: object = None
        self._repeats = 0

    def to_the_end(self) -> AgentResult:
        """Run to the end, going on after the last journaled turn if there is one."""
        for generation, journaled in self.episode.replay():
            ended = self._act(generation, journaled.action, journaled)
            if ended is not None:
                return ended
        while True:
            stop = self.episode.blocked()
            if stop is not None:
                return self.episode.result(stop)
            sampled = self.episode.sample()
            if isinstance(sampled, StopReason):
                return self.episode.result(sampled)
            action = self._understand(sampled)
            self.episode.record(sampled, action)
            ended = self._act(sampled, action, None)
            if ended is not None:
                return ended

    def _understand(self, sampled: Generation) -> Action:
        action = self._read(
            Turn(
                text=lambda: self.episode.text(sampled),
                parsed=lambda: self.episode.parsed(sampled),
                complete=sampled.finish_reason == "stop",
            )
        )
        if self._context.chat is None:
            return action
        return of_text_only(action, self.episode.parsed(sampled), self.episode.counted_tokens())

    def _act(
        self, generation: Generation, action: Action, journaled: JournaledTurn | None
    ) -> AgentResult | None:
        """Do what the turn asks for; a journaled turn that was observed is only counted."""
        if action.kind == "answer":
            return self._answer(generation, action)
        if generation.finish_reason == "abort":
            return self.episode.result(StopReason.AGENT_TIMEOUT)
        if is_degenerate(
            said_in(self.episode.messages[-1]),
            words=self._limits.repeated_words,
            times=self._limits.text_repeats,
        ):
            return self.episode.result(StopReason.REPETITION)
        observed = journaled is not None and journaled.messages is not None
        if action.kind == "malformed":
            return self._complain(generation, str(action.text), observed)
        wrong = calls.complaints(self._context, action.calls, self._max_calls)
        ended = self._count(action, wrong)
        if ended is None and not self._executes:
            ended = self.episode.result(StopReason.FINISHED, _described(action))
        if ended is None:
            ended = self._carry_out(action, wrong, journaled)
        if ended is None and self._one_turn:
            if journaled is not None and journaled.messages is not None:
                self.episode.keep(journaled.messages)
            ended = self.episode.result(StopReason.FINISHED, _described(action))
        return ended

    def _answer(self, generation: Generation, action: Action) -> AgentResult:
        stop = self.episode.cut_by(generation) or (
            StopReason.MAX_TOKENS if generation.finish_reason == "length" else StopReason.FINISHED
        )
        return self.episode.result(stop, action.text)

    def _complain(
        self, generation: Generation, complaint: str, observed: bool
    ) -> AgentResult | None:
        """Count a malformed answer and tell the model, unless it was the last it may give."""
        self.episode.malformed_actions += 1
        self._malformed_in_a_row += 1
        cut_by = self.episode.cut_by(generation)
        if cut_by is not None:
            return self.episode.result(cut_by)
        if self._is_malformed_too_often():
            return self.episode.result(StopReason.MALFORMED_ACTION)
        if not observed:
            self.episode.observe([_user(complaint)])
        return None

    def _is_malformed_too_often(self) -> bool:
        return self._one_turn or self._malformed_in_a_row >= self._limits.malformed

    def _count(self, action: Action, wrong: Sequence[str]) -> AgentResult | None:
        """Count what is malformed or repeated, and end the episode where that is too much."""
        calls.count_wrong(self._context, self.episode, action.calls, wrong)
        if wrong and all(wrong):
            self._malformed_in_a_row += 1
            if self._is_malformed_too_often():
                return self.episode.result(StopReason.MALFORMED_ACTION)
            return None
        self._malformed_in_a_row = 0
        if action.kind == "submit":
            return None
        what = (action.text, [(call.name, call.arguments) for call in action.calls])
        self._repeats = self._repeats + 1 if what == self._last else 1
        self._last = what
        if self._repeats >= self._limits.repeats:
            return self.episode.result(StopReason.REPETITION)
        return None

    def _carry_out(
        self, action: Action, wrong: Sequence[str], journaled: JournaledTurn | None
    ) -> AgentResult | None:
        if action.kind == "calls":
            return calls.carry_out(
                self._context,
                self.episode,
                action,
                wrong,
                journaled,
                on_interrupted=self._limits.on_interrupted,
            )
        if action.kind == "submit":
            return self._submit(action)
        return self._run_command(str(action.text), journaled)

    def _submit(self, action: Action) -> AgentResult:
        call = ToolCall("", "submit", {"answer": action.text})
        submitted = calls.call_tool(self._context, self.episode, call)
        return self.episode.result(StopReason.FINISHED, submitted.answer)

    def _run_command(self, command: str, journaled: JournaledTurn | None) -> AgentResult | None:
        """Run a command and show the model what came of it."""
        if journaled is not None and journaled.messages is not None:
            self._count_command()
            return None
        if journaled is not None:
            if self._limits.on_interrupted == "restart":
                raise CommandInterrupted("a command was in flight when the last worker died")
            content = calls.INTERRUPTED
        else:
            self.episode.check_cancelled()
            if self.episode.tool_allowance() <= 0:
                return self.episode.result(StopReason.AGENT_TIMEOUT)
            call = ToolCall("", "bash", {"command": command})
            content = calls.call_tool(self._context, self.episode, call).content
            self.episode.check_cancelled()
        self._count_command()
        self.episode.observe([_user(content)])
        return None

    def _count_command(self) -> None:
        self.episode.tool_calls += 1
        self.episode.tool_counts["bash"] += 1


def require_tools(context: AgentContext, names: Sequence[str], *, handler: str) -> None:
    """Raise `InvalidAgentSettings` when the environment lacks one of these tools."""
    for name in names:
        if name not in context.tools:
            raise InvalidAgentSettings(f"{handler}: the environment lacks the tool {name!r}")


def _described(action: Action) -> str | None:
    """Return an action as the answer of an episode that ends with it."""
    if action.kind != "calls":
        return action.text
    return json.dumps(
        [
            {"name": call.name, "arguments": call.arguments and dict(call.arguments)}
            for call in action.calls
        ]
    )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
