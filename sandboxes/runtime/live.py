"""Work on instances that go on running: copy their layer, listen in their network."""

from __future__ import annotations

import os
import signal
import socket
import uuid
from contextlib import suppress

from sandboxes.runtime import wire
from sandboxes.runtime.argv import copy_argv
from sandboxes.runtime.exceptions import EnterFailed, SandboxGone
from sandboxes.runtime.jobs import Channel, delete, keep_layer, run_tool, succeed, tools_of
from sandboxes.runtime.layout import Layout, read_record
from sandboxes.runtime.namespaces import enter_network
from sandboxes.runtime.processes import ProcessStat, is_running, read_stat
from sandboxes.runtime.usage import namespace_members


def snapshot(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Copy an instance's writable layer while its processes stand still."""
    name, reference, tools = message["name"], str(message["reference"]), tools_of(message)
    folder = layout.instance(name)
    record = read_record(folder / "record.json")
    if record is None or not is_running(int(record["pid"]), int(record["start_ticks"])):
        raise SandboxGone(f"no running sandbox {name} to copy")
    building = layout.root / "trash" / uuid.uuid4().hex
    (building / "diff").mkdir(parents=True)
    still = [] if tools is None else hold_still(int(record["pid"]))
    try:
        run_tool(copy_argv(tools, str(folder / "upper"), str(building / "diff")))
    except BaseException:
        delete(tools, [building])
        raise
    finally:
        move_again(still)
    keep_layer(layout, record, building, reference)
    succeed(channel, reference=reference)


def hold_still(pid: int) -> list[ProcessStat]:
    """SIGSTOP every process of an instance, parents first; returns them in that order.

    A shell that is stopped before its children, and goes on after them, does not see that
    they were stopped; the same holds for nsenter, which would stop itself for good with its
    child. The first process is let be: the engine's monitor takes its stop for its end. What
    was stopped already is left alone.
    """
    held: dict[int, ProcessStat] = {}
    while True:  # until a look finds nothing new: what is not yet stopped may fork
        members = {member for member in namespace_members(pid) if member != pid}
        stats = [stat for member in members if (stat := read_stat(member))]
        outside = {stat.parent for stat in stats} - members - {pid}
        entered = [stat for parent in outside if (stat := read_stat(parent))]
        stats.sort(key=lambda each: (each.start_ticks, each.pid))
        fresh = [s for s in (*entered, *stats) if s.state not in "TtZX" and s.pid not in held]
        if not fresh:
            return list(held.values())
        for stat in fresh:
            with suppress(ProcessLookupError):
                os.kill(stat.pid, signal.SIGSTOP)
                held[stat.pid] = stat


def move_again(held: list[ProcessStat]) -> None:
    """SIGCONT what `hold_still` stopped, children first."""
    for stat in reversed(held):
        now = read_stat(stat.pid)
        if now is not None and now.start_ticks == stat.start_ticks:
            with suppress(ProcessLookupError):
                os.kill(stat.pid, signal.SIGCONT)


def listen(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Listen on a port of an instance's own network and pass the socket back."""
    name = message["name"]
    record = read_record(layout.instance(name) / "record.json")
    if record is None or not is_running(int(record["pid"]), int(record["start_ticks"])):
        raise SandboxGone(f"no running sandbox {name} to listen in")
    if record.get("network") == "none":
        try:
            enter_network(int(record["pid"]))
        except OSError as fault:
            raise EnterFailed(f"the network of {name} cannot be entered: {fault}") from None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", int(message["port"])))
            server.listen(128)
        except OSError as fault:
            raise EnterFailed(f"port {message['port']} in {name}: {fault.strerror}") from None
        wire.send(channel, {"event": "result"}, [server.fileno()])
