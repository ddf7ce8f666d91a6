"""The log of a running image build: its end is kept in the row, with a sign of life."""

import logging
import time
from uuid import UUID

from django.db import Error as DatabaseError
from django.db.models.functions import Now

from sandboxes.models import ImageBuild
from sandboxes.services.connections import release_connection
from sandboxes.states import ImageBuildState

logger = logging.getLogger(__name__)

LOG_CHARACTERS = 64 * 1024
WRITE_SECONDS = 1.0


class BuildLog:
    """Keep the end of what is said; write it at most once a second, under the build's token.

    `cancelled` says that an operator asked for the end, `lost` that the build is another's now.
    """

    def __init__(self, *, build_id: UUID, token: UUID) -> None:
        self._build_id = build_id
        self._token = token
        self._text = ""
        self._start = 0
        self._written_at = 0.0
        self.cancelled = False
        self.lost = False

    def add(self, text: str) -> None:
        """Take what was said; it is written at the next sign of life."""
        self._text += text.replace("\x00", "\N{REPLACEMENT CHARACTER}")
        extra = len(self._text) - LOG_CHARACTERS
        if extra > 0:
            self._text = self._text[extra:]
            self._start += extra

    def values(self) -> dict[str, object]:
        """Return the columns that hold the log."""
        return {"log": self._text, "log_start": self._start}

    def is_ended(self) -> bool:
        """Give a sign of life when one is due; tell whether the build is to end now."""
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._written_at = time.monotonic()
            try:
                self._write()
            except DatabaseError as error:
                logger.warning("the log of build %s waits: %s", self._build_id, error)
            finally:
                release_connection()
        return self.cancelled or self.lost

    def _write(self) -> None:
        held = ImageBuild.objects.filter(
            pk=self._build_id, state=ImageBuildState.RUNNING, lease_token=self._token
        )
        if not held.update(heartbeat_at=Now(), **self.values()):
            self.lost = True
            return
        self.cancelled = held.filter(cancel_requested_at__isnull=False).exists()
