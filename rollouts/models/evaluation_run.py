"""Evaluation runs: every task k times, with fixed seeds, under one policy version."""

import uuid

from django.conf import settings
from django.core.validators import MinValueValidator
from django.db import models

from rollouts.models.experiment import Experiment
from rollouts.querysets import EvaluationRunQuerySet


class EvaluationRun(models.Model):
    """One measurement of a policy version on task sets; its experiment holds the rollouts."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="evaluation_runs"
    )
    experiment = models.OneToOneField(
        Experiment, on_delete=models.CASCADE, related_name="evaluation_run"
    )
    samples_per_task = models.PositiveIntegerField(validators=[MinValueValidator(1)])
    key = models.CharField(
        max_length=64, default="reward", help_text="Which of the named rewards says what is right."
    )
    threshold = models.FloatField(default=1.0, help_text="From where on a sample is right.")
    policy_version = models.PositiveBigIntegerField(help_text="The policy's when it began.")
    created_at = models.DateTimeField(auto_now_add=True)

    objects = EvaluationRunQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return f"{self.experiment_id} at {self.policy_version}"
