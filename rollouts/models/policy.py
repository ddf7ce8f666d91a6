"""Policies (an inference pool and its current version) and their inference servers."""

import uuid
from fnmatch import fnmatch
from urllib.parse import urlsplit

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.db.models import Q

from rollouts.querysets import InferenceServerQuerySet, PolicyQuerySet, PolicyUpdateQuerySet
from rollouts.states import OPEN_UPDATE, ServerState, UpdateMode, UpdateState
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
    hosts = settings.INFERENCE_HOSTS
    if hosts and not any(fnmatch(parts.hostname or "", host) for host in hosts):
        raise ValidationError(
            f"This deployment takes inference servers on {', '.join(hosts)} alone: an operator "
            "sets PRORL_INFERENCE_HOSTS."
        )


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
        max_length=500,
        blank=True,
        help_text="Folder of the tokenizer and its chat template, on every node; "
        "empty: text only, for evaluation.",
    )
    context_tokens = models.PositiveIntegerField(
        default=2048, validators=[MinValueValidator(16)], help_text="Prompt + sampled tokens."
    )
    version = models.PositiveBigIntegerField(
        default=0, help_text="Raised by the trainer at each weight update."
    )
    weights_epoch = models.PositiveBigIntegerField(
        default=0,
        db_default=0,
        editable=False,
        help_text="Rises whenever the weights may have changed; unlike the version never repeats.",
    )
    created_at = models.DateTimeField(auto_now_add=True)

    objects = PolicyQuerySet.as_manager()

    class Meta:
        ordering = ["name"]
        verbose_name_plural = "policies"

    def __str__(self) -> str:
        return self.name

    @property
    def is_text_only(self) -> bool:
        """Tell whether it has no tokenizer: its servers take messages, and nothing is trainable."""
        return not self.tokenizer


class PolicyUpdate(models.Model):
    """One exchange of a policy's weights: from the wish for quiet to the new version's start."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    policy = models.ForeignKey(Policy, on_delete=models.CASCADE, related_name="updates")
    number = models.PositiveIntegerField(help_text="From 1, per policy.")
    from_version = models.PositiveBigIntegerField()
    to_version = models.PositiveBigIntegerField()
    mode = models.CharField(max_length=16, choices=UpdateMode.choices)
    control = models.BooleanField(
        default=False, help_text="The service pauses and resumes the servers itself."
    )
    state = models.CharField(
        max_length=16, choices=UpdateState.choices, default=UpdateState.QUIESCING
    )
    detail = models.TextField(blank=True, help_text="Why it is not further, or why it ended so.")
    servers = models.JSONField(default=list, help_text="What each server said when last asked.")
    pauses = models.JSONField(
        default=list, help_text="Servers whose pause was asked and that must be resumed."
    )
    requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+"
    )
    created_at = models.DateTimeField(auto_now_add=True)
    paused_at = models.DateTimeField(null=True, help_text="When the servers had been paused.")
    ready_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    opened_at = models.DateTimeField(null=True, help_text="When generation was let go on.")
    released_at = models.DateTimeField(
        null=True, help_text="When nothing was left to undo: every paused server goes on."
    )

    objects = PolicyUpdateQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(
                fields=["created_at"],
                name="update_unreleased",
                condition=Q(released_at__isnull=True),
            ),
        ]
        constraints = [
            models.UniqueConstraint(fields=["policy", "number"], name="update_number_unique"),
            models.UniqueConstraint(
                fields=["policy"], name="update_one_open", condition=Q(state__in=OPEN_UPDATE)
            ),
            models.CheckConstraint(
                name="update_ended_iff_closed",
                condition=Q(state__in=OPEN_UPDATE, ended_at__isnull=True, released_at__isnull=True)
                | (~Q(state__in=OPEN_UPDATE) & Q(ended_at__isnull=False)),
            ),
            models.CheckConstraint(
                name="update_raises_version", condition=Q(to_version__gt=models.F("from_version"))
            ),
        ]

    def __str__(self) -> str:
        return f"{self.policy_id} {self.from_version} → {self.to_version}"


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
    told_version = models.PositiveBigIntegerField(
        null=True, editable=False, help_text="The policy version that it said last; empty: none."
    )
    detail = models.TextField(blank=True, editable=False)
    logprob_mode = models.CharField(max_length=32, default="", db_default="", editable=False)
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
