"""One step of the policy gradient, and the proof that both sides mean the same tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from prorl_client import Trajectory
from torch import Tensor

from examples.train_demo.trainer.model import SmallModel, Weights
from examples.train_demo.trainer.sequences import Sequences, sequences
from examples.train_demo.verdict import MAX_DIFFERENCE, MEAN_DIFFERENCE

SIDE_BY_SIDE = 8


class Disagreement(Exception):
    """The service's log-probabilities are not those of the tokens that it delivered."""


@dataclass(frozen=True)
class Agreement:
    """How far delivered log-probabilities are from the trainer's own, over `tokens` tokens."""

    tokens: int
    largest: float
    mean: float

    def check(self) -> None:
        """Raise Disagreement when they differ by more than float32 arithmetic explains."""
        if not (self.largest <= MAX_DIFFERENCE and self.mean <= MEAN_DIFFERENCE):
            raise Disagreement(
                f"over {self.tokens} tokens the delivered log-probabilities differ from those "
                f"computed here by {self.largest:.4g} at most and {self.mean:.4g} on average; "
                f"allowed are {MAX_DIFFERENCE:g} and {MEAN_DIFFERENCE:g}"
            )


@dataclass(frozen=True)
class Step:
    """What learning from one batch did; `clipped` is the share of tokens that the last pass left.

    Loss and gradient's norm are those of the first pass.
    """

    loss: float
    gradient_norm: float
    clipped: float


class Learner:
    """Train the model's last layers by a clipped policy gradient, `passes` over each batch."""

    def __init__(
        self,
        model: SmallModel,
        *,
        learning_rate: float,
        clip: tuple[float, float],
        passes: int,
        kept: int,
    ) -> None:
        self.model = model
        self._clip = clip
        self._passes = passes
        self._optimiser = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._kept = kept
        self._versions: dict[int, Weights] = {0: model.weights()}

    @property
    def version(self) -> int:
        """Return the newest version."""
        return max(self._versions)

    def learn(self, trajectories: Sequence[Trajectory]) -> tuple[Agreement, Step]:
        """Compare log-probabilities, then learn; a new version. Raises Disagreement."""
        parts = sequences(trajectories, size=SIDE_BY_SIDE)
        if not parts:
            raise Disagreement("the batch holds no sampled token of a scored rollout")
        lower = [self.model.lower(part) for part in parts]
        agreement = self._compare(parts, lower)
        agreement.check()
        steps = [self._step(parts, lower) for _ in range(self._passes)]
        self._versions[self.version + 1] = self.model.weights()
        for old in sorted(self._versions)[: -self._kept]:
            del self._versions[old]
        return agreement, replace(steps[0], clipped=steps[-1].clipped)

    @torch.no_grad()
    def _compare(self, parts: Sequence[Sequences], lower: Sequence[Tensor]) -> Agreement:
        """Compute each token's log-probability anew by the version that sampled it."""
        found = []
        for part, hidden in zip(parts, lower, strict=True):
            for version in part.versions.unique().tolist():
                if version not in self._versions:
                    known = ", ".join(map(str, sorted(self._versions)))
                    raise Disagreement(f"a token of version {version}, and kept are {known}")
                own = self.model.logprobs(hidden, part, self._versions[version])
                theirs = part.versions == version
                found.append((own - part.delivered)[theirs].abs())
        differences = torch.cat(found)
        return Agreement(len(differences), differences.max().item(), differences.mean().item())

    def _step(self, parts: Sequence[Sequences], lower: Sequence[Tensor]) -> Step:
        """Take a step on the mean over all sampled tokens of the clipped objective.

        PPO's (Schulman et al. 2017, arXiv:1707.06347) with a higher upper bound (DAPO, Yu et al.
        2025, arXiv:2503.14476); the delivered log-probabilities are the behaviour's.
        """
        tokens = sum(len(part.rows) for part in parts)
        low, high = 1 - self._clip[0], 1 + self._clip[1]
        total, clipped = 0.0, 0
        self._optimiser.zero_grad()
        for part, hidden in zip(parts, lower, strict=True):
            ratio = (self.model.logprobs(hidden, part) - part.delivered).exp()
            free, bounded = ratio * part.advantages, ratio.clamp(low, high) * part.advantages
            loss = -torch.minimum(free, bounded).sum() / tokens
            loss.backward()
            total += loss.item()
            clipped += int((bounded < free).sum())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimiser.step()
        return Step(loss=total, gradient_norm=float(norm), clipped=clipped / tokens)
