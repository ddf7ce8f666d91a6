"""Read a token server's answer, piece by piece or whole; nothing malformed passes."""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from rollouts.inference.exceptions import MalformedAnswer, ServerUnreachable, WrongModel
from rollouts.inference.protocol import (
    FinishReason,
    Generation,
    SamplingParams,
    Server,
    VersionRun,
)
from rollouts.inference.statuses import fault_of_status, quote
from rollouts.inference.trace import UNKNOWN_POLICY_VERSION

LARGEST_TOKEN_ID = LARGEST_COUNT = 2**31 - 1
LARGEST_VERSION = 2**63 - 1
LONGEST_NUMBER = len(str(LARGEST_VERSION))
LOWEST_LOGPROB = -1e6
_NUMBERS = {int, float}
# Rounding can put a certain token a hair above 0.
HIGHEST_LOGPROB = 1e-3


class Answer(ABC):
    """Collect one turn from the events of a stream, or from one whole body.

    Every piece is checked as it comes: ids in range, as many log-probabilities as ids, all of
    them finite, no more tokens than asked for, none after the end.
    """

    def __init__(self, server: Server, prompt_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.server = server
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.spans: Any = None
        self.version: int | None = None
        # The version of each token as far as events tell it; empty where they do not.
        self.stamps: list[int] = []
        self.cached_tokens: int | None = None
        self.logprob_mode: str | None = None

    def collect(self, event: bytes) -> bool:
        """Take one event of a stream; True when no more is needed. Raises an InferenceFault."""
        body = parse_object(event)
        self._raise_for_error(body)
        return self.read_safely(body)

    def read_whole(self, body: bytes) -> None:
        """Take an answer that came in one piece. Raises MalformedAnswer."""
        self.read_safely(parse_object(body))
        if self.finish_reason is None:
            raise self.malformed("left out the answer, or why it ended")

    def read_safely(self, body: dict[str, Any]) -> bool:
        """Read one body; what it lacks or has in another shape is MalformedAnswer."""
        try:
            return self.read(body)
        except (
            *(KeyError, TypeError, ValueError, IndexError, AttributeError),
            OverflowError,
        ) as error:
            raise self.malformed(f"left out or misshaped {error!s}") from error

    @abstractmethod
    def read(self, body: dict[str, Any]) -> bool:
        """Take what one body says; True when no more is needed.

        May raise KeyError, TypeError, ValueError, IndexError, AttributeError on other shapes.
        """

    def add(self, ids: Any, logprobs: Any) -> None:
        """Append tokens. Raises MalformedAnswer."""
        if not isinstance(ids, list) or not _are_ids(ids):
            raise self.malformed("sent token ids that are no list of ids")
        if not isinstance(logprobs, list) or len(logprobs) != len(ids):
            raise self.malformed("sent log-probabilities that do not match the ids")
        if not _are_logprobs(logprobs):
            wrong = next(value for value in logprobs if not _are_logprobs([value]))
            raise self.malformed(f"sent {wrong!r} as a log-probability")
        if ids and self.finish_reason is not None:
            raise self.malformed("sent tokens after the end")
        if len(self.ids) + len(ids) > self.sampling.max_tokens:
            raise self.malformed(f"sent more than the {self.sampling.max_tokens} tokens asked for")
        self.ids += ids
        self.logprobs += map(float, logprobs)

    def finish(self, reason: Any) -> None:
        """Note why the turn ended. Raises an InferenceFault."""
        if reason == "error":
            raise fault_of_status(500, f"{self.server.url} gave up the request")
        if reason not in ("stop", "length", "abort"):
            raise self.malformed(f"sent {reason!r} as finish_reason")
        if not self.ids and reason != "abort":
            raise self.malformed("sent no tokens")
        self.finish_reason = reason

    def expect_prompt(self, ids: Any) -> None:
        """Check the prompt as the server understood it, where it says so."""
        if ids is not None and ids != list(self.prompt_ids):
            raise self.malformed("understood another prompt than the one sent")

    def expect_count(self, count: Any) -> None:
        """Check how many tokens the server says it sampled, where it says so."""
        if count is not None and count != len(self.ids):
            raise self.malformed(f"sampled {count} tokens and sent {len(self.ids)}")

    def expect_model(self, model: Any) -> None:
        """Check the model that answered, where the server says so."""
        if isinstance(model, str) and model != self.server.model:
            raise WrongModel(f"{self.server.url} answered as {model}, not {self.server.model}")

    def generation(self, *, seconds: float, interrupted: bool) -> Generation:
        """Return the turn. Raises ServerUnreachable when the stream ended in its middle."""
        reason = self.finish_reason
        if reason is None:
            if not interrupted:
                raise ServerUnreachable(f"the stream of {self.server.url} ended in its middle")
            reason = "abort"
        runs = self._runs()
        runs = runs or _runs_of(self.stamps)
        return Generation(
            token_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            policy_version=_known(runs[-1][0]) if runs else self.version,
            server_id=self.server.id,
            seconds=seconds,
            logprob_mode=self.logprob_mode or self.server.logprob_mode,
            version_runs=runs if len(runs) > 1 else (),
            cached_tokens=self.cached_tokens,
        )

    def malformed(self, what: str) -> MalformedAnswer:
        """Return the fault that says what the server did."""
        return MalformedAnswer(f"{self.server.url} {what}")

    def _runs(self) -> tuple[VersionRun, ...]:
        """Return the versions of the tokens; empty where the server's are no numbers.

        Those of an answer that was cut cover what had come before, so they say nothing. Raises
        MalformedAnswer when the spans do not cover the tokens one after the other.
        """
        if not self.spans or self.finish_reason is None:
            return ()
        runs: list[tuple[int | None, int]] = []
        place = 0
        try:
            for span in self.spans:
                if type(span["end"]) is not int or span["start"] != place:
                    raise ValueError(span)
                if not place < span["end"] <= len(self.ids):
                    raise ValueError(span)
                runs.append((as_version(span["version"]), span["end"] - place))
                place = span["end"]
        except (KeyError, TypeError, ValueError) as error:
            raise self.malformed("sent weight versions that do not cover its tokens") from error
        if place != len(self.ids):
            raise self.malformed("sent weight versions that do not cover its tokens")
        known = tuple((version, count) for version, count in runs if version is not None)
        return known if len(known) == len(runs) else ()

    def _raise_for_error(self, body: dict[str, Any]) -> None:
        """Raise the fault that a server tells of in the middle of a stream."""
        error = body.get("error")
        if error is None:
            return
        code = error.get("code") if isinstance(error, dict) else None
        status = code if type(code) is int and 400 <= code <= 599 else 500
        said = quote(json.dumps(error).encode())
        raise fault_of_status(status, f"{self.server.url} gave up with {status}: {said}")


def _runs_of(stamps: Sequence[int]) -> tuple[VersionRun, ...]:
    return tuple((stamp, len(list(same))) for stamp, same in groupby(stamps))


def _known(stamp: int) -> int | None:
    return None if stamp == UNKNOWN_POLICY_VERSION else stamp


def parse_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object; raise MalformedAnswer when it is none."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        value = _parse_leniently(body)
    if not isinstance(value, dict):
        raise MalformedAnswer(f"the answer is no object: {quote(body)}")
    return value


def _parse_leniently(body: bytes) -> Any:
    """Read what the strict parser refuses: NaN must be known as such, to say what is wrong."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedAnswer(f"the answer is not JSON: {quote(body)}") from error


def as_version(value: Any) -> int | None:
    """Return a weight version as a number, None where it is another word.

    PostgreSQL's widest integer bounds it; a fraction, a sign or a boolean is no version.
    """
    if isinstance(value, str) and len(value) <= LONGEST_NUMBER and value.isascii():
        value = int(value) if value.isdigit() else None
    return value if type(value) is int and 0 <= value <= LARGEST_VERSION else None


def as_count(value: Any) -> int | None:
    """Return a count, None where it is none, or one that no server can have counted to."""
    return value if type(value) is int and 0 <= value <= LARGEST_COUNT else None


# Of whole lists, as thousands of streams have a few values in each of their events.
def _are_ids(tokens: list[Any]) -> bool:
    if not tokens:
        return True
    return set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) <= LARGEST_TOKEN_ID


def _are_logprobs(values: list[Any]) -> bool:
    if not values:
        return True
    # NaN compares with nothing, so that its place would decide what is lowest.
    numbers = set(map(type, values)) <= _NUMBERS and not any(map(math.isnan, values))
    return numbers and min(values) >= LOWEST_LOGPROB and max(values) <= HIGHEST_LOGPROB
