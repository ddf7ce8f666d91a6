"""Work on instances that go on running: copy their layer, listen in their network."""

from __future__ import annotations

import socket
import uuid
from contextlib import nullcontext

from sandboxes.runtime import wire
from sandboxes.runtime.argv import copy_argv
from sandboxes.runtime.exceptions import EnterFailed, SandboxGone
from sandboxes.runtime.jobs import (
    SNAPSHOT,
    Channel,
    delete,
    keep_layer,
    run_tool,
    succeed,
    tools_of,
)
from sandboxes.runtime.layout import Layout, read_record
from sandboxes.runtime.namespaces import enter_network
from sandboxes.runtime.processes import is_running
from sandboxes.runtime.stillness import standing_still


def snapshot(layout: Layout, channel: Channel, message: wire.Message) -> None:
    """Copy an instance's writable layer while its processes stand still."""
    name, reference, tools = message["name"], str(message["reference"]), tools_of(message)
    folder = layout.instance(name)
    record = read_record(folder / "record.json")
    if record is None or not is_running(int(record["pid"]), int(record["start_ticks"])):
        raise SandboxGone(f"no running sandbox {name} to copy")
    building = layout.root / "tmp" / f"{SNAPSHOT}{uuid.uuid4().hex}"
    (building / "diff").mkdir(parents=True)
    try:
        with nullcontext() if tools is None else standing_still(int(record["pid"])):
            run_tool(copy_argv(tools, str(folder / "upper"), str(building / "diff")))
    except BaseException:
        delete(tools, [building])
        raise
    keep_layer(layout, record, building, reference)
    succeed(channel, reference=reference)


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
