"""Generate on whichever server of a pool can: wait for a slot, retry elsewhere, within a budget."""

import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollouts.inference.adapters import as_chat_adapter, as_token_adapter
from rollouts.inference.exceptions import (
    ContextFull,
    GenerationCancelled,
    GenerationTimeout,
    InferenceFault,
    MalformedAnswer,
    NoServer,
    RouterUnavailable,
    ServerOverloaded,
    UnknownServerKind,
)
from rollouts.inference.protocol import (
    Cancelled,
    ChatAnswer,
    Generation,
    Message,
    SamplingParams,
    Server,
    ServerAdapter,
)
from rollouts.inference.router import KEPT_LEASE_SECONDS, Assignment, Place, Router

logger = logging.getLogger(__name__)

# How often a waiter looks whether it was cancelled and which servers there are. A slot that is
# given to it wakes it at once. Who has waited long looks less often: hundreds may.
SLOT_POLL_SECONDS = 0.2
LONGEST_SLOT_POLL_SECONDS = 0.6
POLL_SHARE_OF_WAIT = 0.2
# How long one call leaves alone a server that just failed it, where the server says nothing.
AVOID_SECONDS = 1.0
MALFORMED_RETRIES = 2
REQUEST_SECONDS = 600.0
# What a turn is expected to sample: callers allow whole contexts, and few turns use them.
EXPECTED_TOKENS = 512
CHARACTERS_PER_TOKEN = 4

T = TypeVar("T", Generation, ChatAnswer)
Ask = Callable[[Server, float], T]


class _Interrupted(Exception):
    """The caller wants no slot any more, and is content with nothing."""


@dataclass(slots=True)
class _Call:
    """Hold what one call needs and has seen so far; times by the monotonic clock."""

    rollout_id: str
    deadline: float
    cancelled: Cancelled
    interrupted: Cancelled
    generation_seconds: float | None
    experiment: str
    share: float
    prompt_tokens: int
    max_tokens: int
    # None where servers are asked in messages: only they know how many tokens those are.
    needed_tokens: int | None
    speaks: Callable[[Server], bool]
    malformed: int = 0
    last_fault: InferenceFault | None = None
    avoid_until: dict[str, float] = field(default_factory=dict)

    def remaining(self) -> float:
        """Return the seconds left."""
        return self.deadline - time.monotonic()

    def request_seconds(self) -> float:
        """Return the seconds that one request may take."""
        return self.remaining() if self.generation_seconds is None else self.generation_seconds

    def place(self) -> Place:
        """Return a new place in the queue."""
        return Place(
            self.rollout_id,
            tokens=min(self.max_tokens, EXPECTED_TOKENS),
            prompt_tokens=self.prompt_tokens,
            experiment=self.experiment,
            share=self.share,
        )


