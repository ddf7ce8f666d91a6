"""Policies: create and change."""

from typing import Any
from uuid import UUID

from django.db import IntegrityError, transaction

from rollouts.exceptions import StateConflict
from rollouts.models import Policy


def create_policy(*, name: str, **values: Any) -> Policy:
    """Create a policy. Raises StateConflict when the name is taken."""
    try:
        with transaction.atomic():
            return Policy.objects.create(name=name, **values)
    except IntegrityError:
        raise _taken(name) from None


def update_policy(*, policy_id: UUID, **changes: Any) -> Policy:
    """Change a policy. Raises StateConflict when the new name is taken."""
    try:
        with transaction.atomic():
            if changes:
                Policy.objects.filter(pk=policy_id).update(**changes)
    except IntegrityError:
        raise _taken(str(changes.get("name"))) from None
    return Policy.objects.get(pk=policy_id)


def _taken(name: str) -> StateConflict:
    return StateConflict(f"There is a policy {name!r} already.", code="policy.exists")
