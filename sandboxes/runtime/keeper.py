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
from contextlib import suppress
from pathlib import Path
from typing import Any

from sandboxes.runtime import wire
from sandboxes.runtime.account import adopt_orphans
from sandboxes.runtime.argv import (
    ENTER_DESCRIPTOR,
    SANDBOX_ENV,
    Tools,
    engine_env,
    engine_exec_argv,
    enter_argv,
    program_argv,
    start_argv,
)
from sandboxes.runtime.exceptions import EnterFailed, SandboxCancelled, StartFailed, StartTimeout
from sandboxes.runtime.jobs import Channel, remove, succeed
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.overlay import DRIVER, check_image, find_layers, mount_options
from sandboxes.runtime.processes import (
    descendants,
    is_running,
    kill_process,
    raise_oom_score,
    read_stat,
)
from sandboxes.runtime.usage import Usage

ENTRY_NSENTER = "nsenter"
ENTRY_ENGINE = "engine"


def run(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Start an instance, report its handle, and guard it to its end."""
    tools, spec = Tools(**message["tools"]), message["spec"]
    folder = layout.instance(spec["name"])
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise StartFailed(f"the name {spec['name']} is in use") from None
    keeper = Keeper(layout, tools, channel, spec, deadline=message["timeout_seconds"])
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
        self._wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(wake_write)
        adopt_orphans()

    def start(self) -> dict[str, Any]:
        """Start the instance and make its working directory; returns the record."""
        own = read_stat(os.getpid())
        assert own is not None
        self._record = dict(self._spec)
        self._record |= {"keeper_pid": own.pid, "keeper_ticks": own.start_ticks, "driver": DRIVER}
        self._write()
        options = self._prepare()
        merged = str((self._folder / "merged").relative_to(self._layout.root))
        argv = start_argv(
            self._tools,
            name=self._name,
            options=options,
            merged=merged,
            network=self._spec["network"],
        )
        code = self._step(argv, engine_env(self._layout.root))
        pid = self._find_pid()
        stat = read_stat(pid) if pid else None
        if code != 0 or stat is None:
            raise StartFailed(f"apptainer ended with {code}: {self._log()}")
        raise_oom_score(stat.pid)
        self._record |= {
            "pid": stat.pid,
            "start_ticks": stat.start_ticks,
            "entry": self._find_entry(stat.pid),
            "started_at": time.time(),
        }
        self._write()
        return self._record

    def guard(self) -> None:
        """Wait for the instance's end, or end it at a limit and write down which."""
        limits = self._spec["limits"]
        usage = Usage(self._record["pid"], self._folder / "upper", limits)
        end = self._started + limits["lifetime_seconds"]
        pidfd = os.pidfd_open(self._record["pid"])
        reason = ""
        while is_running(self._record["pid"], self._record["start_ticks"]):
            left = end - time.monotonic()
            reason = "lifetime" if left <= 0 else usage.exceeded()
            if reason:
                break
            if self._wait([pidfd], min(left, usage.interval_seconds)) == self._wake:
                break
        if reason:
            with suppress(OSError):
                write_record(self._folder / "ended.json", {"reason": reason, "at": time.time()})
        self.end_all()

    def end_all(self) -> None:
        """Kill the instance and everything that the start left, and collect it."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if "pid" in self._record:
            kill_process(self._record["pid"], self._record["start_ticks"], wait_seconds=10)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for stat in reversed(descendants(os.getpid())):
                kill_process(stat.pid, stat.start_ticks, wait_seconds=1)
            try:
                while os.waitpid(-1, os.WNOHANG) != (0, 0):
                    pass
            except ChildProcessError:
                return

    def clean(self) -> None:
        """Remove what a failed start made."""
        for path in self._layout.engine_records(self._name):
            remove(self._layout, self._tools, [path])
        remove(self._layout, self._tools, [self._folder])

    def _write(self) -> None:
        write_record(self._folder / "record.json", self._record)

    def _prepare(self) -> str:
        image = Path(self._spec["image"])
        check_image(image, os.geteuid(), os.getegid())
        layers = find_layers(self._layout, self._spec["layers"], DRIVER)
        for part in ("upper", "work", "merged"):
            (self._folder / part).mkdir(mode=0o755)
        return mount_options(self._layout, image=image, layers=layers, instance=self._folder)

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
                preexec_fn=lambda: _open_enter_descriptor(),
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
            raise SandboxCancelled(f"the start of {self._name} was given up")
        return child.wait()

    def _wait(self, descriptors: list[int], seconds: float) -> int | None:
        poller = select.poll()
        for descriptor in [*descriptors, self._wake]:
            poller.register(descriptor, select.POLLIN | select.POLLHUP)
        ready = [found for found, _ in poller.poll(max(0.0, seconds) * 1000)]
        for descriptor in descriptors:
            if descriptor in ready:
                return descriptor
        return ready[0] if ready else None


def _open_enter_descriptor() -> None:
    null = os.open("/dev/null", os.O_WRONLY)
    os.dup2(null, ENTER_DESCRIPTOR)
