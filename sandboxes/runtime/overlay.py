"""What the kernel's overlay is told: lower layers, the writable one, and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sandboxes.runtime.exceptions import ImageUnusable, LayerMissing, StartFailed
from sandboxes.runtime.layout import Layout, read_record

# Layers of another driver mark deletions otherwise: deleted files would come back.
DRIVER = "overlay-userxattr"
_SPECIAL = set(',:\\"')
_OPTIONS_BYTES = 4000  # mount(2) takes one page


def check_image(image: Path, uid: int, gid: int) -> None:
    """Raise ImageUnusable when an unpacked image cannot carry a sandbox of that owner."""
    try:
        complete, owner = (image / ".singularity.d").is_dir(), image.stat()
    except PermissionError:
        raise ImageUnusable(f"the sandbox account cannot read {image}") from None
    if not complete:
        raise ImageUnusable(f"{image} has no .singularity.d folder: build it as a sandbox image")
    if (owner.st_uid, owner.st_gid) != (uid, gid):
        raise ImageUnusable(
            f"{image} belongs to {owner.st_uid}:{owner.st_gid} and sandboxes run as {uid}:{gid}: "
            f"chown -R -h {uid}:{gid} {image}"
        )


def find_layers(layout: Layout, references: Sequence[str], driver: str) -> list[Path]:
    """Return the folders of frozen layers, topmost first; raises LayerMissing."""
    folders = []
    for reference in references:
        try:
            folder = layout.layer(reference)
        except ValueError as fault:
            raise LayerMissing(str(fault)) from None
        record = read_record(folder / "layer.json")
        if record is None or not (folder / "diff").is_dir():
            raise LayerMissing(f"no layer {reference} on this node")
        if record.get("driver") != driver:
            raise LayerMissing(f"layer {reference} was written by {record.get('driver')}")
        folders.append(folder / "diff")
    return folders


def mount_options(layout: Layout, *, image: Path, layers: list[Path], instance: Path) -> str:
    """Return the overlay's options, relative to the root folder to stay short.

    Raises StartFailed when a path holds a character that the options cannot carry.
    """

    def short(path: Path) -> str:
        text = str(path.relative_to(layout.root) if path.is_relative_to(layout.root) else path)
        if _SPECIAL & set(text):
            raise StartFailed(f'an overlay path must not hold any of , : \\ ": {text}')
        return text

    lower = ":".join(short(path) for path in [*layers, image])
    upper, work = short(instance / "upper"), short(instance / "work")
    options = f"userxattr,lowerdir={lower},upperdir={upper},workdir={work}"
    if len(options.encode()) > _OPTIONS_BYTES:
        raise StartFailed(f"{len(layers)} layers do not fit one overlay")
    return options
