"""Task sets and tasks."""

import uuid

from django.db import models

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
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["task_set", "ref"]
        constraints = [
            models.UniqueConstraint(fields=["task_set", "ref"], name="task_ref_unique_in_set"),
        ]

    def __str__(self) -> str:
        return self.ref
