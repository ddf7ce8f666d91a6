"""Read what surrounds a task: its setup, its files, and the Dockerfile beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollouts.importers.base import FileContent, Files, ImageBuild
from rollouts.importers.definitions import convert_dockerfile
from rollouts.importers.dockerfile import last_workdir
from rollouts.importers.folder import decode_text, read_files


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Hold what a task's sandbox is made of; `ignored` is what of a Dockerfile has no meaning."""

    setup: str | None = None
    files: Files = field(default_factory=dict)
    image: str | None = None
    build: ImageBuild | None = None
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def read_surroundings(
    task: Path, *, image: str | None, workdir: str | None, folder: str = "environment"
) -> Surroundings:
    """Return what `folder` of a task says; raise `TaskRejected`.

    A `setup.sh` wins over a Dockerfile, as does an image that the task names.
    """
    return surroundings_of(read_files(task / folder, inside=task), image=image, workdir=workdir)


def surroundings_of(
    files: dict[str, FileContent], *, image: str | None, workdir: str | None
) -> Surroundings:
    """Return what a folder's files say; raise `TaskRejected`."""
    setup_file, dockerfile = files.get("setup.sh"), files.pop("Dockerfile", None)
    setup = decode_text(setup_file.data, "environment/setup.sh") if setup_file else None
    if dockerfile is None:
        return Surroundings(setup=setup, files=files, image=image, workdir=workdir)
    text = decode_text(dockerfile.data, "environment/Dockerfile")
    if setup is not None or image is not None:
        workdir = workdir or last_workdir(text)
        return Surroundings(setup=setup, files=files, image=image, workdir=workdir)
    made = convert_dockerfile(text, files)
    return Surroundings(
        build=made.build,
        workdir=workdir or made.workdir,
        env=made.env,
        ignored=made.ignored,
    )
