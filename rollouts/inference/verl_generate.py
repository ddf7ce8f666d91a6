"""Speak the `/generate` that the reference system's trainers put around vLLM: ids in, ids out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollouts.inference.answers import Answer, parse_object
from rollouts.inference.asking import Asker
from rollouts.inference.exceptions import InferenceFault
from rollouts.inference.logprob_probe import LogprobProbe
from rollouts.inference.protocol import (
    Cancelled,
    Generation,
    Health,
    SamplingParams,
    Server,
)
from rollouts.inference.statuses import check_context, raise_for_status
from rollouts.inference.transport import Transport
from rollouts.inference.vllm import PROCESSED, sampling_body

PATH = "/generate"


class VerlGenerateAdapter:
    """Generate through a trainer's own `/generate`.

    It takes `prompt_ids` beside vLLM's sampling parameters and no field that these have not, so
    there is no streaming, no model, no salt; it answers `{response_ids, logprobs}`. Shapes:
    verl_custom/nvidia/rollout/vllm_async_server.py of ProRL Agent's trainers.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport or Transport()
        self._asker = _WholeAsker(self._transport)
        self._probe = LogprobProbe()

    def generate(
        self,
        server: Server,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
        interrupted: Cancelled | None = None,
        cache_salt: str | None = None,
    ) -> Generation:
        """Sample one turn, as TokenAdapter says; raise an InferenceFault."""
        del cache_salt
        check_context(server, prompt_ids, sampling)
        return self._asker.ask(
            PATH,
            {"prompt_ids": list(prompt_ids), **sampling_body(sampling)},
            VerlGenerateAnswer(server, prompt_ids, sampling),
            timeout_seconds=timeout_seconds,
            cancelled=cancelled,
            interrupted=interrupted,
        )

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        """Ask whether the server answers: it lists its one route, and tells no model."""
        url = f"{server.url.rstrip('/')}/openapi.json"
        try:
            answer = self._transport.request("GET", url, timeout_seconds=timeout_seconds)
            raise_for_status(answer, server)
            routes = parse_object(answer.body).get("paths")
        except InferenceFault as fault:
            return Health(False, str(fault))
        if not isinstance(routes, dict) or PATH not in routes:
            return Health(False, f"it has no route {PATH}")
        health = Health(True, f"has {PATH}; which model it serves it does not tell")
        return self._probe.add_mode(
            self.generate, server, health, advice=PROCESSED, timeout_seconds=timeout_seconds
        )


class VerlGenerateAnswer(Answer):
    """Read an answer; why the turn ended follows from its ids."""

    def read(self, body: dict[str, Any]) -> bool:
        """Take the body, as Answer says.

        A turn that neither ends with a stop token nor is as long as it may be was aborted, as
        when the trainer puts its engine to sleep.
        """
        ids: list[Any] = body["response_ids"]
        logprobs = body["logprobs"]
        self.add(ids, [] if logprobs is None and not ids else logprobs)
        stops = self.sampling.stop_token_ids
        if ids and (not stops or ids[-1] in stops):
            self.finish("stop")
        else:
            self.finish("length" if len(ids) == self.sampling.max_tokens else "abort")
        return True


class _WholeAsker(Asker):
    """Ask without streaming: the route refuses the field."""

    def ask(self, path: str, body: dict[str, Any], answer: Answer, **rest: Any) -> Generation:
        """Return the turn."""
        self._whole_only.add(f"{answer.server.url.rstrip('/')}{path}")
        return super().ask(path, body, answer, **rest)
