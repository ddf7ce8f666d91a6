"""Build rows of the line for tests of the services."""

import uuid
from datetime import timedelta

from django.contrib.auth.models import User
from django.utils import timezone

from rollouts.models import Attempt, Experiment, Group, Policy, Rollout, Task, TaskSet, Worker
from rollouts.services.claim import Claim, claim_attempt
from rollouts.services.dispatch import dispatch
from rollouts.services.experiments import create_experiment
from rollouts.services.finish import (
    EvalResult,
    RunResult,
    StoredTrajectory,
    finish_eval,
    finish_init,
    finish_run,
)
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.services.workers import Registration
from rollouts.states import Stage
from sandboxes.models import Environment, Image, Node
from sandboxes.services.catalogue import save_environment, save_image


def make_environment(*, sandbox: bool = True) -> Environment:
    """Return an environment, with an image or without."""
    image: Image | None = save_image(name="base", source="base") if sandbox else None
    name = "terminal" if sandbox else "plain"
    return save_environment(name=name, image=image)


def make_task(*, ref: str = "t1", sandbox: bool = True) -> Task:
    """Return a task of the set `set`."""
    task_set, _created = TaskSet.objects.get_or_create(name="set")
    return Task.objects.create(
        task_set=task_set,
        ref=ref,
        environment=make_environment(sandbox=sandbox),
        instruction="Do it.",
        content_hash="0" * 64,
    )


def make_experiment(*, owner: str = "alice", **values: object) -> Experiment:
    """Return an experiment of a user."""
    user, _created = User.objects.get_or_create(username=owner)
    policy, _created = Policy.objects.get_or_create(
        name="policy", defaults={"model": "m", "tokenizer": "/nowhere"}
    )
    return create_experiment(owner=user, name="e", policy=policy, **values)  # type: ignore[arg-type]


def make_group(
    *,
    experiment: Experiment | None = None,
    task: Task | None = None,
    samples: int = 1,
    **values: int,
) -> Group:
    """Return a submitted group."""
    experiment = experiment or make_experiment()
    task = task or make_task(ref=uuid.uuid4().hex)
    request = GroupRequest(task=task.pk, samples=samples, **values)  # type: ignore[arg-type]
    return submit_groups(experiment=experiment, requests=[request])[0]


def make_worker(
    stage: str, *, node: str = "n1", capacity: int = 4, concurrency: int = 8
) -> Registration:
    """Return the registration of a live worker process."""
    row, _created = Node.objects.get_or_create(name=node, defaults={"capacity": capacity})
    worker = Worker.objects.create(
        node=row,
        stage=stage,
        pid=1,
        concurrency=concurrency,
        lease_expires_at=timezone.now() + timedelta(seconds=60),
    )
    return Registration(worker.pk, row.pk, row.name)


def make_node(name: str = "n1", *, capacity: int = 4) -> dict[str, Registration]:
    """Return live workers of every stage on one node."""
    return {stage: make_worker(stage, node=name, capacity=capacity) for stage in Stage.values}


def active_attempt(rollout: Rollout) -> Attempt:
    """Return the one active attempt of a rollout."""
    return Attempt.objects.get(rollout=rollout, state__in=["queued", "running"])


def claim_active(rollout: Rollout, worker: Registration) -> Claim:
    """Claim the active attempt of a rollout."""
    claim = claim_attempt(attempt_id=active_attempt(rollout).pk, worker=worker)
    assert claim is not None
    return claim


def stored() -> StoredTrajectory:
    """Return where a trajectory would be."""
    return StoredTrajectory(
        path="x/y.json",
        size_bytes=2,
        sha256="0" * 64,
        segments=1,
        prompt_tokens=3,
        response_tokens=4,
        sampled_tokens=4,
        trainable=True,
        first_policy_version=0,
        last_policy_version=0,
    )


def run_result() -> RunResult:
    """Return what a RUN may leave."""
    return RunResult(
        stop_reason="finished",
        answer="42",
        last_message="submit 42",
        turns=2,
        sampled_tokens=4,
        tool_calls=1,
        inference_seconds=0.5,
        tool_seconds=0.25,
        trajectory=stored(),
    )


def eval_result(reward: float = 1.0) -> EvalResult:
    """Return what an EVAL may find."""
    return EvalResult(
        evaluator="script", reward=reward, rewards={"reward": reward}, details={}, log=""
    )


def bring_to(rollout: Rollout, state: str, workers: dict[str, Registration]) -> Claim | None:
    """Bring a queued rollout to a state; the claim of its running attempt, if it is in a stage."""
    if state == "queued":
        return None
    assert dispatch() >= 1
    claim = claim_active(rollout, workers["init"])
    if state == "init":
        return claim
    finish_init(claim=claim)
    claim = claim_active(rollout, workers["run"])
    if state == "run":
        return claim
    finish_run(claim=claim, result=run_result())
    claim = claim_active(rollout, workers["eval"])
    if state == "eval":
        return claim
    finish_eval(claim=claim, result=eval_result())
    return None
