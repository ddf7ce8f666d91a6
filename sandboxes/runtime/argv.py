"""The command lines of Apptainer, nsenter and unshare; they are built nowhere else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxes.runtime.exceptions import RuntimeMissing
from sandboxes.runtime.protocol import Network

Words = list[str]

HOST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SANDBOX_ENV = {
    "PATH": HOST_PATH,
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
HOSTNAME = "sandbox"

# Descriptor 3 tells that the sandbox was entered: what comes after is the program's own.
ENTER_DESCRIPTOR = 3
_ENTER = 'printf . >&3; exec 3>&-; cd -- "$1" || exit 126; shift; exec "$@"'
# The overlay needs userxattr, which neither --overlay nor --writable-tmpfs passes: without
# it deleting a directory of the image fails with EIO in a user namespace.
_MOUNT = 'mount -t overlay overlay -o "$1" "$2" && shift 2 && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Hold the absolute paths of the programs that the runtime calls."""

    engine: str
    nsenter: str
    setpriv: str
    unshare: str


def find_tools() -> Tools:
    """Find the programs on this node; raises RuntimeMissing naming those it misses."""
    path = os.pathsep.join([os.environ.get("PATH", ""), HOST_PATH])
    engine = shutil.which("apptainer", path=path) or shutil.which("singularity", path=path)
    found = {name: shutil.which(name, path=path) for name in ("nsenter", "setpriv", "unshare")}
    missing = [name for name, where in found.items() if where is None]
    if engine is None:
        missing.insert(0, "apptainer (or singularity)")
    if missing or engine is None:
        raise RuntimeMissing(f"missing {', '.join(missing)}: run scripts/install-apptainer")
    return Tools(
        engine=engine,
        nsenter=str(found["nsenter"]),
        setpriv=str(found["setpriv"]),
        unshare=str(found["unshare"]),
    )


def engine_env(root: Path) -> dict[str, str]:
    """Return the whole environment of an Apptainer call; nothing of ours passes through."""
    folders = {"CONFIGDIR": root / "apptainer", "CACHEDIR": root / "tmp", "TMPDIR": root / "tmp"}
    env = {"PATH": HOST_PATH, "HOME": str(root / "home"), "LANG": "C.UTF-8"}
    for key, folder in folders.items():
        env[f"APPTAINER_{key}"] = env[f"SINGULARITY_{key}"] = str(folder)
    return env


def start_argv(
    tools: Tools, *, name: str, options: str, merged: str, network: Network
) -> list[str]:
    """Mount the overlay in a new user namespace and start the instance on it."""
    isolated = ["--net", "--network", "none"] if network == "none" else []
    return [
        *(tools.unshare, "-U", "-r", "-m", "--", "/bin/sh", "-c", _MOUNT, "sh", options, merged),
        *(tools.engine, "--silent", "instance", "start", "--userns", "--containall"),
        *("--no-mount", "home,tmp,cwd,bind-paths,/etc/localtime,/etc/hosts"),
        *("--cleanenv", "--uts", "--hostname", HOSTNAME, *isolated),
        *("--writable", merged, name),
    ]


def enter_argv(tools: Tools, *, pid: int, network: Network) -> list[str]:
    """Enter the namespaces of a running instance; the program's own words follow."""
    spaces = ["-U", "--preserve-credentials", "-m", "-p", "-i", "-u"]
    if network == "none":
        spaces.append("-n")
    return [tools.setpriv, "--no-new-privs", tools.nsenter, "-t", str(pid), *spaces, "--"]


def engine_exec_argv(tools: Tools, *, name: str, env: Mapping[str, str]) -> list[str]:
    """Enter through Apptainer itself, eight times slower, where nsenter may not.

    Apptainer 1.4 passes neither --env nor APPTAINERENV_* on to a running instance, so
    `/usr/bin/env` sets the environment in there; users of this node can read it in `ps`.
    """
    inside = [f"{key}={value}" for key, value in env.items()]
    return [
        *(tools.setpriv, "--no-new-privs", tools.engine, "--silent", "exec", "--cleanenv"),
        *("--pwd", "/", f"instance://{name}", "/usr/bin/env", "-i", *inside),
    ]


def program_argv(argv: Sequence[str], *, cwd: str) -> list[str]:
    """Wrap a program so that descriptor 3 tells of the entry and it starts in `cwd`."""
    return ["/bin/sh", "-c", _ENTER, "sh", cwd, *argv]


def bash_argv() -> list[str]:
    """Return the interactive bash of a shell session."""
    return ["bash", "--noprofile", "--norc", "--noediting", "-i"]


def remove_argv(tools: Tools | None, paths: Sequence[str]) -> list[str]:
    """Delete folders as root of a user namespace: modes of 000 inside do not stop it.

    Without tools (no isolation, no foreign modes) they are deleted plainly.
    """
    rm = ["/bin/rm", "-rf", "--one-file-system", "--", *paths]
    return [tools.unshare, "-U", "-r", "--", *rm] if tools is not None else rm
