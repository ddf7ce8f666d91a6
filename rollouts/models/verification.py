"""Verifications: whether an environment does what it is there for, task by task."""

import uuid

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import Q

from rollouts.models.experiment import Experiment
from rollouts.models.task import TaskSet
from rollouts.states import Verdict, VerificationState
from sandboxes.models import Environment

MAX_TASKS = 1000
MAX_REPEATS = 5


class Verification(models.Model):
    """One look at an environment's version; its experiment holds the rollouts."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    environment = models.ForeignKey(
        Environment, on_delete=models.CASCADE, related_name="verifications"
    )
    task_set = models.ForeignKey(
        TaskSet,
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="Where the tasks were taken from; empty: from all that name the environment.",
    )
    experiment = models.OneToOneField(
        Experiment, on_delete=models.CASCADE, related_name="verification"
    )
    requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    state = models.CharField(
        max_length=16, choices=VerificationState.choices, default=VerificationState.RUNNING
    )
    verdict = models.CharField(max_length=16, choices=Verdict.choices, blank=True)
    task_count = models.PositiveIntegerField(validators=[MaxValueValidator(MAX_TASKS)])
    repeats = models.PositiveIntegerField(
        validators=[MinValueValidator(1), MaxValueValidator(MAX_REPEATS)],
        help_text="How often each task is solved and left alone.",
    )
    seed = models.PositiveBigIntegerField(default=0, help_text="Which tasks are taken.")
    threshold = models.FloatField(default=1.0, help_text="From where on a reward is full.")
    tolerance = models.FloatField(
        default=0.0, help_text="Fraction of the tasks that may fail without a broken environment."
    )
    deadline_at = models.DateTimeField(help_text="Then it ends with what it has.")
    report = models.JSONField(default=dict)
    created_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(fields=["environment", "-created_at"], name="verification_of_version"),
            models.Index(fields=["-created_at"], name="verification_created"),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["environment"],
                name="verification_one_running",
                condition=Q(state=VerificationState.RUNNING),
            ),
            models.CheckConstraint(
                name="verification_ended_iff_done",
                condition=Q(state=VerificationState.RUNNING, ended_at__isnull=True, verdict="")
                | (~Q(state=VerificationState.RUNNING) & Q(ended_at__isnull=False)),
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)
