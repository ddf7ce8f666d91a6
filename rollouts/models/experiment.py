"""Experiments and groups."""

import uuid

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Func, Q, Value

from rollouts.models.batch import Batch
from rollouts.models.policy import Policy
from rollouts.models.task import Task, TaskSet
from rollouts.querysets import ExperimentQuerySet, GroupQuerySet
from rollouts.states import ExperimentState, GroupState, LagAction
from sandboxes.models import Environment, Snapshot

MAX_SAMPLES = 1024


class Experiment(models.Model):
    """One training run as the service sees it."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="experiments"
    )
    name = models.CharField(max_length=200)
    policy = models.ForeignKey(Policy, on_delete=models.PROTECT, related_name="experiments")
    task_sets = models.ManyToManyField(TaskSet, blank=True, related_name="experiments")
    state = models.CharField(
        max_length=16, choices=ExperimentState.choices, default=ExperimentState.ACTIVE
    )
    group_size = models.PositiveIntegerField(
        default=8, validators=[MinValueValidator(1), MaxValueValidator(MAX_SAMPLES)]
    )
    sampling = models.JSONField(default=dict, blank=True)
    budgets = models.JSONField(default=dict, blank=True)
    priority = models.IntegerField(default=0, help_text="Higher starts first.")
    share = models.PositiveIntegerField(
        default=1,
        validators=[MinValueValidator(1), MaxValueValidator(1000)],
        help_text="Weight against other experiments of the same priority.",
    )
    max_attempts = models.PositiveIntegerField(
        default=3, validators=[MinValueValidator(1), MaxValueValidator(20)]
    )
    failure_reward = models.FloatField(
        default=0.0, help_text="Reward of a policy that broke its own grading."
    )
    max_policy_lag = models.PositiveIntegerField(
        null=True,
        blank=True,
        help_text="How far a rollout's newest policy version may be from its oldest; empty: any.",
    )
    on_policy_lag = models.CharField(
        max_length=8,
        choices=LagAction.choices,
        default=LagAction.CUT,
        db_default=LagAction.CUT,
        help_text="What becomes of a rollout that would go beyond it: cut ends and scores it, "
        "drop cancels it, keep lets it go on.",
    )
    created_at = models.DateTimeField(auto_now_add=True, db_index=True)

    objects = ExperimentQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]

    def __str__(self) -> str:
        return self.name


class Group(models.Model):
    """The rollouts of one task that a group-relative algorithm compares."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    sequence = models.BigIntegerField(
        editable=False,
        db_default=Func(Value("rollouts_group_sequence"), function="nextval"),
        help_text="Order in which groups start and leave.",
    )
    experiment = models.ForeignKey(Experiment, on_delete=models.CASCADE, related_name="groups")
    task = models.ForeignKey(Task, on_delete=models.PROTECT, related_name="groups")
    environment = models.ForeignKey(Environment, on_delete=models.PROTECT, related_name="+")
    state = models.CharField(max_length=16, choices=GroupState.choices, default=GroupState.OPEN)
    size = models.PositiveIntegerField()
    done_count = models.PositiveIntegerField(default=0)
    priority = models.IntegerField(default=0)
    metadata = models.JSONField(default=dict, blank=True)
    snapshot = models.ForeignKey(
        Snapshot,
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The rollouts start from this state of another one's sandbox, on its node.",
    )
    batch = models.ForeignKey(Batch, null=True, on_delete=models.SET_NULL, related_name="groups")
    created_at = models.DateTimeField(auto_now_add=True)
    ready_at = models.DateTimeField(null=True)

    objects = GroupQuerySet.as_manager()

    class Meta:
        ordering = ["sequence"]
        indexes = [
            models.Index(fields=["experiment", "state", "sequence"], name="group_lease_order"),
        ]
        constraints = [
            models.CheckConstraint(
                name="group_done_within_size", condition=Q(done_count__lte=F("size"))
            ),
            models.CheckConstraint(
                name="group_batch_iff_leased",
                condition=Q(state__in=[GroupState.LEASED, GroupState.CONSUMED], batch__isnull=False)
                | Q(
                    state__in=[GroupState.OPEN, GroupState.READY, GroupState.CANCELLED],
                    batch__isnull=True,
                ),
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)
