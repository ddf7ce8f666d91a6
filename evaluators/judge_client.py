"""Ask a judge's server for votes: OpenAI's chat completions, with retries inside a deadline."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evaluators.base import JudgeRefused, JudgeUnavailable
from evaluators.judge_cache import VoteCache
from evaluators.judge_verdict import Judge, Vote

if TYPE_CHECKING:
    import httpx

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
OURS = frozenset({401, 402, 403, 404, 405, 407, 410})
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 20.0
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_PARALLEL = 8
SHOWN_CHARACTERS = 300


class _Later(Exception):
    """Say that the request may be sent again; `seconds` is what the server asks to wait."""

    def __init__(self, reason: str, seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.seconds = seconds


def ask(
    judge: Judge,
    messages: Sequence[dict[str, str]],
    seeds: Sequence[int],
    *,
    cache: VoteCache,
    seconds: float,
) -> list[Vote]:
    """Return a vote for each seed, in order.

    Raises `JudgeUnavailable` when the server gives no answer within the seconds or does not let us
    in, `JudgeRefused` when it refuses what it was sent. No message holds the key.
    """
    return asyncio.run(_ask(judge, messages, seeds, cache, time.monotonic() + seconds))


async def _ask(
    judge: Judge,
    messages: Sequence[dict[str, str]],
    seeds: Sequence[int],
    cache: VoteCache,
    deadline: float,
) -> list[Vote]:
    import httpx

    headers = {"Authorization": f"Bearer {judge.api_key}"} if judge.api_key else {}
    room = asyncio.Semaphore(MAX_PARALLEL)
    # No proxies and no .netrc of the process's surroundings; redirects are not followed.
    # Certificates are a tenth of a second to load: only where there is something to verify.
    verify = judge.url.lower().startswith("https:")
    async with httpx.AsyncClient(headers=headers, trust_env=False, verify=verify) as client:

        async def one(seed: int) -> Vote:
            body = judge.body(messages, seed)
            key = hashlib.sha256(json.dumps([judge.url, body]).encode()).hexdigest()
            kept = _kept(cache.get(key), seed)
            if kept is not None:
                return kept
            async with room:
                vote = await _insist(client, judge, body, deadline)
            cache.put(key, _plain(vote))
            return vote

        tasks = [asyncio.ensure_future(one(seed)) for seed in seeds]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _insist(
    client: httpx.AsyncClient, judge: Judge, body: dict[str, Any], deadline: float
) -> Vote:
    wait = FIRST_WAIT_SECONDS
    requests = 0
    while True:
        requests += 1
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise _Later("there is no time left")
            vote = await asyncio.wait_for(
                _send(client, judge, body), min(left, judge.request_seconds)
            )
            return replace(vote, requests=requests)
        except (_Later, TimeoutError) as fault:
            reason = str(fault) or f"no answer within {min(left, judge.request_seconds):g} seconds"
            asked = fault.seconds if isinstance(fault, _Later) else 0.0
        pause = max(min(wait, LONGEST_WAIT_SECONDS), min(asked, 600.0))
        if requests > judge.retries or time.monotonic() + pause >= deadline:
            raise JudgeUnavailable(
                f"the judge at {judge.url} gave no vote in {requests} requests: "
                f"{_shown(judge, reason)}"
            )
        await asyncio.sleep(pause)
        wait *= 2


async def _send(client: httpx.AsyncClient, judge: Judge, body: dict[str, Any]) -> Vote:
    import httpx

    address = judge.url.rstrip("/") + "/chat/completions"
    try:
        async with client.stream("POST", address, json=body, timeout=None) as response:
            data = b""
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise _Later(f"its answer has more than {MAX_BODY_BYTES} bytes")
    except (httpx.TransportError, httpx.DecodingError) as error:
        raise _Later(f"{type(error).__name__}: {error}") from error
    if response.status_code != 200:
        _refuse(judge, response, data)
    return _vote(judge, data, body["seed"])


def _refuse(judge: Judge, response: httpx.Response, data: bytes) -> None:
    status = response.status_code
    said = _shown(judge, f"HTTP {status}: {data[:2000].decode(errors='replace')}")
    if status in RETRIED:
        raise _Later(said, _retry_after(response.headers.get("Retry-After", "")))
    if status in OURS or status < 400 or status >= 500:
        raise JudgeUnavailable(
            f"the judge at {judge.url} does not serve us; check its url, model and key. {said}"
        )
    raise JudgeRefused(f"the judge at {judge.url} refuses what it was to judge. {said}")


def _retry_after(text: str) -> float:
    return float(text) if text.isdecimal() and len(text) < 6 else 0.0


def _vote(judge: Judge, data: bytes, seed: int) -> Vote:
    try:
        body = json.loads(data)
        choice = body["choices"][0]
        text = choice["message"]["content"]
        usage = body.get("usage") or {}
        if not isinstance(text, str | None):
            raise TypeError("content is no text")
        return Vote(
            text=_without_key(judge, text or ""),
            seed=seed,
            finish_reason=str(choice.get("finish_reason"))[:50],
            tokens_in=_count(usage.get("prompt_tokens")),
            tokens_out=_count(usage.get("completion_tokens")),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _Later(f"its answer is no chat completion: {data[:200]!r}") from error


def _count(value: Any) -> int | None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**9
    return value if is_count else None


def _shown(judge: Judge, text: str) -> str:
    """Return a server's words short, and without the key that it may echo."""
    return " ".join(_without_key(judge, text).split())[:SHOWN_CHARACTERS]


def _without_key(judge: Judge, text: str) -> str:
    return text.replace(judge.api_key, "***") if judge.api_key else text


def _plain(vote: Vote) -> dict[str, Any]:
    return {
        "text": vote.text,
        "finish_reason": vote.finish_reason,
        "tokens_in": vote.tokens_in,
        "tokens_out": vote.tokens_out,
    }


def _kept(body: dict[str, Any] | None, seed: int) -> Vote | None:
    if body is None or not isinstance(body.get("text"), str):
        return None
    return Vote(
        text=body["text"],
        seed=seed,
        finish_reason=str(body.get("finish_reason")),
        tokens_in=_count(body.get("tokens_in")),
        tokens_out=_count(body.get("tokens_out")),
        cached=True,
        requests=0,
    )
