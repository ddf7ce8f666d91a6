"""Keep the books of one episode: prompt ids, trace, journal, messages, counters and limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollouts.handlers.base import (
    Action,
    AgentCancelled,
    AgentContext,
    AgentResult,
    JournaledTurn,
    Message,
    PolicyLagExceeded,
    StopReason,
)
from rollouts.handlers.window import FORK_REASONS, STOP, first_fitting, shorter
from rollouts.inference.exceptions import CannotExtend, ContextFull
from rollouts.inference.parsed import ParsedTurn
from rollouts.inference.protocol import ChatAnswer, Generation
from rollouts.inference.rendering import ConversationRenderer


class Episode:
    """Sample, observe and replay turns so that every prompt extends the one before exactly.

    What was sampled is not rendered again: the next prompt is the last prompt's ids, the sampled
    ids, and the template's own tokens for the observations. Where the template cannot be extended
    so, or the conversation is made shorter, all of it is rendered and the trace forks.
    """

    def __init__(
        self,
        context: AgentContext,
        first_messages: Sequence[Message],
        *,
        schemas: Sequence[Mapping[str, Any]] = (),
        context_policy: str = STOP,
    ) -> None:
        self._context = context
        self._schemas = list(schemas)
        self._policy = context_policy
        self._head = len(first_messages)
        self.messages: list[Message] = [dict(message) for message in first_messages]
        self.turns = 0
        self.sampled_tokens = 0
        self.tool_calls = 0
        self.malformed_actions = 0
        self.inference_seconds = 0.0
        self.tool_seconds = 0.0
        self.tool_counts: Counter[str] = Counter()
        self.tool_errors: Counter[str] = Counter()
        self._shown: list[Message] = list(self.messages)  # what the policy sees of `messages`
        self._previous_ids: list[int] = []
        self._prompt_ids: list[int] = []
        self._fork_reason: str | None = None
        self._pending: list[Message] = []
        self._answer: ChatAnswer | None = None
        context.books.episode = self

    def replay(self) -> Iterator[tuple[Generation, JournaledTurn]]:
        """Take the journaled turns into trace, messages and counters, one by one.

        The turn's own observations are taken when the iteration goes on, as `observe` would.
        Another iteration goes on behind the last turn that was taken.
        """
        for turn in self._context.journal.replay()[self.turns :]:
            self._prompt_ids = list(turn.prompt_ids)
            self._fork_reason = turn.fork_reason
            if turn.fork_reason in FORK_REASONS.values():
                self._shorten_as(self._prompt_ids)
            self._take(turn.generation)
            self.sampled_tokens += turn.action.counted_tokens
            self.inference_seconds += turn.generation.seconds
            self._say(turn.generation, turn.action)
            yield turn.generation, turn
            if turn.messages is not None:
                self._append(turn.messages)

    def blocked(self) -> StopReason | None:
        """Say why no further turn may begin; raise `AgentCancelled` when cancelled."""
        self.check_cancelled()
        budget = self._context.budget
        if self.tool_allowance() <= 0:
            return StopReason.AGENT_TIMEOUT
        if self.turns >= budget.max_turns:
            return StopReason.MAX_TURNS
        if self.sampled_tokens >= budget.max_tokens:
            return StopReason.MAX_TOKENS
        return None

    def sample(self) -> Generation | StopReason:
        """Sample the next turn, or say why there is none; the turn is in the trace.

        A turn of a text-only policy has no ids.
        """
        began = self._context.clock()
        try:
            if self._context.chat is not None:
                return self._ask()
            return self._generate()
        except PolicyLagExceeded:
            return StopReason.POLICY_LAG
        finally:
            self.inference_seconds += self._context.clock() - began

    def cut_by(self, generation: Generation) -> StopReason | None:
        """Say which limit of the episode cut this turn short; None for the turn's own."""
        if generation.finish_reason == "abort":
            return StopReason.AGENT_TIMEOUT
        if generation.finish_reason != "length":
            return None
        if self.sampled_tokens >= self._context.budget.max_tokens:
            return StopReason.MAX_TOKENS
        used = len(self._prompt_ids) + len(generation.token_ids)
        if used >= self._context.budget.context_tokens and self._policy == STOP:
            return StopReason.CONTEXT_FULL
        return None

    def text(self, generation: Generation) -> str:
        """Return the sampled text without special tokens."""
        if self._answer is not None:
            return self._answer.parsed.content
        return self._renderer().decode(generation.token_ids)

    def parsed(self, generation: Generation) -> ParsedTurn:
        """Return the turn just sampled, read: text, thoughts and calls."""
        if self._answer is not None:
            return self._answer.parsed
        return self._renderer().parse(generation.token_ids, self._schemas or None)

    def counted_tokens(self) -> int:
        """Return what a text-only server said that it sampled for the last turn, else 0."""
        return 0 if self._answer is None else self._answer.sampled_tokens

    def record(self, generation: Generation, action: Action) -> None:
        """Journal the sampled turn; call it before the action takes effect."""
        self._context.journal.record_sampled(
            self.turns - 1, generation, self._prompt_ids, action, fork_reason=self._fork_reason
        )
        self._say(generation, action)

    def called(self, call: int, message: Message) -> None:
        """Journal the result of one of several calls with the state of the shell."""
        self._context.journal.record_called(self.turns - 1, call, message, self._shell_state())

    def observe(self, messages: Sequence[Message]) -> None:
        """Append what the turn led to and journal it with the state of the shell."""
        state = self._shell_state()
        self._context.journal.record_observed(self.turns - 1, tuple(messages), state)
        self._append(messages)

    def keep(self, messages: Sequence[Message]) -> None:
        """Append what the last turn led to before it ended the episode."""
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
            tool_counts=dict(self.tool_counts),
            tool_errors=dict(self.tool_errors),
        )

    def remaining_seconds(self) -> float:
        """Return the seconds left to the agent."""
        return self._context.budget.deadline - self._context.clock()

    def tool_allowance(self) -> float:
        """Return the seconds that a tool may still take."""
        left, bound = self.remaining_seconds(), self._context.budget.tool_seconds
        return left if bound is None else min(left, bound - self.tool_seconds)

    def check_cancelled(self) -> None:
        """Raise `AgentCancelled` when the rollout is cancelled."""
        if self._context.cancelled():
            raise AgentCancelled("the rollout was cancelled")

    def _generate(self) -> Generation | StopReason:
        ids, self._fork_reason = self._next_prompt()
        if self._policy != STOP and self._allowance(ids) < self._reserve():
            ids = self._shorten(ids) or ids
        while True:
            allowance = self._allowance(ids)
            try:
                if allowance < 1:
                    raise ContextFull("the context is full")
                generation = self._context.generate(ids, allowance)
                break
            except ContextFull:
                shortened = self._shorten(ids)
                if shortened is None:
                    return StopReason.CONTEXT_FULL
                ids = shortened
        self._prompt_ids = ids
        if generation.finish_reason == "abort" and not generation.token_ids:
            return StopReason.AGENT_TIMEOUT
        self._take(generation)
        return generation

    def _ask(self) -> Generation | StopReason:
        chat, budget = self._context.chat, self._context.budget
        assert chat is not None
        allowance = min(budget.turn_tokens, budget.max_tokens - self.sampled_tokens)
        while True:
            try:
                answer = chat(self._shown, self._schemas, allowance)
                break
            except ContextFull:
                forms = shorter(self._policy, self._shown, self._head)
                if not forms:
                    return StopReason.CONTEXT_FULL
                self._shown = forms[len(forms) // 2]
        if answer.finish_reason == "abort":
            return StopReason.AGENT_TIMEOUT
        self._answer = answer
        self.turns += 1
        self.sampled_tokens += answer.sampled_tokens
        return Generation((), (), answer.finish_reason, None, answer.server_id, answer.seconds)

    def _next_prompt(self) -> tuple[list[int], str | None]:
        if not self._previous_ids:
            return self._render(self._shown), None
        renderer, tools = self._renderer(), self._schemas or None
        try:
            return renderer.bridge(self._previous_ids, self._pending, tools), None
        except CannotExtend:
            return self._render(self._shown), "template_rewrites_history"

    def _shorten(self, ids: Sequence[int]) -> list[int] | None:
        """Show less of the conversation and return its prompt; None when nothing more can go."""
        target = min(len(ids), self._context.budget.context_tokens) // 2
        forms = shorter(self._policy, self._shown, self._head)
        form = first_fitting(forms, lambda each: len(self._render(each)) <= target)
        shortened = None if form is None else self._render(form)
        if form is None or shortened is None or len(shortened) >= len(ids):
            return None
        self._shown, self._fork_reason = form, FORK_REASONS[self._policy]
        return shortened

    def _shorten_as(self, ids: Sequence[int]) -> None:
        """Show what an earlier worker showed: the form that has these ids."""
        forms = shorter(self._policy, self._shown, self._head)
        form = first_fitting(forms, lambda each: len(self._render(each)) <= len(ids))
        self._shown = self._shown if form is None else form

    def _render(self, messages: Sequence[Message]) -> list[int]:
        return self._renderer().render(messages, self._schemas or None)

    def _reserve(self) -> int:
        """Return the tokens that a turn should find free: less is worth a shorter conversation."""
        budget = self._context.budget
        left = budget.max_tokens - self.sampled_tokens
        return min(budget.turn_tokens, budget.context_tokens // 4, left)

    def _allowance(self, prompt_ids: Sequence[int]) -> int:
        budget = self._context.budget
        return min(
            budget.turn_tokens,
            budget.max_tokens - self.sampled_tokens,
            budget.context_tokens - len(prompt_ids),
        )

    def _take(self, generation: Generation) -> None:
        self.turns += 1
        if not generation.token_ids:
            return  # a text-only policy's
        trace = self._context.trace
        trace.extend(self._prompt_ids, fork_reason=self._fork_reason or "prompt_changed")
        trace.append_sampled(
            generation.token_ids,
            generation.logprobs,
            policy_version=generation.policy_version,
            finish_reason=generation.finish_reason,
            sampling=self._context.sampling,
            logprob_mode=generation.logprob_mode,
            version_runs=generation.version_runs,
        )
        self.sampled_tokens += len(generation.token_ids)
        self._previous_ids = [*self._prompt_ids, *generation.token_ids]

    def _say(self, generation: Generation, action: Action) -> None:
        said = action.message or {"role": "assistant", "content": self.text(generation)}
        self.messages.append(dict(said))
        self._shown.append(dict(said))
        self._pending = []

    def _append(self, messages: Sequence[Message]) -> None:
        copies = [dict(message) for message in messages]
        self.messages += copies
        self._shown += copies
        self._pending = copies

    def _renderer(self) -> ConversationRenderer:
        renderer = self._context.renderer
        assert renderer is not None, "a policy with token ids has a renderer"
        return renderer

    def _shell_state(self) -> Any:
        shell = self._context.shell
        return None if shell is None else shell.state()
