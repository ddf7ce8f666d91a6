"""Sample turns on a policy's servers: wait for updates, go on from what one cut, stamp versions."""

import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from rollouts.handlers.base import PolicyLagExceeded
from rollouts.inference.exceptions import GenerationCancelled, NoServer, RouterUnavailable
from rollouts.inference.parsed import ParsedTurn
from rollouts.inference.pool import REQUEST_SECONDS, InferencePool
from rollouts.inference.protocol import (
    ChatAnswer,
    FinishReason,
    Generation,
    SamplingParams,
    VersionRun,
)
from rollouts.inference.trace import UNKNOWN_POLICY_VERSION
from rollouts.models import Policy, Rollout
from rollouts.options import Budgets, Sampling
from rollouts.services.policy_gate import policy_gate
from rollouts.services.policy_updates import is_open
from rollouts.services.routable import watched
from rollouts.services.servers import adapters
from rollouts.stages import process
from rollouts.stages.database import database
from rollouts.stages.lag import Lag
from rollouts.stages.lease import Held
from rollouts.stages.policy_view import PolicyView
from rollouts.stages.seeding import seed_of
from rollouts.stages.stamping import Asked, Partial, versions_of
from rollouts.stages.turnstile import GatedAdapters, GateShut, Turnstile

logger = logging.getLogger(__name__)

HELD_POLL_SECONDS = 0.25
RETRY_SECONDS = 0.2
LEAST_WAIT_SECONDS = 0.1
BY_TIME, BY_UPDATE = "time", "update"


