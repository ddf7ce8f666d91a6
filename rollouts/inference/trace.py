"""The trace of one rollout: token ids are the truth, and every prompt extends the last exactly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.inference.protocol import SamplingParams

UNKNOWN_POLICY_VERSION = -1


class TraceError(ValueError):
    """Say that a trace contradicts itself: lengths, masks or run lengths do not add up."""

    code = "trace.broken"


@dataclass(slots=True)
class Turn:
    """Mark one sampled turn: `start` and `end` are offsets into the segment's response."""

    start: int
    end: int
    finish_reason: str
    reward: float | None = None


@dataclass(slots=True)
class Segment:
    """Hold one run of tokens in which every prompt extends the one before exactly.

    `response_ids`, `response_mask`, `response_logprobs` and `versions` have equal length;
    `versions` holds the policy version of each token (environment tokens carry the version
    in force when they were added).
    """

    id: int
    prompt_ids: list[int]
    parent: int | None = None
    fork_reason: str | None = None
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    logprob_mode: str = "unknown"

    @property
    def token_ids(self) -> list[int]:
        """Return prompt and response as one new list."""
        return self.prompt_ids + self.response_ids

    def as_dict(self) -> dict[str, Any]:
        """Return the segment in the API's shape; raise TraceError when it contradicts itself."""
        body = {
            "id": self.id,
            "parent": self.parent,
            "fork_reason": self.fork_reason,
            "sampling": dict(self.sampling),
            "logprob_mode": self.logprob_mode,
            "turns": [
                {
                    "start": turn.start,
                    "end": turn.end,
                    "finish_reason": turn.finish_reason,
                    "reward": turn.reward,
                }
                for turn in self.turns
            ],
            "prompt_ids": list(self.prompt_ids),
            "response_ids": list(self.response_ids),
            "response_mask": list(self.response_mask),
            "response_logprobs": list(self.response_logprobs),
            "policy_versions": _run_lengths(self.versions),
        }
        check_segment(body)
        return body


class Trace:
    """Collect the segments of one rollout. Not thread-safe: one rollout, one thread."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._open = False

    @property
    def forks(self) -> int:
        """Return how many segments began because a prompt did not extend the last."""
        return sum(segment.parent is not None for segment in self.segments)

    @property
    def turns(self) -> int:
        """Return how many turns were sampled."""
        return sum(len(segment.turns) for segment in self.segments)

    @property
    def sampled_tokens(self) -> int:
        """Return how many tokens the policy sampled."""
        return sum(sum(segment.response_mask) for segment in self.segments)

    @property
    def token_ids(self) -> list[int]:
        """Return prompt and response of the newest segment, empty before the first prompt."""
        return self.segments[-1].token_ids if self.segments else []

    def extend(self, prompt_ids: Sequence[int], *, fork_reason: str = "prompt_changed") -> Segment:
        """Take the next prompt, whole, and return the segment it belongs to.

        A prompt that extends everything before continues the newest segment, its new tokens
        masked 0. Any other prompt starts a new segment whose parent is the newest, with
        `fork_reason`. Raises ValueError for an empty prompt.
        """
        prompt = [int(token) for token in prompt_ids]
        if not prompt:
            raise ValueError("a prompt holds at least one token")
        if not self.segments:
            return self._begin(prompt, parent=None, fork_reason=None)
        newest = self.segments[-1]
        before = newest.token_ids
        if prompt[: len(before)] != before:
            return self._begin(prompt, parent=newest.id, fork_reason=fork_reason)
        added = prompt[len(before) :]
        if not newest.response_ids:
            newest.prompt_ids = prompt
        elif added:
            version = newest.versions[-1]
            newest.response_ids += added
            newest.response_mask += [0] * len(added)
            newest.response_logprobs += [0.0] * len(added)
            newest.versions += [version] * len(added)
        self._open = True
        return newest

    def append_sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        policy_version: int | None,
        finish_reason: str,
        sampling: SamplingParams | None = None,
        logprob_mode: str | None = None,
    ) -> Turn:
        """Append what the policy sampled for the prompt given last; return the turn's marks.

        Raises TraceError when no prompt was given since the last turn, when ids and
        log-probabilities differ in number, or when nothing was sampled.
        """
        if not self._open:
            raise TraceError("a sampled turn needs a prompt before it")
        if len(ids) != len(logprobs):
            raise TraceError(f"{len(ids)} ids with {len(logprobs)} log-probabilities")
        if not ids:
            raise TraceError("a sampled turn holds at least one token")
        segment = self.segments[-1]
        version = UNKNOWN_POLICY_VERSION if policy_version is None else policy_version
        turn = Turn(
            start=len(segment.response_ids),
            end=len(segment.response_ids) + len(ids),
            finish_reason=finish_reason,
        )
        segment.response_ids += [int(token) for token in ids]
        segment.response_mask += [1] * len(ids)
        segment.response_logprobs += [float(value) for value in logprobs]
        segment.versions += [version] * len(ids)
        segment.turns.append(turn)
        if sampling is not None:
            segment.sampling = sampling.as_dict()
        if logprob_mode is not None:
            segment.logprob_mode = logprob_mode
        self._open = False
        return turn

    def as_dict(self) -> list[dict[str, Any]]:
        """Return the segments in the API's shape; raise TraceError when they contradict."""
        return [segment.as_dict() for segment in self.segments]

    @classmethod
    def from_dict(cls, segments: Sequence[Mapping[str, Any]]) -> "Trace":
        """Rebuild a trace from what `as_dict` gave; raise TraceError when it contradicts itself.

        A rebuilt trace waits for a prompt: `extend` comes before `append_sampled`.
        """
        trace = cls()
        for position, body in enumerate(segments):
            check_segment(body)
            if body["id"] != position:
                raise TraceError(f"segment {body['id']} stands at place {position}")
            if body["parent"] is not None and not 0 <= body["parent"] < position:
                raise TraceError(f"segment {position} has no earlier parent {body['parent']}")
            trace.segments.append(_segment_from(body))
        return trace

    def _begin(self, prompt: list[int], *, parent: int | None, fork_reason: str | None) -> Segment:
        segment = Segment(
            id=len(self.segments), prompt_ids=prompt, parent=parent, fork_reason=fork_reason
        )
        self.segments.append(segment)
        self._open = True
        return segment


