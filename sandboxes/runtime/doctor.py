"""What a node needs for sandboxes, looked at as the account that will run them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from sandboxes.runtime.account import Account
from sandboxes.runtime.argv import HOST_PATH, Tools, engine_env, find_tools
from sandboxes.runtime.exceptions import SandboxFault
from sandboxes.runtime.program import run_program
from sandboxes.runtime.protocol import Check
from sandboxes.runtime.spawner import Spawner

_FREE_BYTES = 5 * 1024**3
_INSTALL = "run scripts/install-apptainer as root"
_SECONDS = 20.0
_OVERLAY_SECONDS = 90.0

_WAYS = {
    "memory": {
        "cgroup v2": "the kernel ends a sandbox as a whole",
        "cgroup v1": "the kernel ends a process, the keeper the sandbox",
        "watchdog": "looked at up to 16 times a second, more may be taken in between",
    },
    "cpu": {
        "cgroup v2": "cpu.max",
        "cgroup v1": "a quota of the fair scheduler",
        "none": "Limits.cpus has no effect",
    },
    "processes": {
        "cgroup v2": "pids.max",
        "cgroup v1": "pids.max",
        "rlimit": "RLIMIT_NPROC, which counts per user namespace",
    },
    "disk": {"watchdog": "blocks and files are counted, and no file is longer than the limit"},
}
_DELEGATE = (
    "control groups would keep it better: run the worker in a systemd unit with Delegate=yes (or "
    "under systemd-run --user --scope -p Delegate=yes), or as root where version 1 is mounted"
)


def check_node(
    root: Path,
    account: Account,
    spawner: Spawner,
    kept: Mapping[str, str],
    wanted: Callable[[], Tools] = find_tools,
) -> list[Check]:
    """Return one finding per requirement, and one per limit; nothing stays behind.

    `kept` says how each limit is kept, as `Runtime.enforcement` does; `wanted` finds the
    tools that starts use.
    """
    try:
        tools: Tools | None = wanted()
        found = [_engine(root, spawner, wanted().engine)]
    except SandboxFault as fault:
        tools = None
        found = [Check(name="apptainer", ok=False, detail=str(fault), remedy=_INSTALL)]
    found.append(_as_account(root, spawner, account))
    found.append(_overlay(spawner, tools))
    found.append(_fuse(account))
    found.append(_program("unsquashfs", "squashfs-tools", "unpacks SIF images"))
    found.append(_disk(root))
    found.extend(_limit(name, way) for name, way in kept.items())
    return found


def _limit(name: str, way: str) -> Check:
    """Tell how a limit is kept; one that this node cannot keep is no fault of the node."""
    detail = f"{way}: {_WAYS[name][way]}"
    if name != "disk" and not way.startswith("cgroup"):
        detail += f"; {_DELEGATE}"
    return Check(name=f"limit: {name}", ok=True, detail=detail)


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


def _engine(root: Path, spawner: Spawner, engine: str) -> Check:
    code, said = _run(spawner, root, [engine, "--version"])
    remedy = "" if code == 0 else f"{engine} does not run: {_INSTALL}"
    return Check(name="apptainer", ok=code == 0, detail=f"{engine}: {said}", remedy=remedy)


def _as_account(root: Path, spawner: Spawner, account: Account) -> Check:
    code, said = _run(spawner, root, ["/usr/bin/id", "-u"])
    ok = code == 0 and said == str(account.uid) and account.uid != 0
    detail = f"sandboxes run as {account.name} ({account.uid})" if ok else said
    remedy = "" if ok else f"{_INSTALL}, and let {account.name} reach {root}"
    return Check(name="account", ok=ok, detail=detail, remedy=remedy)


def _overlay(spawner: Spawner, tools: Tools | None) -> Check:
    """Try the overlay drivers as a start does: a directory of a lower layer is replaced."""
    name = "user namespaces and overlay"
    if tools is None:
        return Check(name=name, ok=False, detail="the tools are missing", remedy=_INSTALL)
    try:
        message = {"op": "driver", "tools": asdict(tools)}
        found = spawner.run_job(message, timeout_seconds=_OVERLAY_SECONDS)
    except SandboxFault as fault:
        remedy = (
            "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
            "user.max_user_namespaces > 0, kernel.apparmor_restrict_unprivileged_userns=0); the "
            "kernel's overlay wants Linux 5.11 and a local file system (not NFS) below the "
            "sandbox folder, fuse-overlayfs wants /dev/fuse"
        )
        return Check(name=name, ok=False, detail=str(fault), remedy=remedy)
    return Check(name=name, ok=True, detail=f"{found['driver']} replaced a directory of an image")


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
