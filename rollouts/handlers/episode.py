"""Keep the books of one episode: prompt ids, trace, journal, messages, counters and limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollouts.handlers.base import (
    Action,
    AgentCancelled,
    AgentContext,
    AgentResult,
    JournaledTurn,
    Message,
    StopReason,
)
from rollouts.inference.exceptions import ContextFull
from rollouts.inference.protocol import Generation


class Episode:
    """Sample, observe and replay turns so that every prompt extends the one before exactly.

    What was sampled is never rendered again: the next prompt is the last prompt's ids, the
    sampled ids, and the template's own tokens for the observations.
    """

    def __init__(self, context: AgentContext, first_messages: Sequence[Message]) -> None:
        self._context = context
        self.messages: list[Message] = [dict(message) for message in first_messages]
        self.turns = 0
        self.sampled_tokens = 0
        self.tool_calls = 0
        self.malformed_actions = 0
        self.inference_seconds = 0.0
        self.tool_seconds = 0.0
        self._previous_ids: list[int] = []
        self._prompt_ids: list[int] = []
        self._pending: list[Message] = list(self.messages)

    def replay(self) -> Iterator[tuple[Generation, JournaledTurn]]:
        """Take the journaled turns into trace, messages and counters, one by one.

        The turn's own observations are taken when the iteration goes on, as `observe` would.
        """
        for turn in self._context.journal.replay():
            self._context.trace.extend(turn.prompt_ids)
            self._prompt_ids = list(turn.prompt_ids)
            self._take(turn.generation)
            yield turn.generation, turn
            if turn.messages is not None:
                self._append(turn.messages)

    def blocked(self) -> StopReason | None:
        """Say why no further turn may begin; raise `AgentCancelled` when cancelled."""
        self.check_cancelled()
        budget = self._context.budget
        if self.remaining_seconds() <= 0:
            return StopReason.AGENT_TIMEOUT
        if self.turns >= budget.max_turns:
            return StopReason.MAX_TURNS
        if self.sampled_tokens >= budget.max_tokens:
            return StopReason.MAX_TOKENS
        return None

    def sample(self) -> Generation | StopReason:
        """Sample the next turn, or say that the context is full; the turn is in the trace."""
        prompt_ids = self._next_prompt()
        allowance = self._allowance(prompt_ids)
        if allowance < 1:
            return StopReason.CONTEXT_FULL
        began = self._context.clock()
        try:
            generation = self._context.generate(prompt_ids, allowance)
        except ContextFull:
            return StopReason.CONTEXT_FULL
        finally:
            self.inference_seconds += self._context.clock() - began
        self._context.trace.extend(prompt_ids)
        self._prompt_ids = prompt_ids
        self._take(generation, replayed=False)
        return generation

    def cut_by(self, generation: Generation) -> StopReason | None:
        """Say which limit of the episode cut this turn short; None for the turn's own."""
        if generation.finish_reason != "length":
            return None
        if self.sampled_tokens >= self._context.budget.max_tokens:
            return StopReason.MAX_TOKENS
        used = len(self._prompt_ids) + len(generation.token_ids)
        if used >= self._context.budget.context_tokens:
            return StopReason.CONTEXT_FULL
        return None

    def text(self, generation: Generation) -> str:
        """Return the sampled text without special tokens."""
        return self._context.renderer.decode(generation.token_ids)

    def record(self, generation: Generation, action: Action) -> None:
        """Journal the sampled turn; call it before the action takes effect."""
        self._context.journal.record_sampled(
            self.turns - 1, generation, tuple(self._prompt_ids), action
        )

    def observe(self, messages: Sequence[Message]) -> None:
        """Append what the turn led to and journal it with the state of the shell."""
        shell = self._context.shell
        state = None if shell is None else shell.state()
        self._context.journal.record_observed(self.turns - 1, tuple(messages), state)
        self._append(messages)

    def result(self, stop_reason: StopReason, answer: str | None = None) -> AgentResult:
        """Return the episode's end."""
        return AgentResult(
            stop_reason=stop_reason,
            answer=answer,
            messages=tuple(self.messages),
            turns=self.turns,
            sampled_tokens=self.sampled_tokens,
            tool_calls=self.tool_calls,
            malformed_actions=self.malformed_actions,
            inference_seconds=self.inference_seconds,
            tool_seconds=self.tool_seconds,
        )

    def remaining_seconds(self) -> float:
        """Return the seconds left to the agent."""
        return self._context.budget.deadline - self._context.clock()

    def check_cancelled(self) -> None:
        """Raise `AgentCancelled` when the rollout is cancelled."""
        if self._context.cancelled():
            raise AgentCancelled("the rollout was cancelled")

    def _next_prompt(self) -> list[int]:
        renderer = self._context.renderer
        if not self._previous_ids:
            return renderer.render(self._pending)
        return renderer.bridge(self._previous_ids, self._pending)

    def _allowance(self, prompt_ids: Sequence[int]) -> int:
        budget = self._context.budget
        return min(
            budget.turn_tokens,
            budget.max_tokens - self.sampled_tokens,
            budget.context_tokens - len(prompt_ids),
        )

    def _take(self, generation: Generation, *, replayed: bool = True) -> None:
        self._context.trace.append_sampled(
            generation.token_ids,
            generation.logprobs,
            policy_version=generation.policy_version,
            finish_reason=generation.finish_reason,
            sampling=self._context.sampling,
            logprob_mode=generation.logprob_mode,
        )
        self.turns += 1
        self.sampled_tokens += len(generation.token_ids)
        if replayed:
            self.inference_seconds += generation.seconds
        self._previous_ids = [*self._prompt_ids, *generation.token_ids]
        self._pending = []
        self.messages.append({"role": "assistant", "content": self.text(generation)})

    def _append(self, messages: Sequence[Message]) -> None:
        copies = [dict(message) for message in messages]
        self.messages += copies
        self._pending = copies
