"""The transition table: every (state, event) pair."""

import pytest

from rollouts.states import Event, RolloutState, sources, target

ALLOWED = {
    ("queued", "dispatch"): "init",
    ("queued", "end"): "done",
    ("init", "finish_stage"): "run",
    ("init", "restart"): "queued",
    ("init", "end"): "done",
    ("run", "finish_stage"): "eval",
    ("run", "restart"): "queued",
    ("run", "end"): "done",
    ("eval", "finish_stage"): "done",
    ("eval", "restart"): "queued",
    ("eval", "end"): "done",
}


@pytest.mark.parametrize("state", RolloutState.values)
@pytest.mark.parametrize("event", Event.values)
def test_each_pair_leads_where_the_table_says(state: str, event: str) -> None:
    assert target(state, event) == ALLOWED.get((state, event))


def test_nothing_leads_out_of_done() -> None:
    assert all("done" not in sources(event) for event in Event.values)
