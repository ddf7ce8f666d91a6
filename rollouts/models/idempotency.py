"""Remembered creating calls: same key and body, same answer."""

from django.conf import settings
from django.db import models


class IdempotencyRecord(models.Model):
    """One creating call under an Idempotency-Key."""

    id = models.BigAutoField(primary_key=True)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    key = models.CharField(max_length=200)
    route = models.CharField(max_length=300)
    fingerprint = models.CharField(max_length=64, help_text="SHA-256 of the request body.")
    status = models.PositiveIntegerField(null=True, help_text="Empty while the call runs.")
    body = models.JSONField(null=True)
    created_at = models.DateTimeField(auto_now_add=True, db_index=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(fields=["owner", "key", "route"], name="idempotency_key_once"),
        ]

    def __str__(self) -> str:
        return self.key
