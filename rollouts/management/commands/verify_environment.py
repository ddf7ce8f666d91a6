"""Verify an environment: its tasks' solutions must be paid in full, doing nothing must not."""

import time
from typing import IO, Any, cast

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connection
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rollouts.exceptions import RolloutError
from rollouts.models import TaskSet, Verification
from rollouts.services.verifications import (
    advance_verifications,
    begin_verification,
    cancel_verification,
    done_of,
)
from rollouts.states import Verdict, VerificationState
from sandboxes.admin.shown import plain
from sandboxes.services.catalogue import find_environment

POLL_SECONDS = 0.5
CHECKS = ("starts", "setup", "solution", "nothing", "repeats")


class Command(BaseCommand):
    """Begin, wait for the end and print the report; the exit status is 1 unless it is verified."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Take what the API takes."""
        parser.add_argument("environment", help="name, or name@version")
        parser.add_argument("--task-set", help="take the tasks from this set")
        parser.add_argument("--tasks", type=int, default=10, help="at most so many")
        parser.add_argument("--repeats", type=int, default=2)
        parser.add_argument("--seed", type=int, default=0, help="which tasks")
        parser.add_argument("--threshold", type=float, default=1.0, help="a full reward")
        parser.add_argument("--tolerance", type=float, default=0.0, help="fraction that may fail")
        parser.add_argument("--deadline-seconds", type=float, default=3600.0)
        parser.add_argument("--user", help="whose it is; left out: the first operator")
        parser.add_argument("--no-wait", action="store_true", help="print its id and end")

    def handle(self, *_args: Any, **options: Any) -> None:
        """Verify."""
        try:
            verification = begin_verification(
                environment=find_environment(ref=options["environment"]),
                requested_by=_operator(options["user"]),
                task_set=_task_set(options["task_set"]),
                **{
                    name: options[name]
                    for name in ("tasks", "repeats", "seed", "threshold", "tolerance")
                },
                deadline_seconds=options["deadline_seconds"],
            )
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from None
        except RolloutError as refused:
            raise CommandError(str(refused)) from None
        if options["no_wait"]:
            self.stdout.write(str(verification.pk))
            return
        self.stdout.ending = ""  # what is drawn over must not be broken into lines
        console = Console(file=cast("IO[str]", self.stdout), soft_wrap=True)
        ended = self._wait(verification, console)
        _print(ended, console)
        if ended.verdict != Verdict.VERIFIED:
            raise CommandError(f"{ended.environment.ref} is {ended.verdict}.", returncode=1)

    def _wait(self, verification: Verification, console: Console) -> Verification:
        """Return the verification once it has ended; Ctrl-C cancels it."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(f"verifying {verification.environment.ref}", total=None)
            try:
                while verification.state == VerificationState.RUNNING:
                    done, everything = done_of(verification)
                    progress.update(bar, completed=done, total=everything)
                    # The workers do so too; here it also ends where none of them is left.
                    advance_verifications(experiment_id=verification.experiment_id)
                    verification = Verification.objects.select_related("environment").get(
                        pk=verification.pk
                    )
                    connection.close()
                    if verification.state == VerificationState.RUNNING:
                        time.sleep(POLL_SECONDS)
            except KeyboardInterrupt:
                cancel_verification(verification_id=verification.pk)
                raise CommandError("The verification was cancelled.") from None
        return verification


def _print(verification: Verification, console: Console) -> None:
    report = verification.report
    table = Table("task", *CHECKS, "rewards")
    for each in report["tasks"]:
        rewards = " ".join(
            "-" if reward is None else f"{reward:g}"
            for role in ("oracle", "noop")
            for reward in each["rewards"][role]
        )
        checks = (each["checks"][name] for name in CHECKS)
        table.add_row(Text(plain(each["ref"])), *checks, rewards)
    console.print(table)
    for stage, seconds in report["seconds"].items():
        console.print(
            f"{stage}: median {seconds['p50']} s, 90 % within {seconds['p90']} s", markup=False
        )
    for each in report["tasks"]:
        said = "\n".join(filter(None, (each["detail"], each["log"])))
        if said:
            console.print(f"--- {plain(each['ref'])}\n{plain(said)}", markup=False)
    console.print(f"{report['environment']}: {verification.verdict}", markup=False)


def _operator(name: str | None) -> Any:
    users = get_user_model().objects.filter(is_active=True, is_staff=True)
    found = users.filter(username=name).first() if name else users.order_by("pk").first()
    if found is None:
        whom = f"There is no operator {name!r}" if name else "There is no operator yet"
        raise CommandError(f"{whom}: make one with create_operator.")
    return found


def _task_set(name: str | None) -> TaskSet | None:
    if name is None:
        return None
    found = TaskSet.objects.filter(name=name).first()
    if found is None:
        raise CommandError(f"There is no task set {name!r}.")
    return found
