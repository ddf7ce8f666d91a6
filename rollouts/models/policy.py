"""Policies (an inference pool and its current version) and their inference servers."""

import uuid
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q

from rollouts.querysets import InferenceServerQuerySet, PolicyQuerySet
from rollouts.states import ServerState
from sandboxes.models import validate_name


def validate_server_url(value: str) -> None:
    """Raise ValidationError unless this is an http(s) address; a host of one word will do."""
    try:
        parts = urlsplit(value)
        plain = not (parts.username or parts.query or parts.fragment) and parts.port != 0
        usable = plain and parts.scheme in {"http", "https"} and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable or any(each.isspace() for each in value):
        raise ValidationError("Write the server's address like http://node7:8000.")


class Policy(models.Model):
    """What samples tokens: a pool of inference servers with one model, tokenizer and version."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=99, unique=True, validators=[validate_name])
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="policies",
        help_text="Whose it is; empty: every trainer may use and change it.",
    )
    model = models.CharField(max_length=200, help_text="The model's name at its servers.")
    tokenizer = models.CharField(
        max_length=500, help_text="Folder of the tokenizer and its chat template, on every node."
    )
    context_tokens = models.PositiveIntegerField(
        default=2048, validators=[MinValueValidator(16)], help_text="Prompt + sampled tokens."
    )
    version = models.PositiveBigIntegerField(
        default=0, help_text="Raised by the trainer at each weight update."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    objects = PolicyQuerySet.as_manager()

    class Meta:
        ordering = ["name"]
        verbose_name_plural = "policies"

    def __str__(self) -> str:
        return self.name


class InferenceServer(models.Model):
    """One endpoint that samples tokens for a policy."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    policy = models.ForeignKey(Policy, on_delete=models.CASCADE, related_name="servers")
    url = models.CharField(
        max_length=500,
        validators=[validate_server_url],
        help_text="Base address, such as http://node7:8000, without /v1.",
    )
    kind = models.CharField(max_length=32, default="vllm")
    max_in_flight = models.PositiveIntegerField(default=16, validators=[MinValueValidator(1)])
    state = models.CharField(max_length=16, choices=ServerState.choices, default=ServerState.ACTIVE)
    healthy = models.BooleanField(null=True, editable=False)
    detail = models.TextField(blank=True, editable=False)
    checked_at = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = InferenceServerQuerySet.as_manager()

    class Meta:
        ordering = ["created_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["policy", "url"],
                name="server_url_unique_in_policy",
                condition=~Q(state=ServerState.REMOVED),
            ),
        ]

    def __str__(self) -> str:
        return self.url
