"""A bare root for trying example tasks: a user namespace, a chroot and nothing of the service.

It has the same places that a sandbox has (`/app`, `/setup`, `/tests`, `/logs/verifier`) on a
tmpfs, the programs read-only from the base image or else from this machine. It isolates
nothing that matters: it is for scripts of this repository only.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rollouts.importers.base import Files, TaskRecord

BASE_IMAGE = Path(__file__).resolve().parents[3] / "var" / "images" / "base"
TIMEOUT_SECONDS = 120

OUTER = r"""
set -eu
mount -t tmpfs none "$ROOT"
cd "$ROOT"
mkdir -p dev etc logs/verifier proc root tmp usr
for link in bin sbin lib lib64; do
    [ -e "$IMAGE/$link" ] && ln -s "usr/$link" "$link"
done
mount --rbind "$IMAGE/usr" usr
mount --rbind "$IMAGE/etc" etc
mount -o remount,bind,ro usr
mount --rbind /proc proc
mount --bind "$LOGS" logs/verifier
ln -s /proc/self/fd dev/fd
for device in null zero urandom; do
    touch "dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
cp -r "$STAGE/setup" setup
mkdir app
run() {
    chroot . /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
        /bin/bash -c "cd /app && exec bash $1"
}
[ -e setup/setup.sh ] && run /setup/setup.sh
rm -rf setup
cp -r "$STAGE/agent" solution
[ -e solution/solve.sh ] && run /solution/solve.sh
rm -rf solution tests
cp -r "$STAGE/tests" tests
run /tests/test.sh
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Hold what the scripts left: the reward files and everything printed."""

    reward_json: bytes | None
    reward_txt: bytes | None
    log: str


def missing() -> str | None:
    """Say why no such root can be made here; None when it can."""
    if shutil.which("unshare") is None:
        return "unshare (util-linux) is not installed"
    tried = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "true"],
        capture_output=True,
        check=False,
    )
    if tried.returncode != 0:
        return "user namespaces are not allowed here"
    for program in ("bash", "git", "python3"):
        if not (programs() / "usr/bin" / program).exists():
            return f"{programs()} has no usr/bin/{program}; build the base image"
    return None


def programs() -> Path:
    """Return the root that programs are taken from."""
    return BASE_IMAGE if (BASE_IMAGE / "usr/bin/python3").exists() else Path("/")


def attempt(task: TaskRecord, agent: Files, folder: Path) -> Outcome:
    """Set the task up, run the agent's `solve.sh` if there is one, then the task's test."""
    stage, logs, root = folder / "stage", folder / "logs", folder / "root"
    for name, files in (("setup", task.files), ("agent", agent), ("tests", task.tests)):
        write_files(stage / name, files)
    logs.mkdir()
    root.mkdir()
    process = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--mount", "/bin/bash", "-c", OUTER],
        env={
            "PATH": os.environ["PATH"],
            "ROOT": str(root),
            "STAGE": str(stage),
            "LOGS": str(logs),
            "IMAGE": str(programs()).rstrip("/"),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(
        reward_json=_read(logs / "reward.json"),
        reward_txt=_read(logs / "reward.txt"),
        log=printed.decode(errors="replace"),
    )


def write_files(folder: Path, files: Files) -> None:
    """Write files with their modes."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.data)
        path.chmod(content.mode)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
