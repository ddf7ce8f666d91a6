"""Carry out one queued import of tasks; workers call it, nobody else needs to."""

import signal
from argparse import ArgumentParser
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand

from rollouts.services.import_claim import claim_import
from rollouts.services.import_work import carry_out_import
from rollouts.services.messages import flush


class Command(BaseCommand):
    """End with 0 whatever came of it, which its row says; SIGTERM gives it back."""

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
            carry_out_import(claimed=claimed, ending=lambda: bool(told))
        flush()
