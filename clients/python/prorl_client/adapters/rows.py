"""What every trainer takes in one form or another: sequences with masks, rewards and versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal

import numpy as np

from prorl_client.errors import ProrlError
from prorl_client.trajectories import UNKNOWN_VERSION, Segment, Trajectory

Forks = Literal["most", "last", "refuse"]
Status = Literal["completed", "truncated", "cancelled", "failed"]

# Where an episode was ended by a limit, not by its agent.
LIMITS = frozenset(
    {"max_turns", "max_tokens", "context_full", "agent_timeout", "policy_lag", "sandbox_limit"}
)


class ForkedTrajectory(ProrlError):
    """A trajectory has several segments and the caller takes one row a sample."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One sequence to train on; all lists of the response have its length.

    `mask` is 1 where the policy sampled, `logprobs` 0.0 where it did not, and `versions` the policy
    version of each token, -1 where nobody knows it. `reward` is the trajectory's, None when it has
    none: then nothing of the row may be trained on, and `loss_mask` is all 0.
    """

    trajectory: Trajectory
    segment: Segment | None
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]

    @property
    def reward(self) -> float | None:
        """The trajectory's reward."""
        return self.trajectory.reward if self.is_scored else None

    @property
    def is_scored(self) -> bool:
        """Whether it may be trained on."""
        return self.segment is not None and is_scored(self.trajectory)

    @property
    def loss_mask(self) -> list[int]:
        """The mask, all 0 for what may not be trained on."""
        return self.mask if self.is_scored else [0] * len(self.mask)

    @property
    def sampled(self) -> int:
        """How many tokens the policy sampled."""
        return sum(self.mask)

    @property
    def version_span(self) -> tuple[int, int] | None:
        """The oldest and the newest version of its sampled tokens, None when nobody knows."""
        pairs = zip(self.versions, self.mask, strict=True)
        known = [version for version, mask in pairs if mask and version != UNKNOWN_VERSION]
        return (min(known), max(known)) if known else None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response as one list."""
        return self.prompt_ids + self.response_ids

    def clipped(self, response_tokens: int) -> Row:
        """Return it with at most so many response tokens; what stays was sampled as it stands."""
        if len(self.response_ids) <= response_tokens:
            return self
        return Row(
            trajectory=self.trajectory,
            segment=self.segment,
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids[:response_tokens],
            mask=self.mask[:response_tokens],
            logprobs=self.logprobs[:response_tokens],
            versions=self.versions[:response_tokens],
        )


def is_scored(trajectory: Trajectory) -> bool:
    """Tell whether a trajectory may be trained on: it has tokens and a reward of its own."""
    return trajectory.trainable and trajectory.reward is not None


def status_of(trajectory: Trajectory) -> Status:
    """Tell how a rollout ended: `truncated` is scored, but a limit ended it."""
    if trajectory.outcome == "scored":
        return "truncated" if trajectory.stop_reason in LIMITS else "completed"
    return "cancelled" if trajectory.outcome in (None, "cancelled") else "failed"


def rows_of(trajectory: Trajectory) -> list[Row]:
    """Return a row for each segment that was sampled in; none for a rollout that sampled nothing.

    Of a fork, what was sampled before is in the prompt: every sampled token is in the mask of one
    row. What follows the last sampled token is left out, as nothing is learnt from it.
    """
    return [_row(trajectory, each) for each in trajectory.segments if each.response_mask.any()]


def single_row(trajectory: Trajectory, *, forks: Forks = "most") -> Row | None:
    """Return one row for a trajectory, None when it sampled nothing.

    Of several segments it is the one with the most sampled tokens, or the last; the others are
    left out. Raises ForkedTrajectory with `refuse`.
    """
    rows = rows_of(trajectory)
    if len(rows) > 1 and forks == "refuse":
        raise ForkedTrajectory(
            f"Rollout {trajectory.rollout} has {len(rows)} segments, and this trainer takes one "
            "row a sample: use forks='most' or 'last', or an environment that does not fork."
        )
    if forks == "last":
        return rows[-1] if rows else None
    return max(rows, key=lambda row: row.sampled, default=None)


def placeholder(trajectory: Trajectory, token_id: int) -> Row:
    """Return a row of one masked token, for trainers that want a row for every sample."""
    return Row(
        trajectory=trajectory,
        segment=None,
        prompt_ids=[token_id],
        response_ids=[token_id],
        mask=[0],
        logprobs=[0.0],
        versions=[UNKNOWN_VERSION],
    )


def missing(task_ref: str, sample: int) -> Trajectory:
    """Return a trajectory for a sample that is not there."""
    return Trajectory(
        rollout="",
        group="",
        task="",
        task_ref=task_ref,
        sample=sample,
        environment="",
        outcome=None,
        reward=None,
        trainable=False,
    )


def samples_of(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Return as many trajectories as samples were asked for.

    A group may hold more, when failed ones were sampled anew, or fewer. Scored ones go first.
    """
    chosen = sorted(trajectories, key=lambda each: not is_scored(each))[:count]
    chosen.sort(key=lambda each: each.sample)
    ref = trajectories[0].task_ref if trajectories else ""
    return chosen + [missing(ref, number) for number in range(len(chosen), count)]


def neutral_reward(group: Sequence[Trajectory]) -> float:
    """Return the mean reward of those of a group that have one, 0 when none has.

    For trainers that want a number for every sample: where a sample without a reward gets this
    one, and no loss, the mean that the others are compared with stays what it is.
    """
    known = [each.reward for each in group if is_scored(each) and each.reward is not None]
    return fmean(known) if known else 0.0


def advantages_of(
    rewards: Sequence[float | None], *, scale: bool = True, epsilon: float = 1e-4
) -> list[float | None]:
    """Return reward minus the group's mean, over its spread with `scale`; None stays None.

    GRPO's (arXiv 2402.03300), over the samples that have a reward.
    """
    known = [each for each in rewards if each is not None]
    if not known:
        return [None] * len(rewards)
    mean = fmean(known)
    spread = pstdev(known) + epsilon if scale else 1.0
    return [None if each is None else (each - mean) / spread for each in rewards]


def _row(trajectory: Trajectory, segment: Segment) -> Row:
    size = int(np.flatnonzero(segment.response_mask)[-1]) + 1
    return Row(
        trajectory=trajectory,
        segment=segment,
        prompt_ids=segment.prompt_ids.tolist(),
        response_ids=segment.response_ids[:size].tolist(),
        mask=segment.response_mask[:size].tolist(),
        logprobs=segment.response_logprobs[:size].tolist(),
        versions=segment.policy_versions[:size].tolist(),
    )
