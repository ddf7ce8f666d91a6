"""Find out whether a server's log-probabilities are those of the sampling, or raw ones."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from rollouts.inference.exceptions import InferenceFault
from rollouts.inference.protocol import Generation, Health, SamplingParams, Server

logger = logging.getLogger(__name__)

Mode = Literal["raw_logprobs", "processed_logprobs"]
REMEMBERED_SECONDS = 600.0
ASKED_AGAIN_SECONDS = 60.0
# One token each, on a busy server too; health has its own, longer time.
LONGEST_SECONDS = 2.0
PROMPTS = ((1, 2, 3, 4, 5, 6, 7, 8), (9, 8, 7, 6, 5), (11, 3, 11, 3, 11))
# A token surer than this says nothing: at both temperatures it has almost all the probability.
SUREST_LOGPROB = -0.02
SAME_SHARE = 0.1


class LogprobProbe:
    """Remember per server what its log-probabilities are of. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, str], tuple[str | None, float]] = {}

    def add_mode(
        self,
        generate: Callable[..., Generation],
        server: Server,
        health: Health,
        *,
        advice: str,
        timeout_seconds: float,
    ) -> Health:
        """Return the health with `logprob_mode`, and a sentence where the raw ones are given.

        A trainer needs the log-probability under which a token was sampled. At a temperature of
        1 without top-p and top-k both are the same, so this is no fault.
        """
        if not health.ok or server.held:
            return health
        mode = self._mode(generate, server, timeout_seconds)
        if mode != "raw_logprobs":
            return replace(health, logprob_mode=mode)
        warning = (
            "its log-probabilities are raw, from before the temperature: right for training at "
            f"temperature 1 alone. {advice}"
        )
        return replace(health, logprob_mode=mode, detail=f"{health.detail}; {warning}")

    def _mode(
        self, generate: Callable[..., Generation], server: Server, timeout_seconds: float
    ) -> str | None:
        key, now = (server.url, server.model), time.monotonic()
        with self._lock:
            mode, until = self._known.get(key, (None, 0.0))
            if now < until:
                return mode
            # Nobody else asks meanwhile.
            self._known[key] = (mode, now + ASKED_AGAIN_SECONDS)
        try:
            mode = probe_logprobs(
                generate, server, timeout_seconds=min(timeout_seconds, LONGEST_SECONDS)
            )
        except InferenceFault as fault:
            logger.debug("log-probabilities of %s were not tried out: %s", server.url, fault)
            return mode
        if mode is not None:
            with self._lock:
                self._known[key] = (mode, now + REMEMBERED_SECONDS)
        return mode


def probe_logprobs(
    generate: Callable[..., Generation], server: Server, *, timeout_seconds: float
) -> str | None:
    """Return the server's own word for its log-probabilities, else what two samples show.

    The likeliest token is sampled at two low temperatures: what is of the sampling rises
    with the lower one, what is raw stays. None when no prompt decides. Raises an InferenceFault.
    """
    deadline = time.monotonic() + timeout_seconds
    server = replace(server, logprob_mode=None)  # what was found before may hold no longer
    for prompt in PROMPTS:
        seen: list[Generation] = []
        for temperature in (0.5, 0.1):
            sampling = SamplingParams(temperature=temperature, max_tokens=1)
            answer = generate(server, prompt, sampling, timeout_seconds=deadline - time.monotonic())
            if answer.logprob_mode is not None:
                return answer.logprob_mode
            seen.append(answer)
        mode = _compare(*seen)
        if mode is not None:
            return mode
    return None


def _compare(warm: Generation, cold: Generation) -> Mode | None:
    if warm.token_ids != cold.token_ids or len(warm.logprobs) != 1:
        return None
    before, after = warm.logprobs[0], cold.logprobs[0]
    if before > SUREST_LOGPROB:
        return None
    if abs(after - before) <= SAME_SHARE * abs(before):
        return "raw_logprobs"
    return "processed_logprobs" if after > before else None
