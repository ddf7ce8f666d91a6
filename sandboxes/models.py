"""Images, versioned environments, nodes and sandboxes. Owners are opaque UUIDs."""

import uuid

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q

from sandboxes.querysets import (
    EnvironmentQuerySet,
    ImageBuildQuerySet,
    NodeQuerySet,
    SandboxQuerySet,
    SnapshotQuerySet,
)
from sandboxes.states import (
    IMAGE_BUILD_ACTIVE,
    Gpu,
    ImageBuildKind,
    ImageBuildState,
    ImageReuse,
    ImageState,
    Network,
    PromptFormat,
    SandboxPurpose,
    SandboxState,
    SnapshotState,
    Verified,
)

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
        help_text="A path (SIF file, unpacked image or root file system), absolute or relative to "
        "the node's image root; docker://, oras:// or library:// and a reference; definition: or "
        "template: for the text below; template:NAME for a shipped one.",
    )
    definition = models.TextField(
        blank=True, help_text="Definition file, or a Jinja2 template of one."
    )
    files = models.JSONField(
        default=dict, blank=True, help_text="Laid beside the definition for %files: path to text."
    )
    parameters = models.JSONField(default=dict, blank=True, help_text="Values for the template.")
    reuse = models.CharField(
        max_length=16, choices=ImageReuse.choices, default=ImageReuse.VERSIONED
    )
    lock = models.CharField(
        max_length=200, blank=True, help_text="For reuse by lock: such as a lock file's digest."
    )
    state = models.CharField(
        max_length=16, choices=ImageState.choices, default=ImageState.UNCHECKED, editable=False
    )
    detail = models.TextField(blank=True, editable=False)
    digest = models.CharField(max_length=64, blank=True, editable=False)
    checked_at = models.DateTimeField(null=True, editable=False)
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
    files = models.JSONField(
        default=dict,
        db_default={},
        blank=True,
        help_text="Put under /setup for every setup: path to base64 and mode.",
    )
    workdir = models.CharField(max_length=200, default="/app")
    agent = models.CharField(max_length=99, default="command_line")
    agent_settings = models.JSONField(default=dict, blank=True)
    system_prompt = models.TextField(blank=True)
    prompt_format = models.CharField(
        max_length=16,
        choices=PromptFormat.choices,
        default=PromptFormat.PLAIN,
        db_default=PromptFormat.PLAIN,
        help_text="How system prompt, instruction_template, demonstrations and tool descriptions "
        "are read.",
    )
    tools = models.JSONField(
        default=list, blank=True, help_text='Such as ["bash", "submit", "mcp:files/read"].'
    )
    tool_settings = models.JSONField(
        default=dict,
        db_default={},
        blank=True,
        help_text='By tool: its settings, and a "description" in place of its own.',
    )
    network = models.CharField(max_length=16, choices=Network.choices, default=Network.NONE)
    egress_hosts = models.JSONField(
        default=list,
        blank=True,
        help_text='For "listed hosts": such as "pypi.org", "*.example.org" or "10.0.0.5:8443".',
    )
    gpu = models.CharField(max_length=16, choices=Gpu.choices, default=Gpu.NONE, blank=True)
    warm = models.PositiveSmallIntegerField(
        default=0,
        validators=[MaxValueValidator(256)],
        help_text="Sandboxes that each node keeps started ahead, within its capacity.",
    )
    limits = models.JSONField(
        default=dict,
        blank=True,
        help_text=(
            "memory_bytes, cpus, processes, disk_bytes, output_bytes, lifetime_seconds; "
            "absent means no limit."
        ),
    )
    evaluator = models.CharField(max_length=99, default="script")
    evaluator_settings = models.JSONField(default=dict, blank=True)
    secrets = models.JSONField(
        default=dict,
        db_default={},
        blank=True,
        help_text='By reference, never the value: {"TOKEN": {"from": "env:TOKEN", "to": '
        '["setup", "tools", "evaluator"]}}.',
    )
    verification = models.CharField(
        max_length=16,
        choices=Verified.choices,
        default=Verified.UNVERIFIED,
        db_default=Verified.UNVERIFIED,
        editable=False,
    )
    verified_at = models.DateTimeField(null=True, editable=False)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = EnvironmentQuerySet.as_manager()

    class Meta:
        ordering = ["name", "-version"]
        constraints = [
            models.UniqueConstraint(fields=["name", "version"], name="environment_version_unique"),
        ]
        indexes = [
            models.Index(
                fields=["name"],
                name="environment_broken",
                condition=Q(verification=Verified.BROKEN),
            ),
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
    enforcement = models.JSONField(
        default=dict, editable=False, help_text="How each limit of a sandbox is kept here."
    )
    leaked = models.PositiveBigIntegerField(
        default=0, editable=False, help_text="Instances found that no row owned, and removed."
    )
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
    layers = models.JSONField(
        default=list, help_text="The read-only layers below its writable one, topmost first."
    )
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


class Snapshot(models.Model):
    """The state of a sandbox after a turn, kept on its node for others to start from."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    owner = models.UUIDField(help_text="The rollout whose sandbox it was.")
    environment = models.ForeignKey(Environment, on_delete=models.PROTECT, related_name="+")
    turn = models.PositiveIntegerField(
        null=True, help_text="Turns done before it; empty while the next one is awaited."
    )
    state = models.CharField(
        max_length=16, choices=SnapshotState.choices, default=SnapshotState.REQUESTED
    )
    node = models.ForeignKey(Node, null=True, on_delete=models.PROTECT, related_name="snapshots")
    layers = models.JSONField(default=list, help_text="What to start on, topmost first.")
    workdir = models.CharField(max_length=4096, blank=True, help_text="The shell's directory then.")
    detail = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    ready_at = models.DateTimeField(null=True)

    objects = SnapshotQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(fields=["owner", "state"], name="snapshot_owner"),
            models.Index(fields=["-created_at"], name="snapshot_created"),
        ]
        constraints = [
            models.CheckConstraint(
                name="snapshot_ready_whole",
                condition=~Q(state=SnapshotState.READY)
                | Q(ready_at__isnull=False, node__isnull=False, turn__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)


class ImageBuild(models.Model):
    """One image on its way onto one node: who asked, how far it is, what came of it."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    image = models.ForeignKey(Image, on_delete=models.CASCADE, related_name="builds")
    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="image_builds")
    kind = models.CharField(max_length=16, choices=ImageBuildKind.choices)
    state = models.CharField(
        max_length=16, choices=ImageBuildState.choices, default=ImageBuildState.QUEUED
    )
    requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="Empty: a rollout needed it.",
    )
    fresh = models.BooleanField(
        default=False, help_text="Pass over what an earlier pull or scratch build left."
    )
    spec_digest = models.CharField(max_length=64, editable=False)
    time_limit_seconds = models.FloatField()
    lease_token = models.UUIDField(null=True, editable=False)
    attempts = models.PositiveSmallIntegerField(default=0)
    cancel_requested_at = models.DateTimeField(null=True)
    published_at = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    log = models.TextField(blank=True, help_text="The end of what was said, at most 64 KiB.")
    log_start = models.PositiveBigIntegerField(
        default=0, help_text="Characters that were said before what `log` holds."
    )
    digest = models.CharField(max_length=64, blank=True)
    image_bytes = models.PositiveBigIntegerField(null=True)
    sif_bytes = models.PositiveBigIntegerField(null=True)
    error_code = models.CharField(max_length=99, blank=True)
    error = models.TextField(blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    objects = ImageBuildQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        indexes = [
            models.Index(fields=["image", "-created_at"], name="image_build_of_image"),
            models.Index(fields=["-created_at"], name="image_build_created"),
            models.Index(
                fields=["node", "state"],
                name="image_build_active",
                condition=Q(state__in=IMAGE_BUILD_ACTIVE),
            ),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=["image", "node"],
                name="image_build_one_active",
                condition=Q(state__in=IMAGE_BUILD_ACTIVE),
            ),
            models.CheckConstraint(
                name="image_build_leased_iff_running",
                condition=Q(state=ImageBuildState.RUNNING, lease_token__isnull=False)
                | (~Q(state=ImageBuildState.RUNNING) & Q(lease_token__isnull=True)),
            ),
            models.CheckConstraint(
                name="image_build_ended_iff_done",
                condition=Q(state__in=IMAGE_BUILD_ACTIVE, ended_at__isnull=True)
                | (~Q(state__in=IMAGE_BUILD_ACTIVE) & Q(ended_at__isnull=False)),
            ),
        ]

    def __str__(self) -> str:
        return str(self.id)
