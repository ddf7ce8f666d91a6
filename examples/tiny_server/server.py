"""Serve the model over HTTP, by the paths and in the shapes of vLLM."""

import json
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from examples.tiny_server.answers import Chat, Completions, Dialect, Ending, Generate, Voice
from examples.tiny_server.chat import ChatTemplate
from examples.tiny_server.control import Control
from examples.tiny_server.engine import (
    MAX_WAITING,
    NONSENSE,
    Engine,
    EnginePausedError,
    EngineStoppedError,
    QueueFullError,
)
from examples.tiny_server.fields import Limits, check_model, flag, refuse, token_ids
from examples.tiny_server.json_http import (
    Answer,
    EventStream,
    Exchange,
    HangUpError,
    HttpError,
    JsonServer,
    problem,
)
from examples.tiny_server.model import Model
from examples.tiny_server.sequences import Sequence
from examples.tiny_server.tensors import read_tensors, replaced
from examples.tiny_server.tokenizer import cached_tokenizer
from examples.tiny_server.weights import load_weights
from examples.tiny_server.wire import (
    CompletionRequest,
    parse_chat,
    parse_completion,
    parse_generate,
)

MODEL_NAME = "smollm2-135m-instruct"
DISCONNECT_POLL_SECONDS = 0.1
MAX_ID_CHARACTERS = 256

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")


@dataclass(frozen=True, slots=True)
class Options:
    """Say how to serve.

    `control` opens the routes that steer the server; `weights_dir` is where they may read
    weights from, nowhere when None. `weights` replaces tensors of the model from the start.
    """

    model_name: str = MODEL_NAME
    logprobs_mode: str = LOGPROBS_MODES[0]
    max_waiting: int = MAX_WAITING
    control: bool = False
    weights_dir: Path | None = None
    weights: Path | None = None
    weight_version: str = "default"


