"""Count what sandboxes could leave on a node: processes, mounts, networks, folders, groups."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.layout import read_record
from sandboxes.runtime.processes import all_pids, all_stats, descendants
from sandboxes.runtime.protocol import SandboxHandle
from tests.sandbox.conftest import PREFIX

DEADLINE_SECONDS = 30.0


@dataclass(frozen=True)
class Census:
    """Hold what one runtime has on this node at one moment."""

    processes: frozenset[int]
    mounts: frozenset[str]
    networks: frozenset[str]
    folders: frozenset[str]
    groups: frozenset[str]


def census(runtime: ApptainerRuntime) -> Census:
    """Count what belongs to a runtime now; its spawner must run."""
    processes = processes_of(runtime)
    return Census(
        processes=frozenset(processes),
        mounts=frozenset(mounts_of(runtime)),
        networks=frozenset(networks_of(processes)),
        folders=frozenset(kept(runtime)),
        groups=frozenset(groups_of(runtime)),
    )


@contextmanager
def nothing_stays(runtime: ApptainerRuntime) -> Iterator[None]:
    """Compare the counts before and after, deletions that nobody waits for included."""
    runtime.prepare()
    assert eventually(lambda: not trash(runtime) and not jobs_of(runtime))
    before = census(runtime)
    yield
    assert eventually(lambda: census(runtime) == before), _difference(before, census(runtime))


def _difference(before: Census, after: Census) -> str:
    told = []
    for name in ("processes", "mounts", "networks", "folders", "groups"):
        old, new = getattr(before, name), getattr(after, name)
        if old != new:
            told.append(f"{name}: {sorted(new - old)} came, {sorted(old - new)} went")
    return "; ".join(told)


def eventually(condition: Callable[[], bool]) -> bool:
    """Ask until it is so or the deadline passed."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def processes_of(runtime: ApptainerRuntime) -> set[int]:
    """Return the living processes of one runtime: spawner, keepers, and all below them."""
    root = str(runtime.root).encode()
    found = set()
    for pid in all_pids():
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"sandboxes.runtime.spawner_server" in words and root in words:
                found |= {pid} | {stat.pid for stat in descendants(pid)}
    return found


def mounts_of(runtime: ApptainerRuntime) -> set[str]:
    """Return what is mounted on or from a runtime's folder, as the host sees it."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in lines if str(runtime.root) in line}


def jobs_of(runtime: ApptainerRuntime) -> set[int]:
    """Return the children of a runtime's spawner that are no instance's keeper."""
    records = (read_record(path) or {} for path in runtime.root.glob("instances/*/record.json"))
    keepers = {record.get("keeper_pid") for record in records}
    spawner = runtime._spawner.pid
    stats = all_stats()
    return {stat.pid for stat in stats if stat.parent == spawner and stat.pid not in keepers}


def networks_of(processes: set[int]) -> set[str]:
    """Return the network namespaces that processes are in."""
    found = set()
    for pid in processes:
        with suppress(OSError):
            found.add(str(Path(f"/proc/{pid}/ns/net").readlink()))
    return found


def kept(runtime: ApptainerRuntime) -> set[str]:
    """Return every path below the runtime's folder that an instance could leave."""
    bases = ("instances", "layers", "trash", "apptainer/instances/logs", "apptainer/instances/app")
    return {
        str(path)
        for base in bases
        for path in (runtime.root / base).rglob("*")
        if path.is_file() or base in ("instances", "layers", "trash")
    }


def trash(runtime: ApptainerRuntime) -> list[Path]:
    """Return what waits for its deletion."""
    return list((runtime.root / "trash").iterdir())


def groups_of(runtime: ApptainerRuntime) -> set[str]:
    """Return the control groups below the folders that were delegated to a runtime."""
    return {
        entry.path
        for folder in set(runtime._delegated().values())
        for entry in os.scandir(folder)
        if entry.is_dir()
    }


def output_of(runtime: ApptainerRuntime, handle: SandboxHandle, script: str) -> str:
    """Run a script of bash that must end well; returns what it printed."""
    result = runtime.exec(handle, ["bash", "-c", script], timeout_seconds=60)
    assert result.exit_code == 0, (result.exit_code, result.stdout, result.stderr)
    return result.stdout.decode()


@contextmanager
def runtime_of(folder: Path, groups: str) -> Iterator[ApptainerRuntime]:
    """Make a runtime whose control groups are "auto" or "none"; nothing of it stays."""
    made = ApptainerRuntime(folder / "root", PREFIX, resolve_account(None), groups=groups)
    made.prepare()
    try:
        yield made
    finally:
        for name in [*made.list(), *made.list_warm()]:
            made.stop(name)
        made.close()
