"""Imports of tasks as jobs, and the rows that they refused."""

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q

from rollouts.models.task import TaskSet
from rollouts.querysets import TaskImportQuerySet
from rollouts.states import IMPORT_ACTIVE, ImportSource, ImportState
from sandboxes.models import Environment, validate_name


class TaskImport(models.Model):
    """One source of tasks on its way into a task set: how far it is, what came of it."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    set_name = models.CharField(max_length=99, validators=[validate_name])
    task_set = models.ForeignKey(
        TaskSet, null=True, on_delete=models.SET_NULL, related_name="imports"
    )
    description = models.TextField(blank=True)
    format = models.CharField(max_length=32, blank=True, help_text="Empty: told by its content.")
    source = models.CharField(max_length=16, choices=ImportSource.choices)
    name = models.CharField(max_length=500, help_text="What the source is called.")
    path = models.CharField(max_length=4096, editable=False)
    options = models.JSONField(default=dict, blank=True)
    environment = models.ForeignKey(
        Environment,
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="Where all tasks run; empty: one is made for each need.",
    )
    requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    state = models.CharField(max_length=16, choices=ImportState.choices, default=ImportState.QUEUED)
    created = models.PositiveBigIntegerField(default=0)
    changed = models.PositiveBigIntegerField(default=0)
    unchanged = models.PositiveBigIntegerField(default=0)
    rejected = models.PositiveBigIntegerField(default=0)
    offset = models.PositiveBigIntegerField(default=0, help_text="Bytes or rows that are done.")
    number = models.PositiveBigIntegerField(default=0, help_text="Rows or folders that are done.")
    total = models.PositiveBigIntegerField(null=True, help_text="What the offset ends at.")
    main_need = models.CharField(max_length=64, blank=True, editable=False)
    lease_token = models.UUIDField(null=True, editable=False)
    heartbeat_at = models.DateTimeField(null=True)
    published_at = models.DateTimeField(null=True)
    attempts = models.PositiveSmallIntegerField(default=0)
    cancel_requested_at = models.DateTimeField(null=True)
    error_code = models.CharField(max_length=99, blank=True)
    error = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    objects = TaskImportQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(fields=["-created_at"], name="task_import_created"),
            models.Index(
                fields=["state"],
                name="task_import_active",
                condition=Q(state__in=IMPORT_ACTIVE),
            ),
        ]
        constraints = [
            models.CheckConstraint(
                name="task_import_leased_iff_running",
                condition=Q(state=ImportState.RUNNING, lease_token__isnull=False)
                | (~Q(state=ImportState.RUNNING) & Q(lease_token__isnull=True)),
            ),
            models.CheckConstraint(
                name="task_import_ended_iff_over",
                condition=Q(state__in=IMPORT_ACTIVE, ended_at__isnull=True)
                | (~Q(state__in=IMPORT_ACTIVE) & Q(ended_at__isnull=False)),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.name} into {self.set_name}"


class RejectedRow(models.Model):
    """What an import refused: where it stands, why, and what was read of it."""

    id = models.BigAutoField(primary_key=True)
    task_import = models.ForeignKey(
        TaskImport, on_delete=models.CASCADE, related_name="rejected_rows"
    )
    number = models.PositiveBigIntegerField(help_text="Which row or folder it is, from 1.")
    place = models.CharField(max_length=500)
    reason = models.TextField()
    raw = models.TextField(blank=True, help_text="The row, at most 16,000 characters of it.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(
                fields=["task_import", "number"], name="rejected_row_once_per_import"
            ),
        ]

    def __str__(self) -> str:
        return self.place
