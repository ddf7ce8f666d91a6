"""The command lines of Apptainer, nsenter and unshare; they are built nowhere else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sandboxes.runtime.exceptions import RuntimeMissing
from sandboxes.runtime.protocol import Gpu, Network

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
GPU_OPTION: dict[Gpu, str] = {"nvidia": "--nv", "rocm": "--rocm"}
GPU_DEVICE: dict[Gpu, str] = {"nvidia": "/dev/nvidiactl", "rocm": "/dev/kfd"}
GPU_ENV = {"LD_LIBRARY_PATH": "/.singularity.d/libs"}  # where both options put the libraries

# Descriptor 3 tells that the sandbox was entered: what comes after is the program's own.
ENTER_DESCRIPTOR = 3
_ENTER = 'printf . >&3; exec 3>&-; cd -- "$1" || exit 126; shift; exec "$@"'
# A sandbox belongs to the account that its control groups belong to: it must neither see their
# files nor mount them again from a cgroup namespace of its own. What is set in the outer user
# namespace cannot be undone from the inner one.
_NO_CGROUPS = """echo 0 > /proc/sys/user/max_cgroup_namespaces
[ ! -d /sys/fs/cgroup ] || mount -t tmpfs -o ro,size=4k tmpfs /sys/fs/cgroup || exit 98
"""
# A namespace inside gives no power that the sandbox lacks, but each takes memory of the kernel
# that no limit counts: there are enough for a browser's or a build tool's own sandbox.
_FEW_NAMESPACES = """for kind in user mnt net pid ipc uts time; do
  echo 64 > "/proc/sys/user/max_${kind}_namespaces"
done 2>/dev/null
"""
_BASH = ["bash", "--noprofile", "--norc", "--noediting", "-i"]
_PLAIN_SHELL = ["/bin/sh", "-c", "SHELL=/bin/sh exec sh -i"]
# The overlay needs userxattr, which neither --overlay nor --writable-tmpfs passes: without
# it deleting a directory of the image fails with EIO in a user namespace.
_KERNEL_MOUNT = 'mount -t overlay overlay -o "$1" "$2" || exit 97; shift 3; exec "$@"'
# The daemon has left the mount namespace that it serves: the mount ends with the instance's last
# process, however that ends, and the daemon with its mount.
_FUSE_MOUNT = """command exec 4<>/dev/fuse || exit 97
mount -i -t fuse fuse-overlayfs "$2" \
  -o fd=4,rootmode=40000,user_id=0,group_id=0,default_permissions || exit 97
unshare -m -- /bin/sh -c 'umount -l "$1" && exec "$2" -f -o "$3" /dev/fd/4' sh "$2" "$3" "$1" 3>&- &
echo $! > "${2%/*}/driver.pid"
exec 4>&-
shift 3
exec "$@"
"""
# The first process of an instance keeps its logs open, so a sandbox can write to them: they go
# to a small file system of their own, not to the node's disk, and are shown where a start fails.
# SingularityCE's starter knows no CONFIGDIR: it keeps its records in the home folder that passwd
# names, so it sees one of ours.
_START = """mkdir -p "$1" && mount -t tmpfs -o size=256k,mode=700 tmpfs "$1" || exit 98
logs=$1
shift
export "$1"
shift
case "$1" in */singularity)
  read -r _ uid _ </proc/self/uid_map
  printf '%s:x:%s:0::%s:/bin/sh\\n' "$(id -un "$uid")" "$uid" "$PWD/home" \\
    root 0 "$PWD/home" >"$logs/passwd"
  ln -sfn ../apptainer home/.singularity
  mount --bind "$logs/passwd" /etc/passwd || exit 98 ;;
esac
"$@" || { code=$?; cat "$logs"/*/*/*.err >&2 2>/dev/null; exit $code; }
"""
# SingularityCE has no instances in the OCI mode that a site may have made its default.
_NO_OCI = "SINGULARITY_NO_OCI=1"
_LOGS = "apptainer/instances/logs"  # below the root folder, where every start runs
MOUNT_REFUSED = 97
# Layers of another driver mark deletions otherwise: deleted files would come back.
KERNEL_DRIVER = "overlay-userxattr"
FUSE_DRIVER = "fuse-overlayfs"
Overlay = Literal["auto", "kernel", "fuse"]


@dataclass(frozen=True, kw_only=True)
class Tools:
    """Hold the absolute paths of the programs that the runtime calls.

    `fuse_overlayfs` is empty where there is none; `overlay` says which driver is wanted.
    """

    engine: str
    nsenter: str
    unshare: str
    fuse_overlayfs: str = ""
    overlay: Overlay = "auto"


def find_tools(*, engine: str = "", overlay: Overlay = "auto") -> Tools:
    """Find the programs on this node; raises RuntimeMissing naming those it misses.

    `engine` names another one than the first of apptainer and singularity: a name or a path.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), HOST_PATH])
    wanted = [engine] if engine else ["apptainer", "singularity"]
    found_engine = next(filter(None, (shutil.which(name, path=path) for name in wanted)), None)
    found = {name: shutil.which(name, path=path) for name in ("nsenter", "unshare")}
    missing = [name for name, where in found.items() if where is None]
    if found_engine is None:
        missing.insert(0, engine or "apptainer (or singularity)")
    fuse_overlayfs = shutil.which("fuse-overlayfs", path=path) or ""
    if overlay == "fuse" and not fuse_overlayfs:
        missing.append("fuse-overlayfs")
    if missing or found_engine is None:
        raise RuntimeMissing(f"missing {', '.join(missing)}: run scripts/install-apptainer")
    return Tools(
        engine=found_engine,
        nsenter=str(found["nsenter"]),
        unshare=str(found["unshare"]),
        fuse_overlayfs=fuse_overlayfs,
        overlay=overlay,
    )


