"""Re-evaluations: a finished experiment scored again, without new rollouts."""

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q

from rollouts.models.experiment import Experiment
from rollouts.querysets import ReevaluationQuerySet
from rollouts.states import OPEN_REEVALUATION, ReevaluationState
from sandboxes.models import Environment


class Reevaluation(models.Model):
    """One job that scores what an experiment's rollouts left by another evaluator."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="reevaluations"
    )
    experiment = models.ForeignKey(
        Experiment, on_delete=models.CASCADE, related_name="reevaluations"
    )
    evaluator = models.CharField(max_length=99)
    evaluator_settings = models.JSONField(
        null=True, help_text="Empty: those of the task and its environment, where they fit."
    )
    environment = models.ForeignKey(
        Environment,
        null=True,
        on_delete=models.PROTECT,
        related_name="+",
        help_text="Whose evaluator it is; empty: the evaluator was named.",
    )
    state = models.CharField(
        max_length=16, choices=ReevaluationState.choices, default=ReevaluationState.QUEUED
    )
    cancel_requested_at = models.DateTimeField(null=True)
    lease_token = models.UUIDField(null=True, editable=False)
    lease_expires_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True)

    objects = ReevaluationQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(
                fields=["created_at"],
                name="reevaluation_open",
                condition=Q(state__in=OPEN_REEVALUATION),
            ),
        ]
        constraints = [
            models.CheckConstraint(
                name="reevaluation_ended_iff_over",
                condition=Q(state__in=OPEN_REEVALUATION, ended_at__isnull=True)
                | (~Q(state__in=OPEN_REEVALUATION) & Q(ended_at__isnull=False)),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.evaluator} over {self.experiment_id}"
