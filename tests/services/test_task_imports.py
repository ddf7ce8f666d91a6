"""Imports as jobs: in chunks, from where they stood, told apart by content, nothing dropped."""

import json
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from django.core.exceptions import ValidationError
from django.core.management import call_command
from django.utils import timezone

from rollouts.management.commands import import_tasks as import_command
from rollouts.models import RejectedRow, Task, TaskImport, TaskSet
from rollouts.services import import_life, import_work
from rollouts.services.import_claim import ClaimedImport, beat, claim_import, recover_imports
from rollouts.services.import_sources import import_folder, open_source, store_upload
from rollouts.services.import_work import carry_out_import
from rollouts.services.task_imports import begin_here, begin_path, begin_upload, cancel_import
from rollouts.states import ImportState
from sandboxes.models import Environment, Image
from sandboxes.services.catalogue import save_environment, save_image
from tests import factories

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, settings: Any) -> Path:
    settings.IMPORT_FOLDER = tmp_path / "imports"
    return tmp_path


def plain_rows(count: int, **values: Any) -> list[dict[str, Any]]:
    return [
        {"ref": f"r{number}", "instruction": f"{number} + 1?", "answer": str(number + 1), **values}
        for number in range(count)
    ]


def lines(rows: list[Any]) -> bytes:
    return b"".join(
        (row if isinstance(row, str) else json.dumps(row)).encode() + b"\n" for row in rows
    )


def write(folder: Path, rows: list[Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(lines(rows))
    return path


def claimed(job: TaskImport) -> ClaimedImport:
    found = claim_import(import_id=job.pk)
    assert found is not None
    return found


def run(path: Path, set_name: str = "set", **values: Any) -> TaskImport:
    job = begin_here(set_name=set_name, path=path, **values)
    carry_out_import(claimed=claimed(job))
    job.refresh_from_db()
    return job


def counts(job: TaskImport) -> tuple[int, int, int, int]:
    return job.created, job.changed, job.unchanged, job.rejected


def test_the_same_content_is_imported_once_and_a_changed_row_again(folder: Path) -> None:
    rows = plain_rows(3)
    first = run(write(folder, rows))
    again = run(write(folder, rows))
    rows[1]["answer"] = "two"
    third = run(write(folder, [*rows, *plain_rows(4)[3:]]))

    assert [counts(job) for job in (first, again, third)] == [
        (3, 0, 0, 0),
        (0, 0, 3, 0),
        (1, 1, 2, 0),
    ]
    assert {job.state for job in (first, again, third)} == {"done"}
    assert Task.objects.get(ref="r1").hidden["evaluator_payload"] == {"answer": "two"}
    environment = Environment.objects.get()
    assert (environment.name, environment.agent, environment.image) == ("set", "single_turn", None)


def test_bad_rows_are_kept_aside_with_line_reason_and_what_they_were(folder: Path) -> None:
    good = plain_rows(2)
    job = run(write(folder, [good[0], "{oops\0", good[0], {"ref": "x"}, good[1]]), format="jsonl")

    assert counts(job) == (2, 0, 0, 3)
    kept = list(RejectedRow.objects.values_list("number", "place", "reason", "raw"))
    assert [(number, place.rsplit("/", 1)[-1]) for number, place, _reason, _raw in kept] == [
        (2, "rows.jsonl:2"),
        (3, "r0"),
        (4, "rows.jsonl:4"),
    ]
    assert kept[0][2].startswith("the line is not JSON")
    assert kept[0][3] == "{oops\N{REPLACEMENT CHARACTER}"
    assert kept[1][2].startswith("ref 'r0' is taken by an earlier one of this source")
    assert kept[2][2:] == ("'instruction' must be a text that is not empty", '{"ref": "x"}')


def test_only_the_first_refused_rows_are_kept_and_all_are_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_work, "REJECTED_KEPT", 3)
    monkeypatch.setattr(import_work, "CHUNK", 2)
    job = run(write(folder, [*plain_rows(1), *["nothing"] * 7]), format="jsonl")

    assert counts(job) == (1, 0, 0, 7)
    assert list(job.rejected_rows.values_list("number", flat=True)) == [2, 3, 4]


class Killed(BaseException):
    """What ends a process in the middle."""


@pytest.fixture(params=["jsonl", "json", "parquet"])
def many(request: pytest.FixtureRequest, folder: Path) -> Path:
    rows = plain_rows(10)
    if request.param == "jsonl":
        return write(folder, rows)
    path = folder / f"rows.{request.param}"
    if request.param == "json":
        path.write_text(json.dumps(rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    return path


def test_what_a_dead_process_left_is_gone_on_with_and_nothing_comes_twice(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_work, "CHUNK", 3)
    job = begin_here(set_name="set", path=many)
    dying = claimed(job)

    def die(now: TaskImport) -> None:
        if now.number == 6:
            raise Killed

    with pytest.raises(Killed):
        carry_out_import(claimed=dying, progress=die)
    job.refresh_from_db()
    assert (job.state, job.number, Task.objects.count()) == ("running", 6, 6)
    TaskImport.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=5))
    assert recover_imports() == 1
    carry_out_import(claimed=claimed(job))

    job.refresh_from_db()
    assert (job.state, job.number, counts(job)) == ("done", 10, (10, 0, 0, 0))
    assert Task.objects.count() == 10
    carry_out_import(claimed=dying)  # the one that was only thought dead
    job.refresh_from_db()
    assert (job.state, counts(job)) == ("done", (10, 0, 0, 0))


def test_an_import_that_ends_with_its_worker_is_given_back(folder: Path) -> None:
    job = begin_here(set_name="set", path=write(folder, plain_rows(4)))
    seen: list[int] = []

    def ending() -> bool:
        seen.append(1)
        return len(seen) > 2

    carry_out_import(claimed=claimed(job), ending=ending)

    job.refresh_from_db()
    assert (job.state, job.lease_token, job.attempts) == ("queued", None, 0)


def test_an_import_whose_process_dies_again_and_again_fails(folder: Path) -> None:
    job = begin_here(set_name="set", path=write(folder, plain_rows(1)))
    for _attempt in range(3):
        claimed(job)
        TaskImport.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=5))
        assert recover_imports() == 1

    job.refresh_from_db()
    assert (job.state, job.error_code) == ("failed", "import.process_lost")
    assert claim_import(import_id=job.pk) is None


