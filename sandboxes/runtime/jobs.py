"""Work on instances and layers that may block; each call is a forked process of its own."""

from __future__ import annotations

import fcntl
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

from sandboxes.runtime import wire
from sandboxes.runtime.argv import HOST_PATH, Tools, remove_argv
from sandboxes.runtime.exceptions import (
    ImageUnusable,
    LayerMissing,
    SandboxFault,
    SandboxGone,
    StopFailed,
)
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.processes import is_running, kill_process, read_stat
from sandboxes.runtime.sif import find_root_partition

KILL_SECONDS = 10.0
REMOVE_SECONDS = 300.0
UNPACK_SECONDS = 900.0

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


def stop(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """End an instance and delete its folder; fine when there is none."""
    name = message["name"]
    folder = layout.instance(name)
    end_instance(layout, name)
    remove(layout, _tools(message), [folder] if folder.exists() else [])
    succeed(channel)


def freeze(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """End an instance and move its writable layer among the frozen ones."""
    name, reference = message["name"], f"layer-{uuid.uuid4().hex}"
    folder, target = layout.instance(name), layout.layer(reference)
    record = read_record(folder / "record.json")
    if record is None:
        raise SandboxGone(f"no sandbox {name} to freeze")
    end_instance(layout, name)
    building = layout.root / "trash" / reference
    building.mkdir()
    (folder / "upper").rename(building / "diff")
    details = {key: record.get(key) for key in ("image", "layers")}
    write_record(
        building / "layer.json",
        {"driver": record.get("driver"), "from": name, "frozen_at": time.time(), **details},
    )
    building.rename(target)
    remove(layout, _tools(message), [folder])
    succeed(channel, reference=reference)


def discard(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Delete a frozen layer; fine when there is none."""
    try:
        folder = layout.layer(message["reference"])
    except ValueError as fault:
        raise LayerMissing(str(fault)) from None
    remove(layout, _tools(message), [folder] if folder.exists() else [])
    succeed(channel)


def sweep_trash(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Delete what a killed removal left, older than the longest removal."""
    limit = time.time() - REMOVE_SECONDS
    old = [path for path in (layout.root / "trash").iterdir() if path.lstat().st_ctime < limit]
    if old:
        _run(remove_argv(_tools(message), [str(path) for path in old]))
    succeed(channel)


def unpack(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Unpack a SIF image once; the others that want it wait on a lock."""
    source, target = Path(message["source"]), layout.root / "images" / message["key"]
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            _unpack(source, target, str(message["unsquashfs"]))
    succeed(channel, image=str(target))


def _unpack(source: Path, target: Path, unsquashfs: str) -> None:
    try:
        partition = find_root_partition(source)
    except PermissionError:
        raise ImageUnusable(f"the sandbox account cannot read {source}") from None
    part = target.with_suffix(".part")
    if part.exists():
        shutil.rmtree(part)
    ended = subprocess.run(
        [
            *(unsquashfs, "-no-progress", "-quiet", "-no-xattrs", "-ignore-errors"),
            *("-no-exit-code", "-processors", "2", "-offset", str(partition.offset)),
            *("-dest", str(part), str(source)),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=UNPACK_SECONDS,
        env={"PATH": HOST_PATH, "LANG": "C.UTF-8"},
        check=False,
    )
    if ended.returncode != 0 or not (part / ".singularity.d").is_dir():
        detail = ended.stderr.decode("utf-8", "replace")[-1000:]
        raise ImageUnusable(f"{source} could not be unpacked: {detail or 'no .singularity.d'}")
    for folder, _, _ in os.walk(part):
        Path(folder).chmod(Path(folder).stat().st_mode | 0o700)
    part.rename(target)


def _tools(message: wire.Message) -> Tools | None:
    return Tools(**message["tools"]) if message["tools"] else None


def end_instance(layout: Layout, name: str) -> None:
    """Kill what carries that name, by pid and start time; raises StopFailed."""
    record = read_record(layout.instance(name) / "record.json") or {}
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
    if not pid:
        _end_unrecorded(layout, name)
    for path in layout.engine_records(name):
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
        if owner == os.geteuid() and command.startswith(b"appinit"):
            kill_process(stat.pid, stat.start_ticks, wait_seconds=KILL_SECONDS)


def _await_keeper(name: str, keeper: int, ticks: int) -> None:
    deadline = time.monotonic() + KILL_SECONDS
    while keeper and is_running(keeper, ticks):
        if time.monotonic() > deadline:
            if not kill_process(keeper, ticks, wait_seconds=1):
                raise StopFailed(f"the watchdog of sandbox {name} did not end")
            return
        time.sleep(0.002)


def remove(layout: Layout, tools: Tools | None, folders: list[Path]) -> None:
    """Take folders out of sight at once, then delete them; raises StopFailed."""
    moved = []
    for folder in folders:
        target = layout.root / "trash" / uuid.uuid4().hex
        with suppress(FileNotFoundError):
            folder.rename(target)
            moved.append(str(target))
    if moved:
        _run(remove_argv(tools, moved))


def _run(argv: list[str]) -> None:
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
