"""Rollouts, their attempts and the journal of their turns."""

import uuid

from django.db import models
from django.db.models import Q

from rollouts.models.experiment import Experiment, Group
from rollouts.models.worker import Worker
from rollouts.querysets import AttemptQuerySet, RolloutQuerySet
from rollouts.states import (
    ACTIVE_ATTEMPT,
    IN_STAGE,
    AttemptState,
    Outcome,
    RolloutState,
    Stage,
    StopReason,
)
from sandboxes.models import Environment, Node


class Rollout(models.Model):
    """One episode of one task."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    group = models.ForeignKey(Group, on_delete=models.CASCADE, related_name="rollouts")
    experiment = models.ForeignKey(Experiment, on_delete=models.CASCADE, related_name="rollouts")
    environment = models.ForeignKey(Environment, on_delete=models.PROTECT, related_name="+")
    sample = models.PositiveIntegerField(help_text="Number within the group, from 0.")
    needs_sandbox = models.BooleanField(default=True)
    priority = models.IntegerField(default=0)
    sequence = models.BigIntegerField(help_text="The group's sequence.")
    state = models.CharField(
        max_length=8, choices=RolloutState.choices, default=RolloutState.QUEUED
    )
    outcome = models.CharField(max_length=16, choices=Outcome.choices, null=True)
    stop_reason = models.CharField(max_length=32, choices=StopReason.choices, null=True)
    failure_code = models.CharField(max_length=64, blank=True)
    failure_detail = models.TextField(blank=True)
    reward = models.FloatField(null=True)
    rewards = models.JSONField(default=dict)
    node = models.ForeignKey(Node, null=True, on_delete=models.SET_NULL, related_name="+")
    cancel_requested_at = models.DateTimeField(null=True)
    not_before = models.DateTimeField(null=True, help_text="A retry waits until then.")
    retried_at = models.DateTimeField(
        null=True, help_text="An operator's retry: tries before it count no longer."
    )
    restarts = models.PositiveIntegerField(default=0)
    replaced = models.BooleanField(
        default=False,
        db_default=False,
        help_text="It failed, and another sample of its group was started in its place.",
    )
    turns = models.PositiveIntegerField(default=0)
    sampled_tokens = models.PositiveIntegerField(default=0)
    tool_calls = models.PositiveIntegerField(default=0)
    answer = models.TextField(null=True, help_text="What the agent submitted.")
    last_message = models.TextField(blank=True)
    timings = models.JSONField(default=dict, help_text="Seconds per stage, queue and activity.")
    queued_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)
    done_at = models.DateTimeField(null=True)

    objects = RolloutQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at", "sample"]
        indexes = [
            models.Index(
                fields=["experiment", "needs_sandbox", "-priority", "sequence", "sample"],
                name="rollout_dispatch_order",
                condition=Q(state=RolloutState.QUEUED),
            ),
            models.Index(fields=["experiment", "state"], name="rollout_by_state"),
            models.Index(fields=["node"], name="rollout_in_stage", condition=Q(state__in=IN_STAGE)),
            models.Index(fields=["created_at", "id"], name="rollout_created"),
            models.Index(
                fields=["cancel_requested_at"],
                name="rollout_to_cancel",
                condition=Q(cancel_requested_at__isnull=False) & ~Q(state=RolloutState.DONE),
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["group", "sample"], name="rollout_sample_unique"),
            models.CheckConstraint(
                name="rollout_outcome_iff_done",
                condition=Q(state=RolloutState.DONE, outcome__isnull=False, done_at__isnull=False)
                | (~Q(state=RolloutState.DONE) & Q(outcome__isnull=True, done_at__isnull=True)),
            ),
            models.CheckConstraint(
                name="rollout_reward_only_when_scored",
                condition=Q(reward__isnull=True) | Q(outcome=Outcome.SCORED),
            ),
            models.CheckConstraint(
                name="rollout_reward_when_scored",
                condition=Q(outcome__isnull=True)
                | ~Q(outcome=Outcome.SCORED)
                | Q(reward__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)


class Attempt(models.Model):
    """One try at one stage of a rollout; append-only history."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="attempts")
    stage = models.CharField(max_length=8, choices=Stage.choices)
    number = models.PositiveIntegerField(help_text="From 1, per rollout and stage.")
    state = models.CharField(
        max_length=16, choices=AttemptState.choices, default=AttemptState.QUEUED
    )
    node = models.ForeignKey(
        Node, null=True, on_delete=models.SET_NULL, related_name="+", help_text="Empty: any node."
    )
    worker = models.ForeignKey(
        Worker, null=True, on_delete=models.SET_NULL, related_name="attempts"
    )
    lease_token = models.UUIDField(null=True)
    budget_seconds = models.FloatField(help_text="Time that this stage may take.")
    failure_code = models.CharField(max_length=64, blank=True)
    failure_detail = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    published_at = models.DateTimeField(null=True)
    publish_count = models.PositiveIntegerField(default=0)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    objects = AttemptQuerySet.as_manager()

    class Meta:
        ordering = ["created_at"]
        indexes = [
            models.Index(
                fields=["published_at"],
                name="attempt_queued",
                condition=Q(state=AttemptState.QUEUED),
            ),
            models.Index(
                fields=["-ended_at"], name="attempt_init_ended", condition=Q(stage=Stage.INIT)
            ),
            models.Index(
                fields=["worker"], name="attempt_running", condition=Q(state=AttemptState.RUNNING)
            ),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["rollout"],
                name="attempt_one_active",
                condition=Q(state__in=ACTIVE_ATTEMPT),
            ),
            models.UniqueConstraint(
                fields=["rollout", "stage", "number"], name="attempt_number_unique"
            ),
            models.CheckConstraint(
                name="attempt_lease_when_running",
                condition=~Q(state=AttemptState.RUNNING)
                | Q(lease_token__isnull=False, worker__isnull=False, started_at__isnull=False),
            ),
            models.CheckConstraint(
                name="attempt_ended_iff_inactive",
                condition=Q(state__in=ACTIVE_ATTEMPT, ended_at__isnull=True)
                | (~Q(state__in=ACTIVE_ATTEMPT) & Q(ended_at__isnull=False)),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.stage} {self.number} of {self.rollout_id}"


class JournalEntry(models.Model):
    """One finished step of a running episode, written before the next begins."""

    id = models.BigAutoField(primary_key=True)
    rollout = models.ForeignKey(Rollout, on_delete=models.CASCADE, related_name="journal")
    attempt = models.ForeignKey(Attempt, on_delete=models.CASCADE, related_name="+")
    restarts = models.PositiveIntegerField(help_text="Episode of the rollout that it belongs to.")
    turn = models.PositiveIntegerField()
    kind = models.CharField(
        max_length=16, choices=[("sampled", "sampled"), ("observed", "observed")]
    )
    body = models.JSONField()
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["id"]
        verbose_name_plural = "journal entries"
        constraints = [
            models.UniqueConstraint(
                fields=["rollout", "restarts", "turn", "kind"], name="journal_step_once"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.turn} of {self.rollout_id}"