def test_a_running_import_is_cancelled_and_what_it_wrote_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_work, "CHUNK", 2)
    monkeypatch.setattr(import_work, "BEAT_SECONDS", 0.0)
    job = begin_here(set_name="set", path=write(folder, plain_rows(6)))

    carry_out_import(
        claimed=claimed(job), progress=lambda now: assert_true(cancel_import(import_id=now.pk))
    )

    job.refresh_from_db()
    assert (job.state, Task.objects.count()) == ("cancelled", 2)
    assert cancel_import(import_id=job.pk) is False


def assert_true(value: bool) -> None:
    assert value


def test_one_import_runs_at_a_time(folder: Path) -> None:
    path = write(folder, plain_rows(1))
    first, second = (begin_here(set_name=name, path=path) for name in ("one", "two"))
    running = claimed(first)

    assert claim_import(import_id=second.pk) is None
    carry_out_import(claimed=running)
    assert claim_import(import_id=second.pk) is not None


def test_the_content_of_a_task_stays_while_its_rollouts_are_under_way(folder: Path) -> None:
    rows = plain_rows(2)
    run(write(folder, rows))
    task = Task.objects.get(ref="r0")
    group = factories.make_group(task=task)
    for row in rows:
        row["answer"] = "other"

    job = run(write(folder, rows))

    assert counts(job) == (0, 1, 0, 1)
    assert job.rejected_rows.get().reason.startswith("the content of 'r0' changed, and rollouts of")
    task.refresh_from_db()
    assert task.hidden["evaluator_payload"] == {"answer": "1"}
    group.state = "cancelled"
    group.save()
    assert counts(run(write(folder, rows))) == (0, 1, 1, 0)


