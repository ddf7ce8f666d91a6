"""What a finished rollout leaves: its trajectory's place in the store, and its evaluations."""

import uuid

from django.db import models
from django.db.models import Q

from rollouts.models.reevaluation import Reevaluation
from rollouts.models.rollout import Rollout
from rollouts.querysets import EvaluationQuerySet
from rollouts.states import EvaluationSource


class Trajectory(models.Model):
    """Where the trajectory of a rollout is stored, and what it holds."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    rollout = models.OneToOneField(Rollout, on_delete=models.CASCADE, related_name="trajectory")
    path = models.CharField(max_length=300, help_text="Name in the trajectory storage.")
    size_bytes = models.PositiveBigIntegerField()
    sha256 = models.CharField(max_length=64)
    arrow_path = models.CharField(
        max_length=300,
        default="",
        db_default="",
        help_text="Name of its segments' Arrow record batch; empty: written before there were any.",
    )
    arrow_bytes = models.PositiveBigIntegerField(default=0, db_default=0)
    segments = models.PositiveIntegerField()
    prompt_tokens = models.PositiveIntegerField()
    response_tokens = models.PositiveIntegerField()
    sampled_tokens = models.PositiveIntegerField()
    trainable = models.BooleanField()
    first_policy_version = models.PositiveBigIntegerField(null=True)
    last_policy_version = models.PositiveBigIntegerField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-created_at"]
        verbose_name_plural = "trajectories"

    def __str__(self) -> str:
        return self.path


class Evaluation(models.Model):
    """One scoring of a rollout; append-only."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="evaluations")
    evaluator = models.CharField(max_length=99)
    reward = models.FloatField(null=True)
    rewards = models.JSONField(default=dict)
    details = models.JSONField(default=dict)
    log = models.TextField(blank=True)
    code = models.CharField(
        max_length=64, blank=True, default="", db_default="", help_text="Why there is no reward."
    )
    evaluator_version = models.CharField(max_length=32, blank=True, default="", db_default="")
    settings_digest = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text="SHA-256 of the evaluator's settings as sorted JSON.",
    )
    turn_rewards = models.JSONField(
        default=list, db_default=[], help_text="Of the policy's turns in order; null: none."
    )
    source = models.CharField(
        max_length=16,
        choices=EvaluationSource.choices,
        default=EvaluationSource.ROLLOUT,
        db_default=EvaluationSource.ROLLOUT,
    )
    reevaluation = models.ForeignKey(
        Reevaluation, null=True, on_delete=models.CASCADE, related_name="evaluations"
    )
    evidence_path = models.CharField(
        max_length=300,
        blank=True,
        default="",
        db_default="",
        help_text="What the evaluator was given, in the trajectory storage; empty: nothing kept.",
    )
    evidence_size_bytes = models.PositiveBigIntegerField(default=0, db_default=0)
    evidence_sha256 = models.CharField(max_length=64, blank=True, default="", db_default="")
    created_at = models.DateTimeField(auto_now_add=True)

    objects = EvaluationQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["reevaluation", "rollout"],
                name="evaluation_once_per_reevaluation",
                condition=Q(reevaluation__isnull=False),
            ),
            models.CheckConstraint(
                name="evaluation_source_says_job",
                condition=Q(source=EvaluationSource.ROLLOUT, reevaluation__isnull=True)
                | Q(source=EvaluationSource.REEVALUATION, reevaluation__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.evaluator} of {self.rollout_id}"
