"""What the surface answers when a job is done, and how it words a fault."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.http import JsonResponse
from rest_framework.response import Response
from rest_framework.settings import api_settings

from rollouts.api.reference.results import Finished, result
from rollouts.api.reference.surface import DataSource, Surface
from rollouts.exceptions import NotThere
from rollouts.models import Rollout
from rollouts.services.reference_jobs import Job, deliver_job, failed_stage, is_running
from rollouts.services.trajectories import empty_trajectory, read_trajectory
from rollouts.states import EvaluationSource, Outcome


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A job and what its answer depends on, as it was asked for."""

    owner: Any
    job: Job
    surface: Surface
    source: DataSource
    instance: Mapping[str, Any]
    with_tokens: bool
    job_id: str | None


def timed_out() -> JsonResponse:
    """Return what a call gets whose job took too long."""
    return JsonResponse(
        {"detail": "Processing timed out", "code": "reference.timed_out"}, status=504
    )


def answer_of(asked: Asked) -> JsonResponse:
    """Return the result of a job that is done, whatever became of it."""
    try:
        rollout = deliver_job(job=asked.job)
    except NotThere as error:
        return JsonResponse({"detail": str(error), "code": error.code}, status=error.status)
    if rollout.outcome == Outcome.CANCELLED and not is_running(owner=asked.owner):
        detail = "Failed to process job: Server is stopping; job cancelled"
        return JsonResponse({"detail": detail, "code": "reference.stopped"}, status=500)
    return JsonResponse(
        result(
            _finished(rollout),
            instance=asked.instance,
            resolved_above=asked.source.resolved_above,
            patch=asked.source.patch,
            with_tokens=asked.with_tokens,
            input_ids=asked.surface.input_ids,
        )
    )


def _finished(rollout: Rollout) -> Finished:
    broken = ""
    try:
        trajectory = read_trajectory(rollout=rollout)
    except NotThere as error:
        trajectory = empty_trajectory(rollout)
        broken = str(error) if hasattr(rollout, "trajectory") else ""
    evaluation = rollout.evaluations.filter(source=EvaluationSource.ROLLOUT).first()
    return Finished(
        outcome=rollout.outcome or "",
        stop_reason=rollout.stop_reason,
        reward=rollout.reward,
        rewards=rollout.rewards,
        answer=rollout.answer,
        failure_code=rollout.failure_code,
        failure_detail=rollout.failure_detail,
        failed_stage=failed_stage(rollout=rollout),
        timings=rollout.timings,
        trajectory=trajectory,
        details={} if evaluation is None else evaluation.details,
        lost=broken,
    )


def reference_handler(exc: Exception, context: dict[str, Any]) -> Response | None:
    """Answer a fault with `detail`, as the reference does, and with our `code`.

    A body that lacks a field is 422 with a list of places, as of its framework.
    """
    handler: Any = api_settings.EXCEPTION_HANDLER
    response: Response | None = handler(exc, context)
    if response is None or not isinstance(response.data, Mapping):
        return response
    problem = response.data
    response.content_type = "application/json"
    if "errors" in problem:
        response.status_code = 422
        response.data = {
            "detail": [
                {"type": "value_error", "loc": ["body", name], "msg": " ".join(map(str, said))}
                for name, said in _by_field(problem["errors"])
            ],
            "code": problem["code"],
        }
    else:
        response.data = {name: problem[name] for name in ("detail", "code") if name in problem}
    return response


def _by_field(errors: Any) -> list[tuple[str, list[Any]]]:
    if not isinstance(errors, Mapping):
        return [("body", list(errors))]
    return [
        (str(name), said if isinstance(said, list) else [said]) for name, said in errors.items()
    ]