def test_an_uploaded_file_is_imported_and_then_forgotten(folder: Path) -> None:
    user = factories.make_operator()
    data = lines(plain_rows(2))
    job = begin_upload(
        set_name="sent", name="../rows.jsonl", chunks=[data[:5], data[5:]], requested_by=user
    )
    assert (job.state, job.name, job.source) == ("queued", "rows.jsonl", "upload")

    carry_out_import(claimed=claimed(job))

    job.refresh_from_db()
    assert (job.state, job.format, counts(job)) == ("done", "jsonl", (2, 0, 0, 0))
    assert not import_folder(job.pk).exists()


@pytest.mark.parametrize(
    ("values", "chunks", "message"),
    [
        ({}, [b"x" * 11], "more than 10 bytes"),
        ({}, [], "is empty"),
        ({"format": "csv"}, [b"x"], "no format 'csv'"),
        ({"environment": "none"}, [b"x"], "no environment 'none'"),
        ({"options": {"evaluator": "vibes"}}, [b"x"], "no evaluator 'vibes'"),
        ({"options": {"mappings": {}}}, [b"x"], "unknown option 'mappings'"),
        ({"set_name": "No Name"}, [b"x"], "lower-case letters"),
        ({"set_name": "inline-x"}, [b"x"], "are taken"),
    ],
)
def test_an_upload_that_is_not_taken_leaves_nothing(
    folder: Path, settings: Any, values: dict[str, Any], chunks: list[bytes], message: str
) -> None:
    settings.IMPORT_MAX_BYTES = 10
    with pytest.raises(ValidationError, match=message):
        begin_upload(
            **{"set_name": "sent", "name": "x", "chunks": chunks, "requested_by": None, **values}
        )

    assert not TaskImport.objects.exists()
    assert not list((folder / "imports").glob("*"))


def task_folder(root: Path, name: str, files: dict[str, str]) -> Path:
    """Write one Harbor task."""
    texts = {
        "task.toml": 'schema_version = "1.4"\n',
        "instruction.md": "Do it.\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        **files,
    }
    for path, text in texts.items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(text)
    return root / name


def test_an_archive_of_task_folders_is_unpacked_and_read(folder: Path) -> None:
    save_image(name="base", source="base")
    task_folder(folder / "made" / "tasks", "one", {})
    task_folder(folder / "made" / "tasks", "two", {"instruction.md": " "})
    packed = Path(shutil.make_archive(str(folder / "tasks"), "gztar", folder / "made"))
    job = begin_upload(
        set_name="folders", name="t.tgz", chunks=[packed.read_bytes()], requested_by=None
    )

    carry_out_import(claimed=claimed(job))

    job.refresh_from_db()
    assert (job.state, job.format, counts(job)) == ("done", "harbor", (1, 0, 0, 1))
    assert Task.objects.get().environment.name == "folders"


def test_an_archive_that_leads_out_fails_and_writes_nothing(folder: Path) -> None:
    path = folder / "bad.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("../../escaped", "x")
    job = run(path)

    assert (job.state, job.error_code) == ("failed", "import.archive_unsafe")
    assert "leads out of the archive" in job.error
    assert not list(folder.rglob("escaped"))
    assert not TaskSet.objects.exists()


def test_dockerfiles_that_are_equal_share_an_image_to_be_built(folder: Path) -> None:
    root = folder / "tasks"
    docker = {"environment/Dockerfile": "FROM debian:12\nENV A=1\nRUN true\nWORKDIR /work\n"}
    for name in ("one", "two"):
        task_folder(root, name, docker)

    job = run(root)

    assert counts(job) == (2, 0, 0, 0)
    image = Image.objects.get()
    assert (image.name[:6], image.source) == ("built-", "definition:")
    first, second = Task.objects.select_related("environment__image").order_by("ref")
    assert first.environment == second.environment
    assert (first.environment.image, first.environment.workdir) == (image, "/work")
    assert first.payload["env"] == {"A": "1"}


