"""Prepared layers: what a setup leaves is kept read-only and shared by all that need the same."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from sandboxes.models import Environment
from sandboxes.runtime.exceptions import SandboxCancelled, SetupFailed
from sandboxes.runtime.protocol import ExecResult, Runtime, SandboxHandle, SandboxSpec

SETUP_FOLDER = "/setup"
SETUP_OUTPUT_BYTES = 64 * 1024
KEY_VERSION = 2  # raise it when a setup is carried out in another way

Layers = tuple[str, ...]
Start = Callable[[Layers], SandboxHandle]
Network = Callable[[SandboxHandle], AbstractContextManager[Mapping[str, str]]]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One setup: a bash script, run in /setup's presence with files beside it.

    `kind` names whose setup it is, in messages; `files` are relative path to content and mode.
    """

    kind: str
    script: str
    files: Mapping[str, tuple[bytes, int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Tell whether there is anything to do."""
        return bool(self.script.strip() or self.files)

    def key(self, *, base: str) -> str:
        """Return the key of the layer that this setup makes on top of `base`."""
        files = {
            path: [hashlib.sha256(data).hexdigest(), mode]
            for path, (data, mode) in self.files.items()
        }
        described = json.dumps([KEY_VERSION, base, self.script, files], sort_keys=True)
        return hashlib.sha256(described.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """How long a preparation may take, and whether it is to stop."""

    remaining_seconds: Callable[[], float]
    cancelled: Callable[[], bool]

    def seconds(self) -> float:
        """Return what is left, at least a second."""
        return max(1.0, self.remaining_seconds())


def environment_recipe(environment: Environment) -> Recipe:
    """Return an environment's own setup."""
    return Recipe(kind="environment", script=environment.setup)


@dataclass(eq=False)
class _Waiter:
    failure: SetupFailed | None = None

    def share(self) -> None:
        """Raise the failure that happened while the caller waited, if any."""
        if self.failure is not None:
            raise SetupFailed(str(self.failure), timed_out=self.failure.timed_out) from self.failure


class _Failures:
    """Tell those of this process who wait for a setup that it failed meanwhile.

    Who comes later carries it out anew: what it lacked may be there then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[_Waiter]] = {}

    @contextmanager
    def waiting(self, key: str) -> Iterator[_Waiter]:
        """Count the caller among those who wait; what it gets holds a failure from then on."""
        waiter = _Waiter()
        with self._lock:
            self._waiting.setdefault(key, []).append(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiting[key].remove(waiter)
                if not self._waiting[key]:
                    del self._waiting[key]

    def tell(self, key: str, failure: SetupFailed) -> None:
        """Pass a failure on to all who wait now."""
        with self._lock:
            for waiter in self._waiting.get(key, ()):
                waiter.failure = failure


_failures = _Failures()


def base_key(runtime: Runtime, spec: SandboxSpec, environment: Environment) -> str:
    """Return what tells an unprepared sandbox from another, as far as a setup may notice it.

    Image and working directory, and what it reaches: network, listed hosts, GPU.
    """
    return json.dumps(
        [
            runtime.image_key(spec.image),
            spec.workdir,
            spec.network,
            spec.gpu,
            environment.network,
            sorted(environment.egress_hosts),
        ]
    )


def find_layers(
    runtime: Runtime, spec: SandboxSpec, recipes: Sequence[Recipe], *, environment: Environment
) -> Layers | None:
    """Return the prepared layers of these setups, topmost first; None when one is missing."""
    layers: Layers = ()
    key = base_key(runtime, spec, environment)
    for recipe in filter(None, recipes):
        key = recipe.key(base=key)
        found = runtime.find_layer(key)
        if found is None:
            return None
        layers = (found, *layers)
    return layers


def prepare_layers(
    runtime: Runtime,
    spec: SandboxSpec,
    recipes: Sequence[Recipe],
    *,
    environment: Environment,
    start: Start,
    network: Network,
    deadline: Deadline,
) -> Layers:
    """Return the prepared layers of these setups, topmost first; the missing ones are made.

    One process of the node makes a layer while the others wait for it; `start` starts a sandbox
    on given layers for that, which is gone afterwards. Raises SetupFailed, also when the setup
    failed for another caller while this one waited, and the runtime's faults.
    """
    layers: Layers = ()
    key = base_key(runtime, spec, environment)
    for recipe in filter(None, recipes):
        key = recipe.key(base=key)
        found = runtime.find_layer(key)
        if found is None:
            with (
                _failures.waiting(key) as waiter,
                runtime.hold_layer(
                    key, timeout_seconds=deadline.seconds(), cancelled=deadline.cancelled
                ),
            ):
                found = runtime.find_layer(key)
                if found is None:
                    waiter.share()
                    handle = start(layers)
                    try:
                        with network(handle) as env:
                            carry_out(runtime, handle, recipe, env=env, deadline=deadline)
                    except SetupFailed as failure:
                        _failures.tell(key, failure)
                        raise
                    found = runtime.freeze(handle, key=key)
        layers = (found, *layers)
    return layers


def carry_out(
    runtime: Runtime,
    handle: SandboxHandle,
    recipe: Recipe,
    *,
    env: Mapping[str, str],
    deadline: Deadline,
) -> None:
    """Run one setup in a sandbox. Raises SetupFailed, and SandboxCancelled when it was stopped."""
    script = f"{SETUP_FOLDER}/.{recipe.kind}-setup.sh"
    files = {f"{SETUP_FOLDER}/{path}": content for path, content in recipe.files.items()}
    if recipe.script.strip():
        files[script] = (recipe.script.encode(), 0o755)
    runtime.write_files(handle, files)
    if recipe.script.strip():
        result = runtime.exec(
            handle,
            ["bash", script],
            env=env,
            timeout_seconds=deadline.seconds(),
            output_bytes=SETUP_OUTPUT_BYTES,
            cancelled=deadline.cancelled,
        )
        if result.cancelled:
            raise SandboxCancelled(f"The {recipe.kind}'s setup was stopped.")
        if result.exit_code != 0:
            raise _failure(recipe, result)
    runtime.exec(handle, ["rm", "-rf", SETUP_FOLDER], cwd="/", timeout_seconds=60)


def _failure(recipe: Recipe, result: ExecResult) -> SetupFailed:
    output = (result.stdout + result.stderr).decode(errors="replace")[-2000:]
    how = "did not end in time" if result.timed_out else f"ended with {result.exit_code}"
    return SetupFailed(f"The {recipe.kind}'s setup {how}: {output}", timed_out=result.timed_out)
