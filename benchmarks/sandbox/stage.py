"""The folder, the runtime and the processes of one run; all of it ends with the run."""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from rich.console import Console
from rich.progress import track

from benchmarks.sandbox.measures import rounds
from sandboxes.runtime.account import Account, resolve_account
from sandboxes.runtime.argv import SANDBOX_ENV, Tools, enter_argv, find_tools, remove_argv
from sandboxes.runtime.factory import make_runtime
from sandboxes.runtime.processes import all_stats, descendants, kill_process, kill_sessions
from sandboxes.runtime.protocol import Limits, Network, Runtime, SandboxHandle, SandboxSpec

Item = TypeVar("Item")

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_SECONDS = 120.0
_LIFETIME_SECONDS = 3600.0  # a backstop: a run that is killed leaves nothing for longer

_SETPRIV = shutil.which("setpriv") or "/usr/bin/setpriv"


class WayLacking(Exception):
    """Say why a way cannot be measured on this machine, and how to mend that."""


class Stage:
    """Start sandboxes of ours and plain processes as the sandbox account; `open_stage` makes it.

    `quick` asks every section for its smallest form; `rounds` None for its usual number.
    """

    def __init__(
        self, folder: Path, image: Path, *, quick: bool, rounds: int | None, seed: int
    ) -> None:
        self.folder = folder
        self.image = image
        self.quick = quick
        self.chance = random.Random(seed)
        self.tools: Tools = find_tools()
        self.account: Account = resolve_account(None)
        self.console = Console(stderr=True)
        self.notes: list[str] = []
        self._rounds = rounds
        self._prefix = f"bench-{secrets.token_hex(4)}-"
        self.root = folder / "ours"
        self.runtime: Runtime = make_runtime("apptainer", self.root, self._prefix, None)

    def rounds(
        self, title: str, items: Sequence[Item], usual: int, quick: int = 2
    ) -> Iterator[tuple[int, Item]]:
        """Yield (round, item): every item once a round, shuffled anew each round."""
        count = self._rounds or (quick if self.quick else usual)
        self.console.print(f"{title}: {count} rounds of {len(items)}")
        turns = rounds(items, count, self.chance)
        return iter(
            track(
                turns,
                total=count * len(items),
                description=title,
                console=self.console,
                transient=True,
            )
        )

    def note(self, text: str) -> None:
        """Keep a remark that belongs beside the numbers, once."""
        if text not in self.notes:
            self.notes.append(text)

    def spec(self, *, network: Network = "none") -> SandboxSpec:
        """Describe a sandbox with a new name."""
        return SandboxSpec(
            name=self.new_name(),
            image=str(self.image),
            network=network,
            limits=Limits(lifetime_seconds=_LIFETIME_SECONDS),
        )

    def new_name(self) -> str:
        """Return a sandbox name that no other run has."""
        return f"{self._prefix}{secrets.token_hex(6)}"

    def start(self, spec: SandboxSpec) -> SandboxHandle:
        """Start a sandbox of ours."""
        return self.runtime.start(spec, timeout_seconds=START_SECONDS)

    @contextmanager
    def sandbox(self, *, network: Network = "none") -> Iterator[SandboxHandle]:
        """Yield a sandbox of ours, stopped afterwards."""
        handle = self.start(self.spec(network=network))
        try:
            yield handle
        finally:
            self.runtime.stop(handle.name)

    def own_folder(self, name: str) -> Path:
        """Make a folder that belongs to the sandbox account."""
        made = self.folder / name
        made.mkdir(parents=True)
        if os.geteuid() == 0:
            os.chown(made, self.account.uid, self.account.gid)
        return made

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.DEVNULL,
        stderr: int | IO[bytes] = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a process as the sandbox account, in a session of its own."""
        return subprocess.Popen(
            self.as_account(argv),
            env=dict(env),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd="/",
            start_new_session=True,
        )

    def as_account(self, argv: Sequence[str]) -> list[str]:
        """Return the command line that drops root first; without root it is `argv`.

        Not by Popen's `user`, which has to fork where it could vfork: on bare ways, whose
        times are the limit for ours, that millisecond would flatter us.
        """
        if os.geteuid() != 0:
            return list(argv)
        drop = [f"--reuid={self.account.uid}", f"--regid={self.account.gid}", "--clear-groups"]
        return [_SETPRIV, *drop, "--no-new-privs", "--", *argv]

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        seconds: float,
        to_its_end: bool = False,
    ) -> None:
        """Run a process as the sandbox account; raises CalledProcessError, TimeoutExpired.

        `to_its_end` holds a Ctrl-C back until then: half a start may leave a daemon.
        """
        with tempfile.TemporaryFile(dir=self.folder) as output:
            process = self.spawn(argv, env=env, stdout=output, stderr=output)
            try:
                code = _wait(process, seconds) if to_its_end else process.wait(seconds)
            except BaseException:
                kill_sessions({process.pid})
                process.wait()
                raise
            output.seek(0)
            text = output.read()
        if code != 0:
            raise subprocess.CalledProcessError(code, list(argv), output=text[-2000:])

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """End a process that `spawn` started, those below it first.

        What entered a sandbox is a grandchild: were its parent gone first, it would be an
        orphan, and the sandbox could not end before somebody collects it.
        """
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        for stat in reversed(descendants(process.pid)):
            kill_process(stat.pid, stat.start_ticks, wait_seconds=5)
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def entry(self, pid: int, *, network: Network = "none") -> list[str]:
        """Return the words that enter a sandbox without the spawner."""
        return enter_argv(self.tools, pid=pid, network=network)

    def close(self) -> None:
        """End every sandbox and process of this run, and delete its folder."""
        for name in [*self.runtime.list(), *self.runtime.list_warm()]:
            self.runtime.stop(name)
        self.runtime.close()
        kill_sessions(_instance_sessions(self._prefix))
        for stat in reversed(descendants(os.getpid())):
            kill_process(stat.pid, stat.start_ticks, wait_seconds=5)
        with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):
            inner = [str(path) for path in self.folder.iterdir()]
            self.run(remove_argv(self.tools, inner), env=SANDBOX_ENV, seconds=60)
        shutil.rmtree(self.folder)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for the end, also after a Ctrl-C."""
    try:
        return process.wait(seconds)
    except KeyboardInterrupt:
        process.wait(seconds)
        raise


def _instance_sessions(prefix: str) -> set[int]:
    """Return the sessions of Apptainer's own instances, which call themselves by their name."""
    mark = f"[{prefix}".encode()
    found = set()
    for stat in all_stats():
        with suppress(OSError):
            if mark in Path(f"/proc/{stat.pid}/cmdline").read_bytes():
                found.add(stat.session)
    return found


@contextmanager
def open_stage(
    *, image: Path, work: Path, quick: bool, rounds: int | None, seed: int
) -> Iterator[Stage]:
    """Yield the stage of one run; all that it started has ended afterwards.

    Raises RuntimeMissing where there is no Apptainer or no account to run sandboxes as.
    """
    folder = Path(tempfile.mkdtemp(prefix="prorl-bench-", dir=work))
    folder.chmod(0o755)  # the sandbox account passes it
    try:
        stage = Stage(folder, image, quick=quick, rounds=rounds, seed=seed)
    except BaseException:
        shutil.rmtree(folder)
        raise
    try:
        yield stage
    finally:
        for kind in STOPPING:  # a second Ctrl-C leaves nothing either
            signal.signal(kind, signal.SIG_IGN)
        stage.close()
