"""Statistics of evaluations: against counting by hand and by enumeration."""

import math
from itertools import combinations

import pytest

from rollouts.evaluation_statistics import (
    average,
    compare,
    ks_up_to,
    pass_at,
    proportion,
    sign_test,
)


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(samples: int) -> None:
    for right in range(samples + 1):
        outcomes = [number < right for number in range(samples)]
        for k in range(1, samples + 1):
            draws = list(combinations(outcomes, k))
            share = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at(samples, right, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    assert pass_at(1024, 1, 512) == pytest.approx(0.5)


def test_an_interval_holds_its_mean_and_stays_within_its_bounds() -> None:
    found = proportion([0.0, 0.5, 1.0, 1.0], samples=8)

    assert found.value == 0.625
    assert found.low is not None
    assert found.high is not None
    assert 0 < found.low < 0.625 < found.high < 1


@pytest.mark.parametrize("tasks", [1, 10, 1000])
def test_where_all_tasks_agree_the_interval_is_that_of_so_many_trials(tasks: int) -> None:
    z2 = 1.959963984540054**2

    right, wrong = (proportion([value] * tasks, samples=tasks) for value in (1.0, 0.0))

    assert (right.value, right.high) == (1.0, 1.0)
    assert right.low == pytest.approx(tasks / (tasks + z2))
    assert (wrong.low, wrong.value) == (0.0, 0.0)
    assert wrong.high == pytest.approx(z2 / (tasks + z2))


def test_the_interval_of_zeros_and_ones_is_wilsons() -> None:
    found = proportion([1.0] * 8 + [0.0] * 2, samples=10)

    # n is 10 · 9/10 by the spread over one less than n, which the number of tasks bounds.
    assert (found.low, found.high) == (
        pytest.approx(0.4901625, abs=1e-6),
        pytest.approx(0.9433178, abs=1e-6),
    )


def test_tasks_that_spread_less_than_coins_narrow_the_interval_as_far_as_samples_go() -> None:
    same = proportion([0.5] * 100, samples=800)
    spread = proportion([0.0, 1.0] * 50, samples=800)

    def width(found: object) -> float:
        return getattr(found, "high") - getattr(found, "low")  # noqa: B009

    assert width(same) == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 800), rel=0.01)
    assert width(spread) == pytest.approx(2 * 1.96 * math.sqrt(0.25 / 100), rel=0.03)


def test_nothing_measured_is_no_number() -> None:
    assert vars(proportion([], samples=0)) == {"value": None, "low": None, "high": None, "tasks": 0}
    assert vars(average([])) == {"value": None, "low": None, "high": None, "tasks": 0}
    assert vars(average([2.5])) == {"value": 2.5, "low": None, "high": None, "tasks": 1}


def test_the_average_of_rewards_has_the_normal_interval() -> None:
    found = average([1.0, 2.0, 3.0, 4.0])

    half = 1.959963984540054 * math.sqrt((5 / 3) / 4)
    assert (found.value, found.low, found.high) == (
        2.5,
        pytest.approx(2.5 - half),
        pytest.approx(2.5 + half),
    )


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [(0, 0, 1.0), (5, 5, 1.0), (1, 0, 1.0), (6, 0, 2 / 64), (8, 2, 112 / 1024), (2, 8, 112 / 1024)],
)
def test_the_sign_test_is_exact(wins: int, losses: int, p_value: float) -> None:
    assert sign_test(wins, losses) == p_value


def test_the_sign_test_of_many_pairs_agrees_with_whole_numbers() -> None:
    exact = 2 * sum(math.comb(3000, at) for at in range(1401)) / 2**3000

    assert sign_test(1600, 1400) == pytest.approx(exact, rel=1e-9)
    assert sign_test(1_000_000, 999_000) == pytest.approx(0.4798, abs=2e-4)


def test_two_runs_are_compared_task_by_task() -> None:
    found = compare([1.0, 0.5, 0.0, 1.0], [0.0, 0.5, 0.25, 0.0])

    assert (found.wins, found.losses, found.ties) == (2, 1, 1)
    assert found.difference.value == 0.4375
    assert found.p_value == 1.0


def test_a_run_compared_with_itself_differs_in_nothing() -> None:
    found = compare([0.25, 1.0], [0.25, 1.0])

    assert vars(found.difference) == {"value": 0.0, "low": 0.0, "high": 0.0, "tasks": 2}
    assert (found.wins, found.losses, found.ties, found.p_value) == (0, 0, 2, 1.0)


@pytest.mark.parametrize(
    ("samples", "ks"),
    [
        (1, [1]),
        (4, [1, 2, 3, 4]),
        (20, [*range(1, 17), 20]),
        (64, [*range(1, 17), 32, 64]),
        (100, [*range(1, 17), 32, 64, 100]),
    ],
)
def test_pass_at_k_is_told_for_these_k(samples: int, ks: list[int]) -> None:
    assert ks_up_to(samples) == ks
