"""Rows for tests: each function makes one thing, with what it needs, and takes any column."""

from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any
from uuid import UUID, uuid4

from django.contrib.auth import get_user_model
from django.db import transaction
from django.utils import timezone

from rollouts.models import (
    Attempt,
    Batch,
    Experiment,
    Group,
    InferenceServer,
    Policy,
    PolicyUpdate,
    RejectedRow,
    Rollout,
    Task,
    TaskImport,
    TaskSet,
    TrainerToken,
    Trajectory,
    Verification,
    Worker,
)
from rollouts.options import Budgets, Sampling
from rollouts.services.finish import StoredTrajectory
from rollouts.services.tokens import create_token
from rollouts.services.trajectories import store_trajectory
from rollouts.states import (
    BatchState,
    GroupState,
    Outcome,
    Purpose,
    RolloutState,
    Stage,
    StopReason,
    UpdateMode,
    UpdateState,
)
from sandboxes.models import Environment, Image, ImageBuild, Node, Sandbox
from sandboxes.states import SandboxPurpose

_numbers = count(1)


def unique(word: str) -> str:
    """Return a name that no other row has."""
    return f"{word}-{next(_numbers)}"


def make_user(**columns: Any) -> Any:
    """Return a user without a password."""
    return get_user_model().objects.create(**{"username": unique("trainer"), **columns})


def make_operator(**columns: Any) -> Any:
    """Return a staff user."""
    return make_user(**{"is_staff": True, **columns})


def make_token(user: Any, **options: Any) -> tuple[TrainerToken, str]:
    """Return a token of a user and its text."""
    return create_token(user=user, **{"name": "test", **options})


def make_image(**columns: Any) -> Image:
    """Return an image; no file is behind it."""
    return Image.objects.create(**{"name": unique("image"), "source": "base.sif", **columns})


def make_image_build(**columns: Any) -> ImageBuild:
    """Return a queued build of an image on a node."""
    if "image" not in columns:
        columns["image"] = make_image()
    if "node" not in columns:
        columns["node"] = make_node()
    return ImageBuild.objects.create(
        **{"kind": "pull", "time_limit_seconds": 60.0, "spec_digest": "0" * 64, **columns}
    )


def make_environment(**columns: Any) -> Environment:
    """Return version 1 of an environment without a sandbox."""
    return Environment.objects.create(
        **{"name": unique("environment"), "version": 1, "evaluator": "exact", **columns}
    )


def make_node(**columns: Any) -> Node:
    """Return a node with four slots."""
    return Node.objects.create(**{"name": unique("node"), "capacity": 4, **columns})


def make_sandbox(**columns: Any) -> Sandbox:
    """Return a reserved sandbox."""
    if "node" not in columns:
        columns["node"] = make_node()
    return Sandbox.objects.create(**{"owner": uuid4(), "purpose": SandboxPurpose.RUN, **columns})


def make_task_set(**columns: Any) -> TaskSet:
    """Return an empty task set."""
    return TaskSet.objects.create(**{"name": unique("tasks"), **columns})


def make_task(**columns: Any) -> Task:
    """Return a task with a secret answer."""
    if "task_set" not in columns:
        columns["task_set"] = make_task_set()
    if "environment" not in columns:
        columns["environment"] = make_environment()
    return Task.objects.create(
        **{
            "ref": unique("task"),
            "instruction": "Say hello.",
            "hidden": {"evaluator_payload": {"answer": "hello"}},
            "content_hash": uuid4().hex,
            **columns,
        }
    )


def make_policy(**columns: Any) -> Policy:
    """Return a policy at version 3."""
    return Policy.objects.create(
        **{
            "name": unique("policy"),
            "model": "tiny",
            "tokenizer": "/models/tiny",
            "version": 3,
            **columns,
        }
    )


def make_policy_update(**columns: Any) -> PolicyUpdate:
    """Return an update that is ready, from the policy's version to the next."""
    if "policy" not in columns:
        columns["policy"] = make_policy()
    policy = columns["policy"]
    return PolicyUpdate.objects.create(
        **{
            "number": policy.updates.count() + 1,
            "from_version": policy.version,
            "to_version": policy.version + 1,
            "mode": UpdateMode.NONE,
            "state": UpdateState.READY,
            "ready_at": timezone.now(),
            **columns,
        }
    )


def make_verification(**columns: Any) -> Verification:
    """Return a running verification of one task of an environment without a sandbox."""
    if "environment" not in columns:
        columns["environment"] = make_environment()
    if "experiment" not in columns:
        columns["experiment"] = make_experiment(policy=None, purpose=Purpose.VERIFICATION)
    return Verification.objects.create(
        **{
            "task_count": 1,
            "repeats": 2,
            "deadline_at": timezone.now() + timedelta(hours=1),
            **columns,
        }
    )


def make_server(**columns: Any) -> InferenceServer:
    """Return an active inference server; nothing listens there."""
    if "policy" not in columns:
        columns["policy"] = make_policy()
    return InferenceServer.objects.create(
        **{"url": f"http://127.0.0.1:{10_000 + next(_numbers)}", **columns}
    )


def make_experiment(*, task_sets: Sequence[TaskSet] = (), **columns: Any) -> Experiment:
    """Return an active experiment with groups of two."""
    if "owner" not in columns:
        columns["owner"] = make_user()
    if "policy" not in columns:
        columns["policy"] = make_policy()
    experiment = Experiment.objects.create(
        **{
            "name": unique("experiment"),
            "group_size": 2,
            "sampling": Sampling().as_dict(),
            "budgets": Budgets().as_dict(),
            **columns,
        }
    )
    experiment.task_sets.set(task_sets)
    return experiment


