"""Carry out one queued import of tasks; workers call it, nobody else needs to."""

import os
import signal
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand

from rollouts.services.import_claim import ClaimedImport, claim_import, end_import
from rollouts.services.import_life import beating
from rollouts.services.import_sources import forget_upload
from rollouts.services.import_work import carry_out_import
from rollouts.services.messages import flush
from rollouts.states import ImportState

LOST_CODE = 75  # EX_TEMPFAIL: others have the import, or nobody wants it any more


class Command(BaseCommand):
    """End with 0 whatever came of it, which its row says; SIGTERM gives it back.

    When the import is taken away in the middle of something long, end at once with 75.
    """

    help = __doc__ or ""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("import_id", type=UUID)

    def handle(self, *_args: Any, **options: Any) -> None:
        """Claim, carry out."""
        told: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _frame: told.append(number))
        claimed = claim_import(import_id=options["import_id"])
        if claimed is not None:
            with beating(claimed=claimed, lost=lambda: _leave(claimed)):
                carry_out_import(claimed=claimed, ending=lambda: bool(told))
        flush()


def _leave(claimed: ClaimedImport) -> None:
    """End this process from the thread that found the import cancelled or held by others."""
    try:
        end_import(claimed=claimed, state=ImportState.CANCELLED)
        forget_upload(job=claimed.job)
        flush()
    finally:
        os._exit(LOST_CODE)
