"""States of images and sandboxes."""

from django.db import models


class ImageState(models.TextChoices):
    """Whether an image can start sandboxes."""

    UNCHECKED = "unchecked", "unchecked"
    READY = "ready", "ready"
    BROKEN = "broken", "broken"


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
    HOST = "host", "host"
