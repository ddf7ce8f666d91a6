"""What comes in, in vLLM's field names: completions, token-level generation, chat."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from examples.tiny_server.fields import (
    Limits,
    answer_room,
    check_model,
    flag,
    integer,
    mapping,
    number,
    prompt_ids,
    refuse,
    text,
    token_ids,
)
from examples.tiny_server.sampling import Sampling

DEFAULT_MAX_TOKENS = 16
Encode = Callable[[str], list[int]]

# Fields that would change the answer, and that nothing here heeds.
REFUSED = (
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "echo",
    "frequency_penalty",
    "functions",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "prompt_logprobs",
    "response_format",
    "stop",
    "structured_outputs",
    "suffix",
    "tools",
)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """Hold one checked request. `logprobs` None leaves log-probabilities out.

    `request_id` is the body's own, empty when it has none.
    """

    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    seed: int | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    logprobs: int | None
    return_token_ids: bool
    stream: bool = False
    include_usage: bool = False
    return_weight_versions: bool = False
    tokens_as_ids: bool = False
    cache_salt: str = ""
    request_id: str = ""


def parse_completion(
    body: dict[str, Any], limits: Limits, encode: Encode, *, streams: bool = False
) -> CompletionRequest:
    """Check the body of `/v1/completions`; raise HttpError 404 for another model, 400 else.

    Streams are refused unless the caller says that it `streams`.
    """
    check_model(body, limits)
    if body.get("stream") and not streams:
        raise refuse("stream", "stream is not supported")
    ids = prompt_ids(body.get("prompt"), "prompt", limits, encode)
    return _request(
        body,
        body,
        limits,
        ids,
        max_tokens=answer_room(body, "max_tokens", DEFAULT_MAX_TOKENS, limits, ids),
        logprobs=integer(body, "logprobs", None, 0, 1),
    )


def parse_generate(body: dict[str, Any], limits: Limits) -> CompletionRequest:
    """Check the body of `/inference/v1/generate`, in its `tokens` mode."""
    check_model(body, limits)
    if body.get("output_mode", "tokens") != "tokens":
        raise refuse("output_mode", "output_mode must be tokens")
    params = mapping(body, "sampling_params")
    ids = prompt_ids(
        token_ids(body.get("token_ids"), "token_ids", limits), "token_ids", limits, _no
    )
    return _request(
        body,
        params,
        limits,
        ids,
        max_tokens=answer_room(params, "max_tokens", None, limits, ids),
        logprobs=integer(params, "logprobs", None, 0, 1),
    )


def parse_chat(
    body: dict[str, Any], limits: Limits, render: Callable[[dict[str, Any]], list[int]]
) -> CompletionRequest:
    """Check the body of `/v1/chat/completions`; `render` turns its messages into ids."""
    check_model(body, limits)
    ids = prompt_ids(render(body), "messages", limits, _no)
    named = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    top = integer(body, "top_logprobs", 0, 0, 1)
    return _request(
        body,
        body,
        limits,
        ids,
        max_tokens=answer_room(body, named, None, limits, ids),
        logprobs=top if flag(body, "logprobs") else None,
    )


def _no(_text: str) -> list[int]:
    raise AssertionError("these prompts are ids already")


def _request(
    body: dict[str, Any],
    params: dict[str, Any],
    limits: Limits,
    ids: list[int],
    *,
    max_tokens: int,
    logprobs: int | None,
) -> CompletionRequest:
    """Read what all three have in common: sampling from `params`, the rest from `body`."""
    for name in REFUSED:
        if body.get(name) or params.get(name):
            raise refuse(name, f"{name} is not supported")
    if number(params, "repetition_penalty", 1.0, 0.0, 2.0, above=True) != 1.0:
        raise refuse("repetition_penalty", "repetition_penalty must be 1")
    if integer(params, "n", 1, 1, None) != 1:
        raise refuse("n", "n must be 1")
    options = mapping(body, "stream_options")
    if options.get("continuous_usage_stats"):
        raise refuse("stream_options", "continuous_usage_stats is not supported")
    sampling = Sampling(
        temperature=number(params, "temperature", 1.0, 0.0, 100.0),
        top_p=number(params, "top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(integer(params, "top_k", 0, -1, None) or 0, 0),
    )
    stop_ids = token_ids(params.get("stop_token_ids") or [], "stop_token_ids", limits)
    return CompletionRequest(
        prompt=ids,
        max_tokens=max_tokens,
        sampling=sampling,
        seed=integer(params, "seed", None, 0, None),
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=flag(params, "ignore_eos"),
        logprobs=logprobs,
        return_token_ids=flag(body, "return_token_ids"),
        stream=flag(body, "stream"),
        include_usage=flag(options, "include_usage"),
        return_weight_versions=flag(body, "return_weight_versions"),
        tokens_as_ids=flag(body, "return_tokens_as_token_ids"),
        cache_salt=text(body, "cache_salt"),
        request_id=text(body, "request_id"),
    )
