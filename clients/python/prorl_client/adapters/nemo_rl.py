"""NeMo RL: a stand-in for `run_async_multi_turn_rollout`, which samples through the service.

Shapes: NVIDIA-NeMo/RL, experience/rollouts.py and algorithms/grpo.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prorl_client import Experiment, Trajectory
from prorl_client.adapters.rows import (
    Forks,
    Row,
    neutral_reward,
    placeholder,
    single_row,
    status_of,
)
from prorl_client.adapters.sampling import TaskOf, runs_of, sample, task_of
from prorl_client.adapters.turns import turns_of

Message = dict[str, Any]


def message_log(row: Row) -> list[Message]:
    """Return a row as messages with ids: user's ones that were read, assistant's that were sampled.

    The trainer's mask is 1 exactly on assistant messages that have `generation_logprobs`: a row
    that may not be trained on has none.
    """
    if row.segment is None:
        return [
            {"role": "user", "content": "", "token_ids": row.prompt_ids},
            {"role": "assistant", "content": "", "token_ids": row.response_ids},
        ]
    log: list[Message] = []
    for turn in turns_of(row):
        log.append({"role": "user", "content": "", "token_ids": turn.read_ids})
        said: Message = {"role": "assistant", "content": "", "token_ids": turn.said_ids}
        if row.is_scored:
            said["generation_logprobs"] = turn.logprobs
        log.append(said)
    return log


def batch_columns(
    groups: Sequence[Sequence[Trajectory]], *, stand_in: int, forks: Forks = "most"
) -> dict[str, list[Any]]:
    """Return the columns of the final batch that come from the service, as lists.

    A sample without a reward has its group's mean, and `loss_multiplier` 0.
    """
    columns: dict[str, list[Any]] = {
        name: [] for name in ("message_log", "total_reward", "truncated", "loss_multiplier")
    }
    for group in groups:
        neutral = neutral_reward(group)
        for trajectory in group:
            row = single_row(trajectory, forks=forks) or placeholder(trajectory, stand_in)
            columns["message_log"].append(message_log(row))
            columns["total_reward"].append(neutral if row.reward is None else row.reward)
            columns["truncated"].append(status_of(trajectory) == "truncated")
            columns["loss_multiplier"].append(0.0 if row.reward is None else 1.0)
    return columns


def metrics_of(columns: dict[str, list[Any]], groups: Sequence[Sequence[Trajectory]]) -> Message:
    """Return the metrics that the trainer logs of a rollout."""
    flat = [each for group in groups for each in group]
    logs: list[list[Message]] = columns["message_log"]
    said = [_tokens(log, "assistant") for log in logs]
    total = [sum(len(each["token_ids"]) for each in log) for log in logs]
    turns = [each.turns for each in flat]
    rewards, count = columns["total_reward"], max(1, len(flat))
    return {
        "total_turns": sum(turns),
        "avg_turns_per_sample": sum(turns) / count,
        "max_turns_per_sample": max(turns, default=0),
        "natural_termination_rate": sum(status_of(each) == "completed" for each in flat) / count,
        "truncation_rate": sum(columns["truncated"]) / count,
        "max_turns_reached_rate": sum(each.stop_reason == "max_turns" for each in flat) / count,
        "mean_total_tokens_per_sample": sum(total) / count,
        "mean_gen_tokens_per_sample": sum(said) / count,
        "max_gen_tokens_per_sample": max(said, default=0),
        "mean_env_tokens_per_sample": (sum(total) - sum(said)) / count,
        "mean_total_reward": sum(rewards) / count,
        "max_total_reward": max(rewards, default=0.0),
        "min_total_reward": min(rewards, default=0.0),
        "unscored_rate": columns["loss_multiplier"].count(0.0) / count,
    }


class ServiceRollout:
    """Sample a batch through the service; takes the arguments of `run_async_multi_turn_rollout`.

    Put it in that function's place before training starts:
    `nemo_rl.algorithms.grpo.run_async_multi_turn_rollout = ServiceRollout(experiment)`. A sample's
    `extra_env_info` names its task, see `task_of`; how to sample is the experiment's own.
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        task: TaskOf = task_of,
        forks: Forks = "most",
        timeout: float | None = None,
    ) -> None:
        self.experiment = experiment
        self.task = task
        self.forks = forks
        self.timeout = timeout

    def __call__(
        self, policy_generation: Any, input_batch: Any, tokenizer: Any, *_: Any, **__: Any
    ) -> tuple[Any, Message]:
        """Return the final batch, in the input's order, and metrics."""
        del policy_generation
        wanted = runs_of([self.task(each or {}) for each in input_batch["extra_env_info"]])
        groups = sample(self.experiment, wanted, timeout=self.timeout)
        stand_in = tokenizer.eos_token_id
        columns = batch_columns(groups, stand_in=stand_in, forks=self.forks)
        return _final_batch(input_batch, columns), metrics_of(columns, groups)


def _final_batch(input_batch: Any, columns: dict[str, list[Any]]) -> Any:
    import torch

    kinds = {"token_ids": torch.int64, "generation_logprobs": torch.float32}
    batch = type(input_batch)(
        {
            "message_log": [
                [
                    {
                        name: torch.tensor(value, dtype=kinds[name]) if name in kinds else value
                        for name, value in message.items()
                    }
                    for message in log
                ]
                for log in columns["message_log"]
            ],
            "total_reward": torch.tensor(columns["total_reward"], dtype=torch.float32),
            "truncated": torch.tensor(columns["truncated"], dtype=torch.bool),
        }
    )
    for key in input_batch:
        if key not in batch:
            batch[key] = input_batch[key]
    usable = torch.tensor(columns["loss_multiplier"], dtype=torch.float32)
    given = batch.get("loss_multiplier")
    batch["loss_multiplier"] = usable if given is None else torch.as_tensor(given) * usable
    return batch


def _tokens(log: Sequence[Message], role: str) -> int:
    return sum(len(each["token_ids"]) for each in log if each["role"] == role)
