"""Segments as Arrow: what is stored is what a reader gets, without a copy."""

import hashlib
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest

from rollouts.models import Rollout, Trajectory
from rollouts.services import arrow
from rollouts.services.discard import forget_trajectory
from rollouts.services.trajectories import read_arrow, store_trajectory
from tests import factories

SEGMENTS: list[dict[str, Any]] = [
    {
        "id": 0,
        "parent": None,
        "fork_reason": None,
        "sampling": {"temperature": 0.7},
        "logprob_mode": "sampled",
        "turns": [
            {"start": 0, "end": 2, "finish_reason": "stop", "reward": None},
            {"start": 3, "end": 4, "finish_reason": "length", "reward": 0.5},
        ],
        "prompt_ids": [1, 2, 3],
        "response_ids": [11, 12, 13, 2**31 - 1],
        "response_mask": [1, 1, 0, 1],
        "response_logprobs": [-0.5, -1.25, 0.0, -3.0],
        "policy_versions": [[3, 2], [-1, 2]],
    },
    {
        "id": 1,
        "parent": 0,
        "fork_reason": "template",
        "sampling": {"temperature": 0.7},
        "logprob_mode": "mixed",
        "turns": [],
        "prompt_ids": [],
        "response_ids": [],
        "response_mask": [],
        "response_logprobs": [],
        "policy_versions": [],
    },
]


def test_a_stream_of_stored_batches_is_read_by_arrow_itself() -> None:
    one, two = uuid4(), uuid4()
    stream = (
        arrow.schema_message(batch=b'{"a":1}', rollouts=b"[]")
        + arrow.encode_segments(rollout_id=one, segments=SEGMENTS)
        + arrow.encode_segments(rollout_id=two, segments=SEGMENTS[:1])
        + arrow.END_OF_STREAM
    )

    with pa.ipc.open_stream(stream) as reader:
        assert reader.schema.metadata == {b"prorl.batch": b'{"a":1}', b"prorl.rollouts": b"[]"}
        table = reader.read_all()
    table.validate(full=True)
    rows = table.to_pylist()
    assert [(row["rollout"], row["segment"]) for row in rows] == [
        (one.bytes, 0),
        (one.bytes, 1),
        (two.bytes, 0),
    ]
    assert rows[0] == {
        "rollout": one.bytes,
        "segment": 0,
        "parent": None,
        "fork_reason": None,
        "logprob_mode": "sampled",
        "sampling": '{"temperature":0.7}',
        "prompt_ids": [1, 2, 3],
        "response_ids": [11, 12, 13, 2**31 - 1],
        "response_mask": [1, 1, 0, 1],
        "response_logprobs": [-0.5, -1.25, 0.0, -3.0],
        "policy_versions": [3, -1],
        "version_runs": [2, 2],
        "turn_starts": [0, 3],
        "turn_ends": [2, 4],
        "turn_finish_reasons": ["stop", "length"],
        "turn_rewards": [None, 0.5],
    }
    assert (rows[1]["parent"], rows[1]["fork_reason"], rows[1]["response_ids"]) == (
        0,
        "template",
        [],
    )
    types = {field.name: str(field.type) for field in table.schema}
    assert types["response_ids"] == "list<item: int32>"
    assert types["response_mask"] == "list<item: uint8>"
    assert types["response_logprobs"] == "list<item: float>"
    assert types["rollout"] == "fixed_size_binary[16]"


def test_tokens_reach_numpy_without_a_copy() -> None:
    stream = pa.py_buffer(
        arrow.schema_message(batch=b"{}", rollouts=b"[]")
        + arrow.encode_segments(rollout_id=uuid4(), segments=SEGMENTS)
        + arrow.END_OF_STREAM
    )
    with pa.ipc.open_stream(stream) as reader:
        batch = reader.read_next_batch()
    for name, dtype in (
        ("response_ids", "int32"),
        ("response_mask", "uint8"),
        ("response_logprobs", "float32"),
    ):
        tokens = batch.column(name).values.to_numpy(zero_copy_only=True)
        assert tokens.dtype == dtype
        assert tokens.tolist() == SEGMENTS[0][name]
        place = tokens.__array_interface__["data"][0]
        assert stream.address <= place < stream.address + stream.size


@pytest.mark.parametrize(
    "changes",
    [
        {"response_ids": [2**31]},
        {"response_ids": ["a"]},
        {"response_mask": [256]},
        {"response_mask": [-1]},
        {"sampling": {"odd": object()}},
        {"turns": [{"start": 0}]},
        {"parent": "first"},
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(arrow.NotEncodable):
        arrow.encode_segments(rollout_id=uuid4(), segments=[{**SEGMENTS[0], **changes}])


@pytest.fixture
def folder(settings: Any, tmp_path: Path) -> Path:
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(tmp_path)}
    settings.STORAGES = stores
    return tmp_path


def store(rollout: Rollout, segments: list[dict[str, Any]]) -> Trajectory:
    stored = store_trajectory(
        experiment_id=rollout.experiment_id,
        rollout_id=rollout.pk,
        attempt_id=uuid4(),
        segments=segments,
        messages=[],
        tools=[],
    )
    return Trajectory.objects.create(rollout=rollout, **vars(stored))


@pytest.mark.django_db
def test_storing_writes_arrow_beside_the_json(folder: Path) -> None:
    rollout = factories.make_rollout()
    stored = store(rollout, SEGMENTS)

    encoded = (folder / stored.arrow_path).read_bytes()
    assert encoded == arrow.encode_segments(rollout_id=rollout.pk, segments=SEGMENTS)
    assert stored.arrow_bytes == len(encoded)
    digest = hashlib.sha256(encoded).hexdigest()
    assert stored.arrow_path == stored.path.removesuffix(".json") + f".1-{digest}.arrow"
    assert json.loads((folder / stored.path).read_bytes())["segments"] == SEGMENTS
    assert read_arrow(stored) == encoded


@pytest.mark.django_db
def test_a_trajectory_of_text_alone_has_no_arrow(folder: Path) -> None:
    stored = store(factories.make_rollout(), [])
    assert (stored.arrow_path, stored.arrow_bytes) == ("", 0)
    assert [path.suffix for path in folder.rglob("*.*") if path.is_file()] == [".json"]


@pytest.mark.django_db
def test_what_does_not_fit_is_stored_as_json_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segments = [{**SEGMENTS[0], "response_ids": [11, 12, 13, 2**40]}]
    stored = store(factories.make_rollout(), segments)
    assert (stored.arrow_path, stored.arrow_bytes) == ("", 0)
    assert json.loads((folder / stored.path).read_bytes())["segments"] == segments
    assert len(caplog.records) == 1


@pytest.mark.django_db(transaction=True)
def test_forgetting_a_trajectory_deletes_both_files(folder: Path) -> None:
    stored = store(factories.make_rollout(), SEGMENTS)
    forget_trajectory(rollout_id=stored.rollout_id)
    assert [path for path in folder.rglob("*") if path.is_file()] == []
