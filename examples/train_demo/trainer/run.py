"""The training run: lease, compare, learn, exchange the weights, acknowledge."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx
import numpy as np
from prorl_client import (
    Batch,
    Client,
    Experiment,
    NotFound,
    Policy,
    ServiceUnreachable,
    Trajectory,
)

from examples.train_demo.trainer.learner import Learner

WAIT_SECONDS = 600.0  # for a batch: a loaded machine, and nothing that takes longer
LOAD_SECONDS = 120.0
START_SECONDS = 300.0


@dataclass(frozen=True)
class Settings:
    """What the trainer is told."""

    policy: str
    task_set: str
    weights: Path
    steps: int = 10
    groups: int = 4
    samples: int = 8
    max_policy_lag: int = 1
    learning_rate: float = 1e-4
    passes: int = 2
    trained_layers: int = 4
    clip_low: float = 0.2
    clip_high: float = 0.28
    turn_tokens: int = 8
    seed: int = 1


@dataclass(frozen=True)
class Row:
    """One step of the run: what came, how far it agrees, what was learnt, how long it took.

    `reward`, `opened` and `said` are means over the batch's scored rollouts; `lag` is the largest
    of their tokens' policy versions behind `version`, the trainer's.
    """

    step: int
    seconds: float
    version: int
    reward: float
    opened: float
    said: float
    rollouts: int
    scored: int
    tokens: int
    lag: int
    largest_difference: float
    mean_difference: float
    loss: float
    gradient_norm: float
    clipped: float
    waited: float
    learnt: float
    exchanged: float


def find_policy(client: Client, name: str) -> tuple[Policy, list[str]]:
    """Return the policy and its servers' addresses once the service is up and knows them."""
    end = monotonic() + START_SECONDS
    while True:
        try:
            policy = client.policy(name)
            servers = [each.url for each in client.servers(policy=name)]
            if servers:
                return policy, servers
        except (NotFound, ServiceUnreachable):
            if monotonic() > end:
                raise
        if monotonic() > end:
            raise TimeoutError(f"no server of the policy {name} within {START_SECONDS:g} s")
        sleep(0.5)


def create_experiment(client: Client, settings: Settings) -> Experiment:
    """Create the experiment, which draws from its task set and keeps one batch ahead."""
    return client.create_experiment(
        settings.policy,
        settings.policy,
        task_sets=[settings.task_set],
        group_size=settings.samples,
        feed="pull",
        feed_settings={"batch_groups": settings.groups, "seed": settings.seed},
        max_policy_lag=settings.max_policy_lag,
        # Temperature 1: log-probabilities are those of the logits as they are. And no seed, by
        # which the samples of one number would draw the same random numbers in every group.
        sampling={"temperature": 1.0, "max_tokens": settings.turn_tokens},
        budgets={"max_turns": 2, "tool_seconds": 20, "run_seconds": 300},
    )


def train(client: Client, learner: Learner, settings: Settings) -> Iterator[Row]:
    """Yield the steps of a run; what is unfinished at the end is cancelled.

    Raises Disagreement, TimeoutError, and what the client raises.
    """
    policy, servers = find_policy(client, settings.policy)
    experiment = create_experiment(client, settings)
    began = asked = monotonic()
    try:
        batches = experiment.batches(settings.groups, limit=settings.steps, timeout=WAIT_SECONDS)
        for step, batch in enumerate(batches, 1):
            came = monotonic()
            with batch:  # acknowledged once its weights are out; given back if anything fails
                before = learner.version
                agreement, done = learner.learn(batch.trajectories)
                learnt = monotonic()
                exchange(policy, servers, learner, settings.weights)
            now = monotonic()
            yield Row(
                step=step,
                seconds=round(now - began, 1),
                version=before,
                **_outcome(batch, before),
                tokens=agreement.tokens,
                largest_difference=agreement.largest,
                mean_difference=agreement.mean,
                **asdict(done),
                waited=round(came - asked, 1),
                learnt=round(learnt - came, 1),
                exchanged=round(now - learnt, 1),
            )
            asked = now
    finally:
        experiment.stop()


def exchange(policy: Policy, servers: Sequence[str], learner: Learner, folder: Path) -> None:
    """Give the servers the learner's weights in an update of the policy."""
    version = learner.version
    name = f"version-{version}.npz"
    unfinished = folder / f".{name}"
    with unfinished.open("wb") as file:
        np.savez(file, **learner.model.tensors())  # type: ignore[arg-type]
    unfinished.rename(folder / name)
    info = {"path": name, "weight_version": str(version)}
    with policy.update(version, mode="abort"):
        for url in servers:
            answer = httpx.post(
                f"{url}/update_weights", json={"update_info": info}, timeout=LOAD_SECONDS
            )
            answer.raise_for_status()
    (folder / name).unlink()


def save_row(path: Path, row: Row) -> None:
    """Append a step to the file that tells how the run goes."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _outcome(batch: Batch, version: int) -> Mapping[str, Any]:
    scored = [each for each in batch.trajectories if each.reward is not None]
    return {
        "reward": _mean([float(each.reward or 0.0) for each in scored]),
        "opened": _mean([each.rewards.get("opened", 0.0) for each in scored]),
        "said": _mean([each.rewards.get("said", 0.0) for each in scored]),
        "rollouts": len(batch.trajectories),
        "scored": len(scored),
        "lag": version - min(map(_oldest, scored), default=version),
    }


def _oldest(trajectory: Trajectory) -> int:
    return min(int(segment.policy_versions.min()) for segment in trajectory.segments)


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0
