"""The process that stands for a sandbox of the local runtime, which isolates nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from sandboxes.runtime import wire
from sandboxes.runtime.argv import copy_argv
from sandboxes.runtime.exceptions import SandboxCancelled
from sandboxes.runtime.jobs import Channel, claim, remove, succeed
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.overlay import find_layers
from sandboxes.runtime.processes import kill_marked

DRIVER = "local-copy"
MARKER = "PRORL_LOCAL_SANDBOX"
_TMP = "/tmp"  # noqa: S108 - below the sandbox's own folder


def folder_of(layout: Layout, name: str) -> Path:
    """Return the folder that plays the root of a local sandbox."""
    return layout.instance(name) / "upper"


def run(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Make the folder, report the handle, and end what is left when the lifetime is over."""
    spec: dict[str, Any] = message["spec"]
    instance = layout.instance(spec["name"])
    signal.signal(signal.SIGTERM, _give_up)  # a stop may come at once
    record = claim(layout, spec)
    try:
        _fill(layout, spec)
        record |= {"pid": record["keeper_pid"], "start_ticks": record["keeper_ticks"]}
        record |= {"driver": DRIVER, "ready": True}
        home = os.open(instance, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        write_record(instance / "record.json", record)
        succeed(channel, pid=record["pid"], start_ticks=record["start_ticks"])
    except BaseException:
        remove(layout, None, [instance])
        raise
    channel.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _wait_for_lifetime(layout, Path(f"/proc/self/fd/{home}"), record)


def _give_up(_number: int, _frame: object) -> None:
    raise SandboxCancelled("the start was given up")


def _wait_for_lifetime(layout: Layout, home: Path, record: dict[str, Any]) -> None:
    """Wait for the end of the lifetime, which a hand-out begins anew, and end what is left."""
    while signal.sigtimedwait([signal.SIGUSR1], record["limits"]["lifetime_seconds"]):
        record = read_record(home / "record.json") or record
    write_record(home / "ended.json", {"reason": "lifetime", "at": time.time()})
    kill_marked(f"{MARKER}={layout.instance(record['name'])}")


def _fill(layout: Layout, spec: dict[str, Any]) -> None:
    folder = folder_of(layout, spec["name"])
    folder.mkdir()
    for layer in reversed(find_layers(layout, spec["layers"], DRIVER)):
        subprocess.run(copy_argv(None, str(layer), str(folder)), check=True)
    for path in spec["hidden"]:
        subprocess.run(["/bin/rm", "-rf", "--", f"{folder}{path}"], check=True)
    for path in (spec["workdir"], _TMP, "/root"):
        subprocess.run(["/bin/mkdir", "-p", "--", f"{folder}{path}"], check=True)
