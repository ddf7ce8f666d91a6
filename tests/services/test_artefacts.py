"""What an evaluator was given is kept beside the trajectory and read back unchanged."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from evaluators.base import Artefacts, PhaseResult, Ran
from evaluators.wire import unpack_artefacts
from rollouts.exceptions import NotThere
from rollouts.models import Evaluation
from rollouts.services import artefacts
from rollouts.services.artefacts import (
    read_evidence,
    read_phases,
    rollout_artefacts,
    store_artefacts,
)
from rollouts.storage import trajectory_storage
from tests import factories
from tests.script_left import script_left

pytestmark = pytest.mark.django_db

PHASE = script_left(b'{"reward": 1}', log=b"\xff log")


@pytest.fixture(autouse=True)
def storage(settings: Any, tmp_path: Path) -> None:
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(tmp_path)}
    settings.STORAGES = stores


def kept() -> Evaluation:
    """Return an evaluation whose evidence is stored."""
    rollout = factories.make_scored_rollout()
    given = Artefacts(answer="a\udcff", messages=({"role": "user"},), phases=(PHASE,))
    stored = store_artefacts(rollout=rollout, name="abc", artefacts=given)
    return Evaluation.objects.create(
        rollout=rollout, evaluator="script", reward=1.0, **stored.columns()
    )


def test_phases_come_back_as_they_were() -> None:
    assert read_phases(evaluation=kept()) == (PHASE,)


def test_the_file_is_compressed_json_without_the_messages() -> None:
    evaluation = kept()

    packed = read_evidence(evaluation=evaluation)

    assert len(packed) == evaluation.evidence_size_bytes
    body = json.loads(gzip.decompress(packed))
    assert (body["format"], body["artefacts"]["answer"]) == (1, "a\udcff")
    assert body["artefacts"]["messages"] == []


def test_of_too_much_output_the_ends_are_kept_and_not_scored_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(artefacts, "OUTPUT_BYTES", 20)
    ran = Ran(exit_code=0, stdout=b"a" * 30 + b"the end", stderr=b"short", seconds=0.1)
    rollout = factories.make_scored_rollout()
    given = Artefacts(phases=(PhaseResult(name="tests", commands=(ran,)),))

    stored = store_artefacts(rollout=rollout, name="abc", artefacts=given)

    evaluation = Evaluation.objects.create(
        rollout=rollout, evaluator="script", reward=1.0, **stored.columns()
    )
    body = json.loads(gzip.decompress(read_evidence(evaluation=evaluation)))
    (kept,) = unpack_artefacts(body["artefacts"]).phases[0].commands
    assert (kept.stdout, kept.stderr, kept.truncated) == (b"aaathe end", b"short", True)
    with pytest.raises(NotThere) as raised:
        read_phases(evaluation=evaluation)
    assert raised.value.code == "evidence.cut"


def test_equal_artefacts_make_equal_files() -> None:
    assert kept().evidence_sha256 == kept().evidence_sha256


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda e: setattr(e, "evidence_path", ""), "evidence.none"),
        (lambda e: trajectory_storage().delete(e.evidence_path), "evidence.missing"),
        (lambda e: setattr(e, "evidence_sha256", "0" * 64), "evidence.damaged"),
    ],
)
def test_what_is_not_there_is_told(spoil: Any, code: str) -> None:
    evaluation = kept()
    spoil(evaluation)

    with pytest.raises(NotThere) as raised:
        read_phases(evaluation=evaluation)

    assert raised.value.code == code


def test_messages_are_read_only_where_they_are_asked_for() -> None:
    rollout = factories.make_scored_rollout(last_message="bye")
    factories.make_trajectory(rollout=rollout)

    with_them = rollout_artefacts(rollout=rollout, with_messages=True)
    without = rollout_artefacts(rollout=rollout, with_messages=False)

    assert with_them.messages == ({"role": "user", "content": "Say hello."},)
    assert without == Artefacts(
        answer="hello",
        last_message="bye",
        turns=1,
        tokens=2,
        stop_reason="finished",
        instruction="Say hello.",
    )


def test_messages_of_no_trajectory_are_not_there() -> None:
    with pytest.raises(NotThere) as raised:
        rollout_artefacts(rollout=factories.make_scored_rollout(), with_messages=True)

    assert raised.value.code == "trajectory.none"
