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
from rollouts.states import COMING, ExperimentState, Feed, GroupState, LagAction, Purpose
from sandboxes.models import Environment, Snapshot

MAX_SAMPLES = 1024


class Experiment(models.Model):
    """One training run as the service sees it."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="experiments"
    )
    name = models.CharField(max_length=200)
    # Typed as always there: only verifications have none, and what they run samples nothing.
    policy: models.ForeignKey[Policy, Policy] = models.ForeignKey(  # type: ignore[misc]
        Policy,
        null=True,
        on_delete=models.PROTECT,
        related_name="experiments",
    )
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
    purpose = models.CharField(
        max_length=16, choices=Purpose.choices, default=Purpose.TRAINING, db_default="training"
    )
    feed = models.CharField(
        max_length=8,
        choices=Feed.choices,
        default=Feed.PUSH,
        db_default="push",
        help_text="push: the trainer posts groups; pull: they are drawn from the task sets.",
    )
    feed_settings = models.JSONField(default=dict, blank=True, db_default={})
    filters = models.JSONField(
        default=list,
        blank=True,
        db_default=[],
        help_text="Rules that keep groups from the trainer, in order.",
    )
    selection = models.JSONField(default=dict, blank=True, db_default={})
    allow_broken = models.BooleanField(
        default=False,
        db_default=False,
        help_text="Run on environments that a verification found broken.",
    )
    feed_epoch = models.PositiveIntegerField(default=0, db_default=0, editable=False)
    feed_position = models.PositiveBigIntegerField(
        default=0, db_default=0, editable=False, help_text="Next place in the epoch's plan."
    )
    feed_detail = models.CharField(
        max_length=300,
        default="",
        db_default="",
        editable=False,
        help_text="What feeding does or waits for, in words.",
    )
    demand_version = models.PositiveBigIntegerField(
        null=True, editable=False, help_text="The policy's version when a batch was last asked for."
    )
    demand_at = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True, db_index=True)

    objects = ExperimentQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        constraints = [
            models.CheckConstraint(
                name="experiment_policy_unless_verification",
                condition=Q(policy__isnull=False) | Q(purpose=Purpose.VERIFICATION),
            ),
        ]

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
    last_batch = models.ForeignKey(
        Batch,
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The batch that it was given back from, to be leased again as it was.",
    )
    filter_rule = models.CharField(max_length=64, default="", db_default="", blank=True)
    filter_detail = models.TextField(default="", db_default="", blank=True)
    epoch = models.PositiveIntegerField(null=True, help_text="Where it came from in the feed.")
    position = models.PositiveBigIntegerField(null=True)
    replacements = models.PositiveIntegerField(
        default=0, db_default=0, help_text="Failed samples that were sampled anew."
    )
    started_at = models.DateTimeField(null=True, help_text="When its first rollout was started.")
    deadline_at = models.DateTimeField(null=True)
    oldest_version = models.PositiveBigIntegerField(
        null=True, help_text="The oldest policy version of its sampled tokens."
    )
    newest_version = models.PositiveBigIntegerField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)
    ready_at = models.DateTimeField(null=True)

    objects = GroupQuerySet.as_manager()

    class Meta:
        ordering = ["sequence"]
        indexes = [
            models.Index(fields=["experiment", "state", "sequence"], name="group_lease_order"),
            models.Index(
                fields=["experiment", "-priority", "sequence"],
                name="group_coming",
                condition=Q(state__in=COMING),
            ),
            models.Index(
                fields=["deadline_at"],
                name="group_deadline",
                condition=Q(state=GroupState.OPEN, deadline_at__isnull=False),
            ),
        ]
        constraints = [
            models.CheckConstraint(
                name="group_done_within_size", condition=Q(done_count__lte=F("size"))
            ),
            models.CheckConstraint(
                name="group_batch_iff_leased",
                condition=Q(state__in=[GroupState.LEASED, GroupState.CONSUMED], batch__isnull=False)
                | Q(
                    state__in=[*COMING, GroupState.FILTERED, GroupState.CANCELLED],
                    batch__isnull=True,
                ),
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)
