"""What the runtimes that keep real processes share: names, layers, warm instances, jobs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from socket import socket
from typing import Any, ClassVar

from sandboxes.runtime.account import Account
from sandboxes.runtime.exceptions import StartFailed, StartTimeout, StopFailed
from sandboxes.runtime.jobs import KILL_SECONDS, REMOVE_SECONDS
from sandboxes.runtime.layers import LayerStore, reference_of
from sandboxes.runtime.layout import (
    NAME_PATTERN,
    PREPARED,
    WARM,
    Layout,
    make_root,
    read_record,
)
from sandboxes.runtime.processes import is_running
from sandboxes.runtime.protocol import Limits, Names, SandboxHandle, SandboxSpec
from sandboxes.runtime.sessions import Cancelled
from sandboxes.runtime.spawner import Spawner
from sandboxes.runtime.warm import SHAPE

_JOB_SECONDS = KILL_SECONDS + REMOVE_SECONDS
_LISTEN_SECONDS = 30.0
_RECORD_SECONDS = 60.0


class SpawnerRuntime:
    """Keep the instances of one deployment below `root`, through a spawner of one account.

    `root` is made when missing and given to `account`; its parents must let the account
    pass. Names begin with `prefix`, and nothing of another name is touched.
    """

    _START: ClassVar[str]  # the spawner's operation that starts an instance

    def __init__(self, root: Path, prefix: str, account: Account) -> None:
        self._layout = Layout(root.absolute())
        self._prefix = prefix
        self._account = account
        make_root(self._layout.root, account)
        self._spawner = Spawner(root=self._layout.root, account=account)
        self._layers = LayerStore(self._layout, self._evict)

    @property
    def root(self) -> Path:
        """Return the folder that holds instances and layers."""
        return self._layout.root

    def freeze(self, handle: SandboxHandle, *, key: str = "") -> str:
        """End the instance and keep its layer; see `Runtime.freeze`."""
        self._check_name(handle.name)
        self._before_end(handle.name)
        # Asked for now: a node's first start finds out which driver it has.
        reference = reference_of(self._own(key)) if key else f"layer-{uuid.uuid4().hex}"
        return str(self._job("freeze", name=handle.name, reference=reference)["reference"])

    def snapshot(self, handle: SandboxHandle) -> str:
        """Copy the writable layer of a live instance; see `Runtime.snapshot`."""
        self._check_name(handle.name)
        reference = f"layer-{uuid.uuid4().hex}"
        return str(self._job("snapshot", name=handle.name, reference=reference)["reference"])

    def cut_layers(
        self, layers: Sequence[str], *, folders: Sequence[str], sealed: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Take folders out of the written layers; see `Runtime.cut_layers`."""
        written = [each for each in layers if not each.startswith(PREPARED)]
        below = [each for each in layers if each.startswith(PREPARED)]
        if not written:
            return tuple(below)
        made = [f"layer-{uuid.uuid4().hex}" for _each in written]
        self._job(
            "cut",
            written=written,
            below=below,
            references=made,
            folders=[*folders],
            sealed=[*sealed],
        )
        return (*made, *below)

    def discard_layer(self, ref: str) -> None:
        """Delete a frozen layer; see `Runtime.discard_layer`."""
        self._job("discard", reference=ref)

    def layer_image(self, ref: str) -> str:
        """Return the image below a layer; see `Runtime.layer_image`."""
        return self._layers.image(ref)

    def find_layer(self, key: str) -> str | None:
        """Return the prepared layer of a key; see `Runtime.find_layer`."""
        return self._layers.find(self._own(key))

    def hold_layer(
        self, key: str, *, timeout_seconds: float, cancelled: Cancelled | None = None
    ) -> AbstractContextManager[None]:
        """Be the only one who prepares a layer; see `Runtime.hold_layer`."""
        return self._layers.hold(key, timeout_seconds=timeout_seconds, cancelled=cancelled)

    def evict_layers(self, *, keep_bytes: int) -> int:
        """Delete unused prepared layers; see `Runtime.evict_layers`."""
        return self._layers.evict(keep_bytes=keep_bytes)

    def _evict(self, reference: str) -> bool:
        return bool(self._job("evict", reference=reference)["evicted"])

    def layer_bytes(self) -> int:
        """Return the bytes that the prepared layers take; see `Runtime.layer_bytes`."""
        return self._layers.size()

    def stop(self, name: str) -> None:
        """End an instance by name; see `Runtime.stop`."""
        self._check_name(name)
        self._before_end(name)
        self._job("stop", name=name)

    def list(self) -> list[str]:
        """Return the names below our prefix, the ended ones that were not stopped included.

        One started ahead that ended before anybody took it is among them.
        """
        ended = [name for name in self._layout.warm_names(self._prefix) if self._has_ended(name)]
        return sorted([*self._layout.names(self._prefix), *ended])

    def unguarded(self) -> Names:
        """Return the instances that run without their keeper; see `Runtime.unguarded`."""
        return [name for name in self._layout.names(self._prefix) if self._is_unguarded(name)]

    def sweep(self) -> None:
        """Delete what killed removals left; see `Runtime.sweep`."""
        self._job("sweep", cgroups=self._delegated())

    def list_layers(self) -> Names:
        """Return the references of the frozen layers on this node, sorted."""
        return self._layout.references()

    def warm(self, spec: SandboxSpec, *, timeout_seconds: float) -> str:
        """Start an instance ahead; see `Runtime.warm`."""
        name = f"{self._prefix}{WARM}{uuid.uuid4().hex}"
        self._start(self._described(spec, None) | {"name": name}, timeout_seconds, None)
        return name

    def list_warm(self) -> dict[str, SandboxSpec]:
        """Return the instances started ahead, those that still start included."""
        found = {}
        for name in self._layout.warm_names(self._prefix):
            record = read_record(self._layout.instance(name) / "record.json")
            if record is not None and not self._has_ended(name):
                found[name] = _spec_of(record)
        return found

    def listen(self, handle: SandboxHandle, port: int) -> socket:
        """Listen inside the instance's own network; see `Runtime.listen`."""
        self._check_name(handle.name)
        message = {"op": "listen", "tools": None, "name": handle.name, "port": port}
        with self._spawner.request(message) as channel:
            _, descriptors = channel.wait(timeout_seconds=_LISTEN_SECONDS)
        return socket(fileno=descriptors[0])

    def close(self) -> None:
        """End the spawner; instances go on."""
        self._spawner.close()

    def _has_ended(self, name: str) -> bool:
        """Tell whether an instance that nobody took has lost its first process or its keeper."""
        folder = self._layout.instance(name)
        record = read_record(folder / "record.json")
        if record is None:  # its keeper is about to write it, or it died before it did
            with suppress(FileNotFoundError):
                return time.time() - folder.stat().st_mtime > _RECORD_SECONDS
            return False
        if not is_running(int(record["keeper_pid"]), int(record["keeper_ticks"])):
            return True
        return "pid" in record and not is_running(int(record["pid"]), int(record["start_ticks"]))

    def _is_unguarded(self, name: str) -> bool:
        record = read_record(self._layout.instance(name) / "record.json")
        if record is None or "pid" not in record:
            return False
        # The keeper first: it ends after its instance, so one that is gone while that runs is lost.
        if is_running(int(record["keeper_pid"]), int(record["keeper_ticks"])):
            return False
        return is_running(int(record["pid"]), int(record["start_ticks"]))

    def _described(self, spec: SandboxSpec, _cancelled: Cancelled | None) -> dict[str, Any]:
        """Return a spec as the spawner takes it."""
        return spec.as_dict()

    def _hand_out(self, spec: Mapping[str, Any]) -> SandboxHandle | None:
        """Take an instance that was started ahead; None when none fits."""
        if not self._layout.warm_names(self._prefix):
            return None
        message = {"op": "take", "prefix": self._prefix, "spec": dict(spec)}
        result = self._spawner.run_job(message, timeout_seconds=_LISTEN_SECONDS)
        return _handle(str(spec["name"]), result) if result["pid"] else None

    def _start(
        self, spec: Mapping[str, Any], timeout_seconds: float, cancelled: Cancelled | None
    ) -> SandboxHandle:
        message = {
            "op": self._START,
            "tools": self._tool_paths(),
            "timeout_seconds": timeout_seconds,
            "cgroups": self._delegated(),
            "spec": dict(spec),
        }
        result = self._spawner.run_job(
            message, timeout_seconds=timeout_seconds + KILL_SECONDS, cancelled=cancelled
        )
        return _handle(str(spec["name"]), result)

    def _job(self, kind: str, **details: Any) -> dict[str, Any]:
        message = {"op": kind, "tools": self._tool_paths(), **details}
        try:
            return self._spawner.run_job(message, timeout_seconds=_JOB_SECONDS)
        except StartTimeout as fault:
            raise StopFailed(f"{kind} {details}: {fault}") from None

    def _own(self, key: str) -> str:
        """Return the key of a layer as this node's driver writes it: another reads it wrongly."""
        return f"{self._driver()}:{key}"

    def _driver(self) -> str:
        """Return the name of what writes layers, empty while it is not known."""
        return ""

    def _tool_paths(self) -> dict[str, Any] | None:
        """Return the programs that isolate, None where nothing is isolated."""
        return None

    def _delegated(self) -> dict[str, str]:
        """Return the folders below which an instance's control groups are made."""
        return {}

    def _before_end(self, name: str) -> None:
        """End what the spawner's jobs do not see."""

    def _check_name(self, name: str) -> None:
        if not name.startswith(self._prefix) or not NAME_PATTERN.fullmatch(name):
            raise StartFailed(f"a sandbox name here begins with {self._prefix!r}: {name!r}")


def _handle(name: str, result: Mapping[str, Any]) -> SandboxHandle:
    return SandboxHandle(
        name=name, pid=int(result["pid"]), start_ticks=int(result["start_ticks"]), layer=name
    )


def _spec_of(record: Mapping[str, Any]) -> SandboxSpec:
    values = {key: record[key] for key in SHAPE}
    values |= {key: tuple(record[key]) for key in ("layers", "hidden")}
    return SandboxSpec(name=record["name"], limits=Limits(**record["limits"]), **values)
