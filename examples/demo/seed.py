"""Accounts, catalogue and tasks of the demo, in one process."""

import argparse
import os
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run the service's own commands in turn; print the trainer's, then the operator's token."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo.seed")
    parser.add_argument("--password", required=True)
    parser.add_argument("--capacity", type=int, required=True)
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "prorl_site.settings.base")
    import django
    from django.core.management import call_command

    django.setup()
    with Path(os.devnull).open("w") as quiet:
        call_command("create_operator", "operator", password=options.password, stdout=quiet)
        call_command("seed_catalogue", stdout=quiet)
        for kind, path, name, environment in (
            ("harbor", FOLDER / "tasks", "examples", "terminal"),
            ("harbor", FOLDER / "demo_tasks", "demo", "terminal-demo"),
            ("jsonl", FOLDER / "arithmetic" / "tasks.jsonl", "arithmetic", "arithmetic"),
        ):
            call_command(
                "import_tasks",
                kind,
                str(path),
                set_name=name,
                environment=environment,
                stdout=quiet,
            )
    from django.conf import settings

    from sandboxes.models import Node

    Node.objects.update_or_create(
        name=settings.NODE_NAME, defaults={"capacity": options.capacity, "draining": False}
    )
    call_command("create_trainer", "demo-trainer", quiet=True)
    call_command("create_trainer", "operator", quiet=True, scopes=["read", "operate"], days=1)


if __name__ == "__main__":
    main()
