"""Rows for the tests of the admin: small, real, in a state that the line itself could reach."""

import itertools
import uuid
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.utils import timezone

from rollouts.models import (
    Attempt,
    Batch,
    Evaluation,
    EvaluationRun,
    Experiment,
    FeedPlan,
    FeedReturn,
    Group,
    IdempotencyRecord,
    InferenceServer,
    JournalEntry,
    Policy,
    Reevaluation,
    Rollout,
    Task,
    TaskProgress,
    TaskSet,
    Webhook,
    WebhookDelivery,
    Worker,
)
from rollouts.options import Budgets, Sampling
from rollouts.services.submit import GroupRequest, submit_groups
from rollouts.services.tokens import create_token
from rollouts.states import AttemptState, BatchState, GroupState, Outcome, RolloutState, Stage
from sandboxes.models import Environment, Image, ImageBuild, Node, Sandbox, Snapshot
from sandboxes.services.catalogue import save_environment, save_image
from sandboxes.states import SandboxPurpose

_numbers = itertools.count(1)


def unique(word: str) -> str:
    """Return a name that no other row of this process has."""
    return f"{word}-{next(_numbers)}"


def make_user(**values: Any) -> Any:
    """Make an account that may not log in."""
    return get_user_model().objects.create(username=unique("trainer"), **values)


def make_image(**values: Any) -> Image:
    """Make an image."""
    return save_image(**{"name": unique("image"), "source": "base", **values})


def make_image_build(**values: Any) -> ImageBuild:
    """Make a queued build of an image."""
    filled = {"kind": "pull", "time_limit_seconds": 60.0, "spec_digest": "0" * 64, **values}
    return ImageBuild.objects.create(
        image=filled.pop("image", None) or make_image(),
        node=filled.pop("node", None) or make_node(),
        **filled,
    )


def make_environment(**values: Any) -> Environment:
    """Make the first version of a shell environment."""
    filled = {
        "name": unique("environment"),
        "agent": "command_line",
        "tools": ["bash", "submit"],
        "evaluator": "script",
        **values,
    }
    if "image" not in filled:
        filled["image"] = make_image()
    return save_environment(**filled)


def make_policy(**values: Any) -> Policy:
    """Make a policy."""
    return Policy.objects.create(
        **{"name": unique("policy"), "model": "m", "tokenizer": "/models/m", **values}
    )


def make_server(**values: Any) -> InferenceServer:
    """Make an inference server."""
    filled = {"url": f"http://127.0.0.1:9/{unique('server')}", **values}
    return InferenceServer.objects.create(
        policy=filled.pop("policy", None) or make_policy(), **filled
    )


def make_task(**values: Any) -> Task:
    """Make a task in a set of its own."""
    filled = {"ref": unique("task"), "instruction": "Do it.", "content_hash": "0" * 64, **values}
    if "task_set" not in filled:
        filled["task_set"] = TaskSet.objects.create(name=unique("set"))
    if "environment" not in filled:
        filled["environment"] = make_environment()
    return Task.objects.create(**filled)


def make_experiment(**values: Any) -> Experiment:
    """Make an active experiment."""
    filled = {
        "name": unique("experiment"),
        "sampling": Sampling().as_dict(),
        "budgets": Budgets().as_dict(),
        **values,
    }
    return Experiment.objects.create(
        owner=filled.pop("owner", None) or make_user(),
        policy=filled.pop("policy", None) or make_policy(),
        **filled,
    )


def make_group(*, samples: int = 2, experiment: Experiment | None = None) -> Group:
    """Submit a group."""
    task = make_task()
    requests = [GroupRequest(task=task.pk, samples=samples)]
    return submit_groups(experiment=experiment or make_experiment(), requests=requests)[0]


def make_rollout(**values: Any) -> Rollout:
    """Submit a group of one; return its rollout."""
    rollout = Rollout.objects.get(group=make_group(samples=1))
    for name, value in values.items():
        setattr(rollout, name, value)
    rollout.save()
    return rollout


def end(rollout: Rollout, outcome: str, **values: Any) -> Rollout:
    """Bring a rollout to its end, as the line does; its sandboxes are gone."""
    from rollouts.services.end import end_rollout

    if outcome == Outcome.SCORED:
        values.setdefault("reward", 1.0)
    assert end_rollout(rollout_id=rollout.pk, outcome=outcome, **values)
    return Rollout.objects.get(pk=rollout.pk)


def make_node(**values: Any) -> Node:
    """Make a node."""
    return Node.objects.create(**{"name": unique("node"), "capacity": 4, **values})


def make_worker(**values: Any) -> Worker:
    """Make a worker process whose lease holds."""
    filled = {
        "stage": Stage.RUN,
        "pid": 4242,
        "lease_expires_at": timezone.now() + timedelta(hours=1),
        **values,
    }
    return Worker.objects.create(node=filled.pop("node", None) or make_node(), **filled)


def make_attempt(**values: Any) -> Attempt:
    """Make a finished try at RUN."""
    now = timezone.now()
    filled = {
        "stage": Stage.RUN,
        "number": 1,
        "state": AttemptState.FINISHED,
        "budget_seconds": 60.0,
        "started_at": now,
        "ended_at": now,
        **values,
    }
    rollout = filled.pop("rollout", None) or make_rollout()
    return Attempt.objects.create(rollout=rollout, worker=make_worker(), **filled)


