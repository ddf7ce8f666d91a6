"""Import tasks into a task set: Harbor folders, or a file with one JSON object a line."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from rollouts.importers.base import TaskRecord
from rollouts.importers.harbor import read_harbor_folder
from rollouts.importers.jsonl import read_jsonl
from rollouts.services.task_environments import place_records, refuse_unmet
from rollouts.services.tasksets import ImportReport, import_tasks
from sandboxes.models import Environment, validate_name
from sandboxes.services.catalogue import find_environment


class Command(BaseCommand):
    """Print what was imported and why the rest was refused; exit 1 when a task was refused."""

    help = __doc__ or ""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the arguments."""
        parser.add_argument("format", choices=["harbor", "jsonl"])
        parser.add_argument("path", type=Path, help="folder of task folders, or a .jsonl file")
        parser.add_argument("--set", required=True, dest="set_name", help="name of the task set")
        parser.add_argument("--description", default="", help="of a task set that is new")
        parser.add_argument(
            "--environment",
            help="name or name@version from the catalogue; Harbor tasks get one made when absent",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """Read, import, tell."""
        try:
            validate_name(options["set_name"])
            report = self._import(options)
        except ValidationError as error:
            raise CommandError("; ".join(error.messages)) from error
        except OSError as error:
            raise CommandError(f"{options['path']}: {error.strerror}") from error
        self._tell(options["set_name"], report)
        if report.rejected:
            raise SystemExit(1)

    def _import(self, options: dict[str, Any]) -> ImportReport:
        name, path = options["set_name"], options["path"]
        chosen: Environment | None = None
        if options["environment"]:
            chosen = find_environment(ref=options["environment"])
        if options["format"] == "jsonl":
            if chosen is None:
                raise CommandError("jsonl needs --environment: a line does not say where it runs.")
            lines = list(
                read_jsonl(
                    path,
                    evaluator=chosen.evaluator,
                    evaluator_settings=chosen.evaluator_settings,
                )
            )
            records, environment_of = lines, _always(chosen)
        else:
            checked = refuse_unmet(read_harbor_folder(path))
            if chosen is None:
                records, environment_of = place_records(name=name, records=checked)
            else:
                records, environment_of = list(checked), _always(chosen)
        if not records:
            raise CommandError(f"{path} holds no task.")
        return import_tasks(
            name=name,
            records=records,
            environment_of=environment_of,
            description=options["description"],
        )

    def _tell(self, name: str, report: ImportReport) -> None:
        self.stdout.write(f"task set {name}")
        for word in ("created", "changed", "unchanged"):
            self.stdout.write(f"  {word:<10} {getattr(report, word):>6}")
        self.stdout.write(f"  {'refused':<10} {len(report.rejected):>6}")
        for where, reason in report.rejected:
            self.stderr.write(f"refused {where}: {reason}")


def _always(environment: Environment) -> Any:
    def environment_of(_record: TaskRecord) -> Environment:
        return environment

    return environment_of
