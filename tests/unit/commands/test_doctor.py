"""The doctor: what is missing is named, with how to mend it, and decides the exit code."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.files.storage import storages
from django.core.management.base import CommandError
from django.utils import timezone

from rollouts.management.commands import doctor
from rollouts.models import Worker
from rollouts.services import health, node_health
from rollouts.services.health import Probe
from sandboxes.models import Node
from sandboxes.services.catalogue import save_image
from tests.unit.commands.calls import call

GROUPS = ["packages", "settings", "runtime", "database", "broker", "storage", "images", "workers"]


@pytest.fixture
def store(tmp_path: Path, settings) -> Path:
    """Keep trajectories in a folder of the test's own."""
    folder = tmp_path / "trajectories"
    settings.STORAGES = {
        **settings.STORAGES,
        "trajectories": {
            "BACKEND": "rollouts.storage.SyncedFileStorage",
            "OPTIONS": {"location": str(folder)},
        },
    }
    yield folder
    storages._storages.clear()


def only(*names: str) -> list[str]:
    """Return the options that leave out every group but these."""
    return [word for name in GROUPS if name not in names for word in ("--skip", name)]


def test_every_group_can_be_left_out_and_no_other_exists() -> None:
    assert list(doctor.CHECKS) == GROUPS
    assert call("doctor", *only()).out == "All 0 checks passed.\n"
    with pytest.raises(CommandError, match="invalid choice"):
        call("doctor", "--skip", "everything")


def test_all_well_is_exit_0_and_a_lack_is_exit_1_with_its_remedy(monkeypatch) -> None:
    good = Probe(name="one", ok=True, detail="here")
    bad = Probe(name="two", ok=False, detail="gone", remedy="Bring it back.")
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: [good]})
    assert call("doctor").code == 0
    monkeypatch.setattr(doctor, "CHECKS", {"a": lambda: [good], "b": lambda: [bad]})

    called = call("doctor")

    assert called.code == 1
    assert called.out.splitlines() == [
        "ok       one  here",
        "missing  two  gone",
        "              to mend: Bring it back.",
        "1 of 2 checks found a lack.",
    ]


def test_json_holds_the_same(monkeypatch) -> None:
    bad = Probe(name="two", ok=False, detail="gone", remedy="Bring it back.")
    monkeypatch.setattr(doctor, "CHECKS", {"b": lambda: [bad]})

    called = call("doctor", "--json")

    assert called.code == 1
    assert json.loads(called.out) == {
        "ok": False,
        "checks": [{"name": "two", "ok": False, "detail": "gone", "remedy": "Bring it back."}],
    }


def test_a_check_that_breaks_is_a_finding_and_the_others_go_on(monkeypatch) -> None:
    def broken() -> list[Probe]:
        raise ImportError("no module named x")

    good = Probe(name="one", ok=True, detail="here")
    monkeypatch.setattr(doctor, "CHECKS", {"a": broken, "b": lambda: [good]})

    called = call("doctor", "--json")

    found = json.loads(called.out)["checks"]
    assert called.code == 1
    assert found[0]["detail"] == "could not be checked: ImportError: no module named x"
    assert found[0]["remedy"] != ""
    assert found[1] == {"name": "one", "ok": True, "detail": "here", "remedy": ""}


@pytest.mark.django_db
def test_the_real_database_broker_and_store_are_found(store) -> None:
    called = call("doctor", "--json", *only("database", "broker", "storage"))

    found = {check["name"]: check for check in json.loads(called.out)["checks"]}
    assert called.code == 0, called.out
    assert list(found) == ["database", "migrations", "broker", "storage"]
    assert found["database"]["detail"].startswith("PostgreSQL ")
    assert found["migrations"]["detail"] == "all applied"
    assert [path.name for path in store.rglob("*") if path.is_file()] == []


@pytest.mark.django_db
def test_a_migration_that_was_not_applied_is_told() -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM django_migrations WHERE app = 'rollouts'")

    found = health.check_database()[1]

    assert (found.name, found.ok) == ("migrations", False)
    assert found.remedy == "Run: python manage.py migrate"


@pytest.mark.django_db
def test_a_database_that_does_not_answer_is_told_at_once(monkeypatch) -> None:
    from django.db import connection

    monkeypatch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
    monkeypatch.setitem(connection.settings_dict, "PORT", "1")

    database = health.check_database()
    workers = health.check_workers()
    images = node_health.check_images()

    assert [probe.ok for probe in database] == [False]
    assert "refused" in database[0].detail
    assert "DATABASE_URL" in database[0].remedy
    assert [probe.ok for probe in workers] == [False, False, False]
    assert images[0].remedy == "Mend the database first."


def test_a_broker_that_does_not_answer_is_told(monkeypatch) -> None:
    from celery import current_app

    monkeypatch.setattr(current_app.conf, "broker_url", "redis://:secret@127.0.0.1:1/0")
    monkeypatch.setattr(current_app.conf, "broker_write_url", "redis://:secret@127.0.0.1:1/0")

    found = health.check_broker() + health.check_control_worker()

    assert [probe.ok for probe in found] == [False, False]
    assert "refused" in found[0].detail
    assert "BROKER_URL" in found[0].remedy
    assert "secret" not in str(found)


