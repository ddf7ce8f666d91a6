"""States of images and sandboxes."""

from django.db import models


class ImageState(models.TextChoices):
    """Whether an image can start sandboxes."""

    UNCHECKED = "unchecked", "unchecked"
    READY = "ready", "ready"
    BROKEN = "broken", "broken"


class PromptFormat(models.TextChoices):
    """How the texts of an environment's prompt are read."""

    PLAIN = "plain", "plain: as they are, {instruction} aside"
    JINJA = "jinja", "jinja: as Jinja2 templates"


class Verified(models.TextChoices):
    """What the last verification found of an environment's version."""

    UNVERIFIED = "unverified", "unverified"
    VERIFIED = "verified", "verified"
    BROKEN = "broken", "broken"


class ImageReuse(models.TextChoices):
    """When an explicit build takes what a node has built before."""

    SCRATCH = "scratch", "scratch: never"
    VERSIONED = "versioned", "versioned: when definition and files are the same"
    LOCK = "lock", "lock: while the lock is the same, whatever else changed"


class ImageBuildKind(models.TextChoices):
    """What getting an image onto a node is; a check looks at one that is there."""

    PULL = "pull", "pull"
    BUILD = "build", "build"
    UNPACK = "unpack", "unpack"
    CHECK = "check", "check"


class ImageBuildState(models.TextChoices):
    """Life of one image build on one node."""

    QUEUED = "queued", "queued"
    RUNNING = "running", "running"
    SUCCEEDED = "succeeded", "succeeded"
    FAILED = "failed", "failed"
    CANCELLED = "cancelled", "cancelled"


IMAGE_BUILD_ACTIVE = (ImageBuildState.QUEUED, ImageBuildState.RUNNING)


class SandboxState(models.TextChoices):
    """Life of one sandbox; the row holds a slot of its node until it is gone."""

    RESERVED = "reserved", "reserved"
    STARTING = "starting", "starting"
    READY = "ready", "ready"
    FROZEN = "frozen", "frozen"
    STOPPING = "stopping", "stopping"
    GONE = "gone", "gone"


class SandboxPurpose(models.TextChoices):
    """What a sandbox is for."""

    RUN = "run", "run"
    GRADE = "grade", "grade"


class Network(models.TextChoices):
    """What a sandbox can reach; `host` is for operators only."""

    NONE = "none", "none"
    MODEL_ONLY = "model_only", "the model only"
    ALLOW_LIST = "allow_list", "listed hosts"
    HOST = "host", "host"


class Gpu(models.TextChoices):
    """Whose devices and driver libraries a sandbox sees."""

    NONE = "", "none"
    NVIDIA = "nvidia", "NVIDIA"
    ROCM = "rocm", "AMD ROCm"


class SnapshotState(models.TextChoices):
    """Whether a sandbox's state was kept."""

    REQUESTED = "requested", "requested"
    READY = "ready", "ready"
    FAILED = "failed", "failed"
