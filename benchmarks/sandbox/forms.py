"""The forms in which a sandbox can be started: ours, and Apptainer's own."""

from __future__ import annotations

import os
import select
import stat
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.sandbox.stage import START_SECONDS, Stage
from benchmarks.sandbox.ways import WayBroken
from sandboxes.runtime.argv import engine_env
from sandboxes.runtime.layout import Layout, read_record
from sandboxes.runtime.processes import ProcessStat, all_stats, is_running, kill_process, read_stat

OURS, OURS_AHEAD = "ours: kernel overlay on disk", "ours, from the warm pool"
SIF = "SIF, --writable-tmpfs"
UNPACKED = "unpacked, --writable-tmpfs"
OVERLAY = "unpacked, --overlay DIR"

_END_SECONDS = 30.0
_BUILD_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class Running:
    """Name a started sandbox by its first process; `record` is the runtime's own about it."""

    name: str
    pid: int
    start_ticks: int
    record: Path | None = None

    def members(self) -> list[ProcessStat]:
        """Return every process on the host that it costs, helpers of FUSE included.

        Apptainer starts each instance in a session of its own.
        """
        first = read_stat(self.pid)
        session = first.session if first is not None else 0
        record = (read_record(self.record) if self.record is not None else None) or {}
        keeper = record.get("keeper_pid", -1)
        return [
            stat
            for stat in all_stats()
            if stat.session == session != 0 or keeper in (stat.pid, stat.parent)
        ]

    def kill(self) -> None:
        """SIGKILL the first process, with which all in there end, and wait for its end."""
        if not kill_process(self.pid, self.start_ticks, wait_seconds=_END_SECONDS):
            raise WayBroken(f"{self.name} survived SIGKILL")


class Form(Protocol):
    """Start sandboxes of one form, from many threads at once."""

    label: str

    def prepare(self, count: int) -> None:
        """Make what the next `count` starts need and what is no part of them."""
        ...

    def start(self) -> Running:
        """Start a sandbox with a new name; this is what is timed."""
        ...

    def clean(self, running: Running) -> None:
        """End a sandbox, whether it still runs or not, and what is left of it."""
        ...

    def evict(self) -> None:
        """Drop the image's file pages from the page cache."""
        ...


class OurForm:
    """Start sandboxes by the runtime; `ahead` has them wait in the warm pool."""

    def __init__(self, stage: Stage, *, ahead: bool) -> None:
        self.label = OURS_AHEAD if ahead else OURS
        self._stage = stage
        self._ahead = ahead

    def prepare(self, count: int) -> None:
        """Fill the warm pool; nothing without one."""
        if self._ahead:
            for _ in range(count):
                self._stage.runtime.warm(self._stage.spec(), timeout_seconds=START_SECONDS)

    def start(self) -> Running:
        """Start a sandbox; see `Form.start`."""
        handle = self._stage.start(self._stage.spec())
        return Running(
            name=handle.name,
            pid=handle.pid,
            start_ticks=handle.start_ticks,
            record=Layout(self._stage.root).instance(handle.name) / "record.json",
        )

    def stop(self, running: Running) -> None:
        """End a sandbox as the service does, its layer thrown away."""
        self._stage.runtime.stop(running.name)

    def clean(self, running: Running) -> None:
        """End a sandbox; see `Form.clean`. Raises WayBroken when the pool was passed by."""
        self._stage.runtime.stop(running.name)
        if self._stage.runtime.list_warm():
            raise WayBroken("a sandbox was started though one was waiting in the warm pool")

    def evict(self) -> None:
        """Drop the image's pages; see `Form.evict`."""
        drop_pages(self._stage.image)


