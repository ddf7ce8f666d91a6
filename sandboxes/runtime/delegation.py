"""Find where this worker may make control groups, and give a folder there to the account."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes.runtime.account import Account
from sandboxes.runtime.cgroups import CONTROLLERS, SERVICE

AUTO = "auto"
NONE = "none"
_WORKER = "worker"  # where the worker's own processes go when its group must be empty
_DELEGATED = ("trusted.delegate", "user.delegate")  # systemd's marks of Delegate=yes
_OPENED = ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "tasks")


@dataclass(frozen=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    point: Path
    root: str


@dataclass
class Delegation:
    """Make and remove the folder in which an account may make its groups.

    `wanted` is "auto", "none", or the absolute path of a group of version 2 that was
    delegated to us. The folder carries the pid: each worker process has its own, below the
    group that it is in itself, so that whatever bounds the worker bounds its sandboxes.
    """

    root: Path
    account: Account
    wanted: str = AUTO
    version: int = 0
    _folders: dict[str, str] = field(default_factory=dict)
    _owner: int = 0
    _placed: int | None = None

    def folders(self, spawner: int | None) -> dict[str, str]:
        """Return the delegated folders by controller, made when missing; {} where none can be.

        `spawner` is the pid that will move processes. Version 2 asks for write access to the
        common ancestor of both groups, so the spawner is put below the folder first.
        """
        if self.wanted == NONE:
            return {}
        gone = not all(Path(folder).is_dir() for folder in self._folders.values())
        if gone or self._owner != os.getpid():
            self._owner, self._placed = os.getpid(), None
            self.version, self._folders = self._make()
        if self.version == 2 and spawner is not None and spawner != self._placed:
            base = next(iter(self._folders.values()))
            try:
                (Path(base) / SERVICE / "cgroup.procs").write_text(str(spawner))
            except OSError:
                self.version, self._folders = 0, {}
            self._placed = spawner
        return dict(self._folders)

    def close(self) -> None:
        """Remove the folders where no instance is left; a later start or close, the others."""
        if self._owner == os.getpid():
            for folder in sorted(set(self._folders.values())):
                _remove_empty(Path(folder))
                self._remove_dead(Path(folder).parent)
            self._owner, self._folders = 0, {}

    @property
    def name(self) -> str:
        """Return the name of our folders."""
        return f"{self._stem}{os.getpid()}"

    @property
    def _stem(self) -> str:
        digest = hashlib.sha256(str(self.root).encode()).hexdigest()[:8]
        return f"prorl-{digest}-"

    def _make(self) -> tuple[int, dict[str, str]]:
        own = _own_groups(Path("/proc/self/cgroup").read_text())
        mounts = list(_mounts(Path("/proc/self/mountinfo").read_text()))
        unified = [mount for mount in mounts if mount.version == 2]
        for parent in self._candidates(unified, own):
            found = self._make_unified(parent)
            if found:
                return 2, found
        if self.wanted != AUTO:
            return 0, {}
        found = {}
        for kind in CONTROLLERS:
            for mount in mounts:
                parent_v1 = _place(mount, own.get(kind)) if kind in mount.controllers else None
                if parent_v1 is not None and self._give(parent_v1):
                    found[kind] = str(parent_v1 / self.name)
        return (1, found) if found else (0, {})

    def _candidates(self, unified: list[_Mount], own: Mapping[str, str]) -> list[Path]:
        """Return the groups of version 2 that our folder could be made in."""
        if self.wanted != AUTO:
            return [Path(self.wanted)]
        found = []
        for mount in unified:
            place = _place(mount, own.get(""))
            if place is None:
                continue
            top = place == mount.point
            above = [] if top else [place.parent]
            found += [path for path in [*above, place] if _is_delegated(path, top=top)]
        return found

    def _make_unified(self, parent: Path) -> dict[str, str]:
        """Make our folder in a delegated group; {} when it has no controllers for us."""
        with suppress(OSError):
            offered = (parent / "cgroup.controllers").read_text().split()
            kinds = [kind for kind in CONTROLLERS if kind in offered]
            if not kinds or not self._give(parent):
                return {}
            base = parent / self.name
            try:
                _enable(parent, kinds)
                _enable(base, kinds)
                service = base / SERVICE
                service.mkdir(exist_ok=True)
                self._open(service)
            except OSError:
                _remove_empty(base)
                return {}
            return dict.fromkeys(kinds, str(base))
        return {}

    def _give(self, parent: Path) -> bool:
        """Make our folder in a group and give it to the account."""
        self._remove_dead(parent)
        folder = parent / self.name
        try:
            folder.mkdir(exist_ok=True)
            self._open(folder)
        except OSError:
            return False
        return True

    def _remove_dead(self, parent: Path) -> None:
        """Remove the empty folders of this deployment's workers that ended without `close`."""
        for old in parent.glob(f"{self._stem}*"):
            if not Path(f"/proc/{old.name.removeprefix(self._stem)}").exists():
                _remove_empty(old)

    def _open(self, folder: Path) -> None:
        """Give a group's folder to the account, but not the files that would limit it."""
        if os.geteuid() == 0:
            for path in [folder, *(folder / name for name in _OPENED)]:
                if path.exists():
                    os.chown(path, self.account.uid, self.account.gid)


