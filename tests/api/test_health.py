"""Health, as a load balancer asks for it."""

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from rollouts.models import Worker
from rollouts.states import Stage
from tests import factories

ALL = ["database", "migrations", "broker", "storage", "worker init", "worker run", "worker eval"]


@pytest.fixture
def workers(db: None) -> None:
    for stage in Stage.values:
        factories.make_worker(stage=stage)


def ready() -> tuple[int, dict[str, bool]]:
    response = Client().get("/readyz")
    body = response.json()
    answers = {name: check["ok"] for name, check in body["checks"].items()}
    assert body["ready"] == (response.status_code == 200) == all(answers.values())
    return response.status_code, answers


def test_process_answers_without_a_database() -> None:
    response = Client().get("/healthz")

    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_ready(workers: None) -> None:
    assert ready() == (200, dict.fromkeys(ALL, True))


def test_stage_without_a_live_worker(workers: None) -> None:
    Worker.objects.filter(stage="eval").update(
        lease_expires_at=timezone.now() - timedelta(seconds=1)
    )

    assert ready() == (503, {**dict.fromkeys(ALL, True), "worker eval": False})


def test_broker_that_is_down(workers: None, settings: Any) -> None:
    from celery import current_app

    before = current_app.conf.broker_write_url
    current_app.conf.broker_write_url = "redis://127.0.0.1:1/0"
    try:
        status, answers = ready()
    finally:
        current_app.conf.broker_write_url = before

    assert (status, answers) == (503, {**dict.fromkeys(ALL, True), "broker": False})


def test_storage_that_cannot_be_written(workers: None, settings: Any, tmp_path: Any) -> None:
    (tmp_path / "file").write_text("in the way")
    stores = {name: dict(store) for name, store in settings.STORAGES.items()}
    stores["trajectories"]["OPTIONS"] = {"location": str(tmp_path / "file")}
    settings.STORAGES = stores

    assert ready() == (503, {**dict.fromkeys(ALL, True), "storage": False})


def test_readiness_tells_strangers_no_addresses(workers: None) -> None:
    body = Client().get("/readyz").content.decode()

    assert "://" not in body
    assert "/tmp" not in body
