"""Images as operators handle them: define, request builds on nodes, cancel, retry."""

import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models.functions import Now
from django.utils import timezone

from sandboxes.images.exceptions import ReferenceInvalid
from sandboxes.images.references import locate, parse_source
from sandboxes.images.specs import ImageSpec, Reuse
from sandboxes.models import Image, ImageBuild, Node
from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.states import ImageBuildKind, ImageBuildState, ImageState

# A node renews its row at every heartbeat: one that was not seen for so long runs nothing.
NODE_SEEN_SECONDS = 120.0
_DEFINING = ("source", "definition", "files", "parameters", "reuse", "lock")


def define_image(*, name: str, source: str, **values: Any) -> Image:
    """Create an image, or change what an existing one is made from; raises ValidationError.

    `values` are `definition`, `files`, `parameters`, `reuse` and `lock`; those left out are empty.
    Nodes that have it go on with what they have until it is pulled or built again.
    """
    candidate = check_definition(name=name, source=source, **values)
    defining = {field: getattr(candidate, field) for field in _DEFINING}
    with transaction.atomic():
        image, created = Image.objects.select_for_update().get_or_create(
            name=name, defaults=defining
        )
        if not created and any(getattr(image, key) != value for key, value in defining.items()):
            fresh = {"state": ImageState.UNCHECKED, "detail": "", "digest": "", "checked_at": None}
            for key, value in (defining | fresh).items():
                setattr(image, key, value)
            image.save(update_fields=[*defining, *fresh])
    return image


def check_definition(*, name: str, source: str, **values: Any) -> Image:
    """Return an unsaved image with these values; raises ValidationError as `define_image` does."""
    candidate = Image(name=name, source=source, **values)
    candidate.full_clean(validate_unique=False, validate_constraints=False)
    try:
        image_spec(candidate).check()
    except ReferenceInvalid as fault:
        raise ValidationError({"source": str(fault)}) from None
    except SandboxFault as fault:
        raise ValidationError({"definition": str(fault)}) from None
    return candidate


def image_spec(image: Image) -> ImageSpec:
    """Return what an image is made from, with an absolute path where it is one.

    Raises ReferenceInvalid.
    """
    source = locate(parse_source(image.source), Path(settings.IMAGE_ROOT))
    return ImageSpec(
        name=image.name,
        source=source.text,
        definition=image.definition,
        files=image.files,
        parameters=image.parameters,
        reuse=cast("Reuse", str(image.reuse)),
        lock=image.lock,
    )


def spec_digest(spec: ImageSpec) -> str:
    """Return a digest of what an image is made from: an edited image has another one."""
    return hashlib.sha256(json.dumps(spec.as_dict(), sort_keys=True).encode()).hexdigest()


def request_builds(
    *,
    image: Image,
    requested_by: Any,
    nodes: Sequence[str] | None = None,
    check_only: bool = False,
) -> list[ImageBuild]:
    """Ask nodes to get an image, or only to check it; all that are seen when none are named.

    A node that is at it already keeps its build, which is returned. Raises ValidationError when a
    node is unknown or none is there.
    """
    spec = _valid_spec(image)
    kind = ImageBuildKind.CHECK if check_only else ImageBuildKind(spec.work)
    return [
        start_build(image=image, spec=spec, node=node, kind=kind, requested_by=requested_by)
        for node in _chosen_nodes(nodes)
    ]


def start_build(
    *,
    image: Image,
    spec: ImageSpec,
    node: Node,
    kind: ImageBuildKind,
    requested_by: Any = None,
) -> ImageBuild:
    """Return the node's active build of an image, made where there is none.

    One that somebody asked for is fresh: it passes over what an earlier pull or scratch build left.
    """
    while True:
        try:
            with transaction.atomic():
                return ImageBuild.objects.create(
                    image=image,
                    node=node,
                    kind=kind,
                    requested_by=requested_by,
                    fresh=requested_by is not None and kind != ImageBuildKind.CHECK,
                    spec_digest=spec_digest(spec),
                    time_limit_seconds=settings.IMAGE_BUILD_SECONDS,
                )
        except IntegrityError:
            active = ImageBuild.objects.active().filter(image=image, node=node).first()
            if active is not None:  # else it ended in between
                return active


def retry_build(*, build: ImageBuild, requested_by: Any) -> ImageBuild:
    """Ask again for what a build was for, as the image is now; raises ValidationError."""
    if build.state in (ImageBuildState.QUEUED, ImageBuildState.RUNNING):
        raise ValidationError("This build is not over.")
    spec = _valid_spec(build.image)
    is_check = build.kind == ImageBuildKind.CHECK
    return start_build(
        image=build.image,
        spec=spec,
        node=build.node,
        kind=ImageBuildKind.CHECK if is_check else ImageBuildKind(spec.work),
        requested_by=requested_by,
    )


def cancel_build(*, build_id: UUID) -> bool:
    """End a build: at once when it is queued, within seconds when it runs; False when it is over.

    Idempotent while it runs.
    """
    now = timezone.now()
    queued = ImageBuild.objects.filter(pk=build_id, state=ImageBuildState.QUEUED)
    if queued.update(state=ImageBuildState.CANCELLED, cancel_requested_at=now, ended_at=now):
        return True
    running = ImageBuild.objects.filter(pk=build_id, state=ImageBuildState.RUNNING)
    return bool(running.update(cancel_requested_at=now))


def _valid_spec(image: Image) -> ImageSpec:
    try:
        spec = image_spec(image)
        spec.check()
    except SandboxFault as fault:
        raise ValidationError(f"Image {image.name}: {fault}") from None
    return spec


def _chosen_nodes(names: Sequence[str] | None) -> list[Node]:
    if names is None:
        seen = Now() - timedelta(seconds=NODE_SEEN_SECONDS)
        found = list(Node.objects.filter(seen_at__gte=seen).order_by("name"))
        if not found:
            raise ValidationError("No node runs workers now.")
        return found
    found = list(Node.objects.filter(name__in=names).order_by("name"))
    unknown = sorted(set(names) - {node.name for node in found})
    if unknown:
        raise ValidationError({"nodes": f"There is no node {', '.join(unknown)}."})
    return found
