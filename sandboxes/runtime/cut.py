"""Take a few folders out of the layers that a sandbox's programs wrote, and leave the rest.

What is taken is put into layers of its own, to lie on what the setups left: none of the programs,
libraries and settings that were changed elsewhere comes along. Nothing of the layers is executed
or followed, and no content is copied: files are linked, which is safe as no layer is written to.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.runtime import wire
from sandboxes.runtime.argv import FUSE_DRIVER, HOST_PATH
from sandboxes.runtime.exceptions import ImageUnusable, LayerMissing
from sandboxes.runtime.jobs import SNAPSHOT, Channel, delete, keep_layer, succeed, tools_of
from sandboxes.runtime.layout import Layout, read_record
from sandboxes.runtime.merged import entry, is_opaque, resolve
from sandboxes.runtime.namespaces import become_root_of_own

_OPAQUE = "user.overlay.opaque"  # both drivers know this mark
# All links of a cut, then all copies of one: the job itself has 310 s.
_SEAL_SECONDS = 60.0
_COPY_SECONDS = 200.0
# Where a link leads that led into a sealed folder: to nothing.
_NOWHERE = "/nonexistent/sealed"
# A link through these leads anywhere, or to what only the reader's process has.
_MAGIC = ("/proc", "/dev", "/sys", "/run")


def run(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Cut layers, topmost first; those of `below` stay as they are and are not touched."""
    tools = tools_of(message)
    written = [str(reference) for reference in message["written"]]
    below = [_folder(layout, str(reference)) for reference in message["below"]]
    records = [_record(layout, reference) for reference in written]
    if tools is not None:
        become_root_of_own()  # modes of 000 that the sandbox's root set do not stop its owner
    fuse = records[0].get("driver") == FUSE_DRIVER
    until = time.monotonic() + _COPY_SECONDS
    image = Path(str(records[0].get("image") or "/nonexistent"))
    base = [*below, *([image] if tools is not None and image.is_dir() else [])]
    folders = _resolved(base, message["folders"], fuse=fuse)
    made: list[Path] = []
    try:
        # From the lowest on: a link is looked up through all that lies below it.
        for reference in reversed(written):
            building = layout.root / "tmp" / f"{SNAPSHOT}{uuid.uuid4().hex}"
            (building / "diff").mkdir(parents=True)
            made.append(building)
            for folder in folders:
                _Cut(base, fuse, until).take(_folder(layout, reference), building / "diff", folder)
        stacked = [each / "diff" for each in reversed(made)]
        for diff in stacked:
            _seal(diff, [*stacked, *base], message["sealed"], fuse=fuse)
        for building, record, reference in zip(
            made, reversed(records), reversed(message["references"]), strict=True
        ):
            keep_layer(layout, {**record, "name": record["from"]}, building, str(reference))
    except (OSError, subprocess.TimeoutExpired) as fault:
        delete(None, [each for each in made if each.exists()])
        raise ImageUnusable(f"the layers cannot be cut: {fault}") from None
    except BaseException:
        delete(None, [each for each in made if each.exists()])
        raise
    succeed(channel)


def _record(layout: Layout, reference: str) -> dict[str, Any]:
    record = read_record(_folder(layout, reference).parent / "layer.json")
    if record is None:
        raise LayerMissing(f"no layer {reference} on this node")
    return record


def _folder(layout: Layout, reference: str) -> Path:
    try:
        folder = layout.layer(reference) / "diff"
    except ValueError as fault:
        raise LayerMissing(str(fault)) from None
    if not folder.is_dir():
        raise LayerMissing(f"no layer {reference} on this node")
    return folder


def _resolved(base: Sequence[Path], folders: Sequence[str], *, fuse: bool) -> list[str]:
    """Return where the folders are by the links of the base, without those inside of others."""
    names = sorted({resolve(base, folder, fuse=fuse).name for folder in folders})
    kept: list[str] = []
    for name in names:
        if not any(name == each or name.startswith(f"{each.rstrip('/')}/") for each in kept):
            kept.append(name)
    return kept