def enforcement(folders: Mapping[str, str], version: int) -> dict[str, str]:
    """Return how an isolating runtime keeps each limit, by the names of `Limits`."""
    group = f"cgroup v{version}"
    return {
        "memory": group if "memory" in folders else "watchdog",
        "cpu": group if "cpu" in folders else "none",
        "processes": group if "pids" in folders else "rlimit",
        "disk": "watchdog",
    }


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        (folder / SERVICE).rmdir()
    with suppress(OSError):
        folder.rmdir()


def _enable(group: Path, kinds: list[str]) -> None:
    """Hand controllers on to the groups below; raises OSError.

    A group other than the topmost may not hold processes then (EBUSY): where they are all
    ours, as in a unit with Delegate=yes, they move one level down.
    """
    text = " ".join(f"+{kind}" for kind in kinds)
    control = group / "cgroup.subtree_control"
    if set(kinds) <= set(control.read_text().split()):
        return
    try:
        control.write_text(text)
    except OSError as fault:
        members = (group / "cgroup.procs").read_text().split()
        owners = {Path(f"/proc/{pid}").stat().st_uid for pid in members}
        if fault.errno != errno.EBUSY or owners - {os.geteuid()}:
            raise
        worker = group / _WORKER
        worker.mkdir(exist_ok=True)
        for pid in members:
            with suppress(ProcessLookupError):
                (worker / "cgroup.procs").write_text(pid)
        control.write_text(text)


def _is_delegated(group: Path, *, top: bool) -> bool:
    """Tell whether a group is ours to divide: by its owner, or for root by systemd's mark.

    `top` says that we see no group above it: a container's own, or a node without systemd.
    """
    if os.geteuid() != 0:
        return os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK)
    if top:
        return shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir()
    for mark in _DELEGATED:
        with suppress(OSError):
            if os.getxattr(group, mark) == b"1":
                return True
    return False


def _own_groups(text: str) -> dict[str, str]:
    """Return our group by controller from /proc/self/cgroup; "" stands for version 2."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, kinds, path = line.split(":", 2)
        found |= dict.fromkeys(kinds.split(","), path)
    return found


def _mounts(text: str) -> Iterator[_Mount]:
    """Yield the cgroup file systems of /proc/self/mountinfo."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, point = before.split(" ")[3:5]
            yield _Mount(
                version=2 if kind == "cgroup2" else 1,
                controllers=frozenset(options.split(",")),
                point=Path(point),
                root=root,
            )


def _place(mount: _Mount, own: str | None) -> Path | None:
    """Return our own group's folder in a mount; None when the mount does not show it."""
    if own is None or not Path(own).is_relative_to(mount.root):
        return None
    return mount.point / Path(own).relative_to(mount.root)
