"""What an environment may set as limits."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.limits import LIMITS, limit_errors

KNOWN = "memory_bytes, cpus, processes, disk_bytes, output_bytes, lifetime_seconds"


@pytest.mark.parametrize(
    "limits",
    [{}, dict.fromkeys(LIMITS, 1), {"cpus": 0.5}, {"cpus": 64}, {"memory_bytes": 2**50}],
)
def test_what_nodes_can_keep_is_accepted(limits: object) -> None:
    assert list(limit_errors(limits)) == []


@pytest.mark.parametrize(
    ("limits", "errors"),
    [
        ([], ["It must be a JSON object."]),
        (None, ["It must be a JSON object."]),
        ({"cpu": 1}, [f"Unknown limit 'cpu'; known: {KNOWN}."]),
        ({"cpus": 0}, ["cpus must be a number above 0, not 0."]),
        ({"cpus": -0.5}, ["cpus must be a number above 0, not -0.5."]),
        ({"cpus": True}, ["cpus must be a number above 0, not True."]),
        ({"cpus": "2"}, ["cpus must be a number above 0, not '2'."]),
        ({"cpus": 10**400}, [f"cpus must be a number above 0, not {10**400}."]),
        ({"cpus": float("inf")}, ["cpus must be a number above 0, not inf."]),
        ({"cpus": float("nan")}, ["cpus must be a number above 0, not nan."]),
        ({"processes": 1.0}, ["processes must be a whole number above 0, not 1.0."]),
        ({"processes": True}, ["processes must be a whole number above 0, not True."]),
        (
            {"memory_bytes": 0, "disk_bytes": None},
            [
                "memory_bytes must be a whole number above 0, not 0.",
                "disk_bytes must be a whole number above 0, not None.",
            ],
        ),
    ],
)
def test_what_no_node_could_keep_is_told(limits: object, errors: list[str]) -> None:
    assert list(limit_errors(limits)) == errors


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(VALUES | st.dictionaries(st.sampled_from(LIMITS) | st.text(), VALUES))
def test_anything_is_accepted_or_told(limits: object) -> None:
    errors = list(limit_errors(limits))

    assert all(error.endswith(".") for error in errors)
    if not errors:
        assert json.loads(json.dumps(limits, allow_nan=False)) == limits
