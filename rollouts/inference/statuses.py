"""Turn HTTP statuses into the faults that they stand for."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from rollouts.inference.exceptions import (
    ContextFull,
    InferenceFault,
    RequestRejected,
    ServerFailed,
    ServerOverloaded,
    WrongModel,
)
from rollouts.inference.protocol import SamplingParams, Server
from rollouts.inference.transport import Response

MAX_QUOTED_CHARACTERS = 300
LONGEST_RETRY_AFTER_SECONDS = 600.0
# How vLLM, SGLang (two) and llama.cpp say that a prompt is too long.
CONTEXT_PHRASES = (
    "maximum context length",
    "model's context length",
    "maximum allowed length",
    "exceed_context_size_error",
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
    if response.status == 200:
        return
    said = f"{server.url} answered {response.status}: {quote(response.body)}"
    retry_after = retry_after_seconds(response.headers.get("retry-after"))
    raise fault_of_status(response.status, said, retry_after)


def fault_of_status(status: int, said: str, retry_after: float | None = None) -> InferenceFault:
    """Return the fault that a status and the server's words stand for."""
    if status == 429 or (status == 503 and retry_after is not None):
        return ServerOverloaded(said, retry_after_seconds=retry_after)
    if status == 404 and "model" in said.lower():
        return WrongModel(said)
    if status in (400, 413, 422) and any(phrase in said for phrase in CONTEXT_PHRASES):
        return ContextFull(said)
    if status >= 500:
        return ServerFailed(said)
    return RequestRejected(said)


def retry_after_seconds(value: str | None) -> float | None:
    """Return what a Retry-After header asks for, in seconds or as an HTTP date; at most 600."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        if date.tzinfo is None:
            date = date.replace(tzinfo=UTC)
        seconds = max(0.0, (date - datetime.now(UTC)).total_seconds())
    if not math.isfinite(seconds) or seconds < 0:
        return None
    return min(seconds, LONGEST_RETRY_AFTER_SECONDS)


def quote(body: bytes) -> str:
    """Return the beginning of a body, for people."""
    return body[:MAX_QUOTED_CHARACTERS].decode("utf-8", "replace")
