"""Recorded requests of the reference's trainers, and what each must come to."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollouts.api.reference.sampling import IGNORED, USED
from rollouts.models import Group, Rollout
from rollouts.states import BatchState, GroupState
from tests import factories
from tests.api.callers import Caller
from tests.api.live import eventually, served
from tests.api.reference.jobs import finish, write_surface

pytestmark = [pytest.mark.django_db(transaction=True)]

GOLDEN = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "golden").glob("*.json"))
}
# The fields of a result and of a message that the reference's documentation and code name.
RESULT = {
    *("instance_id", "trajectory_id", "git_patch", "success", "error", "finish", "messages"),
    *("tools", "end_properly", "resolved", "critical_error", "filter", "report", "timing"),
}
TIMING = {
    *("init_time", "run_time", "eval_time", "others_time", "counted_elapsed"),
    *("timeout_triggered", "init", "run", "eval", "others", "timeout"),
}


@pytest.fixture
def base(transactional_db: None) -> Iterator[str]:
    with served() as address:
        yield address


@pytest.mark.parametrize("name", GOLDEN)
def test_a_recorded_request_gets_the_recorded_answer(
    name: str, base: str, trainer: Caller, settings: Any, tmp_path: Path
) -> None:
    # Given a surface whose names stand for rows of this test.
    golden = GOLDEN[name]
    environment = factories.make_environment()
    rows = {word: factories.make_policy(owner=trainer.user) for word in ("POLICY", "MODEL")}
    for policy in rows.values():
        factories.make_server(policy=policy)
    names = {word: policy.name for word, policy in rows.items()} | {"ENVIRONMENT": environment.name}
    surface = json.loads(_named(json.dumps(golden["surface"]), names))
    settings.REFERENCE_SURFACE = write_surface(tmp_path, rows["POLICY"], **surface)
    bearer = {"Authorization": f"Bearer {trainer.text}"}

    # When the request is sent and its rollout ends as recorded.
    with (
        httpx.Client(base_url=base, headers=bearer, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        client.post("/start").raise_for_status()
        waiting = pool.submit(client.post, "/process", json=golden["request"])
        eventually(lambda: Rollout.objects.exists() or waiting.done(), "the job has a rollout")
        rollout = Rollout.objects.select_related("experiment", "group__task").get()
        finish(rollout, golden["became"])
        response = waiting.result()

    # Then the answer is the recorded one,
    assert response.status_code == golden["status"], response.text
    assert response.json() == golden["answer"]
    # the rollout was sampled as asked,
    experiment, task = rollout.experiment, rollout.group.task
    assert experiment.owner == trainer.user
    assert experiment.policy == rows[golden["policy"]]
    assert experiment.sampling == golden["sampling"]
    assert golden["budgets"].items() <= experiment.budgets.items()
    assert task.environment == environment
    assert {key: getattr(task, key) for key in golden["task"]} == golden["task"]
    # and its group is in no other batch.
    group = Group.objects.select_related("batch").get()
    if rollout.group.state == GroupState.READY:
        assert group.state == GroupState.CONSUMED
        assert group.batch is not None
        assert group.batch.state == BatchState.ACKNOWLEDGED


def _named(text: str, names: dict[str, str]) -> str:
    for word, name in names.items():
        text = text.replace(f'"{word}"', f'"{name}"')
    return text


def test_the_recorded_requests_hold_every_parameter_that_is_known() -> None:
    sent = {key for golden in GOLDEN.values() for key in golden["request"]["sampling_params"]}
    assert set(USED) | set(IGNORED) <= sent
    assert not set(USED) & set(IGNORED)
    assert sent - set(USED) - set(IGNORED) == {"made_up"}


@pytest.mark.parametrize("name", GOLDEN)
def test_every_field_of_the_reference_is_in_every_answer(name: str) -> None:
    answer = GOLDEN[name]["answer"]
    assert set(answer) >= RESULT
    assert set(answer["timing"]) == TIMING
    for message in answer["messages"]:
        assert {"role", "content"} <= set(message)


def test_joined_token_ids_are_the_sequence_that_was_sampled() -> None:
    golden = GOLDEN["verl-math"]
    segment = golden["became"]["trajectory"]["segments"][0]
    joined = [token for message in golden["answer"]["messages"] for token in message["token_ids"]]
    assert joined == segment["prompt_ids"] + segment["response_ids"]
