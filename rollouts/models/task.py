"""Task sets and tasks."""

import uuid

from django.db import models

from rollouts.querysets import TaskQuerySet
from sandboxes.models import Environment, validate_name


class TaskSet(models.Model):
    """An imported data set."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=99, unique=True, validators=[validate_name])
    description = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Task(models.Model):
    """One row of a task set; `hidden` never enters a sandbox while the agent runs."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    task_set = models.ForeignKey(TaskSet, on_delete=models.CASCADE, related_name="tasks")
    ref = models.CharField(max_length=200)
    environment = models.ForeignKey(Environment, on_delete=models.PROTECT, related_name="tasks")
    instruction = models.TextField()
    payload = models.JSONField(
        default=dict, blank=True, help_text="Public: setup script, files for /setup, time limits."
    )
    hidden = models.JSONField(
        default=dict, blank=True, help_text="For the evaluator only: tests, answer, solution."
    )
    metadata = models.JSONField(default=dict, blank=True)
    content_hash = models.CharField(max_length=64)
    seen_in = models.UUIDField(null=True, editable=False, help_text="The last import with it.")
    flaky_hash = models.CharField(
        max_length=64,
        default="",
        db_default="",
        blank=True,
        editable=False,
        help_text="The content that scored differently when it was repeated; empty: none did.",
    )
    flaky_evidence = models.JSONField(default=dict, db_default={}, blank=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TaskQuerySet.as_manager()

    class Meta:
        ordering = ["task_set", "ref"]
        constraints = [
            models.UniqueConstraint(fields=["task_set", "ref"], name="task_ref_unique_in_set"),
        ]

    def __str__(self) -> str:
        return self.ref

    @property
    def flaky(self) -> bool:
        """Tell whether its present content scored differently when it was repeated."""
        return bool(self.flaky_hash) and self.flaky_hash == self.content_hash
