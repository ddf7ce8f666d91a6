"""Webhooks: events of an experiment, sent to an address that the trainer named."""

import uuid

from django.db import models
from django.db.models import Q

from rollouts.models.experiment import Experiment
from rollouts.querysets import WebhookQuerySet


class Webhook(models.Model):
    """An address, the secret that signs what is sent there, and the kinds of events it wants."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    experiment = models.ForeignKey(Experiment, on_delete=models.CASCADE, related_name="webhooks")
    url = models.CharField(max_length=500)
    secret = models.CharField(max_length=100, editable=False)
    kinds = models.JSONField(default=list, blank=True, help_text="Empty: all.")
    active = models.BooleanField(default=True)
    detail = models.TextField(blank=True, help_text="Why it was switched off.")
    created_at = models.DateTimeField(auto_now_add=True)

    objects = WebhookQuerySet.as_manager()

    class Meta:
        ordering = ["created_at"]

    def __str__(self) -> str:
        return self.url


class WebhookDelivery(models.Model):
    """One event on its way to one address."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    webhook = models.ForeignKey(Webhook, on_delete=models.CASCADE, related_name="deliveries")
    kind = models.CharField(max_length=32)
    body = models.JSONField()
    tries = models.PositiveIntegerField(default=0)
    next_at = models.DateTimeField(null=True, help_text="When it is tried next; empty: no more.")
    delivered_at = models.DateTimeField(null=True)
    detail = models.TextField(blank=True, help_text="What the last try met.")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["created_at"]
        verbose_name_plural = "webhook deliveries"
        indexes = [
            models.Index(
                fields=["next_at"], name="delivery_due", condition=Q(next_at__isnull=False)
            ),
        ]

    def __str__(self) -> str:
        return f"{self.kind} to {self.webhook_id}"
