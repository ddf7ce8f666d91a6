"""The overlay of a sandbox: which driver mounts it, its layers, and their limits."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sandboxes.runtime.argv import (
    FUSE_DRIVER,
    KERNEL_DRIVER,
    Tools,
    engine_env,
    marks_argv,
    mount_argv,
    remove_argv,
)
from sandboxes.runtime.exceptions import (
    ImageUnusable,
    LayerMissing,
    RuntimeMissing,
    StartFailed,
)
from sandboxes.runtime.layout import Layout, read_record, write_record

DRIVER = KERNEL_DRIVER  # of a node that says nothing else
CHOICE = "overlay.json"
_SOUND = "sound"  # a file beside layer.json
_OPAQUE = "user.overlay.opaque"  # https://docs.kernel.org/filesystems/overlayfs.html
_SPECIAL = set(',:\\"')
_OPTIONS_BYTES = 4000  # mount(2) takes one page
_TRY_SECONDS = 30.0
# What Apptainer's own forms cannot do; a driver that can do it carries a sandbox.
_TRIAL = 'rm -r "$1/x" && mkdir "$1/x" && test -z "$(ls -A "$1/x")" && echo y > "$1/x/y"'


def known_driver(layout: Layout, tools: Tools) -> str:
    """Return the driver that is wanted, or that was found out on this kernel; else nothing."""
    if tools.overlay == "kernel":
        return KERNEL_DRIVER
    if tools.overlay == "fuse":
        return FUSE_DRIVER
    known = read_record(layout.root / CHOICE) or {}
    if known.get("kernel") == os.uname().release and known.get("driver") in _drivers(tools):
        return str(known["driver"])
    return ""


def _drivers(tools: Tools) -> list[str]:
    return [KERNEL_DRIVER, FUSE_DRIVER] if tools.fuse_overlayfs else [KERNEL_DRIVER]


def choose_driver(layout: Layout, tools: Tools) -> str:
    """Return the driver that is wanted, or the first that works here, found out once a kernel.

    Run as the account. Raises RuntimeMissing when none works, with what each one said.
    """
    known = known_driver(layout, tools)
    if known:
        return known
    release = os.uname().release
    said = []
    for driver in _drivers(tools):
        refusal = try_driver(layout, tools, driver)
        if not refusal:
            write_record(layout.root / CHOICE, {"kernel": release, "driver": driver})
            return driver
        said.append(f"{driver}: {refusal}")
    if not tools.fuse_overlayfs:
        said.append(f"{FUSE_DRIVER}: not installed")
    raise RuntimeMissing(f"no overlay can be mounted in a user namespace ({'; '.join(said)})")


def forget_driver(layout: Layout) -> None:
    """Let the next start find out again: a mount was refused, so the node has changed."""
    (layout.root / CHOICE).unlink(missing_ok=True)


def try_driver(layout: Layout, tools: Tools, driver: str) -> str:
    """Replace a directory of a lower layer on a mount of that driver; returns what went wrong."""
    folder = Path(tempfile.mkdtemp(prefix="overlay-", dir=layout.root / "tmp"))
    try:
        (folder / "image" / "x" / "below").mkdir(parents=True)
        for part in ("upper", "work", "merged"):
            (folder / part).mkdir()
        options = mount_options(
            layout, image=folder / "image", layers=[], instance=folder, driver=driver
        )
        merged = str((folder / "merged").relative_to(layout.root))
        mount = mount_argv(tools, driver=driver, options=options, merged=merged)
        code, said = _run([*mount, "/bin/sh", "-c", _TRIAL, "sh", merged], layout)
        return "" if code == 0 else said or f"exit {code}"
    finally:
        _run(remove_argv(tools, [str(folder)]), layout)


def check_layers(layout: Layout, tools: Tools, references: Sequence[str], driver: str) -> None:
    """Raise ImageUnusable where the driver would lose what a layer holds; looks once a layer.

    fuse-overlayfs lets a program make a folder or a link `.wh.NAME`, and takes it for the
    deletion of NAME when it meets it in a lower layer.
    """
    if driver != FUSE_DRIVER:
        return
    for reference in references:
        folder = layout.layer(reference)
        if (folder / _SOUND).exists():
            continue
        code, said = _run(marks_argv(tools, str(folder / "diff")), layout)
        if code != 0 or said:
            name = said.removeprefix(f"{folder / 'diff'}/")
            raise ImageUnusable(f"{driver} takes a name in {reference} for a deletion: {name}")
        (folder / _SOUND).touch()


def _run(argv: list[str], layout: Layout) -> tuple[int, str]:
    """Run a program; returns its exit code and what it said.

    Its output goes to a file: who waits for the end of a pipe waits for a daemon too.
    """
    with tempfile.TemporaryFile() as output:
        try:
            ended = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_TRY_SECONDS,
                env=engine_env(layout.root),
                cwd=layout.root,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return 1, f"no end within {_TRY_SECONDS:g} s"
        output.seek(0)
        said = output.read(2000).decode("utf-8", "replace").strip()
    return ended.returncode, said


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


def make_mask(folder: Path, hidden: Sequence[str]) -> Path:
    """Make a layer under which these folders of the root begin empty; raises StartFailed.

    Both drivers take a folder with this mark for one that hides what lies below it.
    """
    folder.mkdir()
    for path in hidden:
        name = path.removeprefix("/")
        if not name or "/" in name or name in (".", ".."):
            raise StartFailed(f"only a folder at the root can be hidden: {path!r}")
        (folder / name).mkdir()
        os.setxattr(folder / name, _OPAQUE, b"y")
    return folder


def mount_options(
    layout: Layout,
    *,
    image: Path,
    layers: list[Path],
    instance: Path,
    driver: str = KERNEL_DRIVER,
) -> str:
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
    # Without a write-back cache the writable layer holds what was written: it may be copied.
    first = "writeback=0" if driver == FUSE_DRIVER else "userxattr"
    options = f"{first},lowerdir={lower},upperdir={upper},workdir={work}"
    if len(options.encode()) > _OPTIONS_BYTES:
        raise StartFailed(f"{len(layers)} layers do not fit one overlay")
    return options
