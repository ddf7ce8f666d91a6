"""The trace of one rollout: a tree of token runs, each of which its prompts extend exactly."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollouts.inference.protocol import SamplingParams

UNKNOWN_POLICY_VERSION = -1
# What a segment's log-probabilities are of, where nobody told and where its turns differ.
UNKNOWN_LOGPROBS, MIXED_LOGPROBS = "unknown", "mixed"

# Why a prompt began a segment of its own; a handler may give another word.
FORK_REASONS = (
    "template_rewrites_history",
    "truncated",
    "compacted",
    "history_edited",
    "parallel_agent",
    "prompt_changed",
)


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
    logprob_mode: str = UNKNOWN_LOGPROBS

    @property
    def token_ids(self) -> list[int]:
        """Return prompt and response as one new list."""
        return self.prompt_ids + self.response_ids

    def common_prefix(self, prompt: Sequence[int]) -> int:
        """Return how many leading tokens `prompt` (a list) shares with this segment's."""
        first = _common_prefix(self.prompt_ids, prompt)
        if first < len(self.prompt_ids):
            return first
        return first + _common_prefix(self.response_ids, prompt[first:])

    def is_prefix_of(self, prompt: list[int]) -> bool:
        """Say whether `prompt` begins with all tokens of this segment."""
        middle = len(self.prompt_ids)
        length = middle + len(self.response_ids)
        last = self.response_ids[-1] if self.response_ids else self.prompt_ids[-1]
        # The last token alone tells most others apart, without a copy of the prompt.
        if len(prompt) < length or prompt[length - 1] != last:
            return False
        return prompt[:middle] == self.prompt_ids and prompt[middle:length] == self.response_ids

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
    """Collect the segments of one rollout. Not thread-safe: one rollout, one thread.

    Conversations that run side by side may interleave: each prompt finds the segment it extends.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._open: set[int] = set()
        self._current = 0

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
        """Return prompt and response of the segment used last, empty before the first prompt."""
        return self.segments[self._current].token_ids if self.segments else []

    def fork_counts(self) -> dict[str, int]:
        """Return how many segments began as a fork, by reason."""
        forks = (segment for segment in self.segments if segment.parent is not None)
        return dict(Counter(segment.fork_reason or "prompt_changed" for segment in forks))

    def common_prefix(self, segment: Segment) -> int:
        """Return how many leading tokens a fork shares with its parent, 0 without a parent."""
        if segment.parent is None:
            return 0
        return self.segments[segment.parent].common_prefix(segment.prompt_ids)

    def extend(
        self,
        prompt_ids: Sequence[int],
        *,
        fork_reason: str = "prompt_changed",
        parent: int | None = None,
        policy_version: int | None = None,
    ) -> Segment:
        """Take the next prompt, whole, and return the segment it belongs to.

        A prompt that begins with all tokens of a segment continues it, the longest such segment
        if there are several; its new tokens are masked 0 and carry `policy_version`, the version
        in force (that of the token before where None). Any other prompt starts a new segment,
        with `fork_reason`; its parent is the segment that shares the longest prefix with it, the
        newest of equals. `parent` names the one segment to continue or to fork from. Raises
        ValueError for an empty prompt, TraceError for an unknown parent.
        """
        prompt = list(prompt_ids)
        if not prompt:
            raise ValueError("a prompt holds at least one token")
        if parent is not None and not 0 <= parent < len(self.segments):
            raise TraceError(f"there is no segment {parent}")
        choices = self.segments if parent is None else [self.segments[parent]]
        fitting = [segment for segment in choices if segment.is_prefix_of(prompt)]
        if fitting:
            segment = max(fitting, key=lambda s: (len(s.prompt_ids) + len(s.response_ids), s.id))
            _continue(segment, prompt, policy_version)
        elif choices:
            nearest = max(choices, key=lambda s: (s.common_prefix(prompt), s.id))
            segment = self._begin(prompt, parent=nearest.id, fork_reason=fork_reason)
        else:
            segment = self._begin(prompt, parent=None, fork_reason=None)
        self._open.add(segment.id)
        self._current = segment.id
        return segment

    def append_sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        policy_version: int | None,
        finish_reason: str,
        sampling: SamplingParams | None = None,
        logprob_mode: str | None = None,
        version_runs: Sequence[tuple[int, int]] = (),
        segment_id: int | None = None,
    ) -> Turn:
        """Append what the policy sampled for the prompt given last; return the turn's marks.

        `version_runs` are (version, number of tokens) in order, empty where all tokens are of
        `policy_version`. `segment_id` says whose turn it is where conversations interleave.
        Raises TraceError when no prompt was given since the last turn, when ids and
        log-probabilities differ in number, when the runs do not add up, or when nothing was
        sampled; the trace is unchanged then.
        """
        place = self._current if segment_id is None else segment_id
        if place not in self._open:
            raise TraceError("a sampled turn needs a prompt before it")
        if len(ids) != len(logprobs):
            raise TraceError(f"{len(ids)} ids with {len(logprobs)} log-probabilities")
        if not ids:
            raise TraceError("a sampled turn holds at least one token")
        versions = _versions(len(ids), policy_version, version_runs)
        segment = self.segments[place]
        turn = Turn(
            start=len(segment.response_ids),
            end=len(segment.response_ids) + len(ids),
            finish_reason=finish_reason,
        )
        segment.response_ids += [int(token) for token in ids]
        segment.response_mask += [1] * len(ids)
        segment.response_logprobs += [float(value) for value in logprobs]
        segment.versions += versions
        segment.turns.append(turn)
        if sampling is not None:
            segment.sampling = sampling.as_dict()
        mode = logprob_mode or UNKNOWN_LOGPROBS
        alone = len(segment.turns) == 1
        segment.logprob_mode = mode if alone or mode == segment.logprob_mode else MIXED_LOGPROBS
        self._open.discard(place)
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
        trace._current = max(len(trace.segments) - 1, 0)
        return trace

    def _begin(self, prompt: list[int], *, parent: int | None, fork_reason: str | None) -> Segment:
        segment = Segment(
            id=len(self.segments),
            prompt_ids=[int(token) for token in prompt],
            parent=parent,
            fork_reason=fork_reason,
        )
        self.segments.append(segment)
        return segment


def _continue(segment: Segment, prompt: list[int], policy_version: int | None) -> None:
    if not segment.response_ids:
        segment.prompt_ids = [int(token) for token in prompt]
        return
    known = len(segment.prompt_ids) + len(segment.response_ids)
    added = [int(token) for token in prompt[known:]]
    version = segment.versions[-1] if policy_version is None else policy_version
    segment.response_ids += added
    segment.response_mask += [0] * len(added)
    segment.response_logprobs += [0.0] * len(added)
    segment.versions += [version] * len(added)


def _versions(count: int, policy_version: int | None, runs: Sequence[tuple[int, int]]) -> list[int]:
    if not runs:
        return [UNKNOWN_POLICY_VERSION if policy_version is None else policy_version] * count
    if any(run < 1 for _, run in runs) or sum(run for _, run in runs) != count:
        raise TraceError(f"version runs {list(runs)} do not add up to {count} tokens")
    return [version for version, run in runs for _ in range(run)]


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the common prefix, by halves: comparing slices is C's work."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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
