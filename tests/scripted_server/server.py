"""Serve a script, and misbehave on demand."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.tiny_server.answers import completion_body
from examples.tiny_server.fields import Limits
from examples.tiny_server.json_http import (
    Answer,
    Exchange,
    HangUpError,
    HttpError,
    JsonServer,
)
from examples.tiny_server.sampling import Choice
from examples.tiny_server.wire import CompletionRequest, parse_completion
from rollouts.inference.rendering import load_renderer
from rollouts.inference.tokenizer_folder import TokenizerFolder
from tests.scripted_server.script import Line, parse_script

MODEL_NAME = "scripted-not-a-model"
CONTEXT_LENGTH = 32_768
MODES = (
    *("ok", "hold", "http500", "garbage", "hang", "mismatched", "nan", "overloaded", "disconnect"),
)
POLL_SECONDS = 0.05


def scripted_logprob(token: int, place: int) -> float:
    """Return a made-up log-probability, between -1.001 and -0.001; it measures nothing."""
    return -(1 + (token * 31 + place * 7) % 1000) / 1000


class ScriptedServer:
    """Hold the script, the mode and the HTTP server."""

    def __init__(
        self, *, tokenizer: Path, script: dict[str, Any], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._folder = TokenizerFolder(tokenizer)
        self._end_of_turn = load_renderer(tokenizer).stop_token_ids[0]
        self._script = parse_script(script, self._folder)
        self._lock = threading.Lock()
        self._mode = "ok"
        self._count: int | None = None
        self._delay_seconds = 0.0
        self._requests = self._answered = self._in_flight = self._peak_in_flight = 0
        self._stopped = threading.Event()
        vocabulary = self._folder.full.get_vocab_size(with_added_tokens=True)
        self._limits = Limits(MODEL_NAME, vocabulary, CONTEXT_LENGTH)
        self.http = JsonServer(
            (host, port),
            {
                ("GET", "/health"): self._health,
                ("GET", "/v1/models"): self._models,
                ("POST", "/v1/completions"): self._complete,
                ("GET", "/_control"): self._state,
                ("POST", "/_control"): self._control,
                ("POST", "/_script"): self._swap,
            },
            headers={"X-Scripted-Server": "true"},
        )

    @property
    def url(self) -> str:
        """Return the address that clients use."""
        return self.http.url

    def serve(self) -> None:
        """Serve until `shutdown` is called."""
        try:
            self.http.serve_forever(poll_interval=0.05)
        finally:
            self._stopped.set()
            self.http.server_close()

    def shutdown(self) -> None:
        """Make `serve` return. Call it from another thread."""
        self._stopped.set()
        self.http.shutdown()

    def _health(self, _exchange: Exchange) -> Answer:
        return Answer({"status": "ok", "scripted": True, "model": MODEL_NAME})

    def _models(self, _exchange: Exchange) -> Answer:
        card = {"id": MODEL_NAME, "object": "model", "max_model_len": CONTEXT_LENGTH}
        return Answer({"object": "list", "data": [card], "scripted": True})

    def _state(self, _exchange: Exchange) -> Answer:
        with self._lock:
            return Answer(
                {
                    "mode": self._mode,
                    "count": self._count,
                    "delay_seconds": self._delay_seconds,
                    "requests": self._requests,
                    "answered": self._answered,
                    "in_flight": self._in_flight,
                    "peak_in_flight": self._peak_in_flight,
                }
            )

    def _control(self, exchange: Exchange) -> Answer:
        body = exchange.json()
        mode, count = body.get("mode", "ok"), body.get("count")
        if mode not in MODES:
            raise HttpError(400, f"mode must be one of {', '.join(MODES)}")
        if count is not None and (type(count) is not int or count < 1):
            raise HttpError(400, "count must be a positive integer or null")
        delay_seconds = body.get("delay_seconds", 0.0)
        if type(delay_seconds) not in (int, float) or not 0 <= delay_seconds <= 600:
            raise HttpError(400, "delay_seconds must be a number from 0 to 600")
        with self._lock:
            self._mode, self._count = mode, count
            self._delay_seconds = float(delay_seconds)
        return self._state(exchange)

    def _swap(self, exchange: Exchange) -> Answer:
        self._script = parse_script(exchange.json(), self._folder)
        return Answer({"status": "ok"})

    def _complete(self, exchange: Exchange) -> Answer:
        asked = exchange.json()
        if isinstance(asked, dict) and asked.get("max_tokens") == 1:
            # The service's own question about log-probabilities: no turn, and counted as none.
            return self._answer("ok", exchange)
        mode, delay_seconds = self._enter()
        try:
            if delay_seconds:
                self._stopped.wait(delay_seconds)
            answer = self._answer(mode, exchange)
            with self._lock:
                self._answered += 1
            return answer
        finally:
            with self._lock:
                self._in_flight -= 1

    def _enter(self) -> tuple[str, float]:
        """Count a request in and say how to treat it; a counted mode ends with its last one."""
        with self._lock:
            self._requests += 1
            self._in_flight += 1
            self._peak_in_flight = max(self._peak_in_flight, self._in_flight)
            mode = self._mode
            if self._count is not None:
                self._count -= 1
                if self._count == 0:
                    self._mode, self._count = "ok", None
            return mode, self._delay_seconds

    def _answer(self, mode: str, exchange: Exchange) -> Answer:
        if mode == "http500":
            raise HttpError(500, "told to fail")
        if mode == "overloaded":
            raise HttpError(429, "told to be overloaded", headers={"Retry-After": "1"})
        if mode == "garbage":
            return Answer(b"<html>this is no JSON</html>")
        if mode == "disconnect":
            raise HangUpError
        if mode == "hang":
            while exchange.connected() and not self._stopped.wait(POLL_SECONDS):
                pass
            raise HangUpError
        while mode == self._mode == "hold" and exchange.connected() and not self._stopped.is_set():
            self._stopped.wait(POLL_SECONDS)
        # Who asks for a stream gets the answer in one piece, as from any server without streams.
        request = parse_completion(
            exchange.json(), self._limits, self._folder.encode_with_control, streams=True
        )
        line = self._script.next_line(request.prompt)
        if line.delay_seconds:
            self._stopped.wait(line.delay_seconds)
        return Answer(_spoil(self._play(line, request), mode))

    def _play(self, line: Line, request: CompletionRequest) -> dict[str, Any]:
        ids = self._folder.encode_with_control(line.text)
        if not line.cut:
            ids.append(self._end_of_turn)
        stopped = not line.cut and len(ids) <= request.max_tokens
        ids = ids[: request.max_tokens]
        choices = [
            Choice(token, scripted_logprob(token, place), token, scripted_logprob(token, place))
            for place, token in enumerate(ids)
        ]
        body = completion_body(
            request,
            choices,
            model=MODEL_NAME,
            finish_reason="stop" if stopped else "length",
            eos_token_id=self._end_of_turn,
            decode=self._decode,
        )
        return {**body, "logprobs_mode": "scripted", "scripted": True}

    def _decode(self, ids: Sequence[int], skip_special: bool) -> str:
        return self._folder.decode(ids, skip_special=skip_special)


def _spoil(body: dict[str, Any], mode: str) -> dict[str, Any]:
    logprobs = body["choices"][0]["logprobs"]
    if mode == "mismatched":
        logprobs["token_logprobs"].append(-0.5)
    elif mode == "nan":
        logprobs["token_logprobs"][0] = float("nan")
    return body


def read_script(path: Path) -> dict[str, Any]:
    """Return the script in a file."""
    body: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return body
