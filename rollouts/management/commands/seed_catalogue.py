"""Bring the catalogue's own entries to what this release ships; idempotent."""

import json
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from sandboxes.models import Image
from sandboxes.services.catalogue import save_environment, save_image

SHELL_PROMPT = (
    "You work in a Linux shell. Answer with one line: a shell command, or submit when the task "
    "is done."
)
MIB = 1024 * 1024
LIMITS = {"memory_bytes": 1024 * MIB, "processes": 256, "disk_bytes": 1024 * MIB}


class Command(BaseCommand):
    """Print each entry; one that differs from what is shipped gets a new version."""

    help = __doc__ or ""

    def handle(self, *_args: Any, **_options: Any) -> None:
        """Save the base image and the shipped environments."""
        image = Image.objects.filter(name="base").first() or save_image(name="base", source="base")
        self.stdout.write(f"image {image.name} from {image.source}")
        for name, values in _shipped(image).items():
            environment = save_environment(name=name, **values)
            self.stdout.write(
                f"environment {environment.ref}: {environment.agent}, {environment.evaluator}"
            )


def _shipped(image: Image) -> dict[str, dict[str, Any]]:
    """Return the shipped environments by name.

    The demonstrations are what lets a model of 135 million parameters answer in the form that is
    asked of it; a larger model does no worse with them.
    """
    shell = {
        "image": image,
        "agent": "command_line",
        "tools": ["bash", "submit"],
        "limits": LIMITS,
        "evaluator": "script",
        "agent_settings": {"demonstrations": _demonstrations("demo_tasks")},
    }
    return {
        "terminal": {
            **shell,
            "description": "A shell, one line a turn; a test script in a fresh sandbox scores it.",
            "system_prompt": SHELL_PROMPT,
        },
        "terminal-demo": {
            **shell,
            "description": "As terminal, prompted by demonstrations alone: for a tiny model.",
        },
        "arithmetic": {
            "image": None,
            "description": "One answer, no sandbox; its last whole number is compared.",
            "agent": "single_turn",
            "agent_settings": {"demonstrations": _demonstrations("arithmetic")},
            "evaluator": "regex",
            "evaluator_settings": {"pattern": r"-?\d+", "take": "last", "numeric": True},
        },
    }


def _demonstrations(folder: str) -> list[Any]:
    path = settings.BASE_DIR / "examples" / folder / "demonstrations.json"
    try:
        found: list[Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CommandError(
            f"{path} cannot be read ({error}); run from a whole checkout."
        ) from error
    return found
