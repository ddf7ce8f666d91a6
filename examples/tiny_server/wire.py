"""vLLM's `/v1/completions` in its token-level form: what comes in, what goes out."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from examples.tiny_server.json_http import HttpError
from examples.tiny_server.sampling import Choice, Sampling

DEFAULT_MAX_TOKENS = 16
LOGPROBS_MODE = "after_temperature"
REFUSED = ("echo", "suffix", "prompt_logprobs", "stream", "stop", "logit_bias", "best_of")


@dataclass(frozen=True, slots=True)
class Limits:
    """Say what a request may ask for; lengths in tokens."""

    model: str
    vocabulary: int
    context_length: int


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Hold one checked request. `logprobs` None leaves log-probabilities out."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    seed: int | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    logprobs: int | None
    return_token_ids: bool


def parse_completion(
    body: dict[str, Any], limits: Limits, encode: Callable[[str], list[int]]
) -> CompletionRequest:
    """Check a request body; raise HttpError 404 for another model and 400 for what is wrong."""
    model = body.get("model", limits.model)
    if model != limits.model:
        raise HttpError(404, f"the model {model!r} does not exist here; {limits.model!r} does")
    for name in REFUSED:
        if body.get(name):
            raise HttpError(400, f"{name} is not supported")
    if _integer(body, "n", 1, 1, None) != 1:
        raise HttpError(400, "n must be 1")
    prompt = _prompt(body.get("prompt"), limits, encode)
    room = limits.context_length - len(prompt)
    max_tokens = _integer(body, "max_tokens", DEFAULT_MAX_TOKENS, 1, None)
    assert max_tokens is not None
    if max_tokens > room:
        raise HttpError(
            400,
            f"This model's maximum context length is {limits.context_length} tokens: "
            f"{len(prompt)} in the prompt and max_tokens {max_tokens} are more",
        )
    logprobs = _integer(body, "logprobs", None, 0, 1)
    top_k = _integer(body, "top_k", 0, -1, None) or 0
    sampling = Sampling(
        temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(top_k, 0),
    )
    return CompletionRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=_integer(body, "seed", None, 0, None),
        stop_token_ids=frozenset(_ids(body.get("stop_token_ids") or [], "stop_token_ids", limits)),
        ignore_eos=_flag(body, "ignore_eos"),
        logprobs=logprobs,
        return_token_ids=_flag(body, "return_token_ids"),
    )


def completion_body(
    request: CompletionRequest,
    choices: Sequence[Choice],
    *,
    model: str,
    finish_reason: str,
    eos_token_id: int,
    decode: Callable[[Sequence[int], bool], str],
) -> dict[str, Any]:
    """Return the answer. `decode` takes ids and whether to leave control tokens out.

    As vLLM does: the stop token is among the ids and not in the text; `stop_reason` is null
    for the model's own end of sequence and the id for any other stop token.
    """
    ids = [choice.token for choice in choices]
    stopped = finish_reason == "stop"
    text_ids = ids[:-1] if stopped else ids
    choice: dict[str, Any] = {
        "index": 0,
        "text": decode(text_ids, True),
        "logprobs": None if request.logprobs is None else _logprobs(request, choices, decode),
        "finish_reason": finish_reason,
        "stop_reason": ids[-1] if stopped and ids[-1] != eos_token_id else None,
        "token_ids": ids if request.return_token_ids else None,
        "prompt_token_ids": request.prompt if request.return_token_ids else None,
        "prompt_logprobs": None,
    }
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "logprobs_mode": LOGPROBS_MODE,
        "usage": {
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(request.prompt) + len(ids),
        },
    }


def _logprobs(
    request: CompletionRequest,
    choices: Sequence[Choice],
    decode: Callable[[Sequence[int], bool], str],
) -> dict[str, Any]:
    tokens = [decode([choice.token], False) for choice in choices]
    top: list[dict[str, float]] = []
    offsets: list[int] = []
    offset = 0
    for token, choice in zip(tokens, choices, strict=True):
        likely = {decode([choice.top_token], False): choice.top_logprob} if request.logprobs else {}
        top.append({token: choice.logprob, **likely})
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [choice.logprob for choice in choices],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _prompt(value: Any, limits: Limits, encode: Callable[[str], list[int]]) -> list[int]:
    if isinstance(value, str):
        value = encode(value)
    elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    ids = _ids(value, "prompt", limits)
    if not ids:
        raise HttpError(400, "the prompt is empty")
    if len(ids) >= limits.context_length:
        raise HttpError(
            400,
            f"This model's maximum context length is {limits.context_length} tokens: "
            f"the prompt has {len(ids)} and leaves no room",
        )
    return ids


def _ids(value: Any, name: str, limits: Limits) -> list[int]:
    if not isinstance(value, list) or any(type(token) is not int for token in value):
        raise HttpError(400, f"{name} must be one list of token ids")
    outside = [token for token in value if not 0 <= token < limits.vocabulary]
    if outside:
        raise HttpError(400, f"{name} holds {outside[0]}; ids go from 0 to {limits.vocabulary - 1}")
    return value


def _integer(
    body: dict[str, Any], name: str, default: int | None, low: int, high: int | None
) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise HttpError(400, f"{name} must be an integer, {limit}")
    return value


def _number(
    body: dict[str, Any], name: str, default: float, low: float, high: float, *, above: bool = False
) -> float:
    value = body.get(name)
    if value is None:
        return default
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (above and value <= low):
        edge = "above" if above else "from"
        raise HttpError(400, f"{name} must be a number {edge} {low:g} to {high:g}")
    return float(value)


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise HttpError(400, f"{name} must be true or false")
    return bool(value)
