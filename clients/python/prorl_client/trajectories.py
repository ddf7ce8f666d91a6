"""Trajectories: what a rollout leaves, its tokens as numpy arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from prorl_client.errors import UnreadableContent

UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class Turn:
    """One sampled turn: places in `response_ids`; what a format does not carry is None."""

    start: int
    end: int
    finish_reason: str | None = None
    reward: float | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment:
    """One run of tokens in which every prompt extends the one before exactly.

    prompt_ids int32 [p]; response_ids int32, response_mask uint8 (1 = sampled by the policy) and
    response_logprobs float32 (0.0 where the mask is 0), all [r]. version_values int64 and
    version_runs int32 [v]: policy versions and how many tokens each; the runs add up to r. The
    arrays are read-only, and views of the answer itself where that was Arrow.
    """

    id: int
    parent: int | None = None
    fork_reason: str | None = None
    logprob_mode: str = ""
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    response_mask: NDArray[np.uint8]
    response_logprobs: NDArray[np.float32]
    version_values: NDArray[np.int64]
    version_runs: NDArray[np.int32]
    turns: tuple[Turn, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def policy_versions(self) -> NDArray[np.int64]:
        """The policy version of each response token, int64 [r]; -1 where nobody knows it."""
        expanded = np.repeat(self.version_values, self.version_runs)
        expanded.flags.writeable = False
        return expanded

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Segment:
        """Return the segment of its JSON form. Raises UnreadableContent."""
        try:
            versions = data["policy_versions"]
            segment = cls(
                id=data["id"],
                parent=data.get("parent"),
                fork_reason=data.get("fork_reason"),
                logprob_mode=data.get("logprob_mode", ""),
                prompt_ids=_array(data["prompt_ids"], np.int32),
                response_ids=_array(data["response_ids"], np.int32),
                response_mask=_array(data["response_mask"], np.uint8),
                response_logprobs=_array(data["response_logprobs"], np.float32),
                version_values=_array([version for version, _run in versions], np.int64),
                version_runs=_array([run for _version, run in versions], np.int32),
                turns=tuple(
                    Turn(each["start"], each["end"], each.get("finish_reason"), each.get("reward"))
                    for each in data.get("turns", ())
                ),
                sampling=data.get("sampling") or {},
            )
        except (KeyError, TypeError, ValueError, OverflowError) as fault:
            raise UnreadableContent(f"A segment has an unknown form: {fault!r}.") from fault
        return segment.checked()

    def checked(self) -> Segment:
        """Return the segment itself. Raises UnreadableContent when its lengths do not agree."""
        size = len(self.response_ids)
        lengths = {len(self.response_mask), len(self.response_logprobs)}
        if lengths != {size} or int(self.version_runs.sum()) != size:
            raise UnreadableContent(f"Segment {self.id} has arrays of different lengths.")
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form that the service uses."""
        pairs = zip(self.version_values.tolist(), self.version_runs.tolist(), strict=True)
        return {
            "id": self.id,
            "parent": self.parent,
            "fork_reason": self.fork_reason,
            "sampling": dict(self.sampling),
            "logprob_mode": self.logprob_mode,
            "turns": [vars(turn) for turn in self.turns],
            "prompt_ids": self.prompt_ids.tolist(),
            "response_ids": self.response_ids.tolist(),
            "response_mask": self.response_mask.tolist(),
            "response_logprobs": self.response_logprobs.tolist(),
            "policy_versions": [list(pair) for pair in pairs],
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class Trajectory:
    """What a finished rollout left; without tokens when it sampled none or they cannot be read.

    `messages` and `tools` are None where the format does not carry them: Arrow carries tokens.
    """

    rollout: str
    group: str
    task: str
    task_ref: str
    sample: int
    environment: str
    outcome: str | None
    reward: float | None
    trainable: bool
    stop_reason: str | None = None
    failure_code: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    first_version: int | None = None
    last_version: int | None = None
    unknown_version_tokens: int = 0
    turns: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    messages: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    agent: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None

    @cached_property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled, over all segments."""
        return sum(int(np.count_nonzero(each.response_mask)) for each in self.segments)

    @classmethod
    def parse(
        cls, data: Mapping[str, Any], segments: Sequence[Segment] | None = None
    ) -> Trajectory:
        """Return the trajectory of its JSON form, or of a description and the segments.

        Raises UnreadableContent.
        """
        span = data.get("policy_version") or {}
        listed = data.get("segments") or () if segments is None else ()
        messages, tools = data.get("messages"), data.get("tools")
        try:
            return cls(
                rollout=data["rollout"],
                group=data["group"],
                task=data["task"],
                task_ref=data["task_ref"],
                sample=data["sample"],
                environment=data["environment"],
                outcome=data["outcome"],
                reward=data["reward"],
                trainable=data["trainable"],
                stop_reason=data.get("stop_reason"),
                failure_code=data.get("failure_code"),
                rewards=data.get("rewards") or {},
                first_version=span.get("first"),
                last_version=span.get("last"),
                unknown_version_tokens=data.get("unknown_version_tokens") or 0,
                turns=data.get("turns") or 0,
                timings=data.get("timings") or {},
                segments=tuple(segments or map(Segment.parse, listed)),
                messages=None if messages is None else tuple(messages),
                tools=None if tools is None else tuple(tools),
                agent=data.get("agent") or {},
                metadata=data.get("metadata") or {},
                error=data.get("error"),
            )
        except (KeyError, TypeError, AttributeError) as fault:
            raise UnreadableContent(f"A trajectory has an unknown form: {fault!r}.") from fault

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form that the service uses."""
        found: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "rollout",
                "group",
                "task",
                "task_ref",
                "sample",
                "environment",
                "outcome",
                "stop_reason",
                "failure_code",
                "reward",
                "trainable",
                "turns",
                "unknown_version_tokens",
            )
        }
        found["policy_version"] = {"first": self.first_version, "last": self.last_version}
        for name in ("rewards", "timings", "agent", "metadata"):
            found[name] = dict(getattr(self, name))
        found["segments"] = [segment.as_dict() for segment in self.segments]
        for name in ("messages", "tools"):
            listed = getattr(self, name)
            found[name] = None if listed is None else [dict(each) for each in listed]
        if self.error is not None:
            found["error"] = dict(self.error)
        return found


def read_line(line: bytes) -> Trajectory:
    """Return the trajectory of a line of NDJSON or of an exported file."""
    try:
        data = json.loads(line)
    except ValueError as fault:
        raise UnreadableContent(f"A line is not JSON: {fault}.") from fault
    return Trajectory.parse(data)


def read_jsonl(path: str | Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a file that `export` wrote as JSONL."""
    with Path(path).open("rb") as lines:
        for line in lines:
            if line.strip():
                yield read_line(line)


def _array(values: ArrayLike, kind: type[Any]) -> NDArray[Any]:
    array = np.array(values, dtype=kind)
    if array.ndim != 1:
        raise ValueError("not a flat list")
    array.flags.writeable = False
    return array
