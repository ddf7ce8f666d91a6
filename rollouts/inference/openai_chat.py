"""Speak the chat completions that every provider has: messages in, text and tool calls out."""

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rollouts.inference.answers import as_count, parse_object
from rollouts.inference.exceptions import InferenceFault, MalformedAnswer
from rollouts.inference.parsed import ParsedTurn, ToolCall
from rollouts.inference.parsing.values import clean_name, read_arguments, usable_id
from rollouts.inference.protocol import (
    Cancelled,
    ChatAnswer,
    FinishReason,
    Health,
    Message,
    SamplingParams,
    Server,
)
from rollouts.inference.statuses import raise_for_status
from rollouts.inference.transport import Response, Transport
from rollouts.text import clean_text

FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "content_filter": "stop",
    "length": "length",
}
# The newer name first; servers that do not know it say so.
LIMIT_NAMES = ("max_completion_tokens", "max_tokens")


class OpenAIChatAdapter:
    """Chat with a server that gives text alone. For evaluation: nothing here can be trained on.

    `api_keys` maps the names of hosts to keys: a key is sent to its own host and no other,
    whatever address a server is registered with. Keys are never logged or quoted.
    """

    def __init__(
        self, transport: Transport | None = None, *, api_keys: Mapping[str, str] | None = None
    ) -> None:
        self._transport = transport or Transport()
        self._api_keys = {host.lower(): key for host, key in (api_keys or {}).items()}
        self._older: set[str] = set()

    def __repr__(self) -> str:
        return "OpenAIChatAdapter()"

    def chat(
        self,
        server: Server,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        *,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
    ) -> ChatAnswer:
        """Sample one turn as text and tool calls; raise an InferenceFault."""
        deadline = time.monotonic() + timeout_seconds
        try:
            while True:
                started = time.monotonic()
                limit = LIMIT_NAMES[server.url in self._older]
                response = self._transport.request(
                    "POST",
                    f"{_base(server)}/v1/chat/completions",
                    json=_request_body(server, messages, tools, sampling, limit),
                    headers=self._headers(server),
                    timeout_seconds=deadline - started,
                    cancelled=cancelled,
                )
                if self._knows_only_older_name(response, server, limit):
                    continue
                raise_for_status(response, server)
                return _answer(parse_object(response.body), server, time.monotonic() - started)
        except InferenceFault as fault:
            fault.server_id = server.id
            raise

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        """Ask `/v1/models` whether the server answers and has the model."""
        try:
            response = self._transport.request(
                "GET",
                f"{_base(server)}/v1/models",
                headers=self._headers(server),
                timeout_seconds=timeout_seconds,
            )
            raise_for_status(response, server)
            names = {card["id"] for card in parse_object(response.body)["data"]}
        except InferenceFault as fault:
            return Health(False, str(fault))
        except (KeyError, TypeError):
            return Health(False, "/v1/models is no list of models")
        if server.model not in names:
            return Health(False, f"does not serve {server.model}")
        return Health(True, f"serves {server.model}, as text alone", model=server.model)

    def _headers(self, server: Server) -> dict[str, str]:
        parts = urlsplit(server.url)
        key = self._api_keys.get((parts.hostname or "").lower())
        local = parts.hostname in ("127.0.0.1", "::1", "localhost")
        # Over plain HTTP anybody on the way could read the key.
        allowed = key is not None and (parts.scheme == "https" or local)
        return {"Authorization": f"Bearer {key}"} if allowed else {}

    def _knows_only_older_name(self, response: Response, server: Server, limit: str) -> bool:
        refused = response.status in (400, 422) and LIMIT_NAMES[0].encode() in response.body
        if refused and limit == LIMIT_NAMES[0]:
            self._older.add(server.url)
            return True
        return False


def _base(server: Server) -> str:
    return server.url.rstrip("/").removesuffix("/v1")


def _request_body(
    server: Server,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    limit: str,
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": server.model,
        "messages": [dict(message) for message in messages],
        limit: sampling.max_tokens,
    }
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    # Some models refuse these at all, so they are sent only where they say something.
    if sampling.temperature != 1.0:
        body["temperature"] = sampling.temperature
    if sampling.top_p != 1.0:
        body["top_p"] = sampling.top_p
    if sampling.top_k is not None:
        body["top_k"] = sampling.top_k
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body


def _answer(body: dict[str, Any], server: Server, seconds: float) -> ChatAnswer:
    try:
        (choice,) = body["choices"]
        message, reason = choice["message"], FINISH_REASONS[choice["finish_reason"]]
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = tuple(
            _call(call, place) for place, call in enumerate(message.get("tool_calls") or [])
        )
        usage = body.get("usage") or {}
        prompt = as_count(usage.get("prompt_tokens")) or 0
        sampled = as_count(usage.get("completion_tokens")) or 0
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedAnswer(f"{server.url} left out or misshaped {error!s}") from error
    if not isinstance(content, str) or not isinstance(reasoning, str | None):
        raise MalformedAnswer(f"{server.url} sent content that is no text")
    if not (content or reasoning or calls) and reason == "stop" and not sampled:
        raise MalformedAnswer(f"{server.url} sent an empty answer")
    reasoning = None if reasoning is None else clean_text(reasoning)
    return ChatAnswer(
        parsed=ParsedTurn(clean_text(content), reasoning, calls),
        finish_reason=reason,
        server_id=server.id,
        seconds=seconds,
        prompt_tokens=prompt,
        sampled_tokens=sampled,
    )


def _call(call: Mapping[str, Any], place: int) -> ToolCall:
    function = call["function"]
    name, text = function["name"], function["arguments"]
    if not isinstance(name, str) or not isinstance(text, str):
        raise TypeError("a tool call")
    name, call_id = clean_name(name), usable_id(str(call.get("id") or ""))
    return ToolCall(call_id or f"call_{place}", name, *read_arguments(text or "{}", name))