@dataclass
class Generator:
    """Sample the turns of one rollout; waiting does not use the agent's time.

    `oldest_version` is that of the tokens which earlier workers left, None without any. Not
    thread-safe: one rollout, one thread.
    """

    held: Held
    policy: Policy
    sampling: Sampling
    budgets: Budgets
    stop_token_ids: tuple[int, ...]
    rollout: Rollout
    oldest_version: InitVar[int | None] = None
    # Whether nobody knows which weights sampled one of its tokens, of earlier workers included.
    unknown_versions: InitVar[bool] = False
    # The end of the agent's time, an instant of `clock`.
    deadline: float = float("inf")
    waited: float = 0.0
    # What of it updates were the cause of: the budget for waiting does not count that.
    held_back: float = 0.0
    lag: Lag = field(init=False)

    def __post_init__(self, oldest_version: int | None, unknown_versions: bool) -> None:
        experiment = self.rollout.experiment
        self.lag = Lag(
            experiment.max_policy_lag,
            experiment.on_policy_lag,
            None if oldest_version == UNKNOWN_POLICY_VERSION else oldest_version,
            unknown=unknown_versions,
        )
        # Whether the agent's time cut the present chat, an update, or nothing.
        self._cut_by: str | None = None
        self._call_clock = self._call_seconds = 0.0
        self._shut_by: str | None = None
        self._view = PolicyView(self.policy)
        self._turnstile = Turnstile(policy_gate(), str(self.policy.pk), self._view.in_force)
        self._pool = InferencePool(
            process.router(),
            GatedAdapters(adapters(), self._turnstile, chat=self.policy.is_text_only),
            self._view.servers,
            request_seconds=max(REQUEST_SECONDS, self.budgets.run_seconds),
        )

    def clock(self) -> float:
        """Return monotonic seconds, standing still while no server answered."""
        return time.monotonic() - self.waited

    def params(self, max_tokens: int, *, offset: int = 0) -> SamplingParams:
        """Return the sampling parameters of one request; `offset` tokens of its turn are there."""
        return SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k if self.sampling.top_k > 0 else None,
            max_tokens=max_tokens,
            seed=seed_of(self.rollout, self.sampling.seed, offset=offset),
            stop_token_ids=self.stop_token_ids,
        )

    def __call__(self, prompt_ids: Sequence[int], max_tokens: int) -> Generation:
        """Return the sampled turn, each token stamped with the version that sampled it.

        A turn that an update cut goes on from the tokens it had. `abort` says that the agent's
        time ended, or that the experiment's policy lag cut it: the turn holds what was sampled
        until then. Raises PolicyLagExceeded, PolicyLagDrop and the faults of inference.
        """
        partial = Partial()
        self._begin_call()
        while True:
            self._wait_until_open()
            if self.lag.ends(self._view.version):
                if not partial.token_ids:
                    raise PolicyLagExceeded("the rollout spans too many policy versions")
                return partial.as_generation("abort", version=self._view.version)
            part = self._sample(prompt_ids, partial, max_tokens)
            if part is None:
                continue
            partial.add(part, self._versions_of(part))
            if self.lag.shorten(partial, self._turnstile.version):
                if not partial.token_ids:
                    raise PolicyLagExceeded("its next tokens are of too different a version")
                return partial.as_generation("abort", version=self._view.version)
            self.lag.note(partial.versions, self._turnstile.version)
            finish = self._finish(partial, part, max_tokens)
            if finish is not None:
                return partial.as_generation(finish, version=self._view.version)
            if not part.token_ids and part.server_id:
                self._pause_before_retry("the servers cut every request")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int,
    ) -> ChatAnswer:
        """Return one turn of a text-only policy; what an update cut is asked for again.

        `abort` says that the agent's time ended.
        """
        self._begin_call()
        while True:
            if self._time_is_over():
                return ChatAnswer(ParsedTurn(content=""), "abort", "", 0.0)
            self._wait_until_open()
            answer = self._measured(
                lambda: self._pool.chat(
                    str(self.rollout.id),
                    messages,
                    tools,
                    self.params(max_tokens),
                    budget_seconds=self._wait_left(),
                    generation_seconds=max(1.0, self.held.remaining_seconds()),
                    cancelled=lambda: self.held.stopping() or self._chat_is_cut(),
                    experiment=str(self.rollout.experiment_id),
                    share=self.rollout.experiment.share,
                )
            )
            if isinstance(answer, ChatAnswer):
                return answer

    def server_address(self) -> str | None:
        """Return the address of a server of the policy, any of those that answer."""
        with database():
            servers = self._view.servers()
        return random.choice(servers).url if servers else None  # noqa: S311 - spreads the load

    def _begin_call(self) -> None:
        self._view.begin_anew()
        self._call_clock, self._call_seconds = self.clock(), 0.0

    def _sample(
        self, prompt_ids: Sequence[int], partial: Partial, max_tokens: int
    ) -> Generation | None:
        """Ask for the rest of a turn; None when it must be asked for again."""
        done = len(partial.token_ids)
        part: Generation | None = self._measured(
            lambda: self._pool.generate(
                str(self.rollout.id),
                [*prompt_ids, *partial.token_ids],
                self.params(max_tokens - done, offset=done),
                budget_seconds=self._wait_left(),
                generation_seconds=max(1.0, self.held.remaining_seconds()),
                cancelled=self.held.stopping,
                interrupted=self._interrupted,
                cache_salt=self._view.salt(),
                experiment=str(self.rollout.experiment_id),
                share=self.rollout.experiment.share,
            )
        )
        if part is None:
            return None
        if part.token_ids and self._turnstile.lapsed and part.policy_version is None:
            # Nobody knows which weights sampled it: it was not counted when an update asked.
            logger.warning("rollout %s samples a turn again: its pass lapsed", self.rollout.id)
            return None
        return part

    def _measured(self, ask: Any) -> Any:
        """Ask, and count what was no answer's time as waiting; None: ask again."""
        began = time.monotonic()
        answer: Any = None
        self._cut_by = None
        self._turnstile.forget_seconds()
        try:
            with watched(self.policy):
                answer = ask()
        except GateShut as shut:
            self._shut_by = shut.mark
            self._view.begin_anew()
        except RouterUnavailable as fault:
            if self._wait_left() <= LEAST_WAIT_SECONDS:
                raise
            logger.warning("%s", fault)
            time.sleep(RETRY_SECONDS)
        except GenerationCancelled:
            # A chat has no other way to be cut by an update or by the end of the agent's time.
            if self.held.stopping() or self._cut_by is None:
                raise
        finally:
            # What an update cut of a chat is lost, and nobody's time; what time itself cut is not.
            counts = answer is not None or self._cut_by == BY_TIME
            spent = self._turnstile.last_seconds() if counts else 0.0
            self._call_seconds += spent
            self.waited += max(0.0, time.monotonic() - began - spent)
        return answer

    def _finish(self, partial: Partial, part: Generation, max_tokens: int) -> FinishReason | None:
        """Say how a turn ended; None when it was cut and goes on."""
        if part.finish_reason != "abort":
            return part.finish_reason
        if part.token_ids and part.token_ids[-1] in self.stop_token_ids:
            return "stop"
        if len(partial.token_ids) >= max_tokens:
            return "length"
        return "abort" if self._time_is_over() else None

    def _wait_until_open(self) -> None:
        """Wait while an update holds back generation; no budget is used up meanwhile.

        Raises GenerationCancelled.
        """
        began = time.monotonic()
        while True:
            if self.held.stopping():
                raise GenerationCancelled("cancelled while an update held back generation")
            if not self._view.present().holds_requests():
                break
            time.sleep(HELD_POLL_SECONDS)
        spent = time.monotonic() - began
        if spent >= HELD_POLL_SECONDS:
            self.waited += spent
            self.held_back += spent
            self.held.extend(spent)
        if self._shut_by is not None:
            self._open_left_shut()

    def _open_left_shut(self) -> None:
        """Open a gate that the store keeps closed by an update which is open no longer."""
        mark, self._shut_by = self._shut_by, None
        with database():
            if mark is None or is_open(update_id=mark):
                return
        try:
            policy_gate().open(str(self.policy.pk), mark)
        except RouterUnavailable:
            return

    def _versions_of(self, part: Generation) -> tuple[VersionRun, ...]:
        asked = Asked(self._turnstile.version, self._view.entered, self._turnstile.lapsed)
        runs = versions_of(part, asked, lambda: self._view.read(since=time.monotonic()))
        if any(version == UNKNOWN_POLICY_VERSION for version, _run in runs):
            logger.warning("rollout %s: nobody knows which weights sampled it", self.rollout.id)
        return runs

    def _interrupted(self) -> bool:
        """Tell whether a request must be cut now; from memory, as all requests wait for it."""
        return self._time_is_over() or self._is_cut_by_update()

    def _is_cut_by_update(self) -> bool:
        return self._turnstile.is_cut() or self._view.cuts(queues=not self._turnstile.is_busy())

    def _chat_is_cut(self) -> bool:
        """Tell as `_interrupted` does, and remember by whom: afterwards nobody could say."""
        if self._cut_by is None and self._time_is_over():
            self._cut_by = BY_TIME
        elif self._cut_by is None and self._is_cut_by_update():
            self._cut_by = BY_UPDATE
        return self._cut_by is not None

    def _time_is_over(self) -> bool:
        return self.clock_of_call() >= self.deadline

    def clock_of_call(self) -> float:
        """Return `clock` within a call, where a request's waiting is not yet known as such."""
        return self._call_clock + self._call_seconds + self._turnstile.busy_seconds()

    def _wait_left(self) -> float:
        waited = self.waited - self.held_back
        return max(LEAST_WAIT_SECONDS, self.budgets.inference_wait_seconds - waited)

    def _pause_before_retry(self, why: str) -> None:
        if self._wait_left() <= LEAST_WAIT_SECONDS:
            raise NoServer(f"{why}, and the time for waiting is over")
        time.sleep(RETRY_SECONDS)
        self.waited += RETRY_SECONDS
