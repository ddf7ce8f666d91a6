"""Generate on whichever server of a pool can: wait for a slot, retry elsewhere, within a budget."""

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
    Generation,
    SamplingParams,
    Server,
    ServerAdapter,
)
from rollouts.inference.router import Assignment, Router

logger = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
RENEW_SECONDS = 10.0
SLOT_POLL_SECONDS = 0.1
# How long one call leaves alone a server that just failed it, where the server says nothing.
AVOID_SECONDS = 1.0
MALFORMED_RETRIES = 2
REQUEST_SECONDS = 600.0


@dataclass(slots=True)
class _Call:
    """Hold what one call has seen so far; times by the monotonic clock."""

    rollout_id: str
    deadline: float
    cancelled: Cancelled
    generation_seconds: float | None = None
    malformed: int = 0
    last_fault: InferenceFault | None = None
    avoid_until: dict[str, float] = field(default_factory=dict)

    def remaining(self) -> float:
        """Return the seconds left."""
        return self.deadline - time.monotonic()

    def request_seconds(self) -> float:
        """Return the seconds that one request may take."""
        return self.remaining() if self.generation_seconds is None else self.generation_seconds


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
    ) -> Generation:
        """Sample one turn; `budget_seconds` are for waiting for slots and for failed tries.

        What another try may mend is tried again, elsewhere first. When the budget ends the
        last fault is raised, or NoServer when no server ever took the request. One request
        takes at most the pool's `request_seconds`, and `generation_seconds` where given, else
        what is left of the budget: sampling a long turn is no waiting.

        ContextFull, GenerationCancelled, RequestRejected and UnknownServerKind are raised at
        once, a third MalformedAnswer too.
        """
        call = _Call(
            rollout_id,
            time.monotonic() + budget_seconds,
            cancelled or (lambda: False),
            generation_seconds,
        )
        while True:
            assignment = self._wait_for_slot(call, prompt_ids, sampling)
            try:
                generation = self._ask(call, assignment, prompt_ids, sampling)
            except InferenceFault as fault:
                self._note_fault(call, assignment.server, fault)
                continue
            finally:
                self._quietly(self._router.release, assignment)
            self._quietly(self._router.report_success, assignment.server.id)
            return generation

    def _wait_for_slot(
        self, call: _Call, prompt_ids: Sequence[int], sampling: SamplingParams
    ) -> Assignment:
        reason = "no inference server is registered"
        while True:
            if call.cancelled():
                raise GenerationCancelled("cancelled while waiting for an inference server")
            servers = _with_room(self._spoken_to(), prompt_ids, sampling)
            if call.remaining() <= 0:
                raise call.last_fault or NoServer(f"{reason}, and the time is over")
            try:
                assignment = self._router.acquire(
                    _not_avoided(call, servers), call.rollout_id, lease_seconds=LEASE_SECONDS
                )
            except RouterUnavailable as fault:
                call.last_fault, assignment = fault, None
            if assignment is not None:
                return assignment
            if servers:
                reason = f"none of {len(servers)} inference servers could take the request"
            pause = SLOT_POLL_SECONDS * random.uniform(0.5, 1.5)  # noqa: S311
            time.sleep(max(0.0, min(pause, call.remaining())))

    def _spoken_to(self) -> list[Server]:
        """Return the servers of known kinds; raise UnknownServerKind when there is none."""
        servers = self._list_servers()
        known = [server for server in servers if server.kind in self._adapters]
        if servers and not known:
            kinds = ", ".join(sorted({repr(server.kind) for server in servers}))
            raise UnknownServerKind(f"no adapter speaks to servers of kind {kinds}")
        return known

    def _ask(
        self,
        call: _Call,
        assignment: Assignment,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
    ) -> Generation:
        renew_at = time.monotonic() + RENEW_SECONDS

        def poll() -> bool:
            nonlocal renew_at
            if time.monotonic() >= renew_at:
                renew_at = time.monotonic() + RENEW_SECONDS
                self._quietly(self._router.renew, assignment, lease_seconds=LEASE_SECONDS)
            return call.cancelled()

        return self._adapters[assignment.server.kind].generate(
            assignment.server,
            prompt_ids,
            sampling,
            timeout_seconds=min(call.request_seconds(), self._request_seconds),
            cancelled=poll,
        )

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


def _with_room(
    servers: list[Server], prompt_ids: Sequence[int], sampling: SamplingParams
) -> list[Server]:
    """Return the servers whose model has room; raise ContextFull when there are, and none has."""
    needed = len(prompt_ids) + sampling.max_tokens
    fitting = [
        server
        for server in servers
        if server.max_model_len is None or needed <= server.max_model_len
    ]
    if servers and not fitting:
        longest = max(server.max_model_len or 0 for server in servers)
        raise ContextFull(
            f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} new ones exceed the "
            f"{longest} of the longest server"
        )
    return fitting
