"""Serve the model over HTTP: completions, models, health."""

import time
from collections.abc import Sequence as Ids
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from examples.tiny_server.engine import Engine, EngineStoppedError, Sequence
from examples.tiny_server.json_http import Answer, Exchange, HangUpError, HttpError, JsonServer
from examples.tiny_server.model import Model
from examples.tiny_server.tokenizer import cached_tokenizer
from examples.tiny_server.weights import load_weights
from examples.tiny_server.wire import CompletionRequest, Limits, completion_body, parse_completion

MODEL_NAME = "smollm2-135m-instruct"
DISCONNECT_POLL_SECONDS = 0.1


class TinyServer:
    """Hold the engine, the tokenizer and the HTTP server of one process."""

    def __init__(
        self,
        *,
        cache_dir: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = MODEL_NAME,
    ) -> None:
        self.model = Model(load_weights(cache_dir))
        self.engine = Engine(self.model)
        self.model_name = model_name
        folder = cached_tokenizer(cache_dir)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = self.model.config
        self._limits = Limits(model_name, config.vocabulary, config.context_length)
        self._started_at = int(time.time())
        self.http = JsonServer(
            (host, port),
            {
                ("GET", "/health"): self._health,
                ("GET", "/v1/models"): self._models,
                ("POST", "/v1/completions"): self._complete,
            },
        )

    @property
    def url(self) -> str:
        """Return the address that clients use."""
        return self.http.url

    def serve(self) -> None:
        """Serve until `shutdown` is called."""
        self.engine.start()
        try:
            self.http.serve_forever(poll_interval=0.1)
        finally:
            self.http.server_close()
            self.engine.stop()

    def shutdown(self) -> None:
        """Make `serve` return. Call it from another thread."""
        self.http.shutdown()

    def _health(self, _exchange: Exchange) -> Answer:
        running, waiting = self.engine.load
        alive = self.engine.alive
        state = {"status": "ok" if alive else "failed", "running": running, "waiting": waiting}
        return Answer({**state, "model": self.model_name}, 200 if alive else 503)

    def _models(self, _exchange: Exchange) -> Answer:
        card = {
            "id": self.model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "tiny_server",
            "max_model_len": self._limits.context_length,
        }
        return Answer({"object": "list", "data": [card]})

    def _complete(self, exchange: Exchange) -> Answer:
        request = parse_completion(exchange.json(), self._limits, self._encode)
        sequence = self._run(request, exchange)
        assert sequence.finish_reason is not None
        body = completion_body(
            request,
            sequence.choices,
            model=self.model_name,
            finish_reason=sequence.finish_reason,
            eos_token_id=self.model.config.eos_token_id,
            decode=self._decode,
        )
        return Answer(body)

    def _run(self, request: CompletionRequest, exchange: Exchange) -> Sequence:
        eos = () if request.ignore_eos else (self.model.config.eos_token_id,)
        sequence = Sequence(
            prompt=np.asarray(request.prompt, dtype=np.int64),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            random=np.random.default_rng(request.seed),
            stop_ids=request.stop_token_ids.union(eos),
        )
        try:
            self.engine.submit(sequence)
        except EngineStoppedError as error:
            raise HttpError(503, str(error)) from error
        while not sequence.done.wait(DISCONNECT_POLL_SECONDS):
            if not exchange.connected():
                sequence.cancelled = True
        if sequence.cancelled:
            raise HangUpError
        if sequence.failure is not None:
            raise HttpError(503, f"the request was dropped: {sequence.failure}")
        return sequence

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: Ids[int], skip_special: bool) -> str:
        decoded: Any = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return str(decoded)
