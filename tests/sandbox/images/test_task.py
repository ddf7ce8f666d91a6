"""A real INIT worker carries builds out, and gives one back when it is told to end."""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as configured
from django.contrib.auth import get_user_model
from django.db import connection

from rollouts.models import Worker
from rollouts.services.image_builds import dispatch_image_builds
from sandboxes.models import ImageBuild
from sandboxes.runtime.account import Account
from sandboxes.services.images import define_image, request_builds
from tests.sandbox.conftest import open_folder
from tests.sandbox.images.endless import ENDLESS, eventually, working
from tests.sandbox.images.test_builds import definition

pytestmark = [pytest.mark.broker, pytest.mark.sandbox, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def worker(account: Account, shared: Path) -> Iterator[tuple["subprocess.Popen[bytes]", str]]:
    """Run a worker of INIT on a node of its own; yields it with the node's name."""
    known = connection.settings_dict
    database = f"postgresql://{known['USER']}@/{known['NAME']}?host={known['HOST']}"
    folder = open_folder("prorl-image-worker-")
    node = f"images-{uuid.uuid4().hex[:8]}"
    environment = {
        **os.environ,
        "DATABASE_URL": f"{database}&port={known['PORT']}" if known["PORT"] else database,
        "BROKER_URL": configured.BROKER_URL,
        "PRORL_SECRET_KEY": configured.SECRET_KEY,
        "PRORL_NODE": node,
        "PRORL_RUNTIME": "apptainer",
        "PRORL_SANDBOX_ROOT": str(folder / "root"),
        "PRORL_IMAGE_ROOT": str(shared),
        "PRORL_DISK_RESERVE_BYTES": "0",
    }
    words = f"-A prorl_site worker -Q init --pool threads -c 4 -n {node}@%h".split()
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", *words],
        cwd=configured.BASE_DIR,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert eventually(lambda: Worker.objects.live().filter(node__name=node).exists())
        yield process, node
    finally:
        process.terminate()
        process.wait(timeout=60)
        assert working(folder) == set()
        shutil.rmtree(folder)


def ask(name: str, node: str, **values: Any) -> ImageBuild:
    image = define_image(name=name, **values)
    user = get_user_model().objects.get_or_create(username="operator")[0]
    (build,) = request_builds(image=image, requested_by=user, nodes=[node])
    assert dispatch_image_builds() == 1
    return build


def has(build: ImageBuild, **columns: Any) -> bool:
    return ImageBuild.objects.filter(pk=build.pk, **columns).exists()


def test_a_worker_carries_builds_out_and_gives_one_back_at_its_end(
    worker: tuple["subprocess.Popen[bytes]", str], sif: Path
) -> None:
    process, node = worker

    done = ask("tiny", node, source="tiny.sif")
    assert eventually(lambda: has(done, state="succeeded"))
    endless = ask("endless", node, source="definition:", definition=definition(sif, ENDLESS))
    assert eventually(lambda: has(endless, state="running", log__contains="86398.5"))
    process.terminate()

    assert process.wait(timeout=60) == 0
    endless.refresh_from_db()
    assert (endless.state, endless.attempts, endless.error) == ("queued", 0, "")
