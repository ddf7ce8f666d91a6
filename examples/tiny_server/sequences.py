"""One request while it runs: what it has sampled, by which weights, and how it ends."""

import threading
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from examples.tiny_server.model import Ids, KeyValueCache
from examples.tiny_server.sampling import Choice, Sampling

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class WeightSpan:
    """Say which weights sampled the tokens from `start` up to and without `end`."""

    version: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class Sequence:
    """Hold one request while it runs, and its result once `done` is set.

    `news` is set whenever there is more to read: one reader at a time may wait for it.
    `names` are the request ids that an abort may use; requests of different `salt` share no
    prefixes; `cached_tokens` of the prompt were not computed but copied.
    """

    prompt: Ids
    max_tokens: int
    sampling: Sampling
    random: np.random.Generator
    stop_ids: frozenset[int]
    names: frozenset[str] = frozenset()
    salt: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    news: threading.Event = field(default_factory=threading.Event)
    choices: list[Choice] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failure: str | None = None
    cancelled: bool = False
    aborted: bool = False
    cached_tokens: int = 0
    cache: KeyValueCache | None = None

    @property
    def size(self) -> int:
        """Return the positions that the sequence needs at most."""
        return len(self.prompt) + self.max_tokens

    def pending(self) -> Ids:
        """Return the tokens known and not yet run."""
        assert self.cache is not None
        if self.choices:
            return np.asarray([self.choices[-1].token], dtype=np.int64)
        return self.prompt[self.cache.length :]

    def accept(self, choice: Choice, version: str) -> None:
        """Take the next token, sampled by the weights of `version`, and notice the end."""
        count = len(self.choices) + 1
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = count
        else:
            self.spans.append(WeightSpan(version, count - 1, count))
        if choice.token in self.stop_ids:
            self.finish_reason = "stop"
        elif count == self.max_tokens:
            self.finish_reason = "length"
        # Last: whoever sees the last token must see as well that it is the last.
        self.choices.append(choice)
        self.news.set()

    def end(self, finish_reason: FinishReason | None, failure: str | None) -> None:
        """Say that nothing more comes. A reason that the sequence found itself stays."""
        self.finish_reason = self.finish_reason or finish_reason
        self.failure = failure
        self.cache = None
        self.done.set()
        self.news.set()
