"""Trainers' API tokens: hashed at rest, expiring, revocable, scoped, bound to experiments."""

from django.contrib.postgres.fields import ArrayField
from django.db import models
from knox.models import AbstractAuthToken


class Scope(models.TextChoices):
    """What a token may do."""

    READ = "read"
    SUBMIT = "submit"
    POLICY = "policy"
    OPERATE = "operate"


class TrainerToken(AbstractAuthToken):
    """A token of one user; unless it is bound, it reaches all that its user owns."""

    name = models.CharField(max_length=99)
    scopes = ArrayField(models.CharField(max_length=16, choices=Scope.choices), default=list)
    experiments = models.ManyToManyField("rollouts.Experiment", blank=True, related_name="tokens")
    is_bound = models.BooleanField(
        default=False,
        editable=False,
        help_text="Made for some experiments only; when they are deleted, it reaches nothing.",
    )
    revoked_at = models.DateTimeField(null=True, blank=True)
    used_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-created"]

    def __str__(self) -> str:
        return f"{self.name} ({self.token_key}…)"
