"""What is told of sampled tokens: versions that nobody knows are counted, not hidden."""

import json
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from rollouts.handlers.base import Action, JournaledTurn
from rollouts.inference.protocol import Generation, Health, Server
from rollouts.inference.trace import UNKNOWN_POLICY_VERSION
from rollouts.models import InferenceServer
from rollouts.services import servers as servers_module
from rollouts.services.routable import routable_servers
from rollouts.services.servers import as_server, check_servers, register_server
from rollouts.services.trajectories import store_trajectory
from rollouts.stages.running import _stamps
from rollouts.storage import trajectory_storage
from tests.services.line import make_experiment


def segment(mask: list[int], runs: list[list[int]]) -> dict[str, Any]:
    """Return what counts of a segment."""
    return {
        "prompt_ids": [1],
        "response_ids": [2] * len(mask),
        "response_mask": mask,
        "policy_versions": runs,
    }


@pytest.mark.parametrize(
    ("segments", "unknown", "span"),
    [
        ([segment([1, 1, 1], [[7, 3]])], 0, (7, 7)),
        ([segment([1, 1, 0, 1], [[7, 1], [-1, 3]])], 2, (7, 7)),
        ([segment([1], [[-1, 1]]), segment([0, 1], [[-1, 1], [8, 1]])], 1, (8, 8)),
        ([segment([1], [[-1, 1]])], 1, (None, None)),
    ],
)
def test_tokens_of_unknown_versions_are_counted(
    segments: list[dict[str, Any]], unknown: int, span: tuple[int | None, int | None]
) -> None:
    stored = store_trajectory(
        experiment_id=uuid4(),
        rollout_id=uuid4(),
        attempt_id=uuid4(),
        segments=segments,
        messages=[],
        tools=[],
    )

    with trajectory_storage().open(stored.path, "rb") as stream:
        assert json.load(stream)["unknown_version_tokens"] == unknown
    assert (stored.first_policy_version, stored.last_policy_version) == span
    assert stored.trainable


def turn(ids: tuple[int, ...], version: int | None, *runs: tuple[int, int]) -> JournaledTurn:
    generation = Generation(ids, (-0.5,) * len(ids), "stop", version, "s", 0.1, version_runs=runs)
    action = Action(kind="answer", text="")
    return JournaledTurn(
        turn=0, prompt_ids=(1,), generation=generation, action=action, messages=None
    )


def test_stamps_of_earlier_workers_tell_unknown_ones_apart() -> None:
    turns = [turn((1,), 4), turn((1, 2), 6, (-1, 1), (6, 1)), turn((1,), None), turn((), None)]

    stamps = _stamps(SimpleNamespace(replay=lambda: turns))  # type: ignore[arg-type]

    assert stamps == [4, UNKNOWN_POLICY_VERSION, 6, UNKNOWN_POLICY_VERSION]


@pytest.mark.django_db(transaction=True)
def test_what_a_probe_found_goes_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_experiment().policy
    row = register_server(policy=policy, url="http://127.0.0.1:9")
    found: list[str | None] = ["raw_logprobs", None]

    class Probed:
        def health(self, _server: Server, **_: float) -> Health:
            return Health(ok=True, detail="well", logprob_mode=found.pop(0))

    assert as_server(row).logprob_mode is None
    with monkeypatch.context() as patched:
        patched.setattr(servers_module, "adapters", lambda: {"vllm": Probed()})
        assert [check_servers(), check_servers()] == [1, 1]

    (server,) = routable_servers(policy=policy, since=float("inf")).servers
    assert server.logprob_mode == "raw_logprobs", "what is not found out anew stays known"
    register_server(policy=policy, url="http://127.0.0.1:9")
    assert InferenceServer.objects.get().logprob_mode == "", "another server may be there now"
