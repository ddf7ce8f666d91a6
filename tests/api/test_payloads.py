"""A batch's trajectories in the format that its trainer prefers, whatever became of their files."""

import gzip
import json
import re
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from django.utils import timezone

from rollouts.models import Batch, Experiment, Rollout, Trajectory
from rollouts.services import payloads
from rollouts.services.payloads import json_trajectories, rollouts_of_batch
from tests import factories
from tests.api.callers import Caller, assert_problem
from tests.api.live import served

ARROW = "application/vnd.apache.arrow.stream"
NDJSON = "application/x-ndjson"


@pytest.fixture
def batch(trainer: Caller) -> Batch:
    experiment = factories.make_experiment(owner=trainer.user)
    groups = [factories.make_ready_group(experiment=experiment) for _ in range(2)]
    return factories.make_batch(groups=groups)


def read(caller: Caller, batch: Batch, accept: str, **headers: str) -> Any:
    return caller.call("GET", f"batches/{batch.pk}/", Accept=accept, **headers)


def content(response: Any) -> bytes:
    return b"".join(response.streaming_content)


def opened(body: bytes) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the batch, the rollouts and the rows of an Arrow stream."""
    with pa.ipc.open_stream(body) as reader:
        told = reader.schema.metadata
        table = reader.read_all()
    table.validate(full=True)
    return (
        json.loads(told[b"prorl.batch"]),
        json.loads(told[b"prorl.rollouts"]),
        table.to_pylist(),
    )


def test_arrow_says_the_same_as_json(trainer: Caller, batch: Batch) -> None:
    response = read(trainer, batch, ARROW)
    assert (response.status_code, response["Content-Type"]) == (200, ARROW)
    assert response["Batch-Id"] == str(batch.pk)
    described, rollouts, rows = opened(content(response))

    whole = json.loads(content(read(trainer, batch, "application/json")))
    trajectories = whole.pop("trajectories")
    assert described == whole
    assert len(rows) == len(rollouts) == len(trajectories) == 4
    for row, rollout, trajectory in zip(rows, rollouts, trajectories, strict=True):
        (segment,) = trajectory.pop("segments")
        for text in ("messages", "tools", "agent", "unknown_version_tokens"):
            del trajectory[text]
        assert rollout == {**trajectory, "segments": 1}
        assert row["rollout"].hex() == rollout["rollout"].replace("-", "")
        assert row["response_ids"] == segment["response_ids"]
        assert row["response_mask"] == segment["response_mask"]
        assert row["response_logprobs"] == segment["response_logprobs"]
        assert list(zip(row["policy_versions"], row["version_runs"], strict=True)) == [
            tuple(each) for each in segment["policy_versions"]
        ]


def test_the_documented_reader(trainer: Caller, batch: Batch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, Any] = {}
    exec(next(each for each in blocks if "read_batch" in each), names)

    described, rollouts, table = names["read_batch"](content(read(trainer, batch, ARROW)))

    assert described["id"] == str(batch.pk)
    assert len(rollouts) == table.num_rows == 4


def test_a_lease_answers_in_arrow(trainer: Caller) -> None:
    group = factories.make_ready_group(experiment=factories.make_experiment(owner=trainer.user))
    response = trainer.call(
        "POST", f"experiments/{group.experiment_id}/batches/", {"groups": 1}, Accept=ARROW
    )
    described, rollouts, rows = opened(content(response))
    assert described["id"] == str(Batch.objects.get().pk)
    assert [each["reward"] for each in rollouts] == [1.0, 0.0]
    assert len(rows) == 2


def test_rollouts_without_tokens_are_described_only(trainer: Caller) -> None:
    experiment = factories.make_experiment(owner=trainer.user)
    group = factories.make_ready_group(experiment=experiment, rewards=[1.0], size=2, done_count=2)
    failed = factories.make_rollout(
        group=group, state="done", outcome="infra_failed", done_at=timezone.now()
    )
    text_only = factories.make_scored_rollout(group=group)
    factories.make_trajectory(rollout=text_only)
    Trajectory.objects.filter(rollout=text_only).update(segments=0)
    factories.make_scored_rollout(group=group, replaced=True)
    batch = factories.make_batch(groups=[group])

    _, rollouts, rows = opened(content(read(trainer, batch, ARROW)))

    assert [each["segments"] for each in rollouts] == [1, 0, 0]
    assert rollouts[1]["rollout"] == str(failed.pk)
    assert rollouts[1]["policy_version"] == {"first": None, "last": None}
    assert all("error" not in each for each in rollouts)
    assert len(rows) == 1
    lines = content(read(trainer, batch, NDJSON)).splitlines()
    assert len(lines) == 3  # what was replaced is in no batch


def of(batch: Batch, place: int) -> Trajectory:
    rollout = list(rollouts_of_batch(batch.pk))[place]
    return Trajectory.objects.get(rollout=rollout)


def damage(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-40] ^= 1
    path.write_bytes(body)


def test_old_and_spoilt_arrow_files_are_made_anew_from_the_json(
    trainer: Caller, batch: Batch, trajectory_store: Path
) -> None:
    good = content(read(trainer, batch, ARROW))
    Trajectory.objects.filter(pk=of(batch, 0).pk).update(arrow_path="", arrow_bytes=0)
    damage(trajectory_store / of(batch, 1).arrow_path)
    (trajectory_store / of(batch, 2).arrow_path).unlink()
    other_columns = of(batch, 3).arrow_path.replace(".1-", ".0-")
    (trajectory_store / other_columns).write_bytes(b"of other columns")
    Trajectory.objects.filter(pk=of(batch, 3).pk).update(arrow_path=other_columns)

    assert content(read(trainer, batch, ARROW)) == good


def test_what_cannot_be_read_at_all_is_left_out_and_told(
    trainer: Caller, batch: Batch, trajectory_store: Path
) -> None:
    kept = str(of(batch, 3).rollout_id)
    for place, spoil in enumerate((damage, Path.unlink, _make_folder)):
        stored = of(batch, place)
        (trajectory_store / stored.arrow_path).unlink()
        spoil(trajectory_store / stored.path)

    _, rollouts, rows = opened(content(read(trainer, batch, ARROW)))

    assert [each.get("error", {}).get("code") for each in rollouts] == [
        "trajectory.damaged",
        "trajectory.missing",
        "trajectory.unreadable",
        None,
    ]
    assert [(each["segments"], each["trainable"]) for each in rollouts[:3]] == [(0, False)] * 3
    assert [row["rollout"].hex() for row in rows] == [kept.replace("-", "")]
    lines = [json.loads(line) for line in content(read(trainer, batch, NDJSON)).splitlines()]
    assert [each.get("error", {}).get("code") for each in lines] == [
        each.get("error", {}).get("code") for each in rollouts
    ]
    assert [len(each["segments"]) for each in lines] == [0, 0, 0, 1]


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_a_file_that_vanishes_while_it_is_sent_breaks_nothing(
    trainer: Caller, batch: Batch, trajectory_store: Path
) -> None:
    parts = payloads.arrow_stream(rollouts_of_batch(batch.pk), batch=b"{}")
    begun = [next(parts), next(parts)]
    stored = of(batch, 1)
    (trajectory_store / stored.arrow_path).unlink()
    (trajectory_store / stored.path).unlink()

    _, rollouts, rows = opened(b"".join([*begun, *parts]))

    assert [each["segments"] for each in rollouts] == [1] * 4
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "application/json"),
        ("", "application/json"),
        ("*/*", "application/json"),
        ("application/*", "application/json"),
        (ARROW, ARROW),
        (f"{ARROW}, application/json", ARROW),
        (f"application/json, {ARROW}", "application/json"),
        (f"{ARROW};q=0.4, application/json;q=0.6", "application/json"),
        (f"application/json;q=0.4, {NDJSON};q=0.5, {ARROW};q=0.9", ARROW),
        (f"{ARROW};q=0, */*;q=0.1", "application/json"),
        (f"*/*, application/json;q=0, {ARROW};q=0", NDJSON),
        (f"text/html, {NDJSON};q=0.2", NDJSON),
        ("application/json; charset=utf-8", "application/json"),
        (f"{ARROW};q=nonsense", ARROW),
    ],
)
def test_the_preferred_format(
    trainer: Caller, batch: Batch, accept: str | None, expected: str
) -> None:
    headers = {} if accept is None else {"Accept": accept}
    response = trainer.call("GET", f"batches/{batch.pk}/", **headers)
    assert (response.status_code, response["Content-Type"]) == (200, expected)
    assert response["Vary"] == "Accept, Accept-Encoding"


@pytest.mark.parametrize("accept", ["text/html", f"{ARROW};q=0", "application/parquet, image/*"])
def test_no_format_that_is_offered(trainer: Caller, batch: Batch, accept: str) -> None:
    problem = assert_problem(read(trainer, batch, accept), 406, "request.not_acceptable")
    for name in ("application/json", NDJSON, ARROW):
        assert name in problem["detail"]


def test_a_list_of_batches_is_json_alone(trainer: Caller, batch: Batch) -> None:
    for path in ("batches/", f"experiments/{batch.experiment_id}/batches/"):
        assert_problem(trainer.call("GET", path, Accept=ARROW), 406, "request.not_acceptable")
        assert trainer.call("GET", path).status_code == 200


@pytest.mark.parametrize(
    ("encoding", "compressed"),
    [
        ("", False),
        ("gzip, deflate, br, zstd", False),
        ("*", False),
        ("gzip, identity;q=0.5", True),
        ("identity;q=0, gzip;q=0.1", True),
        ("gzip;q=0.2, identity;q=0.5", False),
        ("br, identity;q=0.5", False),
    ],
)
def test_compression_only_when_it_is_asked_for(
    trainer: Caller, batch: Batch, encoding: str, compressed: bool
) -> None:
    plain = content(read(trainer, batch, ARROW))
    response = read(trainer, batch, ARROW, Accept_Encoding=encoding)
    body = content(response)
    assert response.has_header("Content-Encoding") == compressed
    assert (gzip.decompress(body) if compressed else body) == plain


def test_trajectories_are_read_one_by_one(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = payloads.read_body

    def counted(stored: Trajectory) -> bytes:
        seen.append(stored.pk)
        return original(stored)

    monkeypatch.setattr(payloads, "read_body", counted)
    parts = json_trajectories(rollouts_of_batch(batch.pk))
    next(parts)
    assert len(seen) == 1
    next(parts)
    assert len(seen) == 2


def test_as_many_queries_for_many_rollouts(
    trainer: Caller, batch: Batch, django_assert_num_queries: Callable[..., Any]
) -> None:
    more = [factories.make_ready_group(experiment=batch.experiment) for _ in range(3)]
    large = factories.make_batch(groups=more)
    for each in (batch, large):
        with django_assert_num_queries(2):
            list(json_trajectories(rollouts_of_batch(each.pk)))
        with django_assert_num_queries(3):
            list(payloads.arrow_stream(rollouts_of_batch(each.pk), batch=b"{}"))


def test_memory_is_bounded_by_one_trajectory_not_by_the_batch(
    trainer: Caller, trajectory_store: Path
) -> None:
    experiment = factories.make_experiment(owner=trainer.user)
    group = factories.make_group(experiment=experiment, state="ready", size=40, done_count=40)
    stored = None
    for _ in range(40):
        rollout = factories.make_scored_rollout(group=group)
        stored = factories.make_trajectory(rollout=rollout, tokens=range(50_000))
    batch = factories.make_batch(groups=[group])
    assert stored is not None
    for parts, size in (
        (json_trajectories(rollouts_of_batch(batch.pk)), stored.size_bytes),
        (payloads.arrow_stream(rollouts_of_batch(batch.pk), batch=b"{}"), stored.arrow_bytes),
    ):
        tracemalloc.start()
        total = sum(map(len, payloads.in_chunks(parts)))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert total > 40 * size
        assert peak < 6 * size + 4 * 2**20


def test_chunks_hold_the_same_bytes() -> None:
    parts = [b"a" * 3, b"", b"b" * 10, b"c", b"d" * 2]
    chunks = list(payloads.in_chunks(iter(parts), size=4))
    assert chunks == [b"aaa" + b"b" * 10, b"cdd"]
    assert list(payloads.in_chunks(iter([]), size=4)) == []


@pytest.fixture
def live_batch(transactional_db: None, trainer: Caller) -> Batch:
    experiment: Experiment = factories.make_experiment(owner=trainer.user)
    return factories.make_batch(groups=[factories.make_ready_group(experiment=experiment)])


@pytest.fixture
def base(transactional_db: None) -> Iterator[str]:
    with served() as address:
        yield address


@pytest.mark.django_db(transaction=True)
def test_a_real_server_streams_each_format(base: str, trainer: Caller, live_batch: Batch) -> None:
    url = f"{base}/api/v1/batches/{live_batch.pk}/"
    bodies = {}
    for accept in (ARROW, NDJSON, "application/json"):
        sent = {"Authorization": f"Bearer {trainer.text}", "Accept": accept}
        response = httpx.get(url, headers=sent)
        assert (response.status_code, response.headers["Content-Type"]) == (200, accept)
        assert response.headers["Transfer-Encoding"] == "chunked"
        assert "Content-Encoding" not in response.headers
        bodies[accept] = response.content
    assert len(opened(bodies[ARROW])[2]) == 2
    lines = [json.loads(line) for line in bodies[NDJSON].splitlines()]
    assert lines == json.loads(bodies["application/json"])["trajectories"]


@pytest.mark.django_db(transaction=True)
def test_a_trainer_that_leaves_ends_its_stream(
    base: str, trainer: Caller, live_batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closed = threading.Event(), threading.Event()
    original = payloads._rollouts

    def endless(ids: list[Any]) -> Iterator[Rollout]:
        rows = list(original(ids))
        begun.set()
        try:
            while True:
                yield from rows
        finally:
            closed.set()

    monkeypatch.setattr(payloads, "_rollouts", endless)
    sent = {"Authorization": f"Bearer {trainer.text}", "Accept": NDJSON}
    url = f"{base}/api/v1/batches/{live_batch.pk}/"
    with httpx.stream("GET", url, headers=sent, timeout=60) as response:
        next(response.iter_bytes())
        assert begun.is_set()
    assert closed.wait(60)
