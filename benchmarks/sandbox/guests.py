"""A sandbox with the Python packages of those we compare with, at pinned versions."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.sandbox.stage import Stage, WayLacking
from sandboxes.runtime.protocol import SandboxHandle

GUEST_FOLDER = "/opt/bench-packages"
GUEST_PACKAGES = ("swe-rex", "ipykernel")
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements-bench.txt"
_INSTALL_SECONDS = 600.0


@contextmanager
def guest_sandbox(stage: Stage) -> Iterator[SandboxHandle]:
    """Yield a sandbox on the host's network with the packages below GUEST_FOLDER.

    They are installed once a run, by pip on the host for the image's Python, as wheels only:
    the image needs neither pip nor a network. Raises WayLacking.
    """
    with stage.sandbox(network="host") as handle:
        packages = stage.folder / "packages"
        if not packages.is_dir():
            part = packages.with_suffix(".part")
            _install(part, _python_version(stage, handle))
            part.rename(packages)
        stage.note(
            "The sandbox that holds SWE-ReX or a Jupyter kernel is started with the host's "
            "network, so that their own clients reach them."
        )
        _copy(stage, handle, packages)
        yield handle


def _python_version(stage: Stage, handle: SandboxHandle) -> str:
    words = ["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    result = stage.runtime.exec(handle, words, timeout_seconds=60)
    if result.exit_code != 0:
        raise WayLacking("the image has no python3 to run the packages with")
    return result.stdout.decode().strip()


def _install(packages: Path, python: str) -> None:
    pins = [line.split("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    wanted = [pin for pin in pins if re.split(r"==", pin)[0] in GUEST_PACKAGES]
    words = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--root-user-action=ignore", "--no-compile", "--target", str(packages)),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}"),
        *wanted,
    ]
    try:
        subprocess.run(words, check=True, capture_output=True, timeout=_INSTALL_SECONDS)
    except subprocess.CalledProcessError as fault:
        reason = fault.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise WayLacking(f"pip could not fetch {', '.join(wanted)}: {reason}") from None
    except subprocess.TimeoutExpired:
        raise WayLacking(f"pip did not fetch {', '.join(wanted)} in time") from None


def _copy(stage: Stage, handle: SandboxHandle, packages: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(packages, arcname=".")
    script = 'mkdir -p "$1" && tar -x --no-same-owner -C "$1"'
    result = stage.runtime.exec(
        handle,
        ["sh", "-c", script, "sh", GUEST_FOLDER],
        stdin=stream.getvalue(),
        timeout_seconds=_INSTALL_SECONDS,
    )
    if result.exit_code != 0:
        raise WayLacking(f"the packages could not be unpacked: {result.stderr.decode()[-500:]}")
