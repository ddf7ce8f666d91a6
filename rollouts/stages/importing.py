"""Imports in a process of their own: no worker grows with them or dies of a hostile file."""

import logging
import subprocess
import sys
from collections.abc import Callable
from uuid import UUID

from django.conf import settings

from rollouts.models import TaskImport
from rollouts.stages.database import database
from rollouts.states import ImportState

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
GRACE_SECONDS = 20.0


def run_import(*, import_id: UUID, stopping: Callable[[], bool]) -> int | None:
    """Carry an import out in a child; return its exit code, None when nothing was to do.

    When `stopping` turns true the child is asked to give the import back, then killed. Holds no
    database connection while it waits.
    """
    with database():
        queued = TaskImport.objects.filter(pk=import_id, state=ImportState.QUEUED).exists()
    if not queued:
        return None
    child = subprocess.Popen(
        [sys.executable, str(settings.BASE_DIR / "manage.py"), "carry_out_import", str(import_id)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while True:
            try:
                return child.wait(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if stopping():
                    return _end(child)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def _end(child: "subprocess.Popen[bytes]") -> int:
    child.terminate()
    try:
        return child.wait(timeout=GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