class EngineForm:
    """Start instances by Apptainer alone, as its manual has it."""

    def __init__(self, stage: Stage, *, label: str, image: Path, overlay: bool) -> None:
        self.label = label
        self._stage = stage
        self._image = image
        self._overlay = overlay
        self._root = stage.folder / "engine"
        if not self._root.is_dir():
            stage.own_folder("engine")
            for part in ("apptainer", "home", "tmp", "overlays"):
                stage.own_folder(f"engine/{part}")
        self._env = engine_env(self._root)

    def prepare(self, count: int) -> None:
        """Do nothing: every start begins from nothing."""

    def start(self) -> Running:
        """Start an instance; see `Form.start`."""
        name = self._stage.new_name()
        layer = ["--writable-tmpfs"]
        if self._overlay:
            layer = ["--overlay", str(self._stage.own_folder(f"engine/overlays/{name}"))]
        engine = self._stage.tools.engine
        words = [
            *(engine, "--silent", "instance", "start", "--userns", "--containall", "--cleanenv"),
            "--uts",  # the namespaces of ours: a bare nsenter then enters all forms alike
            *("--net", "--network", "none", *layer, str(self._image), name),
        ]
        self._stage.run(words, env=self._env, seconds=START_SECONDS, to_its_end=True)
        for path in Layout(self._root).engine_records(name):
            entry = read_record(path / f"{name}.json")
            found = read_stat(int(entry["pid"])) if entry and entry.get("pid") else None
            if found is not None:
                return Running(name=name, pid=found.pid, start_ticks=found.start_ticks)
        raise WayBroken(f"{self.label}: {name} left no record")

    def stop(self, running: Running) -> None:
        """End an instance by `apptainer instance stop`."""
        words = [self._stage.tools.engine, "--silent", "instance", "stop", running.name]
        self._stage.run(words, env=self._env, seconds=START_SECONDS)

    def clean(self, running: Running) -> None:
        """End an instance; see `Form.clean`."""
        running.kill()

    def evict(self) -> None:
        """Drop the image's pages; see `Form.evict`."""
        drop_pages(self._image)


def all_forms(stage: Stage) -> list[Form]:
    """Return every form; a SIF file is built from the image first (half a minute)."""
    return [
        OurForm(stage, ahead=False),
        OurForm(stage, ahead=True),
        EngineForm(stage, label=SIF, image=_build_sif(stage), overlay=False),
        EngineForm(stage, label=UNPACKED, image=stage.image, overlay=False),
        EngineForm(stage, label=OVERLAY, image=stage.image, overlay=True),
    ]


def drop_pages(image: Path) -> None:
    """Ask the kernel to forget the pages of every file of an image; needs no root."""
    for path in [image] if image.is_file() else image.rglob("*"):
        with suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


def proportional_mib(members: Iterable[ProcessStat]) -> float:
    """Return the proportional set size of some processes in MiB; see proc(5), smaps_rollup."""
    total = 0
    for member in members:
        with suppress(OSError):
            for line in Path(f"/proc/{member.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


def await_end(members: Iterable[ProcessStat]) -> None:
    """Wait until none of the processes runs; raises WayBroken when one stays."""
    deadline = time.monotonic() + _END_SECONDS
    for member in members:
        try:
            descriptor = os.pidfd_open(member.pid)
        except ProcessLookupError:
            continue
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            while is_running(member.pid, member.start_ticks):
                if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                    raise WayBroken(f"process {member.pid} of an ended sandbox still runs")
        finally:
            os.close(descriptor)


def _build_sif(stage: Stage) -> Path:
    folder = stage.own_folder("sif")
    sif = folder / "image.sif"
    words = [stage.tools.engine, "--silent", "build", str(sif), str(stage.image)]
    root = stage.own_folder("sif/engine")
    for part in ("apptainer", "home", "tmp"):
        stage.own_folder(f"sif/engine/{part}")
    stage.console.print("a SIF file is built from the image")
    try:
        stage.run(words, env=engine_env(root), seconds=_BUILD_SECONDS)
    except subprocess.CalledProcessError as fault:
        raise WayBroken(f"no SIF file could be built: {fault.output!r}") from None
    return sif
