"""Imports in the admin: an upload becomes a job, its page tells, what was refused is inert."""

from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse

from rollouts.models import TaskImport
from tests.factories import make_operator, make_rejected_row, make_task_import

pytestmark = pytest.mark.django_db
UPLOAD = "admin:rollouts_taskimport_upload"


@pytest.fixture
def browser(tmp_path: Path, settings: Any) -> Client:
    settings.IMPORT_FOLDER = tmp_path / "imports"
    client = Client()
    client.force_login(make_operator(is_superuser=True))
    return client


def send(browser: Client, **values: Any) -> Any:
    return browser.post(reverse(UPLOAD), {"set_name": "sums", "options": "{}", **values})


def test_an_upload_becomes_a_queued_import(browser: Client) -> None:
    shown = browser.get(reverse("admin:rollouts_taskimport_changelist"))
    assert reverse(UPLOAD) in shown.content.decode()
    file = SimpleUploadedFile("rows.jsonl", b'{"a": 1}\n')

    answer = send(browser, file=file, format="jsonl", options='{"evaluator": "exact"}')

    job = TaskImport.objects.get()
    assert answer.url == reverse("admin:rollouts_taskimport_change", args=[job.pk])
    assert (job.name, job.format, job.options, job.state) == (
        *("rows.jsonl", "jsonl"),
        {"evaluator": "exact"},
        "queued",
    )
    assert 'http-equiv="refresh"' in browser.get(answer.url).content.decode()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "Give a file or a path."),
        ({"path": "/etc/passwd"}, "No folder is open for imports"),
        ({"path": "/x", "set_name": "No Name"}, "lower-case letters"),
        ({"path": "/x", "options": "[]"}, "It must be a JSON object."),
        ({"path": "/x", "options": '{"tools": "all"}'}, "choose refuse or environment"),
    ],
)
def test_what_is_wrong_is_told_and_begins_nothing(
    browser: Client, settings: Any, values: dict[str, str], words: str
) -> None:
    settings.IMPORT_ROOTS = []

    answer = send(browser, **values)

    assert (answer.status_code, words in answer.content.decode()) == (200, True)
    assert not TaskImport.objects.exists()


def test_refused_rows_are_shown_as_text(browser: Client) -> None:
    row = make_rejected_row(raw="<script>alert(1)</script>", place="<b>rows</b>:1")

    page = browser.get(reverse("admin:rollouts_rejectedrow_change", args=[row.pk]))
    found = browser.get(
        reverse("admin:rollouts_rejectedrow_changelist"),
        {"task_import__id__exact": row.task_import_id},
    )

    for answer in (page, found):
        assert answer.status_code == 200
        assert "<script>alert" not in answer.content.decode()
        assert "<b>rows" not in answer.content.decode()
    assert "&lt;script&gt;alert(1)" in page.content.decode()


def test_those_who_may_only_look_begin_and_cancel_nothing(browser: Client) -> None:
    job = make_task_import()
    viewer = Client()
    viewer.force_login(make_operator())

    assert viewer.get(reverse(UPLOAD)).status_code == 403
    answer = send(viewer, path="/x")

    assert answer.status_code == 403
    assert TaskImport.objects.get() == job
