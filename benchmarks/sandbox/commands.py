"""How long one command takes in a sandbox that already runs, by the way that it goes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks.sandbox.guests import guest_sandbox
from benchmarks.sandbox.measures import Measure, Samples
from benchmarks.sandbox.stage import Stage, WayLacking
from benchmarks.sandbox.ways import Way, WayBroken
from benchmarks.sandbox.ways.ours import ExecWay, ShellWay
from benchmarks.sandbox.ways.pipe import EngineExecWay, PipeWay
from benchmarks.sandbox.ways.swerex import SwerexWay, import_client
from benchmarks.sandbox.ways.tmux import FIXED_POLL, GROWING_POLL, TmuxForm, TmuxWay
from sandboxes.runtime.protocol import SandboxHandle

SECTION = "commands"
PIPE, SHELL, SHELL_PIPES, EXEC = "pipe to bash: the limit", "shell", "shell on pipes", "exec"
ENGINE, SWEREX = "apptainer exec per command", "SWE-ReX as it ships"
TMUX, TMUX_GROWING = "tmux, 0.5 s poll (OpenHands 0.x)", "tmux, growing poll (OpenHands 1.x)"

BUILTIN, EXTERNAL, ECHO, LISTING, LARGE = (
    "builtin true",
    "/bin/true",
    "echo hello",
    "ls -la /usr/bin",
    "1.3 MB of seq",
)
COMMANDS = {
    BUILTIN: "true",
    EXTERNAL: "/bin/true",
    ECHO: "echo hello",
    LISTING: "ls -la /usr/bin",
    LARGE: "seq 200000",
}

_FAST_CALLS = 5  # of a way under a hundredth of a second, so that its median means something


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Describe one way: its name on the command line, its label, its calls per round."""

    key: str
    label: str
    calls: int
    open: Callable[[Stage, SandboxHandle, ExitStack], Way]


def _shell(terminal: bool) -> Callable[[Stage, SandboxHandle, ExitStack], Way]:
    return lambda stage, handle, _: ShellWay(stage, handle, terminal=terminal)


def _tmux(form: TmuxForm) -> Callable[[Stage, SandboxHandle, ExitStack], Way]:
    return lambda stage, handle, _: TmuxWay(stage, handle, form)


def _open_swerex(stage: Stage, _: SandboxHandle, stack: ExitStack) -> Way:
    import_client()  # before a sandbox is filled for nothing
    return SwerexWay(stage, stack.enter_context(guest_sandbox(stage)))


KINDS = (
    Kind(
        key="pipe",
        label=PIPE,
        calls=_FAST_CALLS,
        open=lambda stage, handle, _: PipeWay(stage, stage.entry(handle.pid)),
    ),
    Kind(key="shell", label=SHELL, calls=_FAST_CALLS, open=_shell(True)),
    Kind(key="shell-pipes", label=SHELL_PIPES, calls=_FAST_CALLS, open=_shell(False)),
    Kind(
        key="exec",
        label=EXEC,
        calls=_FAST_CALLS,
        open=lambda stage, handle, _: ExecWay(stage, handle),
    ),
    Kind(
        key="engine",
        label=ENGINE,
        calls=1,
        open=lambda stage, handle, _: EngineExecWay(stage, handle),
    ),
    Kind(key="swerex", label=SWEREX, calls=1, open=_open_swerex),
    Kind(key="tmux", label=TMUX, calls=1, open=_tmux(FIXED_POLL)),
    Kind(key="tmux-growing", label=TMUX_GROWING, calls=1, open=_tmux(GROWING_POLL)),
)


def measure(stage: Stage, ways: Collection[str]) -> list[Measure]:
    """Time every command through every way whose key is in `ways`; empty means all."""
    samples = Samples(SECTION, subjects=list(COMMANDS), ways=[kind.label for kind in KINDS])
    with _opened(stage, [kind for kind in KINDS if not ways or kind.key in ways]) as opened:
        calls = [
            (kind.label, way, subject)
            for kind, way in opened
            for subject in COMMANDS
            for _ in range(kind.calls)
        ]
        for _, (label, way, subject) in stage.rounds(SECTION, calls, 30):
            samples.time(subject, label, partial(way.run, COMMANDS[subject]))
    return samples.measures()


@contextmanager
def _opened(stage: Stage, kinds: list[Kind]) -> Iterator[list[tuple[Kind, Way]]]:
    """Open the ways in one sandbox and try each; those that the machine lacks are noted."""
    with stage.sandbox() as handle, ExitStack() as stack:
        opened: list[tuple[Kind, Way]] = []
        for kind in kinds:
            try:
                way = kind.open(stage, handle, stack)
            except WayLacking as reason:
                stage.note(f"Not measured: {kind.label}: {reason}")
                continue
            stack.callback(way.close)
            opened.append((kind, way))
        reference = ExecWay(stage, handle)
        for subject, command in COMMANDS.items():
            expected = _lines(reference.run(command))
            for kind, way in opened:
                _compare(stage, kind, subject, _lines(way.run(command)), expected)
        yield opened


def _lines(output: str | bytes) -> list[list[str]]:
    text = output if isinstance(output, str) else output.decode()
    return [line.split() for line in text.strip().splitlines()]


def _compare(
    stage: Stage, kind: Kind, subject: str, got: list[list[str]], expected: list[list[str]]
) -> None:
    """Note how much less than the command printed comes back; raises WayBroken for other text.

    Words are compared, not bytes: on a terminal `ls` aligns its names otherwise.
    """
    if got[-1:] != expected[-1:]:
        raise WayBroken(f"{kind.label}: {subject} ended with {got[-1:]}, not {expected[-1:]}")
    if len(got) != len(expected):
        stage.note(f"{kind.label} gives back {len(got)} of the {len(expected)} lines of {subject}.")