def test_a_repair_row_gets_the_image_that_it_names(folder: Path) -> None:
    row = {
        "instance_id": "a__b-1",
        "repo": "a/b",
        "base_commit": "abc123",
        "problem_statement": "It breaks.",
        "image_name": "docker.io/someone/a-b:1",
        "test_patch": "diff --git a/t/test_x.py b/t/test_x.py\n",
        "patch": "diff --git a/x.py b/x.py\n",
        "FAIL_TO_PASS": '["t/test_x.py::test_one"]',
        "PASS_TO_PASS": "[]",
    }
    job = run(write(folder, [row, {**row, "instance_id": "a__b-2", "image_name": "not an image"}]))

    assert (job.format, counts(job)) == ("swe", (1, 0, 0, 1))
    task = Task.objects.select_related("environment__image").get()
    assert (task.ref, task.environment.agent) == ("a__b-1", "bash_block")
    assert task.environment.image is not None
    assert task.environment.image.source == "docker://docker.io/someone/a-b:1"
    assert "patch.diff" in task.hidden["solution"]
    assert "patch" not in task.metadata


def test_a_path_is_read_below_an_open_folder_only(folder: Path, settings: Any) -> None:
    opened, other = folder / "open", folder / "other"
    opened.mkdir()
    other.mkdir()
    inside, outside = write(opened, plain_rows(1)), write(other, plain_rows(1))
    (opened / "link").symlink_to(outside)
    settings.IMPORT_ROOTS = [str(opened)]

    job = begin_path(set_name="set", path=str(inside), requested_by=None)

    assert job.state == ImportState.QUEUED
    for path in (outside, opened / "link", opened / ".." / "other" / "rows.jsonl", "rows.jsonl"):
        with pytest.raises(ValidationError, match=r"There is no|absolute path"):
            begin_path(set_name="set", path=str(path), requested_by=None)
    settings.IMPORT_ROOTS = []
    with pytest.raises(ValidationError, match="No folder is open"):
        begin_path(set_name="set", path=str(inside), requested_by=None)
    assert TaskImport.objects.count() == 1


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"", "import.source_unreadable", "none of the formats"),
        (b'{"a": 1}\n', "import.source_unreadable", "its columns: a"),
        (b"\x1f\x8b\x08", "import.source_unreadable", "is compressed"),
        (b"PAR1 and no more", "import.source_unreadable", "not whole parquet"),
        (b"\0\1\2", "import.source_unreadable", "neither JSON nor parquet"),
    ],
)
def test_a_file_that_is_nothing_fails_with_what_it_is(
    folder: Path, data: bytes, code: str, words: str
) -> None:
    path = folder / "file"
    path.write_bytes(data)
    job = run(path)

    assert (job.state, job.error_code) == ("failed", code)
    assert words in job.error
    assert not TaskSet.objects.exists()


def test_hostile_rows_are_refused_one_by_one(folder: Path) -> None:
    good = {"responses_create_params": {"input": "1 + 1?"}, "uuid": "good", "expected_answer": "2"}
    params = good["responses_create_params"]
    rows = [
        {**good, "responses_create_params": {"input": "x", "tools": 3}},
        {**good, "agent_ref": [], "options": 3, "verifier_metadata": {"unit_tests": "["}},
        {**good, "uuid": "half \ud800"},
        {**good, "responses_create_params": {"input": [{"role": "user", "content": "a\0b"}]}},
        {
            **good,
            "\ud800": "x",
            "responses_create_params": {**params, "tools": [{"name": "\ud800"}]},
        },
        {"instance_id": {}, "FAIL_TO_PASS": 3, "problem_statement": 4, **good},
        good,
    ]
    options = {"verifier": "math_with_judge"}
    job = run(write(folder, rows), format="nemo_gym", options=options)

    assert (job.state, job.error, counts(job)) == ("done", "", (1, 0, 0, 6))
    assert Task.objects.get().ref == "good"