class TinyServer:
    """Hold the engine, the tokenizer and the HTTP server of one process."""

    def __init__(
        self,
        *,
        cache_dir: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        options: Options | None = None,
    ) -> None:
        self.options = options or Options()
        weights = load_weights(cache_dir)
        if self.options.weights is not None:
            weights = replaced(weights, read_tensors(self.options.weights))
        self.engine = Engine(
            Model(weights),
            max_waiting=self.options.max_waiting,
            raw_logprobs=self.options.logprobs_mode == "raw_logprobs",
            weight_version=self.options.weight_version,
        )
        folder = cached_tokenizer(cache_dir)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._template = ChatTemplate(folder, self._encode)
        config = weights.config
        self._limits = Limits(self.model_name, config.vocabulary, config.context_length)
        self._voice = Voice(
            self.model_name, config.eos_token_id, self._decode, self.options.logprobs_mode
        )
        self._started_at = int(time.time())
        routes: dict[tuple[str, str], Callable[[Exchange], Answer | EventStream]] = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/completions"): self._complete,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/inference/v1/generate"): self._generate,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
        }
        if self.options.control:
            routes |= Control(self.engine, self.options.weights_dir).routes()
        self.http = JsonServer((host, port), routes)

    @property
    def model_name(self) -> str:
        """Return the name that requests use."""
        return self.options.model_name

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
            "weight_version": self.engine.weight_version,
        }
        return Answer({"object": "list", "data": [card]})

    def _complete(self, exchange: Exchange) -> Answer | EventStream:
        request = parse_completion(exchange.json(), self._limits, self._encode, streams=True)
        return self._answer(Completions(request, self._voice, _header_id(exchange)), exchange)

    def _generate(self, exchange: Exchange) -> Answer | EventStream:
        request = parse_generate(exchange.json(), self._limits)
        return self._answer(Generate(request, self._voice, _header_id(exchange)), exchange)

    def _chat(self, exchange: Exchange) -> Answer | EventStream:
        request = parse_chat(exchange.json(), self._limits, self._template.render)
        return self._answer(Chat(request, self._voice, _header_id(exchange)), exchange)

    def _answer(self, dialect: Dialect, exchange: Exchange) -> Answer | EventStream:
        sequence = self._submit(dialect)
        if dialect.request.stream:
            events = self._events(dialect, sequence, exchange)
            return EventStream(events, lambda: self.engine.cancel(sequence))
        while not sequence.done.wait(DISCONNECT_POLL_SECONDS):
            if not exchange.connected():
                self.engine.cancel(sequence)
        return Answer(dialect.whole(sequence.choices, _ending(sequence)))

    def _submit(self, dialect: Dialect) -> Sequence:
        request = dialect.request
        sequence = Sequence(
            prompt=np.asarray(request.prompt, dtype=np.int64),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            random=np.random.default_rng(request.seed),
            stop_ids=self._stop_ids(request),
            names=dialect.names,
            salt=request.cache_salt,
        )
        try:
            self.engine.submit(sequence)
        except QueueFullError as error:
            raise HttpError(429, str(error), headers={"Retry-After": "1"}) from error
        except EnginePausedError as error:
            raise HttpError(503, str(error), headers={"Retry-After": "1"}) from error
        except EngineStoppedError as error:
            raise HttpError(503, str(error)) from error
        return sequence

    def _stop_ids(self, request: CompletionRequest) -> frozenset[int]:
        eos = () if request.ignore_eos else (self._voice.eos_token_id,)
        return request.stop_token_ids.union(eos)

    def _events(self, dialect: Dialect, sequence: Sequence, exchange: Exchange) -> Iterator[bytes]:
        """Give the parts of a streamed answer, each as soon as there is a token for it."""
        opening = dialect.opening()
        if opening is not None:
            yield json.dumps(opening).encode()
        sent = 0
        done = False
        while not done:
            sequence.news.wait(DISCONNECT_POLL_SECONDS)
            sequence.news.clear()
            if not exchange.connected():
                raise HangUpError
            # Read before the tokens: none comes after it is set.
            done = sequence.done.is_set()
            fresh = sequence.choices[sent:]
            # The last token goes out with the reason why it is the last.
            if not done and (not fresh or sequence.finish_reason is not None):
                continue
            sent += len(fresh)
            try:
                ending = _ending(sequence) if done else None
            except HttpError as error:
                yield json.dumps(problem(error)).encode()
                break
            yield json.dumps(dialect.part(fresh, ending)).encode()
            if ending is not None and dialect.request.include_usage:
                yield json.dumps(dialect.usage_part(sent, ending)).encode()
        yield b"[DONE]"

    def _tokenize(self, exchange: Exchange) -> Answer:
        body = exchange.json()
        check_model(body, self._limits)
        if "messages" in body:
            ids = self._template.render(body)
        elif isinstance(body.get("prompt"), str):
            ids = self._encode(body["prompt"])
        else:
            raise refuse("prompt", "prompt must be a text; or send messages")
        wanted = flag(body, "return_token_strs")
        strings = [self._tokenizer.id_to_token(token) for token in ids] if wanted else None
        length = self._limits.context_length
        count = {"count": len(ids), "max_model_len": length}
        return Answer({**count, "tokens": ids, "token_strs": strings})

    def _detokenize(self, exchange: Exchange) -> Answer:
        body = exchange.json()
        check_model(body, self._limits)
        ids = token_ids(body.get("tokens"), "tokens", self._limits)
        return Answer({"prompt": self._decode(ids, False)})

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _decode(self, ids: Ids[int], skip_special: bool) -> str:
        decoded: Any = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return str(decoded)


def _ending(sequence: Sequence) -> Ending:
    """Say how a sequence ended; raise HttpError or HangUpError when it has no answer."""
    if sequence.cancelled and sequence.finish_reason is None:
        raise HangUpError
    if sequence.failure is not None:
        status = 500 if sequence.failure == NONSENSE else 503
        raise HttpError(status, f"the request was dropped: {sequence.failure}")
    assert sequence.finish_reason is not None
    return Ending(sequence.finish_reason, sequence.spans, sequence.cached_tokens)


def _header_id(exchange: Exchange) -> str:
    """Return the request id that the header gives, empty for none."""
    named = exchange.headers.get("x-request-id", "")
    if len(named) > MAX_ID_CHARACTERS:
        raise HttpError(400, f"X-Request-Id must have at most {MAX_ID_CHARACTERS} characters")
    return named
