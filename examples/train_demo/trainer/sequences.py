"""A leased batch as tensors, and the advantages of its samples."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from prorl_client import Segment, Trajectory
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """Some sequences side by side, padded at their ends, and the tokens that a policy sampled.

    ids int64 [sequence, position]. Of each sampled token: its row and place in `ids`, the
    log-probability and the policy version that the service delivered, and its advantage.
    """

    ids: Tensor
    rows: Tensor
    places: Tensor
    delivered: Tensor
    versions: Tensor
    advantages: Tensor


def advantages(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the advantage of each scored rollout over the samples of its group (GRPO).

    (reward - mean) / (standard deviation + 1e-4), Shao et al. 2024, arXiv:2402.03300.
    """
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for each in trajectories:
        if each.trainable and each.reward is not None:
            groups[each.group].append(each)
    found = {}
    for members in groups.values():
        rewards = np.array([each.reward for each in members])
        for each, reward in zip(members, rewards, strict=True):
            found[each.rollout] = float((reward - rewards.mean()) / (rewards.std() + 1e-4))
    return found


def sequences(trajectories: Sequence[Trajectory], *, size: int) -> list[Sequences]:
    """Return the segments of the scored rollouts, `size` at a time, similar lengths together."""
    found = advantages(trajectories)
    segments = [
        (segment, found[each.rollout])
        for each in trajectories
        if each.rollout in found
        for segment in each.segments
    ]
    segments.sort(key=lambda pair: len(pair[0].prompt_ids) + len(pair[0].response_ids))
    return [_side_by_side(segments[at : at + size]) for at in range(0, len(segments), size)]


def _side_by_side(segments: Sequence[tuple[Segment, float]]) -> Sequences:
    lengths = [len(each.prompt_ids) + len(each.response_ids) for each, _ in segments]
    ids = np.zeros((len(segments), max(lengths)), dtype=np.int64)
    rows, places, delivered, versions, gains = [], [], [], [], []
    for row, (segment, advantage) in enumerate(segments):
        start = len(segment.prompt_ids)
        ids[row, :start] = segment.prompt_ids
        ids[row, start : lengths[row]] = segment.response_ids
        sampled = np.flatnonzero(segment.response_mask)
        rows.append(np.full(len(sampled), row))
        places.append(start + sampled)
        delivered.append(segment.response_logprobs[sampled])
        versions.append(segment.policy_versions[sampled])
        gains.append(np.full(len(sampled), advantage, dtype=np.float32))
    return Sequences(
        ids=torch.from_numpy(ids),
        rows=torch.from_numpy(np.concatenate(rows)),
        places=torch.from_numpy(np.concatenate(places)),
        delivered=torch.from_numpy(np.concatenate(delivered)),
        versions=torch.from_numpy(np.concatenate(versions)),
        advantages=torch.from_numpy(np.concatenate(gains)),
    )