@dataclass(frozen=True)
class _Cut:
    """What is cut on: the layers below, whose marks count; `until` is a monotonic time."""

    base: Sequence[Path]
    fuse: bool
    until: float

    def take(self, diff: Path, target: Path, folder: str) -> None:
        """Take one folder of a layer, with what its parents say of it."""
        *parents, last = folder.strip("/").split("/")
        here, hides = diff, False
        for name in parents:
            found = entry(here, name, fuse=self.fuse)
            if found is None:
                if hides:
                    break
                return
            if found.kind != "folder":  # it was removed with its parent, or is no folder any more
                hides = True
                break
            here, hides = found.path, hides or is_opaque(found.path, fuse=self.fuse)
        else:
            found = entry(here, last, fuse=self.fuse)
            if found is not None and found.kind != "removed":
                place = self._make_parents(target, parents) / last
                _link(found.path, place, seconds=self.until - time.monotonic())
                if found.kind == "folder" and hides:
                    os.setxattr(place, _OPAQUE, b"y")
                return
            if found is None and not hides:
                return
        place = self._make_parents(target, parents) / last
        place.mkdir(mode=0o755)
        os.setxattr(place, _OPAQUE, b"y")

    def _make_parents(self, target: Path, parents: Sequence[str]) -> Path:
        """Make the folders above the one that is taken, with the modes that they have below."""
        here = target
        shutil.copystat(target, target, follow_symlinks=False)
        for count, name in enumerate(parents, 1):
            here = here / name
            if here.is_dir():
                continue
            here.mkdir(mode=0o755)
            path = "/" + "/".join(parents[:count])
            below = resolve(self.base, path, fuse=self.fuse).entries
            if below and below[0].is_dir():
                here.chmod(stat.S_IMODE(below[0].stat().st_mode))
        return here


def _link(source: Path, place: Path, *, seconds: float) -> None:
    """Make the same tree again of links to its files."""
    ended = subprocess.run(
        ["/bin/cp", "-a", "-l", "--", str(source), str(place)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=max(1.0, seconds),
        env={"PATH": HOST_PATH, "LANG": "C.UTF-8"},
        check=False,
    )
    if ended.returncode != 0:
        said = ended.stderr.decode("utf-8", "replace")[-500:].strip()
        raise ImageUnusable(f"the layer cannot be cut: {said}")


def _seal(diff: Path, layers: Sequence[Path], sealed: Sequence[str], *, fuse: bool) -> None:
    """Let links into sealed folders lead nowhere: a test would read its own files by them.

    So do those of which it cannot be told where they lead: out of what is in no layer, by too many
    steps, or after too long a time for all of them.
    """
    closed = (*sealed, *_MAGIC)
    until = time.monotonic() + _SEAL_SECONDS
    for name in _links(diff):
        if time.monotonic() < until and _is_open(f"/{name}", layers, closed, fuse):
            continue
        path = diff / name
        path.unlink()
        path.symlink_to(_NOWHERE)


def _is_open(path: str, layers: Sequence[Path], closed: Sequence[str], fuse: bool) -> bool:
    """Tell whether it is certain that a link leads into none of the closed folders."""
    try:
        found = resolve(layers, path, fuse=fuse)
    except OSError as fault:
        return fault.errno == errno.ELOOP  # that leads nowhere
    return found.is_sure and not any(
        step == each or step.startswith(f"{each}/") for step in found.through for each in closed
    )


def _links(diff: Path) -> Iterator[str]:
    """Yield the links below a folder by their relative names."""
    waiting = [diff]
    while waiting:
        folder = waiting.pop()
        with suppress(OSError), os.scandir(folder) as entries:
            for each in entries:
                if each.is_symlink():
                    yield os.path.relpath(each.path, diff)
                elif each.is_dir(follow_symlinks=False):
                    waiting.append(Path(each.path))
