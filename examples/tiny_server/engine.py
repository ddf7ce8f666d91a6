"""Step all running sequences together; between steps admit, cut, pause and exchange weights."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Literal, get_args

from examples.tiny_server.model import Chunk, KeyValueCache, Model
from examples.tiny_server.prefixes import PrefixMemory
from examples.tiny_server.sampling import sample
from examples.tiny_server.sequences import FinishReason, Sequence
from examples.tiny_server.weights import Weights

logger = logging.getLogger(__name__)

MAX_BATCH = 16
MAX_WAITING = 256
# About 0.4 s of prefill on one core: what a running sequence waits for a newcomer's prompt.
STEP_TOKENS = 96
# Each position takes 45 KiB of keys and values: 1.5 GB.
CACHE_TOKENS = 32_768

NONSENSE = "the weights give no finite log-probabilities"

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[str, ...] = get_args(PauseMode)


class EngineStoppedError(RuntimeError):
    """Say that the engine no longer runs."""


class EnginePausedError(RuntimeError):
    """Say that the engine takes nothing until it is resumed."""


class QueueFullError(RuntimeError):
    """Say that too many sequences wait already."""


class Engine:
    """Run sequences on one model from one thread of its own."""

    def __init__(
        self,
        model: Model,
        *,
        max_batch: int = MAX_BATCH,
        max_waiting: int = MAX_WAITING,
        cache_tokens: int = CACHE_TOKENS,
        raw_logprobs: bool = False,
        weight_version: str = "default",
    ) -> None:
        self.model = model
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.cache_tokens = max(cache_tokens, model.config.context_length)
        self.weight_version = weight_version
        self._raw_logprobs = raw_logprobs
        # Grows whenever what was computed before may no longer be shared.
        self._epoch = 0
        self._memory = PrefixMemory()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._changed = threading.Condition()
        self._paused: PauseMode | None = None
        self._stepping = False
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Start stepping."""
        self._thread.start()

    def stop(self) -> None:
        """Stop stepping; what waits or runs fails."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
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

    @property
    def paused(self) -> bool:
        """Say whether the engine is paused, or about to be."""
        return self._paused is not None

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its `done` is set when it ended.

        Raises EngineStoppedError, EnginePausedError or QueueFullError.
        """
        with self._changed:
            if self._stopping or not self.alive:
                raise EngineStoppedError("the engine has stopped")
            if self._paused in ("abort", "wait"):
                raise EnginePausedError("Generation is paused. Please retry after it resumes.")
            if len(self._waiting) + len(self._running) >= self.max_batch + self.max_waiting:
                raise QueueFullError(f"{len(self._waiting)} requests wait already")
            self._waiting.append(sequence)
            self._changed.notify_all()

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence before its next token: nobody wants it any more."""
        with self._changed:
            sequence.cancelled = True
            self._changed.notify_all()

    def abort(self, names: Collection[str] = ()) -> int:
        """Cut the sequences of these names, or all without any; return how many there were.

        Each ends before its next token, with what it has.
        """
        with self._changed:
            wanted = frozenset(names)
            cut = [one for one in self._all() if not wanted or one.names & wanted]
            for sequence in cut:
                sequence.aborted = True
            self._changed.notify_all()
            return len(cut)

    def pause(self, mode: PauseMode) -> None:
        """Begin to pause, as vLLM does; `settled` tells when it is done.

        `abort` cuts all, `wait` lets them end, and both refuse what comes; `keep` holds all where
        they are and takes more.
        """
        with self._changed:
            self._paused = mode
            if mode == "abort":
                self.abort()
            self._changed.notify_all()

    def settled(self, timeout_seconds: float) -> bool:
        """Wait for a pause to be complete, or resumed; say whether it is."""
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout_seconds)

    def resume(self) -> None:
        """Go on."""
        with self._changed:
            self._paused = None
            self._changed.notify_all()

    def exchange(self, weights: Weights, version: str | None) -> None:
        """Compute every step that begins from now on with these weights.

        Sequences that run keep their keys and values, as in vLLM, and go on with the new
        weights; what the old ones computed is never shared with another sequence.
        """
        model = Model(weights)
        with self._changed:
            self.model = model
            self.weight_version = self.weight_version if version is None else version
            self._forget()

    def relabel(self, version: str) -> None:
        """Call the weights by another version, and share nothing from before."""
        with self._changed:
            self.weight_version = version
            self._forget()

    def reset_prefixes(self) -> None:
        """Share nothing computed until now, by what runs neither."""
        with self._changed:
            self._forget()

    def _forget(self) -> None:
        self._epoch += 1
        self._memory = PrefixMemory()

    def _all(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    def _is_settled(self) -> bool:
        if self._stopping or self._paused is None:
            return True
        return not self._stepping if self._paused == "keep" else not self._all()

    def _has_work(self) -> bool:
        if self._stopping or any(one.cancelled or one.aborted for one in self._all()):
            return True
        return self._paused != "keep" and bool(self._waiting or self._running)

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
                self._end(lambda _: True, failure="the engine has stopped")

    def _admit(self) -> bool:
        """Wait for work, drop what was cut and let in what fits; False to stop."""
        with self._changed:
            while True:
                self._changed.wait_for(self._has_work)
                if self._stopping:
                    return False
                self._end(lambda sequence: sequence.cancelled, failure="cancelled")
                self._end(lambda sequence: sequence.aborted, finish_reason="abort")
                if self._paused != "keep":
                    break
            while self._waiting and len(self._running) < self.max_batch:
                if not self._make_room(self._waiting[0].size):
                    break
                sequence = self._waiting.popleft()
                sequence.cache = KeyValueCache(self.model.config, sequence.size)
                self._running.append(sequence)
            self._stepping = True
            return True

    def _make_room(self, size: int) -> bool:
        used = sum(sequence.size for sequence in self._running)
        while used + self._memory.tokens + size > self.cache_tokens:
            if not self._memory.forget_oldest():
                return False
        return True

    def _step(self) -> None:
        with self._changed:
            # Model and version of one step belong together: an exchange counts from the next.
            model, version = self.model, self.weight_version
            batch = self._choose_batch()
        if batch:
            logits = model.forward([chunk for _, chunk in batch])
            for (sequence, _), row in zip(batch, logits, strict=True):
                if len(sequence.pending()) == 0 or sequence.choices:
                    choice = sample(row, sequence.sampling, sequence.random, raw=self._raw_logprobs)
                    sequence.accept(choice, version)
        with self._changed:
            self._stepping = False
            self._end(_gave_nonsense, failure=NONSENSE)
            self._end(lambda sequence: sequence.finish_reason is not None)

    def _choose_batch(self) -> list[tuple[Sequence, Chunk]]:
        """Give every decoding sequence its token, and the oldest prompts the rest of the step.

        A prompt is looked up among known prefixes when its turn comes, so the samples of
        one group compute their common prompt once.
        """
        batch: list[tuple[Sequence, Chunk]] = []
        left = STEP_TOKENS
        for sequence in sorted(self._running, key=lambda running: not running.choices):
            cache = sequence.cache
            assert cache is not None
            if not sequence.choices:
                if left <= 0:
                    break
                if cache.length == 0:
                    cache.scope = (self._epoch, sequence.salt)
                if cache.scope[0] == self._epoch:
                    sequence.cached_tokens += self._memory.fill(
                        cache, sequence.prompt, self._running_caches()
                    )
            ids = sequence.pending()[: max(left, 1)]
            batch.append((sequence, Chunk(cache, ids)))
            left -= len(ids)
        return batch

    def _running_caches(self) -> list[KeyValueCache]:
        return [sequence.cache for sequence in self._running if sequence.cache is not None]

    def _end(
        self,
        ended: Callable[[Sequence], bool],
        *,
        finish_reason: FinishReason | None = None,
        failure: str | None = None,
    ) -> None:
        """End the sequences that `ended` names and keep what they computed."""
        for sequence in self._all():
            if not ended(sequence):
                continue
            if sequence in self._running:
                self._running.remove(sequence)
            else:
                self._waiting.remove(sequence)
            cache = sequence.cache
            # What an exchange overtook holds keys and values of two sets of weights.
            if cache is not None and not self._stopping and cache.scope[0] == self._epoch:
                self._memory.keep(cache)
            sequence.end(finish_reason, failure)
        self._changed.notify_all()


def _gave_nonsense(sequence: Sequence) -> bool:
    return bool(sequence.choices) and not math.isfinite(sequence.choices[-1].logprob)
