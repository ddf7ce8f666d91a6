"""Prepared layers: what a setup leaves is kept read-only and shared by all that need the same."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from sandboxes.models import Environment
from sandboxes.runtime.exceptions import SandboxCancelled, SetupFailed
from sandboxes.runtime.protocol import ExecResult, Runtime, SandboxHandle, SandboxSpec
from sandboxes.setup_files import mask, read_files, secrets_for, telling_parts

NO_SECRETS: Mapping[str, str] = MappingProxyType({})
SETUP_FOLDER = "/setup"
SETUP_OUTPUT_BYTES = 64 * 1024
KEY_VERSION = 2  # raise it when a setup is carried out in another way

Layers = tuple[str, ...]
Start = Callable[[Layers], SandboxHandle]
Network = Callable[[SandboxHandle], AbstractContextManager[Mapping[str, str]]]
Resolve = Callable[[Mapping[str, str]], Mapping[str, str]]

# Which files of the sandbox, newer than the script given, hold one of the lines on stdin.
_HOLDING = """
command -v find >/dev/null && command -v grep >/dev/null || exit 3
values=$(cat)
newer=-cnewer
find / -maxdepth 0 -cnewer "$1" >/dev/null 2>&1 || newer=-newer
find / -xdev -path /proc -prune -o -path /setup -prune -o -type f "$newer" "$1" \
  -exec grep -lF -e "$values" {} + 2>/dev/null | head -n 3
"""


def no_secrets(references: Mapping[str, str]) -> Mapping[str, str]:
    """Return nothing for no reference, as where setups have none; raises SetupFailed for one."""
    if references:
        raise SetupFailed(f"Nothing here resolves the secrets {', '.join(sorted(references))}.")
    return {}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One setup: a bash script, run in /setup's presence with files beside it.

    `kind` names whose setup it is, in messages; `files` are relative path to content and mode;
    `secrets` are variables of the script by name, each with the reference of its value; `env` are
    its other variables, which no setup but this one sees.
    """

    kind: str
    script: str
    files: Mapping[str, tuple[bytes, int]] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Tell whether there is anything to do."""
        return bool(self.script.strip() or self.files)

    def key(self, *, base: str) -> str:
        """Return the key of the layer that this setup makes on top of `base`."""
        files = {
            path: [hashlib.sha256(data).hexdigest(), mode]
            for path, (data, mode) in self.files.items()
        }
        parts: list[object] = [KEY_VERSION, base, self.script, files]
        if self.secrets:  # the references: no value becomes part of a key
            parts.append(dict(self.secrets))
        if self.env:
            parts.append({"env": dict(self.env)})
        described = json.dumps(parts, sort_keys=True)
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
    """Return an environment's own setup, with its files and the references of its secrets."""
    if not environment.setup.strip():  # nothing would remain of files alone
        return Recipe(kind="environment", script="")
    return Recipe(
        kind="environment",
        script=environment.setup,
        files=read_files(environment.files),
        secrets=secrets_for(environment.secrets, "setup"),
    )


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

    Image and working directory, variables, and what it reaches: network, listed hosts, GPU.
    """
    return json.dumps(
        [
            runtime.image_key(spec.image),
            spec.workdir,
            spec.network,
            spec.gpu,
            environment.network,
            sorted(environment.egress_hosts),
            *([sorted(spec.env.items())] if spec.env else []),
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
    resolve: Resolve = no_secrets,
) -> Layers:
    """Return the prepared layers of these setups, topmost first; the missing ones are made.

    One process of the node makes a layer while the others wait for it; `start` starts a sandbox
    on given layers for that, which is gone afterwards; `resolve` gives the values of a setup's
    secrets, and may raise what it likes. Raises SetupFailed, also when the setup
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
                    secrets = resolve(recipe.secrets)
                    handle = start(layers)
                    try:
                        with network(handle) as env:
                            carry_out(
                                runtime,
                                handle,
                                recipe,
                                env=env,
                                deadline=deadline,
                                secrets=secrets,
                            )
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
    secrets: Mapping[str, str] = NO_SECRETS,
) -> None:
    """Run one setup in a sandbox. Raises SetupFailed, and SandboxCancelled when it was stopped.

    A setup that leaves the value of a secret in a file fails: its layer would keep it.
    """
    script = f"{SETUP_FOLDER}/.{recipe.kind}-setup.sh"
    files = {f"{SETUP_FOLDER}/{path}": content for path, content in recipe.files.items()}
    if recipe.script.strip():
        files[script] = (recipe.script.encode(), 0o755)
    runtime.write_files(handle, files)
    if recipe.script.strip():
        result = runtime.exec(
            handle,
            ["bash", script],
            env={**recipe.env, **env, **secrets},
            timeout_seconds=deadline.seconds(),
            output_bytes=SETUP_OUTPUT_BYTES,
            cancelled=deadline.cancelled,
        )
        if result.cancelled:
            raise SandboxCancelled(f"The {recipe.kind}'s setup was stopped.")
        if result.exit_code != 0:
            raise _failure(recipe, result, secrets)
        _refuse_left_secrets(runtime, handle, recipe, script, secrets, deadline)
    runtime.exec(handle, ["rm", "-rf", SETUP_FOLDER], cwd="/", timeout_seconds=60)


def _refuse_left_secrets(
    runtime: Runtime,
    handle: SandboxHandle,
    recipe: Recipe,
    script: str,
    secrets: Mapping[str, str],
    deadline: Deadline,
) -> None:
    """Raise SetupFailed when a file that the setup wrote holds the value of one of its secrets."""
    values = telling_parts(secrets)
    if not values:
        return
    found = runtime.exec(
        handle,
        ["sh", "-c", _HOLDING, "sh", script],
        stdin="\n".join(part for _name, part in values).encode(),
        cwd="/",
        timeout_seconds=deadline.seconds(),
        output_bytes=4096,
        cancelled=deadline.cancelled,
    )
    paths = found.stdout.decode(errors="replace").split("\n")
    if found.exit_code != 0 or paths[0]:
        what = (
            f"left a secret in {', '.join(filter(None, paths))}"
            if paths[0]
            else ("was given secrets, and what it left could not be searched for them")
        )
        raise SetupFailed(f"The {recipe.kind}'s setup {what}; it must leave none in its layer.")


def _failure(recipe: Recipe, result: ExecResult, secrets: Mapping[str, str]) -> SetupFailed:
    output = mask((result.stdout + result.stderr).decode(errors="replace"), secrets)[-2000:]
    how = "did not end in time" if result.timed_out else f"ended with {result.exit_code}"
    return SetupFailed(f"The {recipe.kind}'s setup {how}: {output}", timed_out=result.timed_out)
