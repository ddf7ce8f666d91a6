"""Rewards of single turns: from the evaluator into the trajectory, in both of its forms."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from rollouts.models import Evaluation, Rollout, Task, Trajectory
from rollouts.services import arrow
from rollouts.services.claim import Claim
from rollouts.services.trajectories import read_arrow, read_trajectory, store_trajectory
from rollouts.stages.evaluation import carry_out_eval
from rollouts.stages.lease import Held
from tests.services.line import bring_to, make_experiment, make_group, make_node

pytestmark = pytest.mark.django_db(transaction=True)

RULES = [{"rule": "pattern", "pattern": "ls", "name": "lists"}]
SAID = ("ls", "pwd", "ls -l")


@pytest.fixture(autouse=True)
def store(settings: Any, tmp_path: Path) -> Path:
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(tmp_path)}
    settings.STORAGES = stores
    return tmp_path


@pytest.fixture
def claim() -> Claim:
    """Return the claim of a rollout in EVAL that is scored by rules over its turns."""
    workers = make_node()
    make_group(experiment=make_experiment())
    Task.objects.update(
        hidden={"evaluator": "process", "evaluator_settings": {"rules": RULES, "scalar": "sum"}}
    )
    made = bring_to(Rollout.objects.get(), "eval", workers)
    assert made is not None
    return made


def segment(number: int, turns: int) -> dict[str, Any]:
    return {
        "id": number,
        "parent": None if number == 0 else 0,
        "fork_reason": None if number == 0 else "truncated",
        "sampling": {},
        "logprob_mode": "processed_logprobs",
        "turns": [
            {"start": 2 * each, "end": 2 * each + 1, "finish_reason": "stop", "reward": None}
            for each in range(turns)
        ],
        "prompt_ids": [1],
        "response_ids": [5, 6] * turns,
        "response_mask": [1, 0] * turns,
        "response_logprobs": [-0.5, 0.0] * turns,
        "policy_versions": [[3, 2 * turns]],
    }


def leave(claim: Claim, turns: Sequence[int]) -> None:
    """Store a trajectory with so many turns in each of its segments."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look around."}]
    for said in SAID:
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "user", "content": "a.py"})
    stored = store_trajectory(
        experiment_id=Rollout.objects.get().experiment_id,
        rollout_id=claim.rollout_id,
        attempt_id=uuid4(),
        segments=[segment(number, count) for number, count in enumerate(turns)],
        messages=messages,
        tools=[],
    )
    Trajectory.objects.update_or_create(rollout_id=claim.rollout_id, defaults=vars(stored))
    Rollout.objects.update(turns=len(SAID))


def shown() -> tuple[list[list[float | None]], list[list[float | None]]]:
    """Return the rewards of each segment's turns as JSON and as Arrow tell them."""
    rollout = Rollout.objects.select_related("trajectory", "group__task", "environment").get()
    told = read_trajectory(rollout=rollout)["segments"]
    schema = arrow.schema_message(batch=b"{}", rollouts=b"[]")
    stream = schema + read_arrow(rollout.trajectory) + arrow.END_OF_STREAM
    table = pa.ipc.open_stream(stream).read_all()
    as_json = [[turn["reward"] for turn in each["turns"]] for each in told]
    return as_json, table.column("turn_rewards").to_pylist()


def test_each_turn_gets_its_reward_in_json_and_arrow(claim: Claim, store: Path) -> None:
    leave(claim, turns=(2, 1))

    carry_out_eval(Held(claim))

    assert Rollout.objects.get().reward == 2.0
    assert Evaluation.objects.get().turn_rewards == [1.0, 0.0, 1.0]
    assert shown() == ([[1.0, 0.0], [1.0]], [[1.0, 0.0], [1.0]])
    names = sorted(path.name for path in store.rglob("*") if path.is_file())
    kept = Trajectory.objects.get()
    assert [Path(kept.arrow_path).name, Path(kept.path).name] == [
        name for name in names if "evidence" not in name
    ]


def test_turns_that_are_not_those_of_the_rewards_stay_without(claim: Claim) -> None:
    leave(claim, turns=(2,))
    before = Trajectory.objects.values().get()

    carry_out_eval(Held(claim))

    assert Rollout.objects.get().reward == 2.0
    assert Evaluation.objects.get().turn_rewards == [1.0, 0.0, 1.0]
    assert Trajectory.objects.values().get() == before
    assert shown() == ([[None, None]], [[None, None]])