def check_segment(body: Mapping[str, Any]) -> None:
    """Raise TraceError unless lengths, mask, log-probabilities, turns and versions agree."""
    length = len(body["response_ids"])
    mask, logprobs = body["response_mask"], body["response_logprobs"]
    if not body["prompt_ids"]:
        raise TraceError(f"segment {body['id']} has no prompt")
    if len(mask) != length or len(logprobs) != length:
        raise TraceError(
            f"segment {body['id']}: {length} ids, {len(mask)} mask, {len(logprobs)} logprobs"
        )
    if any(run < 1 for _, run in body["policy_versions"]):
        raise TraceError(f"segment {body['id']} has an empty run of a policy version")
    if sum(run for _, run in body["policy_versions"]) != length:
        raise TraceError(f"segment {body['id']}: version runs do not add up to {length}")
    if any(value != 0.0 for value, sampled in zip(logprobs, mask, strict=True) if not sampled):
        raise TraceError(f"segment {body['id']} has a log-probability where the mask is 0")
    expected = [0] * length
    end = 0
    for turn in body["turns"]:
        if not end <= turn["start"] < turn["end"] <= length:
            raise TraceError(f"segment {body['id']} has turns that overlap or leave it")
        end = turn["end"]
        expected[turn["start"] : end] = [1] * (end - turn["start"])
    if list(mask) != expected:
        raise TraceError(f"segment {body['id']}: the mask is not what the turns say")


def _segment_from(body: Mapping[str, Any]) -> Segment:
    return Segment(
        id=body["id"],
        prompt_ids=list(body["prompt_ids"]),
        parent=body["parent"],
        fork_reason=body["fork_reason"],
        response_ids=list(body["response_ids"]),
        response_mask=list(body["response_mask"]),
        response_logprobs=list(body["response_logprobs"]),
        versions=[version for version, run in body["policy_versions"] for _ in range(run)],
        turns=[Turn(**turn) for turn in body["turns"]],
        sampling=dict(body["sampling"]),
        logprob_mode=body["logprob_mode"],
    )


def _run_lengths(versions: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for version in versions:
        if runs and runs[-1][0] == version:
            runs[-1][1] += 1
        else:
            runs.append([version, 1])
    return runs
