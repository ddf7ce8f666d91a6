"""Images, versioned environments, nodes and sandboxes. Owners are opaque UUIDs."""

import uuid

from django.core.validators import MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q

from sandboxes.querysets import EnvironmentQuerySet, NodeQuerySet, SandboxQuerySet
from sandboxes.states import ImageState, Network, SandboxPurpose, SandboxState

validate_name = RegexValidator(
    r"^[a-z0-9][a-z0-9._-]{0,98}$",
    "Use lower-case letters, digits, '.', '_' and '-', beginning with a letter or digit.",
)


class Image(models.Model):
    """A root file system that sandboxes start from."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=99, unique=True, validators=[validate_name])
    source = models.CharField(
        max_length=500,
        help_text="Folder or SIF file: an absolute path, or one relative to the node's image root.",
    )
    state = models.CharField(
        max_length=16, choices=ImageState.choices, default=ImageState.UNCHECKED, editable=False
    )
    detail = models.TextField(blank=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Environment(models.Model):
    """One version of a catalogue entry: how a task's sandbox, agent and scorer are set up."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=99, validators=[validate_name])
    version = models.PositiveIntegerField(editable=False)
    description = models.TextField(blank=True)
    image = models.ForeignKey(
        Image,
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        help_text="Empty: rollouts need no sandbox and run on any node.",
    )
    setup = models.TextField(blank=True, help_text="Bash script, run as root in a fresh sandbox.")
    workdir = models.CharField(max_length=200, default="/app")
    agent = models.CharField(max_length=99, default="command_line")
    agent_settings = models.JSONField(default=dict, blank=True)
    system_prompt = models.TextField(blank=True)
    tools = models.JSONField(default=list, blank=True)
    network = models.CharField(max_length=16, choices=Network.choices, default=Network.NONE)
    limits = models.JSONField(
        default=dict,
        blank=True,
        help_text="memory_bytes, processes, disk_bytes, output_bytes; absent means no limit.",
    )
    evaluator = models.CharField(max_length=99, default="script")
    evaluator_settings = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = EnvironmentQuerySet.as_manager()

    class Meta:
        ordering = ["name", "-version"]
        constraints = [
            models.UniqueConstraint(fields=["name", "version"], name="environment_version_unique"),
        ]

    def __str__(self) -> str:
        return self.ref

    @property
    def ref(self) -> str:
        """Return `name@version`."""
        return f"{self.name}@{self.version}"


class Node(models.Model):
    """One machine that runs stage workers, with a number of sandbox slots."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=99, unique=True, validators=[validate_name])
    capacity = models.PositiveIntegerField(
        validators=[MinValueValidator(0)], help_text="Sandboxes that may exist at once."
    )
    draining = models.BooleanField(default=False, help_text="Start nothing new here.")
    seen_at = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = NodeQuerySet.as_manager()

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Sandbox(models.Model):
    """One instance on one node; its row is the slot, from reservation until it is gone."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.UUIDField(help_text="The rollout that it serves.")
    node = models.ForeignKey(Node, on_delete=models.PROTECT, related_name="sandboxes")
    purpose = models.CharField(max_length=16, choices=SandboxPurpose.choices)
    state = models.CharField(
        max_length=16, choices=SandboxState.choices, default=SandboxState.RESERVED
    )
    handle = models.JSONField(null=True, help_text="What a process on the node needs to enter it.")
    frozen_layer = models.CharField(max_length=500, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    ready_at = models.DateTimeField(null=True)
    gone_at = models.DateTimeField(null=True)

    objects = SandboxQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        verbose_name_plural = "sandboxes"
        indexes = [
            models.Index(fields=["owner"], name="sandbox_owner"),
            models.Index(fields=["-created_at"], name="sandbox_created"),
            models.Index(
                fields=["node", "state"],
                name="sandbox_present",
                condition=~Q(state=SandboxState.GONE),
            ),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["owner", "purpose"],
                name="sandbox_one_usable_per_purpose",
                condition=~Q(state__in=[SandboxState.STOPPING, SandboxState.GONE]),
            ),
            models.CheckConstraint(
                name="sandbox_gone_at_iff_gone",
                condition=Q(state=SandboxState.GONE, gone_at__isnull=False)
                | (~Q(state=SandboxState.GONE) & Q(gone_at__isnull=True)),
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)
