"""One detached process per instance: it starts it, guards its limits, and ends with it.

A keeper is a fork of the spawner in a session of its own. It outlives workers, spawner
and database, so an instance never outlives its lifetime. As the subreaper of all that
the start makes, it leaves nothing behind when a start fails half way.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandboxes.runtime import cgroups, launcher, wire
from sandboxes.runtime.account import adopt_orphans
from sandboxes.runtime.argv import (
    ENTER_DESCRIPTOR,
    GPU_DEVICE,
    MOUNT_REFUSED,
    SANDBOX_ENV,
    Tools,
    engine_env,
    engine_exec_argv,
    enter_argv,
    program_argv,
    start_argv,
)
from sandboxes.runtime.cgroups import Group
from sandboxes.runtime.confine import confine
from sandboxes.runtime.exceptions import EnterFailed, SandboxCancelled, StartFailed, StartTimeout
from sandboxes.runtime.inside import View
from sandboxes.runtime.jobs import Channel, claim, remove, succeed
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.overlay import (
    check_image,
    check_layers,
    choose_driver,
    find_layers,
    forget_driver,
    make_mask,
    mount_options,
)
from sandboxes.runtime.processes import (
    await_end,
    descendants,
    is_running,
    kill_process,
    read_stat,
)
from sandboxes.runtime.protocol import Gpu
from sandboxes.runtime.usage import EndNote, Usage

ENTRY_NSENTER = "nsenter"
ENTRY_ENGINE = "engine"
_LAUNCHER_SECONDS = 1.0  # what it started ends with the instance, before it


def run(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Start an instance, report its handle, and guard it to its end."""
    tools, spec = Tools(**message["tools"]), message["spec"]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # a stop may come at once
    record = claim(layout, spec)
    try:
        keeper = Keeper(layout, tools, channel, record, deadline=message["timeout_seconds"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    except OSError as fault:  # on a full disk it has not even its own files
        remove(layout, tools, [layout.instance(spec["name"])])
        raise StartFailed(f"{spec['name']} could not be started: {fault}") from None
    keeper.make_groups(message.get("cgroups") or {})
    try:
        record = keeper.start()
        succeed(channel, pid=record["pid"], start_ticks=record["start_ticks"])
    except BaseException:
        keeper.end_all()
        keeper.clean()
        raise
    channel.close()
    keeper.guard()


class Keeper:
    """Start one instance and watch over it; times are in seconds."""

    def __init__(
        self, layout: Layout, tools: Tools, channel: Channel, spec: dict[str, Any], deadline: float
    ) -> None:
        self._layout = layout
        self._tools = tools
        self._channel = channel
        self._spec = spec
        self._name: str = spec["name"]
        self._folder = layout.instance(self._name)
        self._started = time.monotonic()
        self._deadline = self._started + deadline
        self._record: dict[str, Any] = {}
        # The folder is renamed when a warm instance is handed out; a descriptor follows it.
        opened = os.open(self._folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._home = Path(f"/proc/self/fd/{opened}")
        self._ending = self._changed = False
        self._group = Group({})
        self._launcher = 0
        self._end_note = EndNote(self._home)
        self._wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)
        signal.set_wakeup_fd(wake_write)
        adopt_orphans()

    def make_groups(self, delegated: Mapping[str, str]) -> None:
        """Make the instance's control groups below the delegated folders, if there are any."""
        self._group = Group.make(delegated, self._name)

    def start(self) -> dict[str, Any]:
        """Start the instance and make its working directory; returns the record."""
        self._record = dict(self._spec)
        driver = choose_driver(self._layout, self._tools)
        self._record |= {"driver": driver, "cgroups": self._group.folders}
        self._write()
        self._launcher = launcher.start(self._home, self._group.folders)
        options = self._prepare(driver)
        merged = str((self._folder / "merged").relative_to(self._layout.root))
        argv = start_argv(
            self._tools,
            name=self._name,
            options=options,
            merged=merged,
            network=self._spec["network"],
            gpu=self._spec["gpu"],
            driver=driver,
        )
        code = self._step(argv, engine_env(self._layout.root))
        pid = self._find_pid()
        stat = read_stat(pid) if pid else None
        if code == MOUNT_REFUSED:
            forget_driver(self._layout)
        if code != 0 or stat is None:
            raise StartFailed(f"apptainer ended with {code}: {self._log()}")
        self._view = View(stat.pid)  # now, while nothing hostile runs in it
        self._record |= {
            "pid": stat.pid,
            "start_ticks": stat.start_ticks,
            "entry": self._find_entry(stat.pid),
            "engine_name": self._name,
            "started_at": time.time(),
            "resting_tasks": self._count_tasks(),
            "ready": True,
        }
        self._record |= self._find_daemon()
        self._write()
        self._limit()
        return self._record

    def guard(self) -> None:
        """Wait for the instance's end, or end it at a limit and write down which."""
        try:
            reason = self._watch()
        except Exception:  # an instance must not go on without its watchdog
            reason = "watchdog"
            with suppress(OSError), (self._home / "log").open("a") as log:
                traceback.print_exc(file=log)
        if not reason and self._group.ran_out_of_memory():
            reason = "memory"
        if reason:
            self._end_note.write(reason)
        self.end_all()

    def _watch(self) -> str:
        """Return the limit that was exceeded, or nothing when the instance ended or shall end."""
        pidfd = os.pidfd_open(self._record["pid"])
        daemon = self._open_daemon()
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes: a launcher may leave orphans
        self._changed = True
        while is_running(self._record["pid"], self._record["start_ticks"]) and not self._ending:
            if self._changed:
                usage, end = self._take_over()
            left = end - time.monotonic()
            reason = "lifetime" if left <= 0 else usage.exceeded()
            if reason:
                return reason
            watched = [pidfd, *daemon, *self._group.descriptors]
            ready = self._wait(watched, min(left, usage.interval_seconds))
            if ready == self._wake:
                os.read(self._wake, 4096)
                _reap()
            elif ready in daemon:
                break  # without its file system nothing in there works
        return ""

    def _take_over(self) -> tuple[Usage, float]:
        """Read the record again, which a hand-out changes, and return what it allows."""
        self._changed = False
        self._record = read_record(self._home / "record.json") or self._record
        limits = self._record["limits"]
        try:
            self._limit()
        except StartFailed:  # it holds more memory already than it may from now on
            self._end_note.write("memory")
            self._ending = True
        usage = Usage(
            home=self._home,
            instances=self._layout.root / "instances",
            limits=limits,
            group=self._group,
            view=self._view,
            pid=self._record["pid"],
        )
        return usage, time.monotonic() + limits["lifetime_seconds"]

    def _limit(self) -> None:
        """Set the limits that the instance's groups keep; one that cannot be set, ends it."""
        try:
            self._group.limit(self._record["limits"], resting_tasks=self._record["resting_tasks"])
        except OSError as fault:
            raise StartFailed(f"the limits of {self._name} were refused: {fault}") from None

    def _on_signal(self, number: int, _frame: object) -> None:
        if number == signal.SIGUSR1:
            self._changed = True
        else:
            self._ending = True

    def end_all(self) -> None:
        """Kill the instance and everything that the start left, and collect it."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "pid" in self._record:
            kill_process(self._record["pid"], self._record["start_ticks"], wait_seconds=10)
        if "daemon_pid" in self._record:  # it ends by itself, when all is written
            await_end(self._record["daemon_pid"], self._record["daemon_ticks"], wait_seconds=10)
        self._end_launcher()
        self._collect()
        cgroups.remove(self._group.folders)

    def _end_launcher(self) -> None:
        """Let the launcher tell of the ends of what it started, then end it."""
        if self._launcher:
            with suppress(ProcessLookupError):
                stat = read_stat(self._launcher)
                os.kill(self._launcher, signal.SIGTERM)
                if stat is not None:
                    await_end(stat.pid, stat.start_ticks, wait_seconds=_LAUNCHER_SECONDS)

    def _collect(self) -> None:
        """Kill and collect what is left below this process."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for stat in reversed(descendants(os.getpid())):
                kill_process(stat.pid, stat.start_ticks, wait_seconds=1)
            if not _reap():
                return

    def clean(self) -> None:
        """Remove what a failed start made."""
        for path in self._layout.engine_records(self._name):
            remove(self._layout, self._tools, [path])
        remove(self._layout, self._tools, [self._folder])

    def _write(self) -> None:
        write_record(self._folder / "record.json", self._record)

    def _prepare(self, driver: str) -> str:
        gpu: Gpu = self._spec["gpu"]
        if gpu and not Path(GPU_DEVICE[gpu]).exists():
            raise StartFailed(f"no {gpu} device on this node: {GPU_DEVICE[gpu]} is missing")
        image = Path(self._spec["image"])
        check_image(image, os.geteuid(), os.getegid())
        layers = find_layers(self._layout, self._spec["layers"], driver)
        check_layers(self._layout, self._tools, self._spec["layers"], driver)
        for part in ("upper", "work", "merged"):
            (self._folder / part).mkdir(mode=0o755)
        if self._spec["hidden"]:
            layers = [make_mask(self._folder / "mask", self._spec["hidden"]), *layers]
        return mount_options(
            self._layout, image=image, layers=layers, instance=self._folder, driver=driver
        )

    def _find_daemon(self) -> dict[str, int]:
        """Return what names the daemon of a FUSE mount; the kernel's overlay has none."""
        path = self._folder / "driver.pid"
        stat = read_stat(int(path.read_text())) if path.exists() else None
        return {"daemon_pid": stat.pid, "daemon_ticks": stat.start_ticks} if stat else {}

    def _open_daemon(self) -> list[int]:
        with suppress(KeyError, ProcessLookupError):
            return [os.pidfd_open(self._record["daemon_pid"])]
        return []

    def _find_pid(self) -> int:
        for path in self._layout.engine_records(self._name):
            entry = read_record(path / f"{self._name}.json")
            if entry is not None and entry.get("pid"):
                return int(entry["pid"])
        return 0

    def _find_entry(self, pid: int) -> str:
        """Enter once, which makes the working directory, and tell which way worked."""
        program = program_argv(["mkdir", "-p", "--", self._spec["workdir"]], cwd="/")
        inner = enter_argv(self._tools, pid=pid, network=self._spec["network"])
        first = self._step([*inner, *program], SANDBOX_ENV)
        if first == 0:
            return ENTRY_NSENTER
        outer = engine_exec_argv(self._tools, name=self._name, env=SANDBOX_ENV)
        second = self._step([*outer, *program], engine_env(self._layout.root))
        if second == 0:
            return ENTRY_ENGINE
        raise EnterFailed(
            f"neither nsenter ({first}) nor apptainer exec ({second}) could make "
            f"{self._spec['workdir']}: {self._log()}"
        )

    def _count_tasks(self) -> int:
        """Return the tasks, threads included, that a limit of processes counts before any other.

        The launcher is in the groups, and outside of the instance's user namespace.
        """
        found = 0
        for stat in descendants(os.getpid()):
            if stat.pid == self._launcher and "pids" not in self._group.folders:
                continue
            with suppress(OSError):
                found += len(list(Path(f"/proc/{stat.pid}/task").iterdir()))
        return found

    def _log(self) -> str:
        text = (self._folder / "log").read_bytes()[-3000:]
        for path in self._layout.engine_records(self._name):
            if path.suffix == ".err":
                text += path.read_bytes()[-1000:]
        return text.decode("utf-8", "replace").strip()

    def _step(self, argv: list[str], env: dict[str, str]) -> int:
        """Run one program to its end; raises StartTimeout, SandboxCancelled."""
        with (self._folder / "log").open("ab") as log:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                preexec_fn=self._prepare_child,
                pass_fds=(ENTER_DESCRIPTOR,),
            )
        pidfd = os.pidfd_open(child.pid)
        try:
            ready = self._wait([pidfd, self._channel.fileno()], self._deadline - time.monotonic())
        finally:
            os.close(pidfd)
        if ready is None:
            raise StartTimeout(f"{self._name} did not start in time: {self._log()}")
        if ready in (self._wake, self._channel.fileno()):
            self._ending = True
            raise SandboxCancelled(f"the start of {self._name} was given up")
        return child.wait()

    def _prepare_child(self) -> None:
        confine({"cgroups": cgroups.entrances(self._group.folders)})
        _open_enter_descriptor()

    def _wait(self, descriptors: list[int], seconds: float) -> int | None:
        poller = select.poll()
        for descriptor in [*descriptors, self._wake]:
            poller.register(descriptor, select.POLLIN | select.POLLHUP)
        ready = [found for found, _ in poller.poll(max(0.0, seconds) * 1000)]
        for descriptor in descriptors:
            if descriptor in ready:
                return descriptor
        return ready[0] if ready else None


def _reap() -> bool:
    """Collect what ended below this process; returns whether anything is left."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True


def _open_enter_descriptor() -> None:
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, ENTER_DESCRIPTOR)
