"""Speak vLLM's token-level completions: ids in, ids and log-probabilities out."""

import json
import math
import time
from collections.abc import Sequence
from typing import Any

from rollouts.inference.exceptions import (
    ContextFull,
    InferenceFault,
    MalformedAnswer,
    RequestRejected,
    ServerFailed,
    ServerOverloaded,
    WrongModel,
)
from rollouts.inference.protocol import (
    Cancelled,
    FinishReason,
    Generation,
    Health,
    SamplingParams,
    Server,
)
from rollouts.inference.transport import Response, Transport

MAX_QUOTED_CHARACTERS = 300
LARGEST_TOKEN_ID = 2**31 - 1
LOWEST_LOGPROB = -1e6


class VllmAdapter:
    """Generate through `/v1/completions` of vLLM, and of servers of the same shape."""

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport or Transport()

    def generate(
        self,
        server: Server,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
    ) -> Generation:
        """Sample one turn; raise an InferenceFault. `cancelled` is polled four times a second."""
        check_context(server, prompt_ids, sampling)
        started = time.monotonic()
        try:
            response = self._transport.request(
                "POST",
                f"{server.url.rstrip('/')}/v1/completions",
                json=_request_body(server, prompt_ids, sampling),
                timeout_seconds=timeout_seconds,
                cancelled=cancelled,
            )
            raise_for_status(response, server)
            return _generation(response, server, sampling, time.monotonic() - started)
        except InferenceFault as fault:
            fault.server_id = server.id
            raise

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        """Ask whether the server answers and whether it serves the model it is registered for."""
        base = server.url.rstrip("/")
        try:
            health = self._transport.request(
                "GET", f"{base}/health", timeout_seconds=timeout_seconds
            )
            if health.status != 200:
                return Health(False, f"/health answered {health.status}")
            models = self._transport.request(
                "GET", f"{base}/v1/models", timeout_seconds=timeout_seconds
            )
            raise_for_status(models, server)
            cards = {card["id"]: card for card in _json(models)["data"]}
        except InferenceFault as fault:
            return Health(False, str(fault))
        except (KeyError, TypeError):
            return Health(False, "/v1/models is no list of models")
        card = cards.get(server.model)
        if card is None:
            served = ", ".join(sorted(map(str, cards))) or "nothing"
            return Health(False, f"serves {served}, not {server.model}")
        length = card.get("max_model_len")
        return Health(
            ok=True,
            detail=f"serves {server.model}",
            model=server.model,
            policy_version=_version(card.get("weight_version")),
            max_model_len=length if isinstance(length, int) else None,
        )


def check_context(server: Server, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
    """Raise ContextFull when prompt and answer cannot fit the server's model."""
    if server.max_model_len is None:
        return
    if len(prompt_ids) + sampling.max_tokens > server.max_model_len:
        raise ContextFull(
            f"{len(prompt_ids)} prompt tokens and {sampling.max_tokens} new ones exceed "
            f"the {server.max_model_len} of {server.model}",
            server_id=server.id,
        )


def raise_for_status(response: Response, server: Server) -> None:
    """Raise the fault that a status stands for; return for 200."""
    status = response.status
    if status == 200:
        return
    said = f"{server.url} answered {status}: {_quote(response.body)}"
    retry_after = _seconds(response.headers.get("retry-after"))
    if status == 429 or (status == 503 and retry_after is not None):
        raise ServerOverloaded(said, retry_after_seconds=retry_after)
    if status == 404 and b"model" in response.body:
        raise WrongModel(said)
    if status == 400 and b"maximum context length" in response.body:
        raise ContextFull(said)
    if status >= 500:
        raise ServerFailed(said)
    raise RequestRejected(said)


def _request_body(
    server: Server, prompt_ids: Sequence[int], sampling: SamplingParams
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": list(prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "logprobs": 0,
        "return_token_ids": True,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body


def _generation(
    response: Response, server: Server, sampling: SamplingParams, seconds: float
) -> Generation:
    body = _json(response)
    try:
        (choice,) = body["choices"]
        ids, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = choice["logprobs"]["token_logprobs"]
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedAnswer(
            f"{server.url} left out {error!s}: token_ids, finish_reason and logprobs are needed"
        ) from error
    mode = body.get("logprobs_mode")
    return Generation(
        token_ids=_checked_ids(ids, server, sampling),
        logprobs=_checked_logprobs(logprobs, ids, server),
        finish_reason=_finish_reason(reason, server),
        policy_version=_choice_version(choice),
        server_id=server.id,
        seconds=seconds,
        logprob_mode=mode if isinstance(mode, str) else None,
    )


def _checked_ids(ids: Any, server: Server, sampling: SamplingParams) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(map(_is_id, ids)):
        raise MalformedAnswer(f"{server.url} sent token_ids that are no list of ids")
    if not 1 <= len(ids) <= sampling.max_tokens:
        raise MalformedAnswer(f"{server.url} sent {len(ids)} ids for 1 to {sampling.max_tokens}")
    return tuple(ids)


def _is_id(token: Any) -> bool:
    return type(token) is int and 0 <= token <= LARGEST_TOKEN_ID


def _checked_logprobs(values: Any, ids: list[int], server: Server) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != len(ids):
        raise MalformedAnswer(f"{server.url} sent log-probabilities that do not match the ids")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Rounding can put a certain token a hair above 0. NaN and infinities fail this too.
        if not number or not LOWEST_LOGPROB <= value <= 1e-3:
            raise MalformedAnswer(f"{server.url} sent {value!r} as a log-probability")
    return tuple(float(value) for value in values)


def _finish_reason(reason: Any, server: Server) -> FinishReason:
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    if reason == "abort":
        raise ServerFailed(f"{server.url} aborted the request")
    raise MalformedAnswer(f"{server.url} sent {reason!r} as finish_reason")


def _choice_version(choice: dict[str, Any]) -> int | None:
    """Return the version of the last token, where the server tells versions of its weights."""
    try:
        return _version(choice["weight_versions"][-1]["version"])
    except (KeyError, TypeError, IndexError):
        return None


def _version(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _json(response: Response) -> dict[str, Any]:
    try:
        body = json.loads(response.body)
    except (ValueError, RecursionError) as error:
        raise MalformedAnswer(f"the answer is not JSON: {_quote(response.body)}") from error
    if not isinstance(body, dict):
        raise MalformedAnswer(f"the answer is no object: {_quote(response.body)}")
    return body


def _seconds(value: str | None) -> float | None:
    try:
        seconds = float(value or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _quote(body: bytes) -> str:
    return body[:MAX_QUOTED_CHARACTERS].decode("utf-8", "replace")
