"""Make an environment's version from a TOML file; equal values make none."""

from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from rollouts.exceptions import RolloutError
from rollouts.services.environment_files import import_environment


class Command(BaseCommand):
    """Print the version that the file describes."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the file."""
        parser.add_argument("path", type=Path)

    def handle(self, *_args: Any, **options: Any) -> None:
        """Import it."""
        path: Path = options["path"]
        try:
            text = path.read_bytes().decode()
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise CommandError(f"{path} is no text in UTF-8.") from None
        try:
            environment = import_environment(text=text)
        except RolloutError as refused:
            raise CommandError(f"{path}: {refused}") from None
        self.stdout.write(f"environment {environment.ref}")
