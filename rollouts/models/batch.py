"""Batches: groups leased to a trainer until it acknowledges them."""

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q

from rollouts.querysets import BatchQuerySet
from rollouts.states import BatchState


class Batch(models.Model):
    """A lease of finished groups."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    experiment = models.ForeignKey(
        "rollouts.Experiment", on_delete=models.CASCADE, related_name="batches"
    )
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.PROTECT, related_name="+")
    number = models.PositiveBigIntegerField(help_text="From 1, per experiment.")
    repeats = models.ForeignKey(
        "self",
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="The batch that was given back before, with the same groups.",
    )
    state = models.CharField(max_length=16, choices=BatchState.choices, default=BatchState.LEASED)
    group_count = models.PositiveIntegerField()
    policy_version = models.PositiveBigIntegerField(help_text="The policy's version at the lease.")
    max_lag = models.PositiveBigIntegerField(
        null=True, help_text="The largest policy lag of its groups at the lease."
    )
    lease_expires_at = models.DateTimeField()
    created_at = models.DateTimeField(auto_now_add=True)
    closed_at = models.DateTimeField(null=True)

    objects = BatchQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        verbose_name_plural = "batches"
        indexes = [
            models.Index(
                fields=["lease_expires_at"],
                name="batch_open_leases",
                condition=Q(state=BatchState.LEASED),
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["experiment", "number"], name="batch_number_unique"),
            models.CheckConstraint(
                name="batch_closed_at_iff_closed",
                condition=Q(state=BatchState.LEASED, closed_at__isnull=True)
                | (~Q(state=BatchState.LEASED) & Q(closed_at__isnull=False)),
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)
