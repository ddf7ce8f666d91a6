"""Speak vLLM's token-level completions: ids in, ids and log-probabilities out."""

import uuid
from collections.abc import Sequence
from typing import Any

from rollouts.inference.answers import Answer, as_count, as_version, parse_object
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

PROCESSED = "Start vLLM with --logprobs-mode processed_logprobs."


class VllmAdapter:
    """Generate through `/v1/completions` of vLLM, and of servers of the same shape.

    Streamed, so that what the caller decides acts at once; in one piece from servers that refuse
    that. An event takes 0.1 to 0.2 ms to read: for hundreds of turns at once start vLLM with
    `--stream-interval 8`. Shapes: vLLM 0.33.0,
    vllm/entrypoints/openai/completion/{protocol,serving}.py.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport or Transport()
        self._asker = Asker(self._transport)
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
        check_context(server, prompt_ids, sampling)
        return self._asker.ask(
            "/v1/completions",
            _request_body(server, prompt_ids, sampling, cache_salt),
            VllmAnswer(server, prompt_ids, sampling),
            headers={"X-Request-Id": uuid.uuid4().hex},
            timeout_seconds=timeout_seconds,
            cancelled=cancelled,
            interrupted=interrupted,
        )

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        """Ask whether the server answers, which model it serves, what its log-probabilities are.

        The last is tried out at most every ten minutes, and never makes a server unwell.
        """
        health = openai_health(self._transport, server, timeout_seconds=timeout_seconds)
        return self._probe.add_mode(
            self.generate, server, health, advice=PROCESSED, timeout_seconds=timeout_seconds
        )


class VllmAnswer(Answer):
    """Read a completion: whole, or the events of its stream, which have the same fields."""

    def read(self, body: dict[str, Any]) -> bool:
        """Take one body, as Answer says."""
        self.expect_model(body.get("model"))
        mode = body.get("logprobs_mode")
        if isinstance(mode, str):
            self.logprob_mode = mode
        choices = body["choices"]
        if not isinstance(choices, list) or len(choices) > 1:
            raise self.malformed("sent no list of one choice")
        for choice in choices:
            self.read_choice(choice)
        self._read_usage(body.get("usage"))
        return False

    def read_choice(self, choice: dict[str, Any]) -> None:
        """Take the tokens of one choice, and its end where it has one."""
        self.expect_prompt(choice.get("prompt_token_ids"))
        ids = choice["token_ids"]
        # An event without tokens has no log-probabilities either: the first, or an abort's.
        if ids or choice.get("finish_reason") is None:
            self.add(ids, self.logprobs_of(choice))
        self.spans = choice.get("weight_versions") or self.spans
        if choice.get("finish_reason") is not None:
            self.finish(choice["finish_reason"])

    def logprobs_of(self, choice: dict[str, Any]) -> Any:
        """Return the log-probabilities of a choice's tokens."""
        given: Any = choice.get("logprobs")
        return [] if given is None and not choice["token_ids"] else given["token_logprobs"]

    def _read_usage(self, usage: Any) -> None:
        if usage is None:
            return
        if self.finish_reason is not None:
            self.expect_count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details") or {}
        self.cached_tokens = as_count(details.get("cached_tokens"))


def openai_health(transport: Transport, server: Server, *, timeout_seconds: float) -> Health:
    """Ask `/health` and `/v1/models`; never raise for what is wrong with the server."""
    base = server.url.rstrip("/")
    try:
        answer = transport.request("GET", f"{base}/health", timeout_seconds=timeout_seconds)
        if answer.status != 200:
            return Health(False, f"/health answered {answer.status}")
        models = transport.request("GET", f"{base}/v1/models", timeout_seconds=timeout_seconds)
        raise_for_status(models, server)
        cards = {card["id"]: card for card in parse_object(models.body)["data"]}
    except InferenceFault as fault:
        return Health(False, str(fault))
    except (KeyError, TypeError):
        return Health(False, "/v1/models is no list of models")
    card = cards.get(server.model)
    if card is None:
        served = ", ".join(sorted(map(str, cards))) or "nothing"
        return Health(False, f"serves {served}, not {server.model}")
    return Health(
        ok=True,
        detail=f"serves {server.model}",
        model=server.model,
        policy_version=as_version(card.get("weight_version")),
        max_model_len=as_count(card.get("max_model_len")),
    )


def _request_body(
    server: Server, prompt_ids: Sequence[int], sampling: SamplingParams, cache_salt: str | None
) -> dict[str, Any]:
    return {
        "model": server.model,
        "prompt": list(prompt_ids),
        "logprobs": 0,
        "return_token_ids": True,
        "return_weight_versions": True,
        **sampling_body(sampling),
        **({"cache_salt": cache_salt} if cache_salt else {}),
    }


def sampling_body(sampling: SamplingParams) -> dict[str, Any]:
    """Return how to sample, in vLLM's words."""
    body: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body
