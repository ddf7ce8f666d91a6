"""Work on instances and layers that may block; each call is a forked process of its own."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandboxes.runtime import cgroups, wire
from sandboxes.runtime.argv import HOST_PATH, Tools, remove_argv
from sandboxes.runtime.exceptions import (
    LayerMissing,
    SandboxFault,
    SandboxGone,
    StartFailed,
    StopFailed,
)
from sandboxes.runtime.layers import used_layers
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.overlay import choose_driver, forget_driver
from sandboxes.runtime.processes import await_end, is_running, kill_process, read_stat
from sandboxes.runtime.usage import folder_bytes

KILL_SECONDS = 10.0
REMOVE_SECONDS = 300.0
SNAPSHOT = "snapshot-"  # what is built in the folder for temporary files, by how it begins
_CLAIM = "start-"
_BUILD_SECONDS = 3600.0

Channel = Any
Job = Callable[[Layout, Channel, wire.Message], None]


def answer(job: Job, layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Run a job and report its fault over the channel."""
    try:
        job(layout, channel, message)
    except SandboxFault as fault:
        _report(channel, fault.code, str(fault))
    except Exception as fault:  # a process boundary: nothing may pass it unseen
        _report(channel, "", f"{type(fault).__name__}: {fault}")


def _report(channel: Channel, code: str, text: str) -> None:
    with suppress(OSError):
        wire.send(channel, {"event": "error", "code": code, "message": text[-4000:]})


def succeed(channel: Channel, **value: Any) -> None:
    """Report the result of a job; raises OSError when nobody listens any more."""
    wire.send(channel, {"event": "result", **value})


def claim(layout: Layout, spec: dict[str, Any]) -> dict[str, Any]:
    """Take an instance's name for this process, its keeper; returns the record of its folder.

    The folder appears with the record in it: who stops it at any time finds whom to end. Raises
    StartFailed.
    """
    own, name = read_stat(os.getpid()), spec["name"]
    assert own is not None
    record = spec | {"keeper_pid": own.pid, "keeper_ticks": own.start_ticks}
    building = layout.root / "tmp" / f"{_CLAIM}{uuid.uuid4().hex}"
    try:
        building.mkdir(mode=0o700)
        write_record(building / "record.json", record)
        building.rename(layout.instance(name))
    except OSError as fault:
        shutil.rmtree(building, ignore_errors=True)
        if fault.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise StartFailed(f"the name {name} is in use") from None
        raise StartFailed(f"{name} could not be started: {fault}") from None
    return record


