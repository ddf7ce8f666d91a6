"""What goes out, in vLLM's field names: whole answers, and the parts of streamed ones."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from examples.tiny_server.sampling import Choice
from examples.tiny_server.sequences import WeightSpan
from examples.tiny_server.wire import CompletionRequest

Decode = Callable[[Sequence[int], bool], str]
"""Turn ids into text; the flag leaves control tokens out."""

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Voice:
    """Hold what every answer of one server shares."""

    model: str
    eos_token_id: int
    decode: Decode
    logprobs_mode: str


@dataclass(frozen=True, slots=True)
class Ending:
    """Say how a sequence ended; `cached_tokens` None when nobody counted."""

    finish_reason: str
    spans: Sequence[WeightSpan] = ()
    cached_tokens: int | None = None


class Dialect(ABC):
    """Word the answer to one request: either `whole`, or `opening`, `part`s and `usage_part`.

    As vLLM does: the stop token is among the ids and not in the text; `stop_reason` is null
    for the model's own end of sequence and the id for any other stop token.
    """

    prefix: ClassVar[str]

    def __init__(self, request: CompletionRequest, voice: Voice, base_id: str = "") -> None:
        self.request = request
        self.voice = voice
        self.base_id = base_id or request.request_id or uuid.uuid4().hex
        self.id = self.prefix + self.base_id
        self._created = int(time.time())
        self._opened = False
        self._unspoken: list[int] = []
        self._offset = 0

    @property
    def names(self) -> frozenset[str]:
        """Return the ids by which the request may be aborted."""
        return frozenset({self.base_id, self.id, f"{self.id}-0"})

    def whole(self, choices: Sequence[Choice], ending: Ending) -> JSON:
        """Return the answer in one piece."""
        body = self._envelope([self._choice(choices, ending)])
        return {**body, "usage": self._usage(len(choices), ending)}

    def opening(self) -> JSON | None:
        """Return what a stream begins with, before any token."""
        return None

    def part(self, choices: Sequence[Choice], ending: Ending | None) -> JSON:
        """Return the next part of a stream; `ending` marks the last."""
        body = self._envelope([self._choice(choices, ending)])
        self._opened = True
        return body

    def usage_part(self, count: int, ending: Ending) -> JSON:
        """Return the part that counts tokens, after the last one."""
        return {**self._envelope([]), "usage": self._usage(count, ending)}

    @abstractmethod
    def _envelope(self, choices: list[JSON]) -> JSON: ...

    @abstractmethod
    def _choice(self, choices: Sequence[Choice], ending: Ending | None) -> JSON: ...

    def _end_fields(self, choices: Sequence[Choice], ending: Ending | None) -> JSON:
        if ending is None:
            return {"finish_reason": None, "stop_reason": None}
        stopped_by = choices[-1].token if ending.finish_reason == "stop" else None
        versions: JSON = {}
        if self.request.return_weight_versions:
            versions = {"weight_versions": [asdict(span) for span in ending.spans]}
        return {
            "finish_reason": ending.finish_reason,
            "stop_reason": None if stopped_by == self.voice.eos_token_id else stopped_by,
            **versions,
        }

    def _text(self, choices: Sequence[Choice], ending: Ending | None) -> str:
        """Return the text of the next tokens; bytes of an unfinished character wait."""
        ids = [choice.token for choice in choices]
        self._unspoken += ids[:-1] if ending and ending.finish_reason == "stop" else ids
        text = self.voice.decode(self._unspoken, True)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and ending is None:
            return ""
        self._unspoken = []
        return text

    def _token(self, token: int) -> str:
        if self.request.tokens_as_ids:
            return f"token_id:{token}"
        return self.voice.decode([token], False)

    def _usage(self, count: int, ending: Ending) -> JSON:
        prompt = len(self.request.prompt)
        usage: JSON = {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
        }
        if ending.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": ending.cached_tokens}
        return usage


class Completions(Dialect):
    """Word `/v1/completions`."""

    prefix = "cmpl-"

    def _envelope(self, choices: list[JSON]) -> JSON:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self.voice.model,
            "choices": choices,
            "logprobs_mode": self.voice.logprobs_mode,
        }

    def _choice(self, choices: Sequence[Choice], ending: Ending | None) -> JSON:
        wanted = self.request.return_token_ids
        body: JSON = {
            "index": 0,
            "text": self._text(choices, ending),
            "logprobs": self._logprobs(choices),
            "token_ids": [choice.token for choice in choices] if wanted else None,
            **self._end_fields(choices, ending),
        }
        if not self._opened:
            body["prompt_token_ids"] = self.request.prompt if wanted else None
        return body if self.request.stream else {**body, "prompt_logprobs": None}

    def _logprobs(self, choices: Sequence[Choice]) -> JSON | None:
        if self.request.logprobs is None:
            return None
        tokens = [self._token(choice.token) for choice in choices]
        top: list[dict[str, float]] = []
        offsets: list[int] = []
        for token, choice in zip(tokens, choices, strict=True):
            likely: dict[str, float] = {}
            if self.request.logprobs:
                likely = {self._token(choice.top_token): choice.top_logprob}
            top.append({token: choice.logprob, **likely})
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [choice.logprob for choice in choices],
            "top_logprobs": top,
            "text_offset": offsets,
        }


class Generate(Dialect):
    """Word `/inference/v1/generate` in its `tokens` mode; versions are always told."""

    prefix = "generate-tokens-"

    def _envelope(self, choices: list[JSON]) -> JSON:
        body: JSON = {"output_mode": "tokens", "request_id": self.id, "choices": choices}
        if not self._opened and self.request.return_token_ids:
            body["prompt_token_ids"] = self.request.prompt
        if not self.request.stream:
            body |= {"model": self.voice.model, "created": self._created, "prompt_logprobs": None}
        return {**body, "logprobs_mode": self.voice.logprobs_mode}

    def _choice(self, choices: Sequence[Choice], ending: Ending | None) -> JSON:
        spans: Sequence[WeightSpan] = ending.spans if ending else ()
        return {
            "index": 0,
            "token_ids": [choice.token for choice in choices],
            "logprobs": None
            if self.request.logprobs is None
            else {"content": [self._entry(choice) for choice in choices]},
            **self._end_fields(choices, ending),
            "weight_versions": [asdict(span) for span in spans] if ending else None,
        }

    def _entry(self, choice: Choice) -> JSON:
        # 0.33 has the integer alone; clients of other versions read it out of `token`.
        def named(token: int, logprob: float) -> JSON:
            return {"token_id": token, "token": f"token_id:{token}", "logprob": logprob}

        top = [named(choice.token, choice.logprob)]
        if self.request.logprobs and choice.top_token != choice.token:
            top.append(named(choice.top_token, choice.top_logprob))
        return {**top[0], "top_logprobs": top if self.request.logprobs else []}


class Chat(Dialect):
    """Word `/v1/chat/completions`."""

    prefix = "chatcmpl-"

    def opening(self) -> JSON:
        """Return the part that names the role, with the prompt's ids where they are wanted."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._envelope([choice])
        self._opened = True
        return body

    def _envelope(self, choices: list[JSON]) -> JSON:
        body: JSON = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.request.stream else "chat.completion",
            "created": self._created,
            "model": self.voice.model,
            "choices": choices,
            "logprobs_mode": self.voice.logprobs_mode,
        }
        if not self._opened and self.request.return_token_ids:
            body["prompt_token_ids"] = self.request.prompt
        return body

    def _choice(self, choices: Sequence[Choice], ending: Ending | None) -> JSON:
        text = self._text(choices, ending)
        said: JSON = {"role": "assistant", "content": text}
        body: JSON = {
            "index": 0,
            **({"delta": {"content": text}} if self.request.stream else {"message": said}),
            "logprobs": self._logprobs(choices),
            **self._end_fields(choices, ending),
        }
        if self.request.return_token_ids:
            body["token_ids"] = [choice.token for choice in choices]
        return body

    def _logprobs(self, choices: Sequence[Choice]) -> JSON | None:
        if self.request.logprobs is None:
            return None

        def entry(token: int, logprob: float) -> JSON:
            text = self._token(token)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        return {
            "content": [
                {
                    **entry(choice.token, choice.logprob),
                    "top_logprobs": [entry(choice.top_token, choice.top_logprob)]
                    if self.request.logprobs
                    else [],
                }
                for choice in choices
            ]
        }


def completion_body(
    request: CompletionRequest,
    choices: Sequence[Choice],
    *,
    model: str,
    finish_reason: str,
    eos_token_id: int,
    decode: Decode,
    logprobs_mode: str = "processed_logprobs",
) -> JSON:
    """Return a whole answer of `/v1/completions`, for whoever samples by other means."""
    voice = Voice(model, eos_token_id, decode, logprobs_mode)
    return Completions(request, voice).whole(choices, Ending(finish_reason))
