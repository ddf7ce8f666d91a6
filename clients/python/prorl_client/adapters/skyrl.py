"""SkyRL: a GeneratorInterface; return it from `BasePPOExp.get_generator`.

Shapes: skyrl 0.4.0, train/generators/base.py and train/utils/trainer_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prorl_client import AsyncExperiment, Trajectory
from prorl_client.adapters.rows import (
    Row,
    neutral_reward,
    placeholder,
    rows_of,
    single_row,
    status_of,
)
from prorl_client.adapters.sampling import TaskOf, runs_of, sample_async, task_of

STOP_REASONS = {
    "completed": "stop",
    "truncated": "length",
    "cancelled": "cancelled",
    "failed": "failed",
}


def generator_output(
    groups: Sequence[Sequence[Trajectory]],
    *,
    stand_in: int,
    trajectory_ids: Sequence[Any] | None = None,
    step_wise: bool = False,
) -> dict[str, Any]:
    """Return a GeneratorOutput with one row for each trajectory, in order.

    What has no reward has its group's mean and a mask of zeros. With `step_wise` every segment is a
    row, `is_last_step` tells the last of each trajectory, and the reward is on that one.
    """
    trajectories = [each for group in groups for each in group]
    neutral = [neutral_reward(group) for group in groups for _each in group]
    rows: list[Row] = []
    rewards: list[float] = []
    last: list[bool] = []
    ids: list[Any] = []
    for place, trajectory in enumerate(trajectories):
        made = _rows(trajectory, stand_in, step_wise)
        rows += made
        last += [False] * (len(made) - 1) + [True]
        reward = made[-1].reward
        rewards += [0.0] * (len(made) - 1) + [neutral[place] if reward is None else reward]
        if trajectory_ids is not None:
            ids += [trajectory_ids[place]] * len(made)
    scored = [row.reward for row in rows if row.reward is not None]
    return {
        "prompt_token_ids": [row.prompt_ids for row in rows],
        "response_ids": [row.response_ids for row in rows],
        "rewards": rewards,
        "loss_masks": [row.loss_mask for row in rows],
        "stop_reasons": [STOP_REASONS[status_of(row.trajectory)] for row in rows],
        "rollout_metrics": {
            "prorl/unscored": 1.0 - len(scored) / len(rows) if rows else 0.0,
            "prorl/mean_turns": _mean([each.turns for each in trajectories]),
        },
        "rollout_logprobs": [row.logprobs for row in rows],
        "trajectory_ids": ids if trajectory_ids is not None else None,
        "trajectory_generation_times": [
            float(each.timings.get("run", 0.0)) for each in trajectories
        ],
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "rollout_sample_support": None,
        "is_last_step": last if step_wise else None,
        "env_metrics": None,
        "pixel_values": None,
        "image_grid_thw": None,
    }


class ProrlGenerator:
    """Generate through an experiment of the service: SkyRL asks for nothing but `generate`.

    `env_extras` name the tasks, see `task_of`; rows next to each other that name the same one are
    a group. How to sample is the experiment's own. `stand_in` is any token of the model's.
    """

    def __init__(
        self,
        experiment: AsyncExperiment,
        *,
        stand_in: int = 0,
        task: TaskOf = task_of,
        step_wise: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.experiment = experiment
        self.stand_in = stand_in
        self.task = task
        self.step_wise = step_wise
        self.timeout = timeout

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row for each prompt, in order."""
        count = len(input_batch["prompts"])
        extras = input_batch.get("env_extras") or [{}] * count
        wanted = runs_of([self.task(each) for each in extras])
        groups = await sample_async(self.experiment, wanted, timeout=self.timeout)
        return generator_output(
            groups,
            stand_in=self.stand_in,
            trajectory_ids=input_batch.get("trajectory_ids"),
            step_wise=self.step_wise,
        )


def _rows(trajectory: Trajectory, stand_in: int, step_wise: bool) -> list[Row]:
    one = single_row(trajectory)
    if one is None:
        return [placeholder(trajectory, stand_in)]
    return rows_of(trajectory) if step_wise else [one]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
