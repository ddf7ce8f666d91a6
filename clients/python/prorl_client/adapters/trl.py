"""TRL: `rollout_func` of GRPOTrainer, and the rollout worker of the asynchronous trainer.

Shapes: trl 1.16.0, trainer/grpo_trainer.py and experimental/async_grpo/.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from prorl_client import Batch, Experiment, Policy, ProrlError, Trajectory
from prorl_client.adapters.rows import (
    Forks,
    Row,
    advantages_of,
    placeholder,
    rows_of,
    single_row,
)
from prorl_client.adapters.sampling import prompt_text, runs_of, sample
from prorl_client.submissions import Task

logger = logging.getLogger("prorl_client")

REWARD = "service_reward"


def service_reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Reward function of the trainer: what the service found; None where it has no reward.

    TRL leaves a sample without a reward out of its group's mean and gives it no advantage.
    """
    rewards: list[float | None] = columns[REWARD]
    assert len(rewards) == len(completions)
    return rewards


def outputs(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Return what `rollout_func` returns for these rows."""
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.response_ids for row in rows],
        "logprobs": [row.logprobs for row in rows],
        "env_mask": [row.loss_mask for row in rows],
        REWARD: [row.reward for row in rows],
        "rollout": [row.trajectory.rollout for row in rows],
    }


class RolloutFunc:
    """Sample what GRPOTrainer asks for through the service: `rollout_func=RolloutFunc(experiment)`.

    TRL passes prompts alone, so a prompt must say which task it is: by default its text, or its
    last user's message, is a `task_ref` of the experiment; `task` makes another task of a prompt.
    TRL takes one row a sample: `forks` says which of several segments that is. Use it with
    `reward_funcs=service_reward`.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        task: Callable[[Any], Task] = prompt_text,
        forks: Forks = "most",
        timeout: float | None = None,
    ) -> None:
        self.experiment = experiment
        self.task = task
        self.forks = forks
        self.timeout = timeout

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return one row for each prompt, in order; neighbours that are equal are one group."""
        wanted = [(self.task(prompt), count) for prompt, count in runs_of(prompts)]
        groups = sample(self.experiment, wanted, timeout=self.timeout)
        stand_in = _any_token(trainer.processing_class)
        return outputs([self._row(each, stand_in) for group in groups for each in group])

    def _row(self, trajectory: Trajectory, stand_in: int) -> Row:
        row = single_row(trajectory, forks=self.forks)
        return placeholder(trajectory, stand_in) if row is None else row


def _any_token(tokenizer: Any) -> int:
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    found = tokenizer.eos_token_id
    return int(tokenizer.pad_token_id if found is None else found)


def rollout_samples(
    group: Sequence[Trajectory],
    *,
    group_id: int,
    model_version: int,
    first_version: int = 0,
    scale_rewards: bool = True,
) -> list[dict[str, Any]]:
    """Return the fields of a RolloutSample for every row of a group; forks give several.

    Each row of a rollout has the rollout's advantage; what has no reward gives none. A sample's
    `model_version` is that of its oldest token, counted from `first_version` as the trainer
    counts from 0; where nobody knows it, the given one.
    """
    rewards = [each.reward if each.trainable else None for each in group]
    found = []
    for trajectory, advantage in zip(
        group, advantages_of(rewards, scale=scale_rewards), strict=True
    ):
        if advantage is None:
            continue
        for row in rows_of(trajectory):
            padding = [0] * len(row.prompt_ids)
            span = row.version_span
            found.append(
                {
                    "prompt": [],
                    "completion": [dict(each) for each in trajectory.messages or ()],
                    "input_ids": row.token_ids,
                    "completion_mask": padding + row.loss_mask,
                    "old_log_probs": [0.0] * len(padding) + row.logprobs,
                    "advantage": advantage,
                    "model_version": model_version if span is None else span[0] - first_version,
                    "group_id": group_id,
                    "metrics": {"reward": float(trajectory.reward or 0.0)},
                }
            )
    return found


class RolloutWorker:
    """TRL's RolloutWorkerProtocol: lease batches in a thread and fill the trainer's queue.

    The experiment is fed by push elsewhere, or by pull. A batch is acknowledged once the last of
    its samples is in the queue, which holds `queue_size` at most: what a crash of the trainer
    loses is what was in there. Pass the policy to have versions counted from where it stands at
    the start.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        groups: int = 1,
        policy: Policy | None = None,
        queue_size: int = 256,
        scale_rewards: bool = True,
    ) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queue_size)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self.experiment = experiment
        self.groups = groups
        self.policy = policy
        self.scale_rewards = scale_rewards
        self._model_version = 0
        self._first_version = 0
        self._group_id = 0
        self._stopping = threading.Event()
        self._fault: BaseException | None = None
        self._alive_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="prorl-rollouts", daemon=True)

    def start(self) -> None:
        """Begin to lease; the trainer has the weights of version 0 by now."""
        if self.policy is not None:
            self._first_version = self.policy.refresh().version
        self._thread.start()

    def stop(self) -> None:
        """Lease no more, and give back what is not in the queue."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    def update_model_version(self, model_version: int) -> None:
        """Take note of the trainer's version."""
        self._model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError when leasing ended, or nothing was heard for so long."""
        if self._fault is not None:
            raise RuntimeError(f"No more rollouts: {self._fault}") from self._fault
        silent = time.monotonic() - self._alive_at
        if not self._thread.is_alive() and not self._stopping.is_set():
            raise RuntimeError("The experiment has no groups left: no more rollouts will come.")
        if silent > stale_after_s:
            raise RuntimeError(f"The service gave no batch for {silent:.0f} s.")

    def _run(self) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        try:
            for batch in self.experiment.batches(groups=self.groups):
                self._alive_at = time.monotonic()
                with batch:
                    self._enqueue(batch, RolloutSample)
                if self._stopping.is_set():
                    return
        except _Stopped:
            return
        except Exception as fault:
            logger.exception("rollouts have stopped")
            self._fault = fault

    def _enqueue(self, batch: Batch, kind: Any) -> None:
        for group in batch.groups:
            self._group_id += 1
            fields = rollout_samples(
                group,
                group_id=self._group_id,
                model_version=self._model_version,
                first_version=self._first_version,
                scale_rewards=self.scale_rewards,
            )
            for each in fields:
                self._put(kind(**_as_arrays(each), enqueued_at=time.time()))
        self.metrics_queue.put({"prorl/batch_lag": float(batch.max_lag or 0)})

    def _put(self, item: Any) -> None:
        while not self._stopping.is_set():
            try:
                self.rollout_buffer.put(item, timeout=0.5)
            except queue.Full:
                self._alive_at = time.monotonic()  # it is the trainer that waits for nothing
            else:
                return
        raise _Stopped("The trainer stopped.")


class _Stopped(ProrlError):
    """The trainer stopped while a batch was being handed over."""


def _as_arrays(fields: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    kinds = {"input_ids": np.int64, "completion_mask": np.int64, "old_log_probs": np.float32}
    return {**fields, **{name: np.asarray(fields[name], kind) for name, kind in kinds.items()}}
