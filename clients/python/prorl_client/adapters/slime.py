"""slime: `--rollout-function-path prorl_client.adapters.slime.generate_rollout`.

Settings by `--custom-config-path`: `prorl_experiment` (an id), `prorl_forks` (most, last, all),
`prorl_timeout`, and `prorl_eval`: `{name: {tasks: [ref], samples: n}}`. The address and the token
come from PRORL_URL and PRORL_TOKEN. Shapes: slime, utils/types.py and rollout/sglang_rollout.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from prorl_client import Client, Experiment, Trajectory
from prorl_client.adapters.rows import Row, neutral_reward, rows_of, single_row, status_of
from prorl_client.adapters.sampling import sample, task_of

STATUSES = {
    "completed": "COMPLETED",
    "truncated": "TRUNCATED",
    "cancelled": "ABORTED",
    "failed": "FAILED",
}


def sample_fields(trajectory: Trajectory, row: Row | None, *, neutral: float) -> dict[str, Any]:
    """Return the fields of a Sample; what may not be trained on is marked `remove_sample`.

    slime wants a number as a reward and at least one response token: such samples have the reward
    `neutral`, and one masked token where there is none.
    """
    if row is None:
        tokens: dict[str, Any] = {
            "tokens": [0, 0],
            "response_length": 1,
            "loss_mask": [0],
            "rollout_log_probs": [0.0],
            "weight_versions": [],
        }
    else:
        span = row.version_span
        tokens = {
            "tokens": row.token_ids,
            "response_length": len(row.response_ids),
            "loss_mask": row.loss_mask,
            "rollout_log_probs": row.logprobs,
            "weight_versions": [] if span is None else [str(each) for each in span],
        }
    scored = row is not None and row.is_scored
    messages = trajectory.messages or ()
    said = [each.get("content") for each in messages if each.get("role") == "assistant"]
    return {
        **tokens,
        "reward": trajectory.reward if scored else neutral,
        "status": STATUSES[status_of(trajectory)],
        "remove_sample": not scored,
        "response": "\n".join(each for each in said if isinstance(each, str)),
    }


def rows_for(trajectory: Trajectory, forks: str) -> list[Row | None]:
    """Return the rows of a sample: one, or with `all` one for each segment."""
    if forks == "all":
        return list(rows_of(trajectory)) or [None]
    return [single_row(trajectory, forks="last" if forks == "last" else "most")]


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return slime's RolloutFnTrainOutput, or RolloutFnEvalOutput of `prorl_eval`."""
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput

    del rollout_id  # the data source counts
    experiment = _experiment(args.prorl_experiment)
    timeout = getattr(args, "prorl_timeout", None)
    if evaluation:
        return RolloutFnEvalOutput(data=_evaluate(args, experiment, timeout))
    groups = data_source.get_samples(args.rollout_batch_size)
    wanted = [(task_of(vars(group[0])), len(group)) for group in groups]
    found = sample(experiment, wanted, timeout=timeout)
    forks = getattr(args, "prorl_forks", "most")
    return RolloutFnTrainOutput(
        samples=[fill(group, each, forks) for group, each in zip(groups, found, strict=True)],
        metrics=_metrics(found),
    )


def fill(samples: Sequence[Any], trajectories: Sequence[Trajectory], forks: str) -> list[Any]:
    """Return a group of slime's Samples with what was sampled; a fork's are a list among them."""
    filled: list[Any] = []
    neutral = neutral_reward(trajectories)
    for each, trajectory in zip(samples, trajectories, strict=True):
        made = []
        for row in rows_for(trajectory, forks):
            one = copy.copy(each)
            for name, value in sample_fields(trajectory, row, neutral=neutral).items():
                setattr(one, name, type(each).Status[value] if name == "status" else value)
            one.rollout_id = each.index if each.rollout_id is None else each.rollout_id
            one.metadata = {**(each.metadata or {}), "rollout": trajectory.rollout}
            made.append(one)
        filled.append(made if forks == "all" else made[0])
    return filled


def _evaluate(args: Any, experiment: Experiment, timeout: float | None) -> dict[str, Any]:
    from slime.utils.types import Sample

    data = {}
    for name, settings in (getattr(args, "prorl_eval", None) or {}).items():
        count = int(settings.get("samples", 1))
        wanted = [(ref, count) for ref in settings["tasks"]]
        found = [each for group in sample(experiment, wanted, timeout=timeout) for each in group]
        blank = [Sample(index=place, prompt=each.task_ref) for place, each in enumerate(found)]
        samples = fill(blank, found, "most")
        data[name] = {
            "rewards": [each.reward for each in samples],
            "truncated": [each.status == Sample.Status.TRUNCATED for each in samples],
            "samples": samples,
        }
    return data


def _metrics(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    flat = [each for group in groups for each in group]
    return {
        f"prorl/{name}": sum(status_of(each) == name for each in flat) / max(1, len(flat))
        for name in STATUSES
    }


@lru_cache(maxsize=8)
def _experiment(experiment_id: str) -> Experiment:
    return Client().experiment(experiment_id)