def test_a_store_that_cannot_be_written_is_told(tmp_path, settings) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    settings.STORAGES = {
        **settings.STORAGES,
        "trajectories": {
            "BACKEND": "rollouts.storage.SyncedFileStorage",
            "OPTIONS": {"location": str(blocked)},
        },
    }
    storages._storages.clear()
    try:
        found = health.check_storage()
    finally:
        storages._storages.clear()

    assert [probe.ok for probe in found] == [False]
    assert str(blocked) in found[0].remedy


@pytest.mark.django_db
def test_live_workers_are_counted_per_stage_and_the_dead_are_not() -> None:
    now = timezone.now()
    node = Node.objects.create(name="gpu-1", capacity=1)
    later = now + timedelta(hours=1)
    for pid in (1, 2):
        Worker.objects.create(
            node=node, stage="run", pid=pid, concurrency=64, lease_expires_at=later
        )
    Worker.objects.create(node=node, stage="eval", pid=3, lease_expires_at=now)
    Worker.objects.create(node=node, stage="init", pid=4, lease_expires_at=later, ended_at=now)

    found = {probe.name: probe for probe in health.check_workers()}

    assert found["worker run"].ok
    assert found["worker run"].detail == "2 live with 128 places on gpu-1"
    assert [found[f"worker {stage}"].ok for stage in ("init", "eval")] == [False, False]
    assert found["worker eval"].remedy.startswith(
        "Run: celery -A prorl_site worker -Q eval --pool prefork"
    )


def test_packages_are_compared_with_their_pins(tmp_path) -> None:
    from importlib.metadata import version

    path = tmp_path / "requirements.txt"
    path.write_text(
        f"# why\nDjango=={version('Django')}  # web\nPsycoPG[binary,pool]=={version('psycopg')}\n"
    )
    assert node_health.check_packages(path)[0].detail == "2 as pinned"
    path.write_text("Django==1.0\nno-such-package==2.0\n")

    found = node_health.check_packages(path)[0]

    assert not found.ok
    assert found.detail == (
        f"Django {version('Django')} (wants 1.0), no-such-package missing (wants 2.0)"
    )
    assert found.remedy == "Run: pip install -r requirements.txt"
    assert not node_health.check_packages(tmp_path / "absent.txt")[0].ok


def test_a_setting_that_a_system_check_refuses_is_told(settings) -> None:
    assert [probe.ok for probe in node_health.check_settings()] == [True]
    settings.SANDBOX_RUNTIME = "podman"

    found = node_health.check_settings()

    assert [(probe.name, probe.ok) for probe in found] == [("settings sandboxes.E001", False)]
    assert found[0].remedy == "Set it to one of: apptainer, local."


@pytest.mark.django_db
def test_images_of_the_catalogue_are_looked_for_on_the_node(tmp_path, settings) -> None:
    settings.IMAGE_ROOT = tmp_path
    (tmp_path / "good" / ".singularity.d").mkdir(parents=True)
    (tmp_path / "bare").mkdir()
    (tmp_path / "broken.sif").write_bytes(b"not an image")
    for name, source in [
        ("good", "good"),
        ("bare", "bare"),
        ("broken", "broken.sif"),
        ("absent", "/nowhere/image.sif"),
    ]:
        save_image(name=name, source=source)

    found = {probe.name: probe for probe in node_health.check_images()}

    assert {name: probe.ok for name, probe in found.items()} == {
        "image good": True,
        "image bare": False,
        "image broken": False,
        "image absent": False,
    }
    assert found["image bare"].detail == f"{tmp_path / 'bare'} has no .singularity.d"
    assert found["image absent"].detail == "/nowhere/image.sif is missing"
    assert all(probe.remedy for probe in found.values() if not probe.ok)


@pytest.mark.sandbox
def test_the_real_runtime_is_checked() -> None:
    found = {probe.name: probe for probe in node_health.check_runtime()}

    assert found["apptainer"].ok, found
    assert found["user namespaces and overlay"].ok, found
    assert all(probe.remedy for probe in found.values() if not probe.ok)


@pytest.mark.broker
@pytest.mark.django_db(transaction=True)
def test_a_real_control_worker_is_heard_and_missed_when_it_ends() -> None:
    from django.conf import settings as configured
    from django.db import connection

    name = f"doctor-{uuid.uuid4().hex[:6]}@%h"
    known = connection.settings_dict
    database = f"postgresql://{known['USER']}@/{known['NAME']}?host={known['HOST']}"
    environment = {
        **os.environ,
        "DATABASE_URL": f"{database}&port={known['PORT']}" if known["PORT"] else database,
        "BROKER_URL": configured.BROKER_URL,
        "PRORL_SECRET_KEY": configured.SECRET_KEY,
    }
    arguments = f"-A prorl_site worker -Q control --pool threads -c 1 -n {name}".split()
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", *arguments],
        cwd=configured.BASE_DIR,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    prefix = name.split("@")[0]

    def heard() -> bool:
        return prefix in health.check_control_worker()[0].detail

    try:
        assert within(90, lambda: worker.poll() is not None or heard())
        assert worker.poll() is None
        assert heard()
    finally:
        worker.terminate()
        worker.wait(timeout=60)
    assert within(30, lambda: not heard())


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Ask again until a condition holds; False when the time is over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
    return False
