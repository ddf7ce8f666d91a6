"""Remove sandboxes of this node by name."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from sandboxes.services.node import close_node_runtime, remove_everything, sweep_node


class Command(BaseCommand):
    """Remove what nothing owns, or every sandbox of this deployment on this node."""

    help = "Remove this node's sandboxes that nothing owns; with --all, every one of them."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument(
            "--all",
            action="store_true",
            help="Also those in use: only when the workers of this node are stopped.",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """Remove and say how many."""
        try:
            removed = remove_everything() if options["all"] else sweep_node()
        finally:
            close_node_runtime()
        self.stdout.write(f"{removed} sandboxes removed")
