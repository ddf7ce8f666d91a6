"""What the service tells of its things, as frozen dataclasses; `raw` is all that it said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, TypeVar

_R = TypeVar("_R", bound="Record")


def moment(text: Any) -> datetime | None:
    """Return a time of the API; None for null and for what is no time."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00"))  # Python 3.10 knows no Z
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class Record:
    """One thing of the service; equal when what it tells is equal."""

    raw: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def parse(cls: type[_R], data: Mapping[str, Any], **more: Any) -> _R:
        """Return the record of an answer: unknown members stay in `raw`, absent ones default."""
        known: dict[str, Any] = {}
        for each in fields(cls):
            if each.name in data and each.name not in more:
                value = data[each.name]
                if "datetime" in str(each.type):
                    value = moment(value)
                elif isinstance(value, list):
                    value = tuple(value)
                known[each.name] = value
        return cls(**{**known, "raw": dict(data), **more})


@dataclass(frozen=True, kw_only=True)
class ExperimentRecord(Record):
    """One training run as the service sees it."""

    id: str
    name: str
    policy: str
    policy_id: str | None = None
    policy_version: int | None = None
    state: str = "active"
    feed: str = "push"
    group_size: int = 1
    task_sets: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    budgets: Mapping[str, Any] = field(default_factory=dict)
    max_policy_lag: int | None = None
    mode: str | None = None
    exhausted: bool = False
    feed_detail: str = ""
    coming: Mapping[str, int] = field(default_factory=dict)
    created_at: datetime | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """How many of its rollouts are in each state; empty where it came from a list."""
        found: Mapping[str, int] = self.raw.get("rollouts") or {}
        return found


@dataclass(frozen=True, kw_only=True)
class GroupRecord(Record):
    """The rollouts of one task; what a submission does not tell is None until `refresh()`."""

    id: str
    experiment: str
    task: str
    samples: int
    task_ref: str | None = None
    environment: str | None = None
    state: str = "open"
    done: int = 0
    priority: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    snapshot: str | None = None
    batch: str | None = None
    filter_rule: str = ""
    filter_detail: str = ""
    rollouts: tuple[str, ...] = ()
    created_at: datetime | None = None
    ready_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutRecord(Record):
    """One episode of one task."""

    id: str
    experiment: str
    group: str
    task: str
    task_ref: str
    sample: int
    environment: str
    state: str
    outcome: str | None = None
    stop_reason: str | None = None
    failure_code: str | None = None
    failure_detail: str | None = None
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    node: str | None = None
    turns: int = 0
    sampled_tokens: int = 0
    tool_calls: int = 0
    answer: str | None = None
    created_at: datetime | None = None
    done_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class BatchRecord(Record):
    """A lease of finished groups, without their trajectories."""

    id: str
    experiment: str
    state: str
    group_count: int
    policy_version: int
    number: int | None = None
    repeats: str | None = None
    max_lag: int | None = None
    lease_expires_at: datetime | None = None
    created_at: datetime | None = None
    closed_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class PolicyRecord(Record):
    """A model, its tokenizer and its current version."""

    id: str
    name: str
    model: str
    version: int
    tokenizer: str = ""
    context_tokens: int | None = None
    created_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateRecord(Record):
    """An update of a policy's weights."""

    id: str
    policy: str
    number: int
    from_version: int
    to_version: int
    mode: str
    state: str
    control: bool = False
    detail: str = ""
    servers: tuple[Mapping[str, Any], ...] = ()
    created_at: datetime | None = None
    ready_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class ServerRecord(Record):
    """An inference server and its last health check."""

    id: str
    policy: str
    url: str
    kind: str
    state: str
    healthy: bool | None = None
    max_in_flight: int | None = None
    detail: str = ""
    checked_at: datetime | None = None
    created_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(Record):
    """A measurement of a policy version; estimates are in `overall` and `by_task_set`."""

    id: str
    name: str
    experiment: str
    policy: str
    policy_version: int
    state: str = "starting"
    task_sets: tuple[str, ...] = ()
    samples_per_task: int = 1
    seed: int | None = None
    key: str = "reward"
    threshold: float = 1.0
    overall: Mapping[str, Any] = field(default_factory=dict)
    by_task_set: Mapping[str, Any] = field(default_factory=dict)
    created_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class TaskSetRecord(Record):
    """An imported data set."""

    id: str
    name: str
    description: str = ""
    task_count: int | None = None
    created_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class TaskImportRecord(Record):
    """An import of tasks; `progress` is 0 to 1, None where nobody knows."""

    id: str
    set_name: str
    state: str
    format: str = ""
    source: str = ""
    name: str = ""
    environment: str | None = None
    created: int = 0
    changed: int = 0
    unchanged: int = 0
    rejected: int = 0
    number: int = 0
    progress: float | None = None
    error_code: str = ""
    error: str = ""
    created_at: datetime | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class RejectedRowRecord(Record):
    """A row or folder that an import refused, and why; `raw["raw"]` is how it stood."""

    number: int
    place: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class TaskRecord(Record):
    """One task, without what only its evaluator may know."""

    id: str
    task_set: str
    ref: str
    environment: str
    instruction: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    content_hash: str = ""
    created_at: datetime | None = None
