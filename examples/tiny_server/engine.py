"""Step all running sequences together; admit new ones between steps."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from examples.tiny_server.model import Chunk, Ids, KeyValueCache, Model
from examples.tiny_server.prefixes import PrefixMemory
from examples.tiny_server.sampling import Choice, Sampling, sample

logger = logging.getLogger(__name__)

MAX_BATCH = 16
# About 0.4 s of prefill on one core: what a running sequence waits for a newcomer's prompt.
STEP_TOKENS = 96
# Each position takes 45 KiB of keys and values: 1.5 GB.
CACHE_TOKENS = 32_768


class EngineStoppedError(RuntimeError):
    """Say that the engine no longer runs."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Hold one request while it runs, and its result once `done` is set."""

    prompt: Ids
    max_tokens: int
    sampling: Sampling
    random: np.random.Generator
    stop_ids: frozenset[int]
    done: threading.Event = field(default_factory=threading.Event)
    choices: list[Choice] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    failure: str | None = None
    cancelled: bool = False
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

    def accept(self, choice: Choice) -> None:
        """Take the next token and notice the end."""
        self.choices.append(choice)
        if choice.token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.choices) == self.max_tokens:
            self.finish_reason = "length"


class Engine:
    """Run sequences on one model from one thread of its own."""

    def __init__(
        self, model: Model, *, max_batch: int = MAX_BATCH, cache_tokens: int = CACHE_TOKENS
    ) -> None:
        self.model = model
        self.max_batch = max_batch
        self.cache_tokens = max(cache_tokens, model.config.context_length)
        self._memory = PrefixMemory()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Start stepping."""
        self._thread.start()

    def stop(self) -> None:
        """Stop stepping; what waits or runs fails."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """Say whether the engine steps."""
        return self._thread.is_alive()

    @property
    def load(self) -> tuple[int, int]:
        """Return how many sequences run and how many wait."""
        with self._changed:
            return len(self._running), len(self._waiting)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its `done` is set when it ended. Raises EngineStoppedError."""
        with self._changed:
            if self._stopping or not self.alive:
                raise EngineStoppedError("the engine has stopped")
            self._waiting.append(sequence)
            self._changed.notify()

    def _loop(self) -> None:
        try:
            while self._admit():
                self._step()
        except Exception:
            logger.exception("the engine failed")
            raise
        finally:
            with self._changed:
                self._stopping = True
                self._end(lambda _: True, "the engine has stopped")

    def _admit(self) -> bool:
        """Wait for work, drop what was cancelled and let in what fits; False to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting or self._running)
            if self._stopping:
                return False
            self._end(lambda sequence: sequence.cancelled, "cancelled")
            while self._waiting and len(self._running) < self.max_batch:
                if not self._make_room(self._waiting[0].size):
                    break
                sequence = self._waiting.popleft()
                sequence.cache = KeyValueCache(self.model.config, sequence.size)
                self._running.append(sequence)
            return True

    def _make_room(self, size: int) -> bool:
        used = sum(sequence.size for sequence in self._running)
        while used + self._memory.tokens + size > self.cache_tokens:
            if not self._memory.forget_oldest():
                return False
        return True

    def _step(self) -> None:
        batch = self._choose_batch()
        if not batch:
            return
        logits = self.model.forward([chunk for _, chunk in batch])
        for (sequence, _), row in zip(batch, logits, strict=True):
            if len(sequence.pending()) == 0 or sequence.choices:
                sequence.accept(sample(row, sequence.sampling, sequence.random))
        with self._changed:
            self._end(lambda sequence: sequence.finish_reason is not None, None)

    def _choose_batch(self) -> list[tuple[Sequence, Chunk]]:
        """Give every decoding sequence its token, and the oldest prompts the rest of the step.

        A prompt is looked up among known prefixes when its turn comes, so the samples of
        one group compute their common prompt once.
        """
        batch: list[tuple[Sequence, Chunk]] = []
        left = STEP_TOKENS
        for sequence in sorted(self._running, key=lambda running: not running.choices):
            assert sequence.cache is not None
            if not sequence.choices:
                if left <= 0:
                    break
                self._memory.fill(sequence.cache, sequence.prompt, self._running_caches())
            ids = sequence.pending()[: max(left, 1)]
            batch.append((sequence, Chunk(sequence.cache, ids)))
            left -= len(ids)
        return batch

    def _running_caches(self) -> list[KeyValueCache]:
        return [sequence.cache for sequence in self._running if sequence.cache is not None]

    def _end(self, ended: Callable[[Sequence], bool], failure: str | None) -> None:
        """End the sequences that `ended` names and keep what they computed."""
        for sequence in [*self._running, *self._waiting]:
            if not ended(sequence):
                continue
            if sequence in self._running:
                self._running.remove(sequence)
            else:
                self._waiting.remove(sequence)
            if sequence.cache is not None and not self._stopping:
                self._memory.keep(sequence.cache)
            sequence.cache = None
            sequence.failure = failure
            sequence.done.set()
