"""How long it takes until a new shell in a running sandbox answers."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.sandbox.measures import Measure, Samples
from benchmarks.sandbox.stage import Stage
from benchmarks.sandbox.ways import Way
from benchmarks.sandbox.ways.ours import ShellWay
from benchmarks.sandbox.ways.pipe import PipeWay
from sandboxes.runtime.argv import SANDBOX_ENV, engine_env, engine_exec_argv
from sandboxes.runtime.protocol import SandboxHandle

SECTION = "shells"
READY = "ready"
BARE, TERMINAL, PIPES, ENGINE = (
    "bare nsenter and bash",
    "open_shell",
    "open_shell on pipes",
    "apptainer exec and bash",
)


def measure(stage: Stage) -> list[Measure]:
    """Time every way to open a shell up to its first answer."""
    samples = Samples(SECTION, ways=(BARE, TERMINAL, PIPES, ENGINE))
    with stage.sandbox() as handle:
        for _, (label, ready) in stage.rounds(SECTION, _ways(stage, handle), 40):
            samples.time(READY, label, ready).close()
    return samples.measures()


def _ways(stage: Stage, handle: SandboxHandle) -> list[tuple[str, Callable[[], Way]]]:
    engine = engine_exec_argv(stage.tools, name=handle.name, env=SANDBOX_ENV)

    def answered(entry: list[str], env: dict[str, str]) -> PipeWay:
        way = PipeWay(stage, entry, env)
        way.run("")
        return way

    return [
        (BARE, lambda: answered(stage.entry(handle.pid), SANDBOX_ENV)),
        (TERMINAL, lambda: ShellWay(stage, handle, terminal=True)),
        (PIPES, lambda: ShellWay(stage, handle, terminal=False)),
        (ENGINE, lambda: answered(engine, engine_env(stage.root))),
    ]
