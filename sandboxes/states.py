"""States of images and sandboxes."""

from django.db import models


class ImageState(models.TextChoices):
    """Whether an image can start sandboxes."""

    UNCHECKED = "unchecked"
    READY = "ready"
    BROKEN = "broken"


class SandboxState(models.TextChoices):
    """Life of one sandbox; the row holds a slot of its node until it is gone."""

    RESERVED = "reserved"
    STARTING = "starting"
    READY = "ready"
    FROZEN = "frozen"
    STOPPING = "stopping"
    GONE = "gone"


class SandboxPurpose(models.TextChoices):
    """What a sandbox is for."""

    RUN = "run"
    GRADE = "grade"


class Network(models.TextChoices):
    """What a sandbox can reach; `host` is for operators only."""

    NONE = "none"
    HOST = "host"
