"""slime's own Sample takes our fields, and its checks pass; from its source."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

pytest.importorskip("slime.utils.types", reason="slime's source is not here: make test-adapters")

from prorl_client.adapters import slime as adapter
from slime.utils.types import Sample

from tests.adapters.made import every_kind
from tests.adapters.real.service import live, service

KINDS = every_kind()


def blank(count: int, **columns: Any) -> list[Sample]:
    return [Sample(group_index=0, index=place, **columns) for place in range(count)]


@pytest.mark.parametrize("forks", ["most", "last", "all"])
def test_every_kind_fills_a_sample(forks: str) -> None:
    filled = adapter.fill(blank(len(KINDS)), list(KINDS.values()), forks)
    flat = [one for each in filled for one in (each if isinstance(each, list) else [each])]
    for each in flat:
        each._validate_response_metadata_lengths()
        assert each.rollout_id is not None
        assert isinstance(each.reward, float)
        assert each.effective_response_length == sum(each.loss_mask)
        assert Sample.from_dict(each.to_dict()).tokens == each.tokens
    assert len(flat) == len(KINDS) + (forks == "all")
    removed = {name for name, each in zip(KINDS, filled, strict=True) if _removed(each)}
    assert removed == {"unscored", "failed", "cancelled", "text only"}


def _removed(each: Any) -> bool:
    return (each[0] if isinstance(each, list) else each).remove_sample


@live
@pytest.mark.parametrize("evaluation", [False, True])
def test_a_rollout_is_sampled_through_slimes_own_call(
    evaluation: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.rollout.base_types import call_rollout_fn

    known = service()

    class Tasks:
        """Give groups of samples, as slime's data source does."""

        def get_samples(self, count: int) -> list[list[Sample]]:
            refs = known.tasks[:count]
            return [blank(2, metadata={"task_ref": ref}) for ref in refs]

    args = Namespace(
        prorl_experiment=known.experiment,
        prorl_timeout=300,
        prorl_eval={"held-out": {"tasks": list(known.tasks), "samples": 1}},
        rollout_batch_size=len(known.tasks),
    )
    output = call_rollout_fn(adapter.generate_rollout, args, 0, Tasks(), evaluation=evaluation)
    if evaluation:
        found = output.data["held-out"]
        assert sorted(found["rewards"]) == [0.0, 1.0]
        assert found["truncated"] == [False, False]
        return
    assert [len(group) for group in output.samples] == [2] * len(known.tasks)
    rewards = [each.reward for group in output.samples for each in group]
    assert sorted(set(rewards)) == [0.0, 1.0]
    assert output.metrics["prorl/completed"] == 1.0
