"""What an episode has of its sandbox in RUN: its shell, its programs, its network."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, ParamSpec, TypeVar

from rollouts.exceptions import InfraFault
from rollouts.handlers.drive import POLICYS_LIMITS
from rollouts.models import Rollout
from rollouts.services.secrets import environment_secrets
from rollouts.stages.journal import StageJournal
from rollouts.stages.network import reachable
from rollouts.tools.sandbox import EpisodeSandbox
from sandboxes.models import Sandbox
from sandboxes.runtime.exceptions import SandboxFault, SandboxGone
from sandboxes.runtime.processes import ends_soon
from sandboxes.runtime.protocol import SandboxHandle
from sandboxes.runtime.sessions import CommandResult, ShellSession, ShellState
from sandboxes.services.node import node_runtime
from sandboxes.states import SandboxState

PROBE_SECONDS = 10.0

P = ParamSpec("P")
Sampled = TypeVar("Sampled")


@dataclass(frozen=True, kw_only=True)
class Inside:
    """Hold an episode's ways into its sandbox, None where it has none.

    `ended` says that it had ended at its limit already when another worker took the episode over.
    `secrets` are the variables of its programs whose values nothing may keep.
    """

    handle: SandboxHandle | None = None
    shell: ShellSession | None = None
    access: EpisodeSandbox | None = None
    ended: SandboxGone | None = None
    secrets: Mapping[str, str] = field(default_factory=dict)

    def sampling(self, sample: Callable[P, Sampled]) -> Callable[P, Sampled]:
        """Return the call, or one that raises SandboxGone where no turn can be carried out."""
        return sample if self.ended is None else partial(_refuse, self.ended)

    def over_limit(self) -> str | None:
        """Return the limit at which the sandbox ended by the policy's own doing, if it did."""
        if self.ended is not None:
            return self.ended.limit
        return None if self.handle is None else limit_at_end(self.handle)


class EndedShell:
    """Stand for the shell of a sandbox that has ended; see `ShellSession`."""

    def __init__(self, gone: SandboxGone, state: ShellState) -> None:
        self._gone = gone
        self._state = state

    def run(self, *_words: object, **_bounds: object) -> CommandResult:
        """Raise SandboxGone."""
        _refuse(self._gone)

    def send(self, *_words: object, **_bounds: object) -> CommandResult:
        """Raise SandboxGone."""
        _refuse(self._gone)

    def state(self) -> ShellState:
        """Return the state that the last command left."""
        return self._state

    def restore(self, state: ShellState) -> None:
        """Take a state over that no command will see."""
        self._state = state

    def close(self) -> None:
        """Do nothing: it went with its sandbox."""


@contextmanager
def inside(
    rollout: Rollout,
    sandbox: Sandbox | None,
    journal: StageJournal,
    *,
    model: Callable[[], str | None],
) -> Iterator[Inside]:
    """Open an episode's shell and serve its sandbox's network for a while.

    A sandbox that ended at its limit after turns were sampled stays ended: the episode is to end
    with them. Raises InfraFault for one that is not there for any other reason, and the faults of
    sandboxes.
    """
    with ExitStack() as stack:
        try:
            found = _enter(stack, rollout, sandbox, journal, model)
        except SandboxFault as fault:
            ended = _ended_at_limit(rollout, sandbox, journal, fault)
            if ended is None:
                raise
            found = ended
        yield found


def limit_at_end(handle: SandboxHandle) -> str | None:
    """Return which of the policy's limits ended a sandbox; None when it runs or ended otherwise.

    Asked after a fault: its programs may be gone a moment before it is.
    """
    runtime = node_runtime()
    if not ends_soon(partial(runtime.alive, handle)):
        return None
    try:
        runtime.exec(handle, ["true"], timeout_seconds=PROBE_SECONDS)
    except SandboxGone as gone:
        return gone.limit if gone.limit in POLICYS_LIMITS else None
    except SandboxFault:
        pass
    return None


def _enter(
    stack: ExitStack,
    rollout: Rollout,
    sandbox: Sandbox | None,
    journal: StageJournal,
    model: Callable[[], str | None],
) -> Inside:
    if not rollout.needs_sandbox:
        return Inside()
    if sandbox is None or sandbox.handle is None or sandbox.state != SandboxState.READY:
        raise InfraFault(
            "The sandbox is not there any more.", code="sandbox.gone", restart_from_init=True
        )
    handle = SandboxHandle.from_dict(sandbox.handle)
    if not node_runtime().alive(handle):
        raise SandboxGone("The sandbox's instance ended.", limit=limit_at_end(handle))
    serving = reachable(handle, environment=rollout.environment, model=model)
    secrets = environment_secrets(rollout.environment, "tools")
    env = {**stack.enter_context(serving), **secrets}
    shell = _open_shell(rollout, handle, journal, env)
    stack.callback(shell.close)
    access = EpisodeSandbox(node_runtime(), handle, resumed=bool(journal.replay()), env=env)
    stack.callback(access.close)
    return Inside(handle=handle, shell=shell, access=access, secrets=secrets)


def _ended_at_limit(
    rollout: Rollout, sandbox: Sandbox | None, journal: StageJournal, fault: SandboxFault
) -> Inside | None:
    """Return what is left of a sandbox that a policy's turns brought to its limit, else None.

    Before the first turn no policy had a hand in it.
    """
    if sandbox is None or sandbox.handle is None or not journal.replay():
        return None
    handle = SandboxHandle.from_dict(sandbox.handle)
    limit = limit_at_end(handle)
    if limit is None:
        return None
    gone = SandboxGone(str(fault), limit=limit)
    state = journal.shell_state or ShellState(cwd=rollout.environment.workdir, exports="")
    access = EpisodeSandbox(node_runtime(), handle, resumed=True)
    return Inside(handle=handle, shell=EndedShell(gone, state), access=access, ended=gone)


def _open_shell(
    rollout: Rollout, handle: SandboxHandle, journal: StageJournal, env: Mapping[str, str]
) -> ShellSession:
    """Open the episode's shell.

    A journal of an earlier worker restores directory and exports; a snapshot its directory.
    """
    shell = node_runtime().open_shell(handle, env=env)
    state, snapshot = journal.shell_state, rollout.group.snapshot
    if state is None and snapshot is not None and snapshot.workdir:
        state = ShellState(cwd=snapshot.workdir, exports="")
    if state is not None:
        shell.restore(state)
    return shell


def _refuse(gone: SandboxGone, *_words: object, **_bounds: object) -> NoReturn:
    raise gone