def make_group(**columns: Any) -> Group:
    """Return an open group of two; its rollouts are made apart."""
    if "experiment" not in columns:
        columns["experiment"] = make_experiment()
    if "task" not in columns:
        columns["task"] = make_task()
    group = Group.objects.create(
        **{"size": 2, "environment": columns["task"].environment, **columns}
    )
    group.refresh_from_db()
    return group


def make_rollout(**columns: Any) -> Rollout:
    """Return a queued rollout, numbered within its group."""
    if "group" not in columns:
        columns["group"] = make_group()
    group = columns["group"]
    return Rollout.objects.create(
        **{
            "experiment": group.experiment,
            "environment": group.environment,
            "sample": group.rollouts.count(),
            "sequence": group.sequence,
            "needs_sandbox": False,
            "queued_at": timezone.now(),
            **columns,
        }
    )


def make_worker(**columns: Any) -> Worker:
    """Return a live worker process of RUN."""
    if "node" not in columns:
        columns["node"] = make_node()
    return Worker.objects.create(
        **{
            "stage": Stage.RUN,
            "pid": 4242,
            "concurrency": 4,
            "lease_expires_at": timezone.now() + timedelta(minutes=5),
            **columns,
        }
    )


def make_attempt(**columns: Any) -> Attempt:
    """Return a queued attempt at INIT."""
    if "rollout" not in columns:
        columns["rollout"] = make_rollout()
    return Attempt.objects.create(
        **{"stage": Stage.INIT, "number": 1, "budget_seconds": 60.0, **columns}
    )


def make_scored_rollout(*, reward: float = 1.0, **columns: Any) -> Rollout:
    """Return a rollout that is done and scored; its trajectory is made apart."""
    return make_rollout(
        **{
            "state": RolloutState.DONE,
            "outcome": Outcome.SCORED,
            "stop_reason": StopReason.FINISHED,
            "reward": reward,
            "rewards": {"exact": reward},
            "turns": 1,
            "sampled_tokens": 2,
            "answer": "hello",
            "timings": {"run": 0.5},
            "done_at": timezone.now(),
            **columns,
        }
    )


def make_trajectory(*, rollout: Rollout, tokens: Sequence[int] = (11, 12)) -> Trajectory:
    """Store a trajectory of one segment, in which the last token is the environment's."""
    stored = write_trajectory(rollout=rollout, tokens=tokens)
    return Trajectory.objects.create(rollout=rollout, **vars(stored))


def write_trajectory(*, rollout: Rollout, tokens: Sequence[int]) -> StoredTrajectory:
    """Write the file of a trajectory."""
    mask = [1] * (len(tokens) - 1) + [0]
    segment = {
        "id": 0,
        "parent": None,
        "fork_reason": None,
        "sampling": {"temperature": 1.0},
        "logprob_mode": "sampled",
        "turns": [{"start": 0, "end": len(tokens) - 1, "finish_reason": "stop", "reward": None}],
        "prompt_ids": [1, 2, 3],
        "response_ids": list(tokens),
        "response_mask": mask,
        "response_logprobs": [-0.5 * sampled for sampled in mask],
        "policy_versions": [[3, len(tokens)]],
    }
    return store_trajectory(
        experiment_id=rollout.experiment_id,
        rollout_id=rollout.pk,
        attempt_id=uuid4(),
        segments=[segment],
        messages=[{"role": "user", "content": "Say hello."}],
        tools=[],
    )


def make_ready_group(*, rewards: Sequence[float] = (1.0, 0.0), **columns: Any) -> Group:
    """Return a finished group: its rollouts are scored and their trajectories stored.

    It appears as a whole, so that a caller who waits for it never leases half of it.
    """
    with transaction.atomic():
        return _make_ready_group(rewards, columns)


def _make_ready_group(rewards: Sequence[float], columns: dict[str, Any]) -> Group:
    group = make_group(
        **{
            "state": GroupState.READY,
            "size": len(rewards),
            "done_count": len(rewards),
            "ready_at": timezone.now(),
            **columns,
        }
    )
    for reward in rewards:
        make_trajectory(rollout=make_scored_rollout(group=group, reward=reward))
    return group


def make_batch(*, groups: Sequence[Group], **columns: Any) -> Batch:
    """Return a leased batch of finished groups of one experiment."""
    experiment = groups[0].experiment
    batch = Batch.objects.create(
        **{
            "experiment": experiment,
            "owner": experiment.owner,
            "number": experiment.batches.count() + 1,
            "state": BatchState.LEASED,
            "group_count": len(groups),
            "policy_version": 3,
            "lease_expires_at": timezone.now() + timedelta(minutes=15),
            **columns,
        }
    )
    ids: list[UUID] = [group.pk for group in groups]
    Group.objects.filter(pk__in=ids).update(state=GroupState.LEASED, batch=batch)
    return batch


def make_task_import(**columns: Any) -> TaskImport:
    """Return a queued import of a path; nothing is there."""
    return TaskImport.objects.create(
        **{
            "set_name": unique("set"),
            "format": "jsonl",
            "source": "path",
            "name": "/data/rows.jsonl",
            "path": "/data/rows.jsonl",
            **columns,
        }
    )


def make_rejected_row(**columns: Any) -> RejectedRow:
    """Return a row that an import refused."""
    if "task_import" not in columns:
        columns["task_import"] = make_task_import()
    return RejectedRow.objects.create(
        **{"number": 1, "place": "rows.jsonl:1", "reason": "no JSON", "raw": "{", **columns}
    )
