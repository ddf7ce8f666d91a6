"""Write an environment as TOML, to a file or to standard output."""

from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser

from rollouts.services.environment_files import export_environment
from sandboxes.services.catalogue import find_environment


class Command(BaseCommand):
    """Print one version; `import_environment` reads it."""

    help = __doc__ or ""

    def add_arguments(self, parser: CommandParser) -> None:
        """Take the environment and where to."""
        parser.add_argument("environment", help="name, or name@version")
        parser.add_argument("--output", type=Path, help="a file that is not there yet")

    def handle(self, *_args: Any, **options: Any) -> None:
        """Write it."""
        try:
            environment = find_environment(ref=options["environment"])
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from None
        text = export_environment(environment=environment)
        output: Path | None = options["output"]
        if output is None:
            self.stdout.write(text, ending="")
            return
        try:
            with output.open("x", encoding="utf-8", newline="") as stream:
                stream.write(text)
        except OSError as error:
            raise CommandError(f"{output} cannot be written: {error.strerror}") from None
        self.stdout.write(f"{environment.ref} is in {output}")
