"""Whether a run showed what it promises: the reward rose, and both sides agreed."""

from collections.abc import Mapping, Sequence
from typing import Any

ENDS = 3
RISE = 0.25
# Of the sampled tokens' log-probabilities: numpy on the server's side, PyTorch on the trainer's.
MAX_DIFFERENCE = 1e-3
MEAN_DIFFERENCE = 1e-4

Rows = Sequence[Mapping[str, Any]]


def rise(rows: Rows) -> float:
    """Return by how much the mean reward of the last three steps is above the first three's."""
    rewards: list[float] = [row["reward"] for row in rows]
    return (sum(rewards[-ENDS:]) - sum(rewards[:ENDS])) / ENDS


def summary(rows: Rows) -> dict[str, Any]:
    """Return the run in numbers."""
    tokens = sum(row["tokens"] for row in rows)
    return {
        "steps": len(rows),
        "seconds": rows[-1]["seconds"],
        "rollouts": sum(row["rollouts"] for row in rows),
        "tokens": tokens,
        "first_reward": round(sum(row["reward"] for row in rows[:ENDS]) / ENDS, 4),
        "last_reward": round(sum(row["reward"] for row in rows[-ENDS:]) / ENDS, 4),
        "rise": round(rise(rows), 4),
        "largest_difference": max(row["largest_difference"] for row in rows),
        "mean_difference": sum(row["mean_difference"] * row["tokens"] for row in rows) / tokens,
        "allowed_largest_difference": MAX_DIFFERENCE,
        "allowed_mean_difference": MEAN_DIFFERENCE,
    }


def complaint(rows: Rows, *, steps: int) -> str:
    """Return what the run did not show, '' when it showed all."""
    if len(rows) != steps or steps < 2 * ENDS:
        return f"{len(rows)} of {steps} steps were made, and {2 * ENDS} are needed to tell a rise"
    for row in rows:
        # Asked this way round, so that what is no number is refused too.
        if not (
            row["largest_difference"] <= MAX_DIFFERENCE
            and row["mean_difference"] <= MEAN_DIFFERENCE
        ):
            return f"step {row['step']}: the log-probabilities do not agree: {row}"
    if rise(rows) < RISE:
        return f"the mean reward rose by {rise(rows):.3f}, and should by {RISE}"
    return ""
