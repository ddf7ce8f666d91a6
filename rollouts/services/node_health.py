"""Probing one node: packages, settings, sandbox runtime, images."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from django.conf import settings
from django.core.checks import ERROR, run_checks
from django.db import DatabaseError

from rollouts.services.health import Probe, connection_fault
from sandboxes.images.unpack import has_shell
from sandboxes.models import Image
from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.runtime.sif import check_complete, find_root_partition
from sandboxes.services.image_store import find_on_node
from sandboxes.services.images import image_spec
from sandboxes.services.node import close_node_runtime, node_runtime

PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==([^\s;#]+)")


def check_packages(requirements: Path) -> list[Probe]:
    """Return whether the packages that a requirements file pins are installed as pinned."""
    try:
        lines = requirements.read_text().splitlines()
    except OSError as error:
        return [
            Probe(
                name="packages",
                ok=False,
                detail=f"{requirements}: {error.strerror}",
                remedy="Run from a whole checkout.",
            )
        ]
    pins = [match.groups() for line in lines if (match := PINNED.match(line))]
    wrong = [
        f"{name} {found or 'missing'} (wants {wanted})"
        for name, wanted in pins
        if (found := _installed(name)) != wanted
    ]
    if wrong:
        return [
            Probe(
                name="packages",
                ok=False,
                detail=", ".join(wrong),
                remedy=f"Run: pip install -r {requirements.name}",
            )
        ]
    return [Probe(name="packages", ok=True, detail=f"{len(pins)} as pinned")]


def check_settings() -> list[Probe]:
    """Return every error of the system checks."""
    errors = [message for message in run_checks() if message.level >= ERROR]
    if not errors:
        return [Probe(name="settings", ok=True, detail="every system check passes")]
    return [
        Probe(
            name=f"settings {message.id}",
            ok=False,
            detail=str(message.msg),
            remedy=str(message.hint or "See the README's settings table."),
        )
        for message in errors
    ]


def check_runtime() -> list[Probe]:
    """Return what the sandbox runtime finds on this node."""
    kind = settings.SANDBOX_RUNTIME
    try:
        found = node_runtime().check()
    except SandboxFault as error:
        remedy = "Run scripts/install-apptainer as root."
        return [Probe(name=f"runtime {kind}", ok=False, detail=str(error), remedy=remedy)]
    finally:
        close_node_runtime()
    return [
        Probe(
            name=check.name,
            ok=check.ok,
            detail=check.detail,
            remedy="" if check.ok else check.remedy or "See the README.",
        )
        for check in found
    ]


def check_images() -> list[Probe]:
    """Return whether every image of the catalogue is there on this node and can be read."""
    if connection_fault():
        return [_unknown("the database does not answer")]
    try:
        images = list(Image.objects.all())
    except DatabaseError:
        return [_unknown("the catalogue has no table; run the migrations")]
    if not images:
        return [Probe(name="images", ok=True, detail="none in the catalogue")]
    return list(_probe_images(images))


def _probe_images(images: list[Image]) -> Iterator[Probe]:
    for image in images:
        name = f"image {image.name}"
        try:
            spec = image_spec(image)
            spec.check()
        except SandboxFault as error:
            remedy = "Mend the image in the catalogue."
            yield Probe(name=name, ok=False, detail=str(error), remedy=remedy)
            continue
        if spec.work == "unpack":
            path = Path(spec.source)
            fault = _image_fault(path)
            remedy = f"Run scripts/build-base-image, or put the image at {path}." if fault else ""
            yield Probe(name=name, ok=not fault, detail=fault or str(path), remedy=remedy)
        else:
            yield Probe(name=name, ok=True, detail=_where(image, spec.source))


def _where(image: Image, source: str) -> str:
    """Return where a pulled or built image is; its absence is no fault."""
    try:
        folder = find_on_node(image=image)
    except SandboxFault as error:
        return f"{source}: {error}"
    return folder or f"{source}: not here yet, got when it is first needed"


def _image_fault(path: Path) -> str:
    if not path.exists():
        return f"{path} is missing"
    if path.is_dir():
        usable = (path / ".singularity.d").is_dir() or has_shell(path)
        return "" if usable else f"{path} has no .singularity.d"
    try:
        check_complete(path, find_root_partition(path))
    except (OSError, SandboxFault) as error:
        return f"{path}: {error}"
    return ""


def _unknown(detail: str) -> Probe:
    remedy = "Mend the database first."
    return Probe(name="images", ok=False, detail=detail, remedy=remedy)


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