def make_running_attempt(rollout: Rollout) -> Attempt:
    """Make a try that a live worker holds, and put the rollout into RUN."""
    Rollout.objects.filter(pk=rollout.pk).update(state=RolloutState.RUN)
    return make_attempt(
        rollout=rollout, state=AttemptState.RUNNING, lease_token=uuid.uuid4(), ended_at=None
    )


def make_journal_entry() -> JournalEntry:
    """Make one journaled step."""
    attempt = make_attempt()
    return JournalEntry.objects.create(
        rollout=attempt.rollout, attempt=attempt, restarts=0, turn=0, kind="sampled", body={}
    )


def make_sandbox(**values: Any) -> Sandbox:
    """Make a reserved sandbox."""
    filled = {"owner": uuid.uuid4(), "purpose": SandboxPurpose.RUN, **values}
    return Sandbox.objects.create(node=filled.pop("node", None) or make_node(), **filled)


def make_snapshot(**values: Any) -> Snapshot:
    """Make a snapshot that is asked for and not taken yet."""
    filled = {"owner": uuid.uuid4(), **values}
    return Snapshot.objects.create(
        environment=filled.pop("environment", None) or make_environment(), **filled
    )


def make_evaluation() -> Evaluation:
    """Make one scoring."""
    return Evaluation.objects.create(
        rollout=make_rollout(), evaluator="script", reward=1.0, rewards={}, details={}
    )


def make_reevaluation() -> Reevaluation:
    """Make a re-evaluation that waits for a worker."""
    experiment = make_experiment()
    return Reevaluation.objects.create(
        experiment=experiment, owner=experiment.owner, evaluator="exact"
    )


def make_batch(**values: Any) -> Batch:
    """Make a leased batch with one finished group."""
    group = make_group(samples=1)
    end(group.rollouts.get(), Outcome.SCORED)
    experiment = group.experiment
    filled = {
        "experiment": experiment,
        "owner": experiment.owner,
        "number": experiment.batches.count() + 1,
        "group_count": 1,
        "policy_version": 0,
        "lease_expires_at": timezone.now() + timedelta(hours=1),
        **values,
    }
    batch = Batch.objects.create(**filled)
    if batch.state == BatchState.LEASED:
        Group.objects.filter(pk=group.pk).update(state=GroupState.LEASED, batch=batch)
    return batch


def make_webhook() -> Webhook:
    """Make an address that wants every event."""
    return Webhook.objects.create(
        experiment=make_experiment(), url="https://trainer.example/hook", secret="whsec_c2VjcmV0"
    )


def make_webhook_delivery() -> WebhookDelivery:
    """Make an event that waits to be sent."""
    return WebhookDelivery.objects.create(
        webhook=make_webhook(), kind="group.ready", body={}, next_at=timezone.now()
    )


def make_record() -> IdempotencyRecord:
    """Make one remembered call."""
    return IdempotencyRecord.objects.create(
        owner=make_user(), key=unique("key"), route="/api/v1/groups/", fingerprint="0" * 64
    )


def make_token(**values: Any) -> Any:
    """Make a token; its text is forgotten."""
    return create_token(**{"user": make_user(), "name": unique("token"), **values})[0]


def make_trajectory(messages: list[Any] | None = None, rollout: Rollout | None = None) -> Any:
    """Store a trajectory of one segment: 2 prompt ids, 3 response ids, 2 of them sampled."""
    from rollouts.models import Trajectory
    from rollouts.services.trajectories import store_trajectory

    rollout = rollout or make_rollout()
    segment = {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "response_logprobs": [-0.5, -0.25, 0.0],
        "response_mask": [1, 1, 0],
        "policy_versions": [[7, 2], [-1, 1]],
    }
    stored = store_trajectory(
        experiment_id=rollout.experiment_id,
        rollout_id=rollout.pk,
        attempt_id=uuid.uuid4(),
        segments=[segment],
        messages=messages or [{"role": "user", "content": "Hello"}],
        tools=[],
    )
    return Trajectory.objects.create(rollout=rollout, **vars(stored))


def make_evaluation_run() -> EvaluationRun:
    """Make an evaluation run of one task, whose samples wait."""
    group = make_group(samples=2)
    return EvaluationRun.objects.create(
        owner=group.experiment.owner,
        experiment=group.experiment,
        samples_per_task=2,
        policy_version=0,
    )


def make_feed_plan() -> FeedPlan:
    """Make the plan of an epoch of one task."""
    return FeedPlan.objects.create(
        experiment=make_experiment(), epoch=0, size=1, tasks=make_task().pk.bytes
    )


def make_feed_return() -> FeedReturn:
    """Make a task that waits to be drawn again."""
    return FeedReturn.objects.create(
        experiment=make_experiment(), epoch=0, position=0, task=make_task(), reason="rewound"
    )


def make_task_progress() -> TaskProgress:
    """Make what is known of a task after a group."""
    return TaskProgress.objects.create(
        experiment=make_experiment(), task=make_task(), groups=1, samples=2, right=1
    )
