"""Sampling parameters and budgets: defaults, bounds, unknown keys."""

import pytest

from rollouts.exceptions import InvalidValue
from rollouts.options import Budgets, Sampling


def test_defaults_are_filled_in() -> None:
    assert Sampling.parse({"temperature": 0}).as_dict() == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 256,
        "seed": None,
    }


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": -1}, "temperature must be between 0 and 10"),
        ({"temperature": float("nan")}, "temperature must be between"),
        ({"max_tokens": 0}, "max_tokens must be between 1"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"max_tokens": "12"}, "max_tokens must be a number"),
        ({"max_tokens": True}, "max_tokens must be a number"),
        ({"temprature": 1}, "Unknown sampling key 'temprature'; known: temperature"),
        ([], "sampling must be an object"),
    ],
)
def test_bad_sampling_is_refused_by_name(values: object, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        Sampling.parse(values)


def test_waiting_for_servers_is_added_to_the_run_stage() -> None:
    budgets = Budgets.parse({"run_seconds": 10, "inference_wait_seconds": 5})

    assert [budgets.of_stage(stage) for stage in ("init", "run", "eval")] == [180.0, 15.0, 1260.0]
