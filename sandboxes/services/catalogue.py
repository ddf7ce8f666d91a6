"""The catalogue: images, and environments whose every edit is a new version."""

from typing import Any

from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.forms.models import model_to_dict

from sandboxes.models import Environment, Image

# What makes a version; what is found out about one later is no part of it.
ENVIRONMENT_VALUES = (
    "description",
    "image",
    "setup",
    "files",
    "workdir",
    "agent",
    "agent_settings",
    "system_prompt",
    "prompt_format",
    "tools",
    "tool_settings",
    "network",
    "egress_hosts",
    "gpu",
    "warm",
    "limits",
    "evaluator",
    "evaluator_settings",
    "secrets",
)


def save_image(*, name: str, source: str) -> Image:
    """Create an image, or point an existing one at another source."""
    image, _created = Image.objects.update_or_create(name=name, defaults={"source": source})
    return image


def save_environment(*, name: str, **values: Any) -> Environment:
    """Return the newest version of an environment with these values, made when they differ.

    Raises ValidationError. Rollouts keep the version that they were submitted with.
    """
    candidate = Environment(name=name, version=1, **values)
    candidate.full_clean(validate_unique=False, validate_constraints=False)
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [f"environment:{name}"])
        newest = Environment.objects.filter(name=name).order_by("-version").first()
        if newest is not None and _same(newest, candidate):
            return newest
        candidate.version = 1 if newest is None else newest.version + 1
        candidate.save(force_insert=True)
    return candidate


def _same(one: Environment, other: Environment) -> bool:
    return model_to_dict(one, ENVIRONMENT_VALUES) == model_to_dict(other, ENVIRONMENT_VALUES)


def find_environment(*, ref: str) -> Environment:
    """Return the environment `name` or `name@version`. Raises ValidationError when unknown."""
    name, separator, version = ref.partition("@")
    if separator and not version.isdecimal():
        raise ValidationError(f"{ref!r} is not an environment: write name or name@version.")
    found = Environment.objects.named(name, int(version) if separator else None).first()
    if found is None:
        raise ValidationError(f"There is no environment {ref!r} in the catalogue.")
    return found