def find_driver(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Report the overlay driver that a start would take now, tried again."""
    tools = tools_of(message)
    assert tools is not None
    forget_driver(layout)
    succeed(channel, driver=choose_driver(layout, tools))


def stop(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """End an instance and delete its folder; fine when there is none."""
    name = message["name"]
    folder = layout.instance(name)
    end_instance(layout, name)
    hidden = hide(layout, [folder])
    with suppress(OSError):
        succeed(channel)
    delete(tools_of(message), hidden)  # nobody waits for it; what fails is swept


def freeze(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """End an instance and move its writable layer among the frozen ones."""
    name, reference = message["name"], str(message["reference"])
    folder = layout.instance(name)
    record = read_record(folder / "record.json")
    if record is None:
        raise SandboxGone(f"no sandbox {name} to freeze")
    end_instance(layout, name)
    building = layout.root / "trash" / uuid.uuid4().hex
    building.mkdir()
    (folder / "upper").rename(building / "diff")
    keep_layer(layout, record, building, reference)
    hidden = hide(layout, [folder, building])
    with suppress(OSError):
        succeed(channel, reference=reference)
    delete(tools_of(message), hidden)


def keep_layer(layout: Layout, record: dict[str, Any], building: Path, reference: str) -> None:
    """Put a finished layer in its place; a prepared one that is there already stays."""
    details = {key: record.get(key) for key in ("driver", "image", "layers")}
    details |= {"from": record["name"], "frozen_at": time.time()}
    details["bytes"] = folder_bytes(building / "diff")
    write_record(building / "layer.json", details)
    try:
        building.rename(layout.layer(reference))
    except OSError as fault:
        if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def evict(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Delete a prepared layer unless something lies on it.

    It is put out of sight before the last look: what wants it after that finds it missing, and
    a start that found it has written so in its record before.
    """
    folder = layout.layer(message["reference"])
    hidden = hide(layout, [folder])
    if hidden and message["reference"] in used_layers(layout):
        with suppress(OSError):
            hidden[0].rename(folder)
            hidden = []
    succeed(channel, evicted=bool(hidden))
    delete(tools_of(message), hidden)


def discard(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Delete a frozen layer; fine when there is none."""
    try:
        folder = layout.layer(message["reference"])
    except ValueError as fault:
        raise LayerMissing(str(fault)) from None
    remove(layout, tools_of(message), [folder] if folder.exists() else [])
    succeed(channel)


def sweep_trash(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Delete what killed removals, copies and starts left, older than the longest of them."""
    delegated = message.get("cgroups") or {}
    cgroups.sweep(delegated, lambda: used_groups(layout))
    old = _older(layout.root / "trash", REMOVE_SECONDS)
    for kind in (SNAPSHOT, _CLAIM):
        old += _older(layout.root / "tmp", _BUILD_SECONDS, f"{kind}*")
    delete(tools_of(message), old)
    succeed(channel)


def _older(folder: Path, seconds: float, pattern: str = "*") -> list[Path]:
    """Return what lies in a folder unchanged for some time; others delete there meanwhile."""
    limit, found = time.time() - seconds, []
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):
            if path.lstat().st_ctime < limit:
                found.append(path)
    return found


def used_groups(layout: Layout) -> set[str]:
    """Return the names of the control groups of every instance, those that still start too."""
    used = set()
    for folder in (layout.root / "instances").iterdir():
        groups = (read_record(folder / "record.json") or {}).get("cgroups") or {}
        used |= {folder.name, *(Path(group).name for group in groups.values())}
    return used


def tools_of(message: wire.Message) -> Tools | None:
    return Tools(**message["tools"]) if message["tools"] else None


def end_instance(layout: Layout, name: str) -> None:
    """Kill what carries that name, by pid and start time; raises StopFailed."""
    record = read_record(layout.instance(name) / "record.json") or {}
    engine_name = str(record.get("engine_name", name))
    keeper, pid = int(record.get("keeper_pid", 0)), int(record.get("pid", 0))
    ticks = int(record.get("keeper_ticks", 0))
    if pid:
        if not kill_process(pid, int(record["start_ticks"]), wait_seconds=KILL_SECONDS):
            raise StopFailed(f"process {pid} of sandbox {name} did not end")
    elif keeper and is_running(keeper, ticks):
        # Still starting: its keeper gives up and collects all that the start made.
        with suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGTERM)
    _await_keeper(name, keeper, ticks)
    cgroups.remove(record.get("cgroups") or {})  # its keeper did, unless it was killed
    if not pid:
        _end_unrecorded(layout, engine_name)
    for path in layout.engine_records(engine_name):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _end_unrecorded(layout: Layout, name: str) -> None:
    """End an instance that only Apptainer's own record knows: its keeper died at the start."""
    for path in layout.engine_records(name):
        entry = read_record(path / f"{name}.json") or {}
        stat = read_stat(int(entry.get("pid", 0)))
        if stat is None:
            continue
        command = Path(f"/proc/{stat.pid}/cmdline").read_bytes()
        owner = Path(f"/proc/{stat.pid}").stat().st_uid
        if owner == os.geteuid() and command.startswith((b"appinit", b"sinit")):
            kill_process(stat.pid, stat.start_ticks, wait_seconds=KILL_SECONDS)


def _await_keeper(name: str, keeper: int, ticks: int) -> None:
    if not keeper or await_end(keeper, ticks, wait_seconds=KILL_SECONDS):
        return
    if not kill_process(keeper, ticks, wait_seconds=1):
        raise StopFailed(f"the watchdog of sandbox {name} did not end")


def remove(layout: Layout, tools: Tools | None, folders: list[Path]) -> None:
    """Take folders out of sight at once, then delete them; raises StopFailed."""
    delete(tools, hide(layout, folders))


def hide(layout: Layout, folders: list[Path]) -> list[Path]:
    """Move folders to the trash; returns where they are now."""
    moved = []
    for folder in folders:
        target = layout.root / "trash" / uuid.uuid4().hex
        with suppress(FileNotFoundError):
            folder.rename(target)
            moved.append(target)
    return moved


def delete(tools: Tools | None, folders: list[Path]) -> None:
    """Delete folders for good; raises StopFailed."""
    if folders:
        run_tool(remove_argv(tools, [str(folder) for folder in folders]))


def run_tool(argv: list[str]) -> None:
    ended = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=REMOVE_SECONDS,
        env={"PATH": HOST_PATH, "LANG": "C.UTF-8"},
        check=False,
    )
    if ended.returncode != 0:
        raise StopFailed(ended.stderr.decode("utf-8", "replace")[-1000:])
