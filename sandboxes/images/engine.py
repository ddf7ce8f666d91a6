"""Pulling and building with Apptainer, as the sandbox account: spython where its client fits.

spython's `pull` streams what the engine says; its `build` keeps stderr until the end or blocks on
a full pipe, and knows no place for --fakeroot: builds are argument lists.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from spython.main import Client  # type: ignore[import-untyped]

from sandboxes.images.exceptions import (
    ImageBuildFailed,
    ImageDiskFull,
    ImageNetworkFault,
    ImagePullFailed,
)
from sandboxes.images.references import Source
from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.runtime.streams import HeadTail

SAID_BYTES = 64 * 1024
_CHUNK = 65536

_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
# What containers/image, Go's net package and registries say of what may be better in a moment.
_PASSING = re.compile(
    r"connection refused|connection reset|no such host|i/o timeout|TLS handshake timeout"
    r"|unexpected EOF|network is unreachable|no route to host|temporary failure"
    r"|context deadline exceeded|server misbehaving|too ?many ?requests"
    r"|(?:status|code|HTTP|:)\D{0,12}(?:429|50[0234])\b|(?:502|503|504) [A-Z]",
    re.IGNORECASE,
)
_FAKEROOT_UNUSABLE = re.compile(r"fakeroot: error|libfakeroot|/\.singularity\.d/libs/faked")
_HINTS = (
    (
        re.compile(r"failed to Lchown"),
        "a folder to start from must belong to the sandbox account: use it as an image of its own "
        "and start from that copy",
    ),
    (
        re.compile(r"extract command failed:.*GLIBC_"),
        "this installation of the engine cannot unpack SIF files: run scripts/install-apptainer",
    ),
)
_MAPPING_REFUSED = re.compile(r"new[ug]idmap")


def run_logged(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | str = "/"
) -> tuple[int, str]:
    """Run a program, pass on what it says, and return its exit code with the end of that.

    Raises ImageDiskFull when it says so.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(env),
        cwd=cwd,
    )
    assert process.stdout is not None
    said = HeadTail(SAID_BYTES)
    with process.stdout as stream:
        while chunk := os.read(stream.fileno(), _CHUNK):
            said.feed(chunk)
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
    code = process.wait()
    text = said.joined().decode("utf-8", "replace")
    if code != 0 and _FULL.search(text):
        raise ImageDiskFull(_last(text, _FULL))
    return code, text


def pull(source: Source, folder: Path, *, engine: str, plain_http: bool) -> Path:
    """Pull a reference into a SIF below `folder`; raises the faults of `pull_fault`.

    Changes this process's environment: spython's client passes it on to the engine.
    """
    programs = folder / "programs"
    programs.mkdir()
    (programs / "singularity").symlink_to(engine)  # the one name that spython calls
    os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    for name in ("APPTAINER_NOHTTPS", "SINGULARITY_NOHTTPS"):
        if plain_http:
            os.environ[name] = "1"
    said = HeadTail(SAID_BYTES)
    try:
        path, lines = Client.pull(
            image=source.text, name="image.sif", pull_folder=str(folder), stream=True, quiet=True
        )
        for line in lines:
            said.feed(line.encode())
            print(line, end="", flush=True)  # noqa: T201 (what is said here is the log)
    except subprocess.CalledProcessError as fault:
        text = said.joined().decode("utf-8", "replace")
        raise pull_fault(text or f"the engine ended with {fault.returncode}") from None
    except UnicodeDecodeError as fault:
        raise ImagePullFailed(f"the engine said what is no text: {fault}") from None
    if not Path(path).is_file():
        raise ImagePullFailed(f"the engine left no image of {source.text}")
    return Path(path)


def pull_fault(said: str) -> SandboxFault:
    """Return what a failed pull means, from the engine's words."""
    if _FULL.search(said):
        return ImageDiskFull(_last(said, _FULL))
    if _PASSING.search(said):
        return ImageNetworkFault(_last(said))
    return ImagePullFailed(_last(said))


def build(
    definition: Path,
    folder: Path,
    *,
    engine: str,
    unshare: str,
    env: Mapping[str, str],
    plain_http: bool,
) -> Path:
    """Build a SIF below `folder` from a definition, in its folder, in a namespace that maps root.

    Where the image cannot run the host's fakeroot command (another C library), or the host
    refuses to map further users, the build is tried once more without. Raises ImageBuildFailed,
    ImageNetworkFault, ImageDiskFull.
    """
    sif = folder / "image.sif"
    options = ["--force", *(["--no-https"] if plain_http else [])]
    words = [engine, "build", "--fakeroot", *options, str(sif), str(definition)]
    code, said = run_logged(words, env=env, cwd=definition.parent)
    if code != 0 and _MAPPING_REFUSED.search(said):
        # Further users are mapped by setuid programs, which no-new-privs keeps from working.
        words = [unshare, "-U", "-r", "--", engine, "build", *options]
        code, said = run_logged([*words, str(sif), str(definition)], env=env, cwd=definition.parent)
    elif code != 0 and _FAKEROOT_UNUSABLE.search(said):
        print("== again without the fakeroot command", flush=True)  # noqa: T201
        words = [engine, "build", "--fakeroot", "--ignore-fakeroot-command", *options]
        code, said = run_logged([*words, str(sif), str(definition)], env=env, cwd=definition.parent)
    if code != 0:
        fetching = "While performing build: conveyor failed" in said
        kind = ImageNetworkFault if fetching and _PASSING.search(said) else ImageBuildFailed
        raise kind(_last(said) or f"the engine ended with {code}")
    if not sif.is_file():
        raise ImageBuildFailed("the engine left no image")
    return sif


def clean_engine_cache(engine: str, env: Mapping[str, str]) -> None:
    """Empty the engine's own cache of downloads; what it says goes to the log."""
    run_logged([engine, "cache", "clean", "--force"], env=env)


def _last(said: str, telling: re.Pattern[str] = re.compile("FATAL")) -> str:
    """Return the last line that tells most, or the end of what the engine said."""
    lines = [line.strip() for line in said.strip().splitlines() if line.strip()]
    fatal = [line for line in lines if telling.search(line)]
    told = (fatal[-1] if fatal else "\n".join(lines[-8:]))[-2000:]
    hints = [hint for pattern, hint in _HINTS if pattern.search(said)]
    return "\n".join([told, *hints])
