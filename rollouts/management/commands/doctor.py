"""Check this node and say how to mend what is missing."""

import json
import textwrap
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from rollouts.services.health import (
    Probe,
    check_broker,
    check_control_worker,
    check_database,
    check_storage,
    check_workers,
)
from rollouts.services.node_health import (
    check_images,
    check_packages,
    check_runtime,
    check_settings,
)

CHECKS: dict[str, Callable[[], list[Probe]]] = {
    "packages": lambda: check_packages(settings.BASE_DIR / "requirements.txt"),
    "settings": check_settings,
    "runtime": check_runtime,
    "database": check_database,
    "broker": check_broker,
    "storage": check_storage,
    "images": check_images,
    "workers": lambda: [*check_workers(), *check_control_worker()],
}
WIDTH = 100


class Command(BaseCommand):
    """Print a table of what this node has and misses; exit 1 when something is missing."""

    help = __doc__ or ""
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options."""
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
        parser.add_argument(
            "--skip",
            action="append",
            default=[],
            choices=sorted(CHECKS),
            help="leave a group of checks out; may be given several times",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """Run the checks one after the other and print what they found."""
        probes = [
            probe
            for name, check in CHECKS.items()
            if name not in options["skip"]
            for probe in _carry_out(name, check)
        ]
        missing = [probe for probe in probes if not probe.ok]
        if options["json"]:
            report = {"ok": not missing, "checks": [asdict(probe) for probe in probes]}
            self.stdout.write(json.dumps(report, indent=2))
        else:
            self._print_table(probes, len(missing))
        if missing:
            raise SystemExit(1)

    def _print_table(self, probes: list[Probe], missing: int) -> None:
        column = max((len(probe.name) for probe in probes), default=0)
        for probe in probes:
            word = self.style.SUCCESS("ok     ") if probe.ok else self.style.ERROR("missing")
            self._print_row(f"{word}  {probe.name:<{column}}  ", column + 11, probe.detail)
            if probe.remedy:
                self._print_row(" " * (column + 11), column + 11, f"to mend: {probe.remedy}")
        if missing:
            self.stdout.write(self.style.ERROR(f"{missing} of {len(probes)} checks found a lack."))
        else:
            self.stdout.write(self.style.SUCCESS(f"All {len(probes)} checks passed."))

    def _print_row(self, start: str, indent: int, text: str) -> None:
        lines = textwrap.wrap(text, max(40, WIDTH - indent)) or [""]
        self.stdout.write(start + lines[0])
        for line in lines[1:]:
            self.stdout.write(" " * indent + line)


def _carry_out(name: str, check: Callable[[], list[Probe]]) -> list[Probe]:
    """Return what a check found; one that cannot be carried out is a finding, not the end."""
    try:
        return check()
    except Exception as error:
        detail = f"could not be checked: {type(error).__name__}: {error}"
        remedy = "Mend this first; `python manage.py check` shows where it comes from."
        return [Probe(name=name, ok=False, detail=detail, remedy=remedy)]
