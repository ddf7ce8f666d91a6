"""Statistics of evaluation runs: pass@k with intervals, and two runs compared task by task.

Tasks are what is sampled: the samples of one task are not independent of each other, so every
interval is over tasks. Pure and deterministic.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Z_95 = 1.959963984540054
EXACT_TO = 1000  # pairs; beyond, the logarithms of the binomial are added up


@dataclass(frozen=True)
class Estimate:
    """A mean over tasks with its 95 % interval; the bounds are None where one task tells none."""

    value: float | None
    low: float | None
    high: float | None
    tasks: int


@dataclass(frozen=True)
class Paired:
    """Two runs on the same tasks: the difference of their pass@1, and who won how many tasks.

    `p_value` is of the exact two-sided sign test on the tasks that are no ties (McNemar's, where
    every task was sampled once).
    """

    difference: Estimate
    wins: int
    losses: int
    ties: int
    p_value: float


@lru_cache(maxsize=65_536)
def pass_at(samples: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k of one task: 1 − C(n−c, k) / C(n, k), for k ≤ n.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", section 2.1.
    """
    if samples - right < k:
        return 1.0
    missed = 1.0
    for place in range(k):
        missed *= (samples - right - place) / (samples - place)
    return 1.0 - missed


def proportion(values: Sequence[float], *, samples: int) -> Estimate:
    """Return the mean of values in 0..1, one for each task, with Wilson's score interval.

    Its number of trials is the effective one: as many independent ones as would spread as the
    tasks do, between the number of tasks and of samples. Unlike the plain normal interval it stays
    within 0..1 and does not vanish where all tasks agree.
    """
    count = len(values)
    if not count:
        return Estimate(None, None, None, 0)
    mean = math.fsum(values) / count
    spread = _variance(values, mean) / count if count > 1 else 0.0
    trials = float(count)
    if 0 < mean < 1 and count > 1:
        trials = mean * (1 - mean) / spread if spread else math.inf
        trials = min(max(trials, float(count)), float(max(samples, count)))
    centre = (mean + Z_95**2 / (2 * trials)) / (1 + Z_95**2 / trials)
    half = Z_95 / (1 + Z_95**2 / trials)
    half *= math.sqrt(mean * (1 - mean) / trials + Z_95**2 / (4 * trials**2))
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return Estimate(mean, min(low, mean), max(high, mean), count)


def average(values: Sequence[float]) -> Estimate:
    """Return the mean of any values, one for each task, with the normal interval."""
    count = len(values)
    if not count:
        return Estimate(None, None, None, 0)
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, None, 1)
    half = Z_95 * math.sqrt(_variance(values, mean) / count)
    return Estimate(mean, mean - half, mean + half, count)


def compare(ours: Sequence[float], others: Sequence[float]) -> Paired:
    """Compare the pass rates of the same tasks in two runs, in the same order."""
    differences = [a - b for a, b in zip(ours, others, strict=True)]
    wins = sum(each > 0 for each in differences)
    losses = sum(each < 0 for each in differences)
    return Paired(
        difference=average(differences),
        wins=wins,
        losses=losses,
        ties=len(differences) - wins - losses,
        p_value=sign_test(wins, losses),
    )


def sign_test(wins: int, losses: int) -> float:
    """Return how likely so uneven a result is where both are equally good: two-sided, exact."""
    count, fewer = wins + losses, min(wins, losses)
    if wins == losses:
        return 1.0
    if count <= EXACT_TO:
        tail: float = sum(math.comb(count, at) for at in range(fewer + 1)) / 2**count
    else:
        tail = math.fsum(
            math.exp(
                math.lgamma(count + 1)
                - math.lgamma(at + 1)
                - math.lgamma(count - at + 1)
                - count * math.log(2)
            )
            for at in range(fewer + 1)
        )
    return min(1.0, 2 * tail)


def ks_up_to(samples: int) -> list[int]:
    """Return the k of which pass@k is told: each up to 16, then powers of two, and the last."""
    doubled = [2**power for power in range(5, samples.bit_length())]
    return sorted({*range(1, min(samples, 16) + 1), *doubled, samples})


def _variance(values: Sequence[float], mean: float) -> float:
    return math.fsum((each - mean) ** 2 for each in values) / (len(values) - 1)
