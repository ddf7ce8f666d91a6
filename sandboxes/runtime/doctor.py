"""What a node needs for sandboxes, looked at as the account that will run them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sandboxes.runtime.account import Account
from sandboxes.runtime.argv import HOST_PATH, engine_env, find_tools
from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.runtime.program import run_program
from sandboxes.runtime.protocol import Check
from sandboxes.runtime.spawner import Spawner

_FREE_BYTES = 5 * 1024**3
_INSTALL = "run scripts/install-apptainer as root"
_SECONDS = 20.0


def check_node(root: Path, account: Account, spawner: Spawner) -> list[Check]:
    """Return one finding per requirement; nothing stays behind."""
    found = [_engine(root, spawner)]
    found.append(_as_account(root, spawner, account))
    found.append(_overlay(root, spawner))
    found.append(_fuse(account))
    found.append(_program("unsquashfs", "squashfs-tools", "unpacks SIF images"))
    found.append(_disk(root))
    return found


def _run(spawner: Spawner, root: Path, argv: list[str]) -> tuple[int, str]:
    """Run a program as the account; returns its exit code and what it said."""
    try:
        result, _ = run_program(
            spawner,
            argv,
            env=engine_env(root),
            stdin=b"",
            timeout_seconds=_SECONDS,
            output_bytes=4096,
            cancelled=None,
            cwd=str(root),
        )
    except SandboxFault as fault:
        return 1, str(fault)
    said = (result.stdout + result.stderr).decode("utf-8", "replace").strip()
    code = result.exit_code
    return (code, said) if code is not None else (1, f"no answer within {_SECONDS:g} s")


def _engine(root: Path, spawner: Spawner) -> Check:
    try:
        engine = find_tools().engine
    except SandboxFault as fault:
        return Check(name="apptainer", ok=False, detail=str(fault), remedy=_INSTALL)
    code, said = _run(spawner, root, [engine, "--version"])
    remedy = "" if code == 0 else f"{engine} does not run: {_INSTALL}"
    return Check(name="apptainer", ok=code == 0, detail=f"{engine}: {said}", remedy=remedy)


def _as_account(root: Path, spawner: Spawner, account: Account) -> Check:
    code, said = _run(spawner, root, ["/usr/bin/id", "-u"])
    ok = code == 0 and said == str(account.uid) and account.uid != 0
    detail = f"sandboxes run as {account.name} ({account.uid})" if ok else said
    remedy = "" if ok else f"{_INSTALL}, and let {account.name} reach {root}"
    return Check(name="account", ok=ok, detail=detail, remedy=remedy)


def _overlay(root: Path, spawner: Spawner) -> Check:
    """Delete a directory of a lower layer in an overlay of a user namespace: the real need."""
    script = (
        "d=$(mktemp -d tmp/check.XXXXXX) && mkdir -p $d/l/x $d/u $d/w $d/m"
        ' && trap "unshare -U -r -- rm -rf $d" EXIT'
        " && unshare -U -r -m -- sh -c 'mount -t overlay overlay -o userxattr,lowerdir=$1/l,"
        "upperdir=$1/u,workdir=$1/w $1/m && rmdir $1/m/x && mkdir $1/m/x; s=$?; umount $1/m;"
        " exit $s' sh $d"
    )
    code, said = _run(spawner, root, ["/bin/sh", "-c", script])
    remedy = (
        ""
        if code == 0
        else "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
        "user.max_user_namespaces > 0, kernel.apparmor_restrict_unprivileged_userns=0), a kernel "
        "of 5.11 or newer, and a local file system (not NFS) below the sandbox folder"
    )
    return Check(
        name="user namespaces and overlay",
        ok=code == 0,
        detail=said or "a directory of a lower layer was deleted and made again",
        remedy=remedy,
    )


def _fuse(account: Account) -> Check:
    device = Path("/dev/fuse")
    if not device.exists():
        return Check(name="/dev/fuse", ok=False, detail="missing", remedy="modprobe fuse")
    mode = device.stat().st_mode & 0o777
    ok = account.uid == 0 or mode & 0o006 == 0o006 or os.access(device, os.R_OK | os.W_OK)
    if os.geteuid() == 0:
        ok = mode & 0o006 == 0o006
    remedy = "" if ok else "chmod 666 /dev/fuse (a udev rule keeps it so)"
    return Check(name="/dev/fuse", ok=ok, detail=f"mode {mode:o}", remedy=remedy)


def _program(name: str, package: str, purpose: str) -> Check:
    where = shutil.which(name, path=HOST_PATH)
    remedy = "" if where else f"install {package}, which {purpose}"
    return Check(name=name, ok=where is not None, detail=where or "missing", remedy=remedy)


def _disk(root: Path) -> Check:
    free = shutil.disk_usage(root).free
    ok = free >= _FREE_BYTES
    remedy = "" if ok else f"free space on the file system of {root}, or give another folder"
    return Check(name="disk", ok=ok, detail=f"{free / 1024**3:.1f} GiB free", remedy=remedy)
