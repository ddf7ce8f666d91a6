"""Signs of life of an import's process, whatever it is busy with."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import Error

from rollouts.services.import_claim import BEAT_SECONDS, ClaimedImport, beat
from sandboxes.services.connections import release_connection

logger = logging.getLogger(__name__)

NOTICE_SECONDS = 10.0  # for the import's own thread to see for itself that it is to end


@contextmanager
def beating(*, claimed: ClaimedImport, lost: Callable[[], None]) -> Iterator[None]:
    """Show life from a thread of its own while the block runs.

    Unpacking and skipping what is done take minutes without a row. When the import is to end
    (cancelled, or held no longer) and the block goes on, the thread calls `lost` and ends.
    """
    over = threading.Event()
    thread = threading.Thread(
        target=_beat_on, args=(claimed, over, lost), name="import-life", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _beat_on(claimed: ClaimedImport, over: threading.Event, lost: Callable[[], None]) -> None:
    while not over.wait(BEAT_SECONDS):
        if not _alive(claimed):
            break
    if not over.wait(NOTICE_SECONDS):
        try:
            lost()
        finally:
            release_connection()


def _alive(claimed: ClaimedImport) -> bool:
    try:
        return beat(claimed=claimed)
    except Error:  # a later beat may come through; without any, others take the import
        logger.warning("import %s could not show life", claimed.job.pk, exc_info=True)
        return True
    finally:
        release_connection()
