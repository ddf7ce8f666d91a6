"""Import tasks into a task set, from folders and files in the formats that data sets ship in."""

import json
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rollouts.importers.formats import FORMATS
from rollouts.importers.options import InvalidOptions, read_option_file
from rollouts.models import TaskImport
from rollouts.services.import_claim import ClaimedImport, claim_import, end_import
from rollouts.services.import_life import beating
from rollouts.services.import_sources import forget_upload
from rollouts.services.import_work import REJECTED_KEPT, carry_out_import
from rollouts.services.task_imports import begin_here, cancel_import
from rollouts.states import ImportState
from sandboxes.services.connections import release_connection

DETECT = "auto"
INTERRUPTED = 130  # what shells show for Ctrl-C


class Command(BaseCommand):
    """Print what was imported and why the rest was refused; exit 1 when a task was refused."""

    help = __doc__ or ""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the arguments."""
        names = "; ".join(f"{each.name}: {each.description}" for each in FORMATS.values())
        parser.add_argument(
            "format", choices=[DETECT, *FORMATS], help=f"{DETECT} tells it by the content; {names}"
        )
        parser.add_argument("path", type=Path, help="folder of task folders, or a file of rows")
        parser.add_argument("--set", required=True, dest="set_name", help="name of the task set")
        parser.add_argument("--description", default="", help="of a task set that is new")
        parser.add_argument(
            "--environment",
            default="",
            help="name or name@version from the catalogue for all tasks; else one is made for each "
            "need that tasks have",
        )
        parser.add_argument("--options", type=Path, help="TOML file of the options below, and more")
        parser.add_argument(
            "--map",
            default="",
            metavar="FIELD=COLUMN,…",
            help="which column holds what, such as instruction=question,answer=final,ref=id",
        )
        parser.add_argument("--evaluator", help="scores rows that name none")
        parser.add_argument("--evaluator-settings", metavar="JSON", help="its settings")
        parser.add_argument("--verifier", help="NeMo Gym's resources server that rows are for")
        parser.add_argument("--image", help="where SWE rows that name none run")
        parser.add_argument(
            "--tools", choices=["refuse", "environment"], help="for rows that bring tools"
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """Read, import, tell."""
        path: Path = options["path"]
        try:
            job = begin_here(
                set_name=options["set_name"],
                path=path,
                format="" if options["format"] == DETECT else options["format"],
                environment=options["environment"],
                options=_read_options(options),
                description=options["description"],
            )
        except ValidationError as error:
            raise CommandError("; ".join(error.messages)) from error
        except InvalidOptions as error:
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}") from error
        try:
            _carry_out(job)
        except KeyboardInterrupt:
            self._cancel(job)
            raise SystemExit(INTERRUPTED) from None
        job.refresh_from_db()
        if job.state == ImportState.FAILED:
            raise CommandError(job.error)
        self._tell(job)
        if job.rejected:
            raise SystemExit(1)

    def _cancel(self, job: TaskImport) -> None:
        """End the import of a user who waits for it no longer: no worker is to take it up."""
        release_connection()  # it may be in the middle of anything
        cancel_import(import_id=job.pk)
        job.refresh_from_db()
        if job.state == ImportState.RUNNING and job.lease_token is not None:
            held = ClaimedImport(job, job.lease_token)
            end_import(claimed=held, state=ImportState.CANCELLED)
        forget_upload(job=job)
        self.stderr.write("Interrupted. What was imported stays; import again to go on.")

    def _tell(self, job: TaskImport) -> None:
        self.stdout.write(f"task set {job.set_name}")
        for word in ("created", "changed", "unchanged"):
            self.stdout.write(f"  {word:<10} {getattr(job, word):>6}")
        self.stdout.write(f"  {'refused':<10} {job.rejected:>6}")
        for row in job.rejected_rows.iterator():
            self.stderr.write(f"refused {row.place}: {row.reason}")
        if job.rejected > REJECTED_KEPT:
            self.stderr.write(f"and {job.rejected - REJECTED_KEPT} more, which are only counted")


def _carry_out(job: TaskImport) -> None:
    claimed = claim_import(import_id=job.pk, limited=False)
    if claimed is None:
        raise CommandError("Another process took the import.")
    with _bar() as bar:
        shown = bar.add_task(job.set_name, total=None)

        def progress(now: TaskImport) -> None:
            bar.update(shown, completed=now.offset, total=now.total)

        # Whoever cancels it is seen with the next row: this user can end the process too.
        with beating(claimed=claimed, lost=lambda: None):
            carry_out_import(claimed=claimed, progress=progress)


def _read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the file and of the command line, which wins."""
    given = read_option_file(options["options"]) if options["options"] else {}
    for name in ("evaluator", "verifier", "image", "tools"):
        if options[name]:
            given[name] = options[name]
    if options["evaluator_settings"]:
        try:
            given["evaluator_settings"] = json.loads(options["evaluator_settings"])
        except ValueError as fault:
            raise InvalidOptions(f"--evaluator-settings is not JSON: {fault}") from fault
    if options["map"]:
        pairs = [pair.partition("=") for pair in options["map"].split(",")]
        given["mapping"] = {name.strip(): column.strip() for name, _equals, column in pairs}
    return given


def _bar() -> Progress:
    """Return a bar on a terminal; elsewhere nothing is drawn."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