def engine_env(root: Path) -> dict[str, str]:
    """Return the whole environment of an Apptainer call; nothing of ours passes through."""
    folders = {"CONFIGDIR": root / "apptainer", "CACHEDIR": root / "tmp", "TMPDIR": root / "tmp"}
    env = {"PATH": HOST_PATH, "HOME": str(root / "home"), "LANG": "C.UTF-8"}
    for key, folder in folders.items():
        env[f"APPTAINER_{key}"] = env[f"SINGULARITY_{key}"] = str(folder)
    return env


def mount_argv(tools: Tools, *, driver: str, options: str, merged: str) -> list[str]:
    """Mount the overlay in a new user namespace; the program that runs on it follows.

    Ends with MOUNT_REFUSED where the kernel refuses the mount.
    """
    mount = _FUSE_MOUNT if driver == FUSE_DRIVER else _KERNEL_MOUNT
    script = _NO_CGROUPS + _FEW_NAMESPACES + mount
    return [
        *(tools.unshare, "-U", "-r", "-m", "--", "/bin/sh", "-c", script, "sh"),
        *(options, merged, tools.fuse_overlayfs),
    ]


def start_argv(
    tools: Tools,
    *,
    name: str,
    options: str,
    merged: str,
    network: Network,
    gpu: Gpu = "",
    driver: str = KERNEL_DRIVER,
) -> list[str]:
    """Mount the overlay in a new user namespace and start the instance on it."""
    isolated = ["--net", "--network", "none"] if network == "none" else []
    if gpu:
        isolated.append(GPU_OPTION[gpu])
    return [
        *mount_argv(tools, driver=driver, options=options, merged=merged),
        *("/bin/sh", "-c", _START, "sh", _LOGS, _NO_OCI),
        *(tools.engine, "--silent", "instance", "start", "--userns", "--containall"),
        *("--no-mount", "home,tmp,cwd,bind-paths,/etc/localtime,/etc/hosts"),
        *("--cleanenv", "--uts", "--hostname", HOSTNAME, *isolated),
        *("--writable", merged, name),
    ]


def enter_argv(tools: Tools, *, pid: int, network: Network) -> list[str]:
    """Enter the namespaces of a running instance; the program's own words follow.

    nsenter sets no no-new-privs: the spawner, which starts it, has set it for good.
    """
    spaces = ["-U", "--preserve-credentials", "-m", "-p", "-i", "-u"]
    if network == "none":
        spaces.append("-n")
    return [tools.nsenter, "-t", str(pid), *spaces, "--"]


def engine_exec_argv(tools: Tools, *, name: str, env: Mapping[str, str]) -> list[str]:
    """Enter through Apptainer itself, eight times slower, where nsenter may not.

    Apptainer 1.4 passes neither --env nor APPTAINERENV_* on to a running instance, so
    `/usr/bin/env` sets the environment in there; users of this node can read it in `ps`.
    """
    inside = [f"{key}={value}" for key, value in env.items()]
    return [
        *("/usr/bin/env", _NO_OCI, tools.engine, "--silent", "exec", "--cleanenv"),
        *("--pwd", "/", f"instance://{name}", "/usr/bin/env", "-i", *inside),
    ]


def program_argv(argv: Sequence[str], *, cwd: str) -> list[str]:
    """Wrap a program so that descriptor 3 tells of the entry and it starts in `cwd`."""
    return ["/bin/sh", "-c", _ENTER, "sh", cwd, *argv]


def shell_argvs() -> tuple[Words, Words]:
    """Return the programs of a shell session: an interactive bash, then what to take without it."""
    return _BASH, _PLAIN_SHELL


def copy_argv(tools: Tools | None, source: str, target: str) -> list[str]:
    """Copy a folder's content as it is: owners, times, links, overlay marks, sparse files.

    Without tools the reader is no root of anything, so what it may not read is left out.
    """
    words = ["/bin/cp", "-a", "--reflink=auto", "--sparse=auto", "--", f"{source}/.", target]
    return [tools.unshare, "-U", "-r", "--", *words] if tools is not None else words


def marks_argv(tools: Tools, folder: str) -> list[str]:
    """Print the first name below a folder that fuse-overlayfs did not make, yet takes for a mark.

    Its own marks of deletions are devices or empty files.
    """
    mark = ["(", "-type", "c", "-o", "-type", "f", "-empty", ")"]
    find = ["/usr/bin/find", folder, "-name", ".wh.*", "!", *mark, "-print", "-quit"]
    return [tools.unshare, "-U", "-r", "--", *find]


def remove_argv(tools: Tools | None, paths: Sequence[str]) -> list[str]:
    """Delete folders as root of a user namespace: modes of 000 inside do not stop it.

    Without tools (no isolation, no foreign modes) they are deleted plainly.
    """
    rm = ["/bin/rm", "-rf", "--one-file-system", "--", *paths]
    return [tools.unshare, "-U", "-r", "--", *rm] if tools is not None else rm
