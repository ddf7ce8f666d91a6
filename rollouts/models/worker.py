"""Worker processes: the row whose lease all attempts of a process hang on."""

import uuid

from django.db import models

from rollouts.querysets import WorkerQuerySet
from rollouts.states import Stage
from sandboxes.models import Node


class Worker(models.Model):
    """One operating-system process that carries out attempts of one stage."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="workers")
    stage = models.CharField(max_length=8, choices=Stage.choices)
    pid = models.PositiveIntegerField()
    concurrency = models.PositiveIntegerField(default=1)
    started_at = models.DateTimeField(auto_now_add=True)
    lease_expires_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)

    objects = WorkerQuerySet.as_manager()

    class Meta:
        ordering = ["-started_at"]
        indexes = [
            models.Index(fields=["stage", "lease_expires_at"], name="worker_live"),
        ]

    def __str__(self) -> str:
        return f"{self.stage} worker {self.pid}"
