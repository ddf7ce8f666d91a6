"""Hand out an instance that was started ahead: one rename decides who gets it."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

from sandboxes.runtime import wire
from sandboxes.runtime.exceptions import StartFailed
from sandboxes.runtime.jobs import Channel, succeed
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.processes import is_running
from sandboxes.runtime.protocol import SandboxSpec

SHAPE = ("image", "layers", "network", "gpu", "workdir", "hidden")


def take(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Report an instance that fits the spec, under the spec's name from now on, or pid 0.

    It runs in the spawner itself, without a fork: it takes well under a millisecond.
    """
    spec: dict[str, Any] = message["spec"]
    for name in layout.warm_names(message["prefix"]):
        record = read_record(layout.instance(name) / "record.json")
        if record is None or not _fits(record, spec):
            continue
        target = layout.instance(spec["name"])
        try:
            layout.instance(name).rename(target)
        except FileNotFoundError:
            continue  # another spawner was faster
        except OSError as fault:
            if fault.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise StartFailed(f"the name {spec['name']} is in use") from None
            raise
        write_record(target / "record.json", record | spec | {"warm": False})
        os.kill(int(record["keeper_pid"]), signal.SIGUSR1)
        succeed(channel, pid=record["pid"], start_ticks=record["start_ticks"])
        return
    succeed(channel, pid=0)


def shape(spec: SandboxSpec) -> tuple[object, ...]:
    """Return what must be equal for one instance to stand for another."""
    return tuple(getattr(spec, key) for key in SHAPE)


def _fits(record: dict[str, Any], spec: dict[str, Any]) -> bool:
    return (
        bool(record.get("ready"))
        and all(record.get(key) == spec.get(key) for key in (*SHAPE, "image_key"))
        and is_running(int(record["pid"]), int(record["start_ticks"]))
        and is_running(int(record["keeper_pid"]), int(record["keeper_ticks"]))
    )