def test_a_place_that_no_environment_can_have_refuses_its_task_only(folder: Path) -> None:
    save_image(name="base", source="base")
    task_folder(
        folder / "tasks", "long", {"task.toml": f'[environment]\nworkdir = "/{"x" * 300}"\n'}
    )
    task_folder(folder / "tasks", "sound", {})

    job = run(folder / "tasks")

    assert (job.state, counts(job)) == ("done", (1, 0, 0, 1))
    assert "at most 200 characters" in job.rejected_rows.get().reason


@pytest.fixture
def terminated() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.django_db(transaction=True)
def test_a_process_shows_life_while_it_unpacks(
    folder: Path, terminated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_life, "BEAT_SECONDS", 0.02)
    job = begin_here(set_name="set", path=write(folder, plain_rows(1)))
    silent: list[int] = []

    def unpack_long(**values: Any) -> Path:
        TaskImport.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=5))
        beaten = wait_for_beat(monkeypatch)
        assert beaten.wait(30)
        silent.append(recover_imports())
        return open_source(**values)

    monkeypatch.setattr(import_work, "open_source", unpack_long)

    call_command("carry_out_import", str(job.pk))

    job.refresh_from_db()
    assert silent == [0]
    assert (job.state, job.attempts, counts(job)) == ("done", 1, (1, 0, 0, 0))


