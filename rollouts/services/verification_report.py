"""What a verification's rollouts show: checks by task, times, and a verdict on the environment."""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models.functions import Right

from rollouts.exceptions import NotThere
from rollouts.models import Evaluation, Rollout, Trajectory, Verification
from rollouts.services.solutions import NOOP, ORACLE, ROLE
from rollouts.services.trajectories import read_body
from rollouts.states import Outcome, Verdict
from rollouts.text import clean_text

PASSED, FAILED, SKIPPED, UNDECIDED = "passed", "failed", "skipped", "undecided"
FLAKY = "flaky"
LOG_CHARACTERS = 2000
UNPAID = (
    "The reference solution is not paid in full. Of its work only the evaluator's workspace is "
    "graded, the working directory by default: where it changes more, say `workspace` or `scope`."
)
MAX_LOGS = 50  # of the tasks that failed: the report is one row
STAGES = ("init", "run", "eval")
# Whose fault a failure is: the image's, the setup's, the grading's; all others decide nothing.
_STARTS = ("sandbox.image", "sandbox.start_", "sandbox.runtime_missing", "sandbox.enter_failed")
_SETUP = ("sandbox.setup_failed", "sandbox.egress_forbidden", "secret.")
_GRADING = ("evaluator.", "eval.timeout")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Seen:
    """One rollout as the report reads it; `trouble` says what failed, empty when it was scored."""

    id: Any
    role: str
    reward: float | None
    trouble: str
    detail: str
    timings: Mapping[str, float]


def report_on(verification: Verification) -> dict[str, Any]:
    """Return the report as JSON: `tasks`, `counts` of their states, `seconds` by stage."""
    rollouts = (
        Rollout.objects.filter(experiment=verification.experiment_id)
        .select_related("group__task")
        .defer(*(f"group__task__{name}" for name in ("instruction", "payload", "hidden")))
        .defer("answer", "last_message")
        .order_by("sequence", "sample")
    )
    by_task: dict[Any, list[Rollout]] = {}
    for rollout in rollouts:
        by_task.setdefault(rollout.group.task_id, []).append(rollout)
    has_image = verification.environment.image_id is not None
    tasks = [_task(verification, rows, has_image=has_image) for rows in by_task.values()]
    _add_logs([each for each in tasks if each["state"] in (FAILED, FLAKY)][:MAX_LOGS])
    tasks.sort(key=lambda each: (each["state"] == PASSED, each["ref"]))
    seen = [row.timings for rows in by_task.values() for row in rows]
    return {
        "environment": verification.environment.ref,
        "tasks": tasks,
        "counts": dict(Counter(each["state"] for each in tasks)),
        "seconds": {stage: spread(times) for stage in STAGES if (times := _times(seen, stage))},
    }


