"""What an evaluation run found, by task set and over all, and how two runs compare."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollouts.evaluation_statistics import (
    Estimate,
    Paired,
    average,
    compare,
    ks_up_to,
    pass_at,
    proportion,
)
from rollouts.exceptions import InvalidValue
from rollouts.models import EvaluationRun
from rollouts.services.evaluations import Progress, TaskResult, progress_of, results_of

INTERVALS = (
    "95 % over tasks: pass@k by Wilson's score with the effective number of trials, "
    "rewards and differences by the normal approximation"
)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What came of some tasks; `nulls` are samples that are done and have no value."""

    tasks: int
    samples: int
    done: int
    scored: int
    nulls: int
    right: int
    pass_at: dict[int, Estimate]
    mean_reward: Estimate


@dataclass(frozen=True, kw_only=True)
class Report:
    """A run's state and what it found so far."""

    progress: Progress
    overall: Slice
    task_sets: dict[str, Slice]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs on the tasks of which both have a value."""

    tasks: int
    complete: bool
    left_out: int
    pass_at_1: tuple[Estimate, Estimate]
    paired: Paired


def report_of(*, run: EvaluationRun) -> Report:
    """Return what a run found so far."""
    results = results_of(run=run)
    by_set: dict[str, list[TaskResult]] = {}
    for each in results:
        by_set.setdefault(each.task_set, []).append(each)
    return Report(
        progress=progress_of(run=run, results=results),
        overall=_slice(results, run.samples_per_task),
        task_sets={name: _slice(of_set, run.samples_per_task) for name, of_set in by_set.items()},
    )


def compare_runs(*, run: EvaluationRun, other: EvaluationRun) -> Comparison:
    """Compare a run with another one on the same tasks.

    Raises InvalidValue where they judge differently or have no task in common.
    """
    if (run.key, run.threshold) != (other.key, other.threshold):
        raise InvalidValue(
            f"The runs judge differently: by {run.key} from {run.threshold:g} on, and by "
            f"{other.key} from {other.threshold:g} on.",
            code="evaluation.incomparable",
        )
    ours, theirs = results_of(run=run), results_of(run=other)
    known = {each.task: each for each in theirs if each.scored}
    pairs = [(each, known[each.task]) for each in ours if each.scored and each.task in known]
    if not pairs:
        raise InvalidValue(
            "The runs have no task in common of which both have a value.",
            code="evaluation.incomparable",
        )
    progress = [progress_of(run=each, results=of) for each, of in ((run, ours), (other, theirs))]
    return Comparison(
        tasks=len(pairs),
        complete=all(each.state == "done" for each in progress),
        left_out=len({each.task for each in (*ours, *theirs)}) - len(pairs),
        pass_at_1=(_passes([a for a, _b in pairs], 1), _passes([b for _a, b in pairs], 1)),
        paired=compare(
            [a.right / a.scored for a, _b in pairs], [b.right / b.scored for _a, b in pairs]
        ),
    )


def _slice(results: Sequence[TaskResult], samples_per_task: int) -> Slice:
    done, scored = sum(each.done for each in results), sum(each.scored for each in results)
    return Slice(
        tasks=len(results),
        samples=sum(each.samples for each in results),
        done=done,
        scored=scored,
        nulls=done - scored,
        right=sum(each.right for each in results),
        pass_at={k: _passes(results, k) for k in ks_up_to(samples_per_task)},
        mean_reward=average([each.total / each.scored for each in results if each.scored]),
    )


def _passes(results: Sequence[TaskResult], k: int) -> Estimate:
    """Return pass@k over the tasks that have at least k values."""
    counted = [each for each in results if each.scored >= k]
    return proportion(
        [pass_at(each.scored, each.right, k) for each in counted],
        samples=sum(each.scored for each in counted) // k,
    )