def wait_for_beat(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return what is set once a beat that begins from now on is in the database."""
    beaten = threading.Event()

    def told(*, claimed: ClaimedImport) -> bool:
        alive = beat(claimed=claimed)
        beaten.set()
        return alive

    monkeypatch.setattr(import_life, "beat", told)
    return beaten


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("taken", [False, True], ids=["cancelled", "taken by others"])
def test_a_process_whose_import_is_taken_away_while_it_unpacks_ends(
    folder: Path, terminated: None, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    monkeypatch.setattr(import_life, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(import_life, "NOTICE_SECONDS", 0.02)
    job = begin_upload(set_name="s", name="r", chunks=[lines(plain_rows(1))], requested_by=None)
    ended, codes = threading.Event(), []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    def unpack_for_ever(**_values: Any) -> Path:
        if taken:
            TaskImport.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=5))
            TaskImport.objects.update(state="queued", lease_token=None)
            claimed(job)
        else:
            assert cancel_import(import_id=job.pk)
        assert ended.wait(30)
        raise Killed

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(import_work, "open_source", unpack_for_ever)

    with pytest.raises(Killed):
        call_command("carry_out_import", str(job.pk))

    job.refresh_from_db()
    assert (codes, job.state) == ([75], "running" if taken else "cancelled")
    assert import_folder(job.pk).exists() is taken


def test_each_holder_of_an_import_unpacks_into_a_folder_of_its_own(folder: Path) -> None:
    path = folder / "tasks.zip"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("a/x", "1")
        packed.writestr("b/x", "1")
    job = begin_here(set_name="set", path=path)
    first = claimed(job)
    before = open_source(job=job, token=first.token)
    TaskImport.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=5))
    recover_imports()

    after = open_source(job=job, token=claimed(job).token)

    assert before != after
    assert sorted(each.name for each in after.iterdir()) == ["a", "b"]


def test_a_name_that_an_environment_of_others_has_is_refused(folder: Path) -> None:
    mine = save_environment(name="counting", image=None, agent="single_turn", evaluator="exact")
    path = write(folder, plain_rows(1))

    with pytest.raises(ValidationError, match=r"--environment counting.*another name for the set"):
        begin_here(set_name="counting", path=path)

    assert Environment.objects.get() == mine
    assert not TaskImport.objects.exists()
    assert counts(run(path, "counting", environment="counting")) == (1, 0, 0, 0)
    assert counts(run(path, "counting")) == (0, 0, 1, 0)
    assert Environment.objects.get() == mine


def test_a_name_that_is_taken_while_the_import_waits_is_refused_too(folder: Path) -> None:
    job = begin_here(set_name="late", path=write(folder, plain_rows(1)))
    save_environment(name="late", image=None, agent="single_turn", evaluator="exact")

    carry_out_import(claimed=claimed(job))

    job.refresh_from_db()
    assert (job.state, job.error_code) == ("failed", "import.refused")
    assert "--environment late" in job.error
    assert Environment.objects.get().version == 1


def test_an_edit_of_a_made_environment_is_not_undone(folder: Path) -> None:
    rows = plain_rows(2)
    run(write(folder, rows))
    edited = save_environment(
        name="set", image=None, agent="single_turn", evaluator="exact", system_prompt="Be brief."
    )
    Task.objects.filter(ref="r1").update(environment=edited)
    rows[0]["answer"] = "other"

    job = run(write(folder, [*rows, *plain_rows(3)[2:]]))

    assert counts(job) == (1, 1, 1, 0)
    found = Task.objects.order_by("ref").values_list("ref", "environment__version")
    assert list(found) == [("r0", 1), ("r1", 2), ("r2", 2)]
    assert Environment.objects.count() == 2


def test_a_task_that_needs_something_else_gets_what_it_needs(folder: Path) -> None:
    save_image(name="base", source="base")
    root = folder / "tasks"
    task_folder(root, "one", {})
    run(root)
    task_folder(root, "one", {"task.toml": "[environment]\nmemory_mb = 64\n"})

    job = run(root)

    assert counts(job) == (0, 1, 0, 0)
    assert Task.objects.get().environment.limits == {"memory_bytes": 64 * 1024 * 1024}


@pytest.mark.parametrize("cancelled", [False, True], ids=["failed", "cancelled"])
def test_the_upload_of_an_import_that_is_given_up_is_deleted(folder: Path, cancelled: bool) -> None:
    job = begin_upload(set_name="s", name="r", chunks=[b"x"], requested_by=None)
    claimed(job)
    TaskImport.objects.update(
        heartbeat_at=timezone.now() - timedelta(minutes=5),
        attempts=3,
        cancel_requested_at=timezone.now() if cancelled else None,
    )

    assert recover_imports() == 1

    job.refresh_from_db()
    assert job.state == ("cancelled" if cancelled else "failed")
    assert not import_folder(job.pk).exists()


def test_old_uploads_that_no_import_is_to_read_are_swept(folder: Path) -> None:
    waiting = begin_upload(set_name="s", name="r", chunks=[b"x"], requested_by=None)
    left, fresh = uuid4(), uuid4()
    for import_id in (left, fresh):
        store_upload(import_id=import_id, chunks=[b"x"])
    other = folder / "imports" / "not-an-import"
    other.mkdir()
    before = (timezone.now() - timedelta(days=2)).timestamp()
    for place in (import_folder(waiting.pk), import_folder(left), other):
        for part in (*place.iterdir(), place):
            os.utime(part, (before, before))

    recover_imports()

    kept = {str(waiting.pk), str(fresh), other.name}
    assert {each.name for each in (folder / "imports").iterdir()} == kept


@pytest.mark.parametrize("early", [True, False], ids=["before it is claimed", "at work"])
def test_an_interrupted_command_cancels_its_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    def interrupt(**_values: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        *((import_command, "claim_import") if early else (import_work, "write_records")), interrupt
    )

    with pytest.raises(SystemExit) as ended:
        call_command("import_tasks", "jsonl", write(folder, plain_rows(1)), set_name="set")

    job = TaskImport.objects.get()
    assert (ended.value.code, job.state, job.lease_token) == (130, "cancelled", None)
