"""POST /process: a job from its request to its answer, which is made when the job is done."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.views.decorators.csrf import csrf_exempt
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from rollouts.api.connections import let_go_of_connection
from rollouts.api.reference.answers import Asked, answer_of, timed_out
from rollouts.api.reference.jobs import inline_task, instance_id_of
from rollouts.api.reference.sampling import read_sampling
from rollouts.api.reference.surface import DataSource
from rollouts.api.reference.views import SurfaceView
from rollouts.api.reference.waiting import done_watch
from rollouts.exceptions import InvalidValue, UnknownReference
from rollouts.models import Task
from rollouts.services.inline import InlineTask
from rollouts.services.reference_jobs import give_up_job, require_running, submit_job
from sandboxes.api.strict import JsonObjectField

logger = logging.getLogger(__name__)

DELIVERY_TRIES = 5
DELIVERY_PAUSE_SECONDS = 1.0


class ProcessInput(serializers.Serializer[Any]):
    """One job; what is not known is ignored, as in the reference."""

    instance = JsonObjectField()
    sampling_params = JsonObjectField()
    job_id = serializers.CharField(required=False, allow_null=True, max_length=200)


class Waits(Response):
    """The job was started: the answer comes when it is done."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(status=202)
        self.asked = asked


class ProcessView(SurfaceView):
    """POST /process."""

    def post(self, request: Request) -> Response:
        """Start a job, or join the one of the same id that is under way."""
        require_running(owner=request.user)
        given = ProcessInput(data=request.data)
        given.is_valid(raise_exception=True)
        instance, job_id = given.validated_data["instance"], given.validated_data.get("job_id")
        name = instance.get("data_source", "swebench")
        source = self.surface.source(name) if isinstance(name, str) else None
        if source is None:
            raise InvalidValue(
                "Invalid dataset type or function not registered: "
                f"Dataset type {name} is not registered",
                code="reference.data_source",
            )
        wanted = read_sampling(
            given.validated_data["sampling_params"], timeout_seconds=self.surface.timeout_seconds
        )
        job = submit_job(
            owner=request.user,
            policy=self.policy(self.surface.policy_for(wanted.model, wanted.tokenizer)),
            sampling=wanted.sampling,
            budgets=wanted.budgets,
            task=_task(instance, source),
            job_id=job_id,
        )
        return Waits(
            Asked(
                owner=request.user,
                job=job,
                surface=self.surface,
                source=source,
                instance=instance,
                with_tokens=wanted.with_tokens,
                job_id=job_id,
            )
        )


def _task(instance: dict[str, Any], source: DataSource) -> InlineTask | Any:
    if not source.task_set:
        return inline_task(instance, source)
    ref = instance_id_of(instance)
    found = Task.objects.filter(task_set__name=source.task_set, ref=ref).first()
    if found is None:
        raise UnknownReference(
            f"The task set {source.task_set} has no task {ref!r}.", code="task.unknown"
        )
    return found.pk


@csrf_exempt
async def process(request: HttpRequest) -> HttpResponseBase:
    """Start a job and answer when it is done; no database connection is held meanwhile.

    504 when it takes too long: then it is cancelled. A caller that goes away ends its job, but
    one with an id: that may be asked for again.
    """
    response = await _in_thread(_started, request)
    if not isinstance(response, Waits):
        return response  # type: ignore[no-any-return]
    asked = response.asked
    try:
        finished = await done_watch().done(asked.job.rollout_id, seconds=asked.surface.wait_seconds)
    except asyncio.CancelledError:
        if asked.job_id is None:
            await asyncio.shield(_in_thread(give_up_job, job=asked.job))
        raise
    if not finished:
        await _in_thread(give_up_job, job=asked.job)
        return timed_out()
    return await _answered(asked)


async def _answered(asked: Asked) -> HttpResponseBase:
    """Return the result; a database that is away for a moment must not cost the whole job."""
    for _try in range(DELIVERY_TRIES - 1):
        try:
            return await _in_thread(answer_of, asked)  # type: ignore[no-any-return]
        except Error as error:
            logger.warning("the result of %s cannot be read now: %s", asked.job.rollout_id, error)
            await asyncio.sleep(DELIVERY_PAUSE_SECONDS)
    return await _in_thread(answer_of, asked)  # type: ignore[no-any-return]


_process_view: Callable[..., HttpResponseBase] = ProcessView.as_view()


def _started(request: HttpRequest) -> HttpResponseBase:
    response = _process_view(request)
    if isinstance(response, Response) and not response.is_rendered:
        response.render()
    return response


def _in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
    return sync_to_async(_and_let_go)(function, *args, **kwargs)


def _and_let_go(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    finally:
        let_go_of_connection()
