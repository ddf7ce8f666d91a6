"""Trainers' tokens: create (shown once) and revoke."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.db import transaction
from django.utils import timezone

from rollouts.exceptions import InvalidValue
from rollouts.models import Experiment, TrainerToken
from rollouts.models.token import Scope


def create_token(
    *,
    user: Any,
    name: str,
    scopes: Sequence[str] = (Scope.READ, Scope.SUBMIT, Scope.POLICY),
    experiments: Sequence[Experiment] = (),
    lifetime: timedelta | None = timedelta(days=90),
) -> tuple[TrainerToken, str]:
    """Create a token; the second value is its text, which is stored nowhere."""
    unknown = sorted(set(scopes) - set(Scope.values))
    if unknown or not scopes:
        raise InvalidValue(f"Scopes must be some of: {', '.join(Scope.values)}.")
    with transaction.atomic():
        token, text = TrainerToken.objects.create(
            user=user,
            expiry=lifetime,
            name=name,
            scopes=list(scopes),
            is_bound=bool(experiments),
        )
        token.experiments.set(experiments)
    return token, text


def revoke_token(*, token: TrainerToken) -> None:
    """Refuse a token from now on; idempotent."""
    TrainerToken.objects.filter(pk=token.pk, revoked_at__isnull=True).update(
        revoked_at=timezone.now()
    )