def verdict_of(report: Mapping[str, Any], *, tolerance: float) -> str:
    """Return what a report says of its environment.

    Broken: more than the tolerated fraction of the tasks failed. Verified: a solution was paid in
    full and no more tasks stayed undecided than passed. Else nothing is said.
    """
    tasks = report["tasks"]
    failed = sum(each["state"] in (FAILED, FLAKY) for each in tasks)
    if failed and failed > tolerance * len(tasks):
        return Verdict.BROKEN
    solved = sum(each["checks"]["solution"] == PASSED for each in tasks)
    passed = sum(each["state"] == PASSED for each in tasks)
    undecided = sum(each["state"] == UNDECIDED for each in tasks)
    return Verdict.VERIFIED if solved and passed > undecided else Verdict.UNDECIDED


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return median, 90th percentile and maximum of some seconds, by nearest rank."""
    ordered = sorted(times)

    def rank(fraction: float) -> float:
        return round(ordered[max(0, math.ceil(fraction * len(ordered)) - 1)], 3)

    return {"p50": rank(0.5), "p90": rank(0.9), "max": rank(1.0)}


def _times(seen: Iterable[Mapping[str, float]], stage: str) -> list[float]:
    return [timings[stage] for timings in seen if stage in timings]


def _task(
    verification: Verification, rows: Sequence[Rollout], *, has_image: bool
) -> dict[str, Any]:
    seen = [_look(row) for row in rows]
    oracle = [each for each in seen if each.role == ORACLE]
    noop = [each for each in seen if each.role == NOOP]
    checks = {
        "starts": _got_past(seen, "starts", ("setup", "grading", "")) if has_image else SKIPPED,
        "setup": _got_past(seen, "setup", ("grading", "")) if has_image else SKIPPED,
        "solution": _paid(oracle, lambda reward: reward >= verification.threshold),
        "nothing": _paid(noop, lambda reward: reward < verification.threshold),
        "repeats": _repeats(oracle, noop) if verification.repeats > 1 else SKIPPED,
    }
    task = rows[0].group.task
    return {
        "task": str(task.pk),
        "ref": task.ref,
        "content_hash": rows[0].group.metadata.get("content_hash", ""),
        "state": _state(checks),
        "checks": checks,
        "rewards": {
            role: [each.reward for each in found]
            for role, found in ((ORACLE, oracle), (NOOP, noop))
        },
        "rollouts": {
            role: [str(each.id) for each in found]
            for role, found in ((ORACLE, oracle), (NOOP, noop))
        },
        "detail": next((each.detail for each in seen if each.trouble), "")
        or (UNPAID if has_image and checks["solution"] == FAILED else ""),
        "log": "",
    }


def _look(row: Rollout) -> _Seen:
    trouble, detail = "", ""
    if row.outcome != Outcome.SCORED:
        trouble = _trouble(row)
        said = f"{row.failure_code}: {row.failure_detail}" if row.failure_code else ""
        detail = said or f"It is {row.outcome or row.state}."
    role = row.group.metadata.get(ROLE, NOOP)
    return _Seen(row.pk, role, row.reward, trouble, detail[-LOG_CHARACTERS:], row.timings)


def _trouble(row: Rollout) -> str:
    code = row.failure_code
    for name, prefixes in (("starts", _STARTS), ("setup", _SETUP), ("grading", _GRADING)):
        if code.startswith(prefixes):
            return name
    return UNDECIDED


def _got_past(seen: Sequence[_Seen], what: str, after: Sequence[str]) -> str:
    """Return whether INIT did one of its parts: no rollout failed there and one got further."""
    if any(each.trouble == what for each in seen):
        return FAILED
    return PASSED if any(each.trouble in after for each in seen) else UNDECIDED


def _paid(seen: Sequence[_Seen], is_right: Any) -> str:
    """Return whether every grading of some rollouts was right; skipped when there are none."""
    if not seen:
        return SKIPPED
    rewards = [each.reward for each in seen if each.reward is not None]
    if any(each.trouble == "grading" for each in seen) or not all(map(is_right, rewards)):
        return FAILED
    return PASSED if rewards else UNDECIDED


def _repeats(*roles: Sequence[_Seen]) -> str:
    """Return whether what was done alike was scored alike."""
    scored = [[each.reward for each in seen if each.reward is not None] for seen in roles]
    if any(len(set(rewards)) > 1 for rewards in scored):
        return FAILED
    return PASSED if any(len(rewards) > 1 for rewards in scored) else UNDECIDED


def _state(checks: Mapping[str, str]) -> str:
    if checks["repeats"] == FAILED:
        return FLAKY
    for state in (FAILED, UNDECIDED):
        if state in checks.values():
            return state
    return PASSED


def _add_logs(tasks: Sequence[dict[str, Any]]) -> None:
    """Write into each task what its rollout that went wrong said: the solution, then the tests."""
    blamed = {rollout: each for each in tasks if (rollout := _blamed(each)) is not None}
    logs = (
        Evaluation.objects.filter(rollout__in=list(blamed))
        .order_by("created_at")
        .annotate(end=Right("log", LOG_CHARACTERS))
        .values_list("rollout_id", "end", "details")
    )
    said: dict[UUID, list[str]] = {rollout_id: [] for rollout_id in blamed}
    for stored in Trajectory.objects.filter(rollout__in=list(blamed)):
        said[stored.rollout_id].append(_output(stored))
    for rollout_id, end, details in logs:
        fault = details.get("policy_fault", "") if isinstance(details, dict) else ""
        said[rollout_id] += [fault and f"[{fault}] {details.get('message', '')}", end]
    for rollout_id, each in blamed.items():
        each["log"] = clean_text("\n".join(filter(None, said[rollout_id])))


def _blamed(task: Mapping[str, Any]) -> UUID | None:
    """Return the rollout to read: of the role whose check failed, the one that was paid least."""
    role = NOOP if task["checks"]["nothing"] == FAILED else ORACLE
    ids, rewards = task["rollouts"][role], task["rewards"][role]
    if not ids:
        role = NOOP
        ids, rewards = task["rollouts"][role], task["rewards"][role]
    worst = min(
        range(len(ids)),
        key=lambda place: -math.inf if rewards[place] is None else rewards[place],
        default=None,
    )
    return None if worst is None else UUID(ids[worst])


def _output(stored: Trajectory) -> str:
    """Return the end of what the solution printed; empty where there is nothing to read."""
    try:
        messages = json.loads(read_body(stored))["messages"]
    except (NotThere, OSError, ValueError, KeyError) as error:
        logger.warning("trajectory %s could not be read: %s", stored.pk, error)
        return ""
    outputs = [str(each["content"]) for each in messages if each.get("role") == "tool"]
    return outputs[-1][-LOG_CHARACTERS:] if outputs else ""
