"""A server of vLLM's shape that takes its time: what many rollouts wait for. No model is in here.

`python -m benchmarks.rollouts.slow_server --help`. An answer is a line that the `command_line`
agent understands; which one follows from how many turns the prompt holds. `POST /_control` says
how long an answer takes, or that answers are held until so many requests wait together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from rollouts.inference.rendering import load_renderer
from rollouts.inference.tokenizer_folder import TokenizerFolder

MODEL = "slow-not-a-model"
CONTEXT_LENGTH = 32_768
BACKLOG = 2048
# With one token the service tries out what log-probabilities are of, whenever it checks servers.
PROBE_TOKENS = 1
JSON = dict[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Script:
    """Know what is said in each turn: a command that differs, and `submit` in the last."""

    def __init__(self, tokenizer: Path, *, turns: int, tokens: int) -> None:
        folder = TokenizerFolder(tokenizer)
        probe = [{"role": "user", "content": "a"}]
        without = folder.apply_template(messages=probe, add_generation_prompt=False)
        opening = folder.apply_template(messages=probe, add_generation_prompt=True)
        self._opening = folder.encode_with_control(opening[len(without) :])
        end = load_renderer(tokenizer).stop_token_ids[0]
        lines = [f"echo turn {turn}" for turn in range(turns - 1)]
        padded = [[*folder.encode_with_control(line), end] for line in lines]
        words = folder.encode_with_control(" word")
        self._lines = [
            [*ids[:-1], *(words * max(0, (tokens - len(ids)) // len(words))), end] for ids in padded
        ]
        self._lines.append([*folder.encode_with_control("submit 7"), end])

    def next_line(self, prompt: Sequence[int]) -> list[int]:
        """Return the next turn's ids."""
        first, size = self._opening[0], len(self._opening)
        turn = sum(
            list(prompt[place : place + size]) == self._opening
            for place, token in enumerate(prompt)
            if token == first
        )
        return self._lines[min(turn - 1, len(self._lines) - 1)]


class SlowServer:
    """An ASGI application that answers after a while, in `events` parts or whole."""

    def __init__(self, script: Script, *, latency_seconds: float, events: int) -> None:
        self._script = script
        self._latency = latency_seconds
        self._events = events
        self._together = 0
        self._held: list[asyncio.Future[None]] = []
        self._answered = self._in_flight = self._peak = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        match scope["path"]:
            case "/v1/completions":
                await self._complete(await _body(receive), receive, send)
            case "/_control":
                self._control(await _body(receive))
                await _answer(send, self._state())
            case "/_state":
                await _answer(send, self._state())
            case "/v1/models":
                card = {"id": MODEL, "object": "model", "max_model_len": CONTEXT_LENGTH}
                await _answer(send, {"object": "list", "data": [card]})
            case "/health":
                await _answer(send, {"status": "ok"})
            case path:
                await _answer(send, {"error": {"message": f"nothing at {path}"}}, status=404)

    def _state(self) -> JSON:
        return {
            "answered": self._answered,
            "in_flight": self._in_flight,
            "peak_in_flight": self._peak,
            "held": len(self._held),
        }

    def _control(self, asked: JSON) -> None:
        """Hold answers until `together` requests wait (0: no longer), and set the latency."""
        self._latency = float(asked.get("latency_seconds", self._latency))
        self._together = int(asked.get("together", self._together))
        self._release()

    def _release(self) -> None:
        if len(self._held) < self._together:
            return
        held, self._held = self._held, []
        for each in held:
            if not each.done():
                each.set_result(None)

    async def _complete(self, asked: JSON, receive: Receive, send: Send) -> None:
        if asked["max_tokens"] == PROBE_TOKENS:
            # No rollout's. Held with them it would be taken for one, and one of them be left out.
            await self._say(asked, send, 0.0)
            return
        self._in_flight += 1
        self._peak = max(self._peak, self._in_flight)
        work = asyncio.create_task(self._work(asked, send))
        left = asyncio.create_task(_until_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            self._answered += work.done() and work.exception() is None
        finally:
            self._in_flight -= 1
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)

    async def _work(self, asked: JSON, send: Send) -> None:
        await self._wait_for_others()
        await self._say(asked, send, self._latency)

    async def _say(self, asked: JSON, send: Send, seconds: float) -> None:
        """Answer, in so many seconds."""
        ids = self._script.next_line(asked["prompt"])[: asked["max_tokens"]]
        if not asked.get("stream") or not self._events:
            await asyncio.sleep(seconds)
            await _answer(send, _part(asked, ids, first=True, last=True))
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in _parts(asked, ids, self._events):
            await asyncio.sleep(seconds / self._events)
            await _event(send, json.dumps(part))
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": len(ids)}
        await _event(send, json.dumps({"model": MODEL, "choices": [], "usage": usage}))
        await _event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})

    async def _wait_for_others(self) -> None:
        if not self._together:
            return
        held = asyncio.get_running_loop().create_future()
        self._held.append(held)
        self._release()
        try:
            await held
        finally:
            if held in self._held:
                self._held.remove(held)


def _parts(asked: JSON, ids: Sequence[int], count: int) -> Iterator[JSON]:
    size = max(1, -(-len(ids) // count))
    for start in range(0, len(ids), size):
        yield _part(asked, ids[start : start + size], start == 0, start + size >= len(ids))


def _part(asked: JSON, ids: Sequence[int], first: bool, last: bool) -> JSON:
    choice: JSON = {
        "index": 0,
        "text": "",
        "token_ids": list(ids),
        "logprobs": {"token_logprobs": [-0.25] * len(ids)},
        "finish_reason": "stop" if last else None,
    }
    if first:
        choice["prompt_token_ids"] = asked["prompt"]
    return {"object": "text_completion", "model": MODEL, "choices": [choice]}


async def _body(receive: Receive) -> JSON:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            found: JSON = json.loads(body or b"{}")
            return found


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _answer(send: Send, body: JSON, *, status: int = 200) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def _event(send: Send, data: str) -> None:
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})


def main() -> None:
    """Serve until the process is told to end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts.slow_server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer folder")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64, help="of a turn")
    parser.add_argument("--latency", type=float, default=2.0, help="seconds")
    parser.add_argument("--events", type=int, default=8, help="0: answers are not streamed")
    options = parser.parse_args()
    script = Script(options.tokenizer, turns=options.turns, tokens=options.tokens)
    app = SlowServer(script, latency_seconds=options.latency, events=options.events)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
