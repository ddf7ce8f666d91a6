"""Imports over HTTP: begun by operators only, followed, looked into, cancelled."""

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from rollouts.models import Task, TaskImport
from rollouts.services.import_claim import claim_import
from rollouts.services.import_work import carry_out_import
from tests import factories
from tests.api.callers import Caller, assert_problem
from tests.services.line import make_environment

pytestmark = pytest.mark.django_db

ROWS = b'{"ref": "a", "instruction": "1 + 1?", "answer": "2"}\nnothing\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, settings: Any) -> Path:
    settings.IMPORT_FOLDER = tmp_path / "imports"
    settings.IMPORT_ROOTS = [str(tmp_path)]
    return tmp_path


def send(caller: Caller, data: bytes, **query: str) -> Any:
    return caller.generic(
        "POST",
        f"/api/v1/task-sets/imports/?{urlencode(query)}",
        data,
        content_type="application/octet-stream",
    )


def test_an_upload_is_imported_and_its_refused_rows_can_be_read(operator: Caller) -> None:
    begun = send(operator, ROWS, set_name="sums", name="rows.jsonl", format="jsonl")

    assert begun.status_code == 202, begun.content
    job = begun.json()
    assert job == {
        "id": job["id"],
        "set_name": "sums",
        "task_set": None,
        "format": "jsonl",
        "source": "upload",
        "name": "rows.jsonl",
        "environment": None,
        "options": {},
        "state": "queued",
        "requested_by": operator.user.username,
        "created": 0,
        "changed": 0,
        "unchanged": 0,
        "rejected": 0,
        "number": 0,
        "progress": None,
        "attempts": 0,
        "error_code": "",
        "error": "",
        "created_at": job["created_at"],
        "started_at": None,
        "ended_at": None,
    }
    claimed = claim_import(import_id=job["id"])
    assert claimed is not None
    carry_out_import(claimed=claimed)
    done = operator.call("GET", f"task-sets/imports/{job['id']}/").json()
    assert (done["state"], done["created"], done["rejected"], done["progress"]) == ("done", 1, 1, 1)
    assert done["task_set"] == str(Task.objects.get().task_set_id)
    (row,) = operator.call("GET", f"task-sets/imports/{job['id']}/rejected/").json()["results"]
    assert (row["number"], row["place"], row["raw"]) == (2, "rows.jsonl:2", "nothing")
    assert row["reason"].startswith("the line is not JSON")


def test_a_path_below_an_open_folder_is_queued(operator: Caller, folder: Path) -> None:
    (folder / "rows.jsonl").write_bytes(ROWS)
    body = {
        "set_name": "sums",
        "path": str(folder / "rows.jsonl"),
        "options": {"evaluator": "exact"},
    }

    begun = operator.call("POST", "task-sets/imports/", body)

    assert begun.status_code == 202, begun.content
    assert (begun.json()["source"], begun.json()["options"]) == ("path", {"evaluator": "exact"})
    found = operator.call("GET", "task-sets/imports/?state=queued&set_name=sums").json()["results"]
    assert [each["id"] for each in found] == [begun.json()["id"]]


@pytest.mark.parametrize(
    "body",
    [
        {"set_name": "s", "path": "/etc/passwd"},
        {"set_name": "s", "path": "/etc/../etc"},
        {"set_name": "s"},
        {"set_name": "S S", "path": "/x"},
        {"set_name": "s", "path": "/x", "format": "csv"},
        {"set_name": "s", "path": "/x", "options": []},
        {"set_name": "s", "path": "/x", "options": {"mapping": {"a": "b"}}},
        {"set_name": "s", "path": "/x", "surprise": 1},
    ],
)
def test_wrong_requests_begin_nothing(operator: Caller, body: dict[str, Any]) -> None:
    assert_problem(operator.call("POST", "task-sets/imports/", body), 400, "request.invalid")

    assert not TaskImport.objects.exists()


def test_an_upload_that_is_too_large_or_says_nothing_begins_nothing(
    operator: Caller, settings: Any, folder: Path
) -> None:
    settings.IMPORT_MAX_BYTES = 10

    assert_problem(send(operator, ROWS, set_name="s"), 400, "import.too_large")
    for data, query in (
        (b"", {"set_name": "s"}),
        (b"x", {}),
        (b"x", {"set_name": "s", "options": "["}),
    ):
        assert_problem(send(operator, data, **query), 400, "request.invalid")

    assert not TaskImport.objects.exists()
    assert not list((folder / "imports").glob("*"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('{"evaluator_settings": {"tolerance": NaN}}', "a number that is not finite"),
        ('{"evaluator_settings": {"tolerance": 1e999}}', "a number that is not finite"),
        ('{"workdir": "/a\\u0000"}', "a NUL or half a surrogate pair"),
        ('{"mapping": {"ref": "\\ud800"}}', "a NUL or half a surrogate pair"),
        ('{"evaluator_settings": ' + '{"a":' * 900 + "1" + "}" * 901, "nested too deep"),
    ],
    ids=["nan", "infinite", "nul", "surrogate", "deep"],
)
def test_options_that_cannot_be_kept_are_refused_with_a_sentence(
    operator: Caller, folder: Path, options: str, words: str
) -> None:
    answer = send(operator, ROWS, set_name="s", options=options)

    assert_problem(answer, 400, "request.invalid")
    assert words in answer.content.decode()
    assert not TaskImport.objects.exists()
    assert not list((folder / "imports").glob("*"))


def test_a_set_named_like_an_environment_of_others_is_told_what_to_do(operator: Caller) -> None:
    environment = make_environment(sandbox=False)

    answer = send(operator, ROWS, set_name=environment.name)

    assert_problem(answer, 400, "request.invalid")
    assert f"(--environment {environment.name})" in answer.content.decode()
    assert (
        send(operator, ROWS, set_name=environment.name, environment=environment.name).status_code
        == 202
    )


def test_a_queued_import_is_cancelled_and_one_that_is_over_stays(operator: Caller) -> None:
    job = factories.make_task_import()

    first = operator.call("POST", f"task-sets/imports/{job.pk}/cancel/")
    again = operator.call("POST", f"task-sets/imports/{job.pk}/cancel/")

    assert [(each.status_code, each.json()["state"]) for each in (first, again)] == [
        (202, "cancelled"),
        (202, "cancelled"),
    ]


def test_only_operators_see_or_begin_imports(trainer: Caller, folder: Path) -> None:
    job = factories.make_task_import()
    for method, path in (
        ("GET", "task-sets/imports/"),
        ("GET", f"task-sets/imports/{job.pk}/"),
        ("GET", f"task-sets/imports/{job.pk}/rejected/"),
        ("POST", f"task-sets/imports/{job.pk}/cancel/"),
    ):
        assert trainer.call(method, path).status_code == 403
    body = {"set_name": "s", "path": str(folder)}
    assert trainer.call("POST", "task-sets/imports/", body).status_code == 403
    assert send(trainer, ROWS, set_name="s").status_code == 403

    job.refresh_from_db()
    assert (job.state, TaskImport.objects.count()) == ("queued", 1)