class InferencePool:
    """Share a set of servers between rollouts. Thread-safe."""

    def __init__(
        self,
        router: Router,
        adapters: Mapping[str, ServerAdapter],
        list_servers: Callable[[], list[Server]],
        *,
        request_seconds: float = REQUEST_SECONDS,
    ) -> None:
        self._router = router
        self._adapters = adapters
        self._list_servers = list_servers
        self._request_seconds = request_seconds

    def generate(
        self,
        rollout_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        budget_seconds: float,
        generation_seconds: float | None = None,
        cancelled: Cancelled | None = None,
        interrupted: Cancelled | None = None,
        cache_salt: str | None = None,
        experiment: str = "",
        share: float = 1.0,
    ) -> Generation:
        """Sample one turn; `budget_seconds` are for waiting for slots and for failed tries.

        What another try may mend is tried again, elsewhere first. When the budget ends the
        last fault is raised, or NoServer when no server ever took the request. One request
        takes at most the pool's `request_seconds`, and `generation_seconds` where given, else
        what is left of the budget: sampling a long turn is no waiting. Once `interrupted` says so
        what was sampled is returned with finish_reason `abort`: nothing, while it waits.

        ContextFull, GenerationCancelled, RequestRejected and UnknownServerKind are raised at
        once, a third MalformedAnswer too.
        """
        interrupted = interrupted or _never

        def ask(server: Server, timeout_seconds: float) -> Generation:
            return as_token_adapter(self._adapters[server.kind], server.kind).generate(
                server,
                prompt_ids,
                sampling,
                timeout_seconds=timeout_seconds,
                cancelled=cancelled,
                interrupted=interrupted,
                cache_salt=cache_salt,
            )

        call = _Call(
            rollout_id,
            time.monotonic() + budget_seconds,
            cancelled or _never,
            interrupted,
            generation_seconds,
            experiment,
            share,
            prompt_tokens=len(prompt_ids),
            max_tokens=sampling.max_tokens,
            needed_tokens=len(prompt_ids) + sampling.max_tokens,
            speaks=lambda server: hasattr(self._adapters[server.kind], "generate"),
        )
        try:
            return self._serve(call, ask)
        except _Interrupted:
            return Generation((), (), "abort", None, "", 0.0)

    def chat(
        self,
        rollout_id: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        *,
        budget_seconds: float,
        generation_seconds: float | None = None,
        cancelled: Cancelled | None = None,
        experiment: str = "",
        share: float = 1.0,
    ) -> ChatAnswer:
        """Sample one turn as text and tool calls, within the budget as `generate` does."""

        def ask(server: Server, timeout_seconds: float) -> ChatAnswer:
            return as_chat_adapter(self._adapters[server.kind], server.kind).chat(
                server,
                messages,
                tools,
                sampling,
                timeout_seconds=timeout_seconds,
                cancelled=cancelled,
            )

        characters = len(json.dumps([*messages, *tools], default=str))
        call = _Call(
            rollout_id,
            time.monotonic() + budget_seconds,
            cancelled or _never,
            _never,
            generation_seconds,
            experiment,
            share,
            prompt_tokens=characters // CHARACTERS_PER_TOKEN,
            max_tokens=sampling.max_tokens,
            needed_tokens=None,
            speaks=lambda server: hasattr(self._adapters[server.kind], "chat"),
        )
        return self._serve(call, ask)

    def _serve(self, call: _Call, ask: Ask[T]) -> T:
        while True:
            assignment = self._wait_for_slot(call)
            server = assignment.server
            timeout_seconds = min(call.request_seconds(), self._request_seconds)
            self._router.keep(assignment)
            answer = None
            try:
                answer = ask(server, timeout_seconds)
            except InferenceFault as fault:
                self._note_fault(call, server, fault)
            finally:
                self._quietly(self._router.release, assignment, well=answer is not None)
            if answer is not None:
                return answer

    def _wait_for_slot(self, call: _Call) -> Assignment:
        place = call.place()
        assignment = None
        try:
            assignment = self._queue_up(call, place)
        finally:
            if assignment is None:
                self._quietly(self._router.leave, place)
        return assignment

    def _queue_up(self, call: _Call, place: Place) -> Assignment:
        reason = "no inference server is registered"
        began = time.monotonic()
        while True:
            if call.cancelled():
                raise GenerationCancelled("cancelled while waiting for an inference server")
            if call.interrupted():
                raise _Interrupted
            servers = _with_room(self._spoken_to(call), call)
            if call.remaining() <= 0:
                raise call.last_fault or NoServer(f"{reason}, and the time is over")
            pause = max(SLOT_POLL_SECONDS, POLL_SHARE_OF_WAIT * (time.monotonic() - began))
            pause = min(pause, LONGEST_SLOT_POLL_SECONDS) * random.uniform(0.75, 1.25)  # noqa: S311
            until = time.monotonic() + max(0.0, min(pause, call.remaining()))
            try:
                assignment = self._router.wait(
                    place,
                    _not_avoided(call, servers),
                    lease_seconds=KEPT_LEASE_SECONDS,
                    wait_seconds=until - time.monotonic(),
                )
            except RouterUnavailable as fault:
                call.last_fault, assignment = fault, None
            if assignment is not None:
                return assignment
            if servers:
                reason = f"none of {len(servers)} inference servers could take the request"
            time.sleep(max(0.0, until - time.monotonic()))

    def _spoken_to(self, call: _Call) -> list[Server]:
        """Return the servers of fitting kinds; raise UnknownServerKind when there is none."""
        servers = self._list_servers()
        known = [each for each in servers if each.kind in self._adapters and call.speaks(each)]
        if servers and not known:
            kinds = ", ".join(sorted({repr(server.kind) for server in servers}))
            raise UnknownServerKind(f"no adapter speaks so to servers of kind {kinds}")
        return known

    def _note_fault(self, call: _Call, server: Server, fault: InferenceFault) -> None:
        """Remember what the fault says about the server; raise it when a retry cannot help."""
        timed_out = isinstance(fault, GenerationTimeout)
        # Running out of this call's own budget says nothing about the server.
        if fault.server_is_suspect and not (timed_out and call.remaining() <= 0):
            self._quietly(self._router.report_fault, server.id)
        call.malformed += isinstance(fault, MalformedAnswer)
        if not (fault.retryable_elsewhere or timed_out) or call.malformed > MALFORMED_RETRIES:
            raise fault
        logger.warning("inference fault %s on %s: %s", fault.code, server.id, fault)
        pause = AVOID_SECONDS
        if isinstance(fault, ServerOverloaded) and fault.retry_after_seconds is not None:
            pause = fault.retry_after_seconds
        call.avoid_until[server.id] = time.monotonic() + pause
        call.last_fault = fault

    @staticmethod
    def _quietly(step: Callable[..., object], *arguments: object, **named: object) -> None:
        """Do a step whose failure leases and cool-offs mend by themselves."""
        try:
            step(*arguments, **named)
        except RouterUnavailable as fault:
            logger.warning("%s", fault)


def _not_avoided(call: _Call, servers: Sequence[Server]) -> list[Server]:
    now = time.monotonic()
    return [server for server in servers if call.avoid_until.get(server.id, 0.0) <= now]


def _with_room(servers: list[Server], call: _Call) -> list[Server]:
    """Return the servers whose model has room; raise ContextFull when there are, and none has."""
    needed = call.needed_tokens
    if needed is None:
        return servers
    fitting = [
        server
        for server in servers
        if server.max_model_len is None or needed <= server.max_model_len
    ]
    if servers and not fitting:
        longest = max(server.max_model_len or 0 for server in servers)
        raise ContextFull(
            f"{call.prompt_tokens} prompt tokens and {call.max_tokens} new ones exceed the "
            f"{longest} of the longest server"
        )
    return fitting


def _never() -> bool:
    return False
