"""A persistent shell: one command at a time, with a marker nobody can guess.

The shell reads its lines from a pipe, not from the terminal: a terminal's line of 4096 bytes or
more would hang, and Ctrl-C empties it. A command runs with stdin from /dev/null, or from the
terminal when it is interactive, and its output on a copy of the terminal or the pipe, so that
`exec >file`, `exec <file` and closed descriptors of a command do not reach the shell itself.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from sandboxes.runtime.capture import Capture, new_token
from sandboxes.runtime.dialects import Dialect, dialect_of, hello, may_change
from sandboxes.runtime.exceptions import EnterFailed, SandboxGone, ShellFailed
from sandboxes.runtime.following import Bounds, Job, follow, recover
from sandboxes.runtime.processes import ends_soon
from sandboxes.runtime.reports import Report
from sandboxes.runtime.sessions import DEFAULT_OUTPUT_BYTES, Cancelled, CommandResult, ShellState
from sandboxes.runtime.terminal import LINE_BYTES, Terminal

OPEN_SECONDS = 30.0
MAX_COMMAND_BYTES = 1024 * 1024
_REPORT_SECONDS = 2.0
# A background job that goes on writing past these, between two commands, ends with its shell:
# no output after it could be told from the job's.
_FLOOD_BYTES = 64 * 1024 * 1024
_FLOOD_SECONDS = 0.3

_FAREWELL = re.compile(r"(?:^|(?<=\n))(?:exit|logout)\n\Z")  # an interactive bash says so
_FLOODED = "[a background job wrote without end: it was ended together with its shell]\n"
_INTERRUPTED = "[the program left running was interrupted first]\n"
_NOTHING_RUNS = "nothing is running: use command, and interactive for a program that reads input"
_LONG_LINE = f"a terminal takes lines of {LINE_BYTES} bytes at most, and nothing was typed"


class PersistentShell:
    """Keep one shell alive over many commands; replaces it when it ends. See `ShellSession`."""

    def __init__(
        self,
        ways: Sequence[Callable[[], Terminal]],
        alive: Callable[[], bool],
        cwd: str,
        *,
        require: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a shell: `ways` begin one each, the later ones where the image lacks the first.

        `require` raises SandboxGone with the reason when the sandbox has ended.
        """
        self._ways = list(ways)
        self._require = require
        self._alive = alive
        self._state = ShellState(cwd=cwd, exports="")
        self._token = ""  # of the last report that was asked for
        self._plain: bool | None = None  # None: not looked up in that report yet
        self._left: Job | None = None
        self._terminal: Terminal | None = None
        self._dialect: Dialect
        self._start()

    def run(
        self,
        command: str,
        *,
        timeout_seconds: float,
        idle_seconds: float | None = None,
        interactive: bool = False,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> CommandResult:
        """Run a command; see `ShellSession.run`."""
        began = time.monotonic()
        refusal = _refuse(command)
        if refusal:
            return self._refused(refusal)
        job = Job(token=new_token(), interactive=interactive, changes=may_change(command))
        capture = Capture(job.token, output_bytes)
        restarted = self._clear_the_way(capture)
        terminal = self._terminal or self._start()
        terminal.reset_modes()
        if interactive or job.changes or not self._looks_plain(terminal):
            terminal.order(self._dialect.order(command, job.token, interactive=interactive))
        else:
            terminal.order(self._dialect.simple_order(command, job.token))
        bounds = Bounds(
            deadline=began + timeout_seconds,
            idle_seconds=idle_seconds,
            cancelled=cancelled,
            nudge=self._nudge(job),
        )
        result = self._finish(terminal, job, capture, began, bounds)
        return replace(result, shell_restarted=True) if restarted else result

    def send(
        self,
        text: str,
        *,
        timeout_seconds: float,
        idle_seconds: float | None = None,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> CommandResult:
        """Type at the program left running; see `ShellSession.send`."""
        began = time.monotonic()
        job, terminal = self._left, self._terminal
        if job is None or terminal is None:
            return self._refused(_NOTHING_RUNS)
        data = text.encode("utf-8", "surrogateescape")
        longest = max(len(line) for line in data.split(b"\n"))
        if longest > LINE_BYTES and terminal.modes.edits_lines():
            return self._refused(_LONG_LINE, running=True)
        self._left = None
        capture = Capture(job.token, output_bytes, held=job.held)
        terminal.type(data)
        bounds = Bounds(
            deadline=began + timeout_seconds, idle_seconds=idle_seconds, cancelled=cancelled
        )
        return self._finish(terminal, job, capture, began, bounds)

    def state(self) -> ShellState:
        """Return the state after the last command that ended."""
        terminal = self._terminal
        if terminal is not None and self._left is None:
            terminal.await_report(self._token, _REPORT_SECONDS)
        self._take_state()
        return self._state

    def restore(self, state: ShellState) -> None:
        """Take over a state; see `ShellSession.restore`."""
        if self._left is not None:
            self._end_left(Capture(self._left.token, DEFAULT_OUTPUT_BYTES))
        self._state = state
        if self._terminal is None:
            self._start()
        else:
            self._restore(self._terminal)

    def close(self) -> None:
        """End the shell and its session; idempotent."""
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None
        self._left = None

    def _finish(
        self, terminal: Terminal, job: Job, capture: Capture, began: float, bounds: Bounds
    ) -> CommandResult:
        """Wait for a command's end, or for what makes it be left or ended."""
        why = follow(terminal, job, capture, bounds)
        restarted = running = False
        exit_code = capture.code
        if job.interactive and why in ("idle", "timeout"):
            running = True
        elif why in ("idle", "timeout", "cancelled"):
            exit_code = None
            restarted = not recover(terminal, self._dialect, job, capture)
        elif why == "ended":
            exit_code, restarted = self._dialect.exit_code(terminal.exit_code), True
        output, truncated = capture.text(hold=running)
        if running:
            self._left = replace(job, held=capture.held)
        elif restarted:
            self._start()
        else:
            self._ended_well(terminal, job, capture)
        return CommandResult(
            output=_FAREWELL.sub("", output) if why == "ended" else output,
            exit_code=exit_code,
            cwd=self._state.cwd,
            duration_seconds=time.monotonic() - began,
            truncated=truncated,
            timed_out=why == "timeout",
            cancelled=why == "cancelled",
            idle=why == "idle",
            running=running,
            shell_restarted=restarted,
        )

    def _refused(self, reason: str, *, running: bool = False) -> CommandResult:
        return CommandResult(
            output=reason, exit_code=126, cwd=self._state.cwd, duration_seconds=0.0, running=running
        )

    def _ended_well(self, terminal: Terminal, job: Job, capture: Capture) -> None:
        if job.changes or job.interactive or not self._looks_plain(terminal):
            self._ask_for_a_report(terminal, job.token)
        if capture.cwd != self._state.cwd and capture.cwd:
            self._state = replace(self._state, cwd=capture.cwd)
        if job.interactive:
            terminal.forget_typed()

    def _ask_for_a_report(self, terminal: Terminal, token: str) -> None:
        terminal.order(self._dialect.report(token))
        self._token = token
        self._plain = None

    def _looks_plain(self, terminal: Terminal) -> bool:
        """Tell from the last report whether a simple command leaves the state as it was."""
        if self._plain is None:
            terminal.collect_reports()
            report = terminal.reports.newest() if terminal.reports.complete(self._token) else None
            self._plain = None if report is None else report.plain
        return bool(self._plain)

    def _clear_the_way(self, capture: Capture) -> bool:
        """Make the shell ready for a command; returns whether it had to be replaced.

        What background jobs wrote since the last command comes first in the output.
        """
        if self._left is not None and not self._end_left(capture):
            self._start()
            return True
        terminal = self._terminal
        if terminal is None:
            return False
        (shown, written), flooded = terminal.leftover(
            most_bytes=_FLOOD_BYTES, most_seconds=_FLOOD_SECONDS
        )
        if flooded or terminal.ended:
            self._start()
            capture.add(_FLOODED.encode() if flooded else b"")
            return True
        if shown or written:
            capture.feed(shown + written)
        return False

    def _end_left(self, capture: Capture) -> bool:
        """Interrupt what was left running; returns whether the shell lives."""
        job, terminal = self._left, self._terminal
        self._left = None
        if job is None or terminal is None:
            return True
        last = Capture(job.token, DEFAULT_OUTPUT_BYTES, held=job.held)
        saved = recover(terminal, self._dialect, job, last)
        if saved:
            self._ended_well(terminal, job, last)
        capture.add(_INTERRUPTED.encode())
        return saved

    def _start(self) -> Terminal:
        """Open a shell in the last known state, in place of the present one."""
        self._take_state()
        self.close()
        if not self._alive():
            self._require()
            raise SandboxGone("the sandbox of this shell no longer runs")
        while True:
            try:
                self._terminal = self._begin(self._ways[0])
                return self._terminal
            except EnterFailed:
                if len(self._ways) == 1:
                    raise
                del self._ways[0]

    def _begin(self, way: Callable[[], Terminal]) -> Terminal:
        terminal = way()
        try:
            self._set_up(terminal)
        except BaseException:
            terminal.close()
            raise
        return terminal

    def _set_up(self, terminal: Terminal) -> None:
        token = new_token()
        terminal.order(hello(token, self._state.cwd, piped=terminal.piped))
        answer = self._await_answer(terminal, token)
        self._dialect, cwd = dialect_of(answer.cwd, piped=terminal.piped)
        terminal.note_shell_group()
        self._ask_for_a_report(terminal, new_token())  # the first: nobody waits for it
        if self._state.restores_more_than_the_directory:
            self._restore(terminal)
        else:
            self._state = replace(self._state, cwd=cwd)

    def _restore(self, terminal: Terminal) -> None:
        """Bring a shell to the remembered state and wait until it is idle."""
        self._token = new_token()
        terminal.order(self._dialect.restore(self._state) + self._dialect.answer(self._token))
        cwd = self._await_answer(terminal, self._token).cwd
        self._ask_for_a_report(terminal, self._token)
        self._state = replace(self._state, cwd=cwd)

    def _await_answer(self, terminal: Terminal, token: str) -> Capture:
        capture = Capture(token, 8192)
        job = Job(token=token, interactive=False)
        why = follow(terminal, job, capture, Bounds(deadline=time.monotonic() + OPEN_SECONDS))
        if why == "ended":
            if ends_soon(self._alive):
                self._require()
                raise SandboxGone("the sandbox ended while a shell started in it")
            raise EnterFailed(f"no shell: {capture.text()[0].strip()[-1000:]}")
        if why:
            raise ShellFailed(f"the shell did not become ready in {OPEN_SECONDS:g} s")
        return capture

    def _nudge(self, job: Job) -> bytes:
        if not self._dialect.nudged or job.interactive:
            return b""
        return self._dialect.answer(job.token)

    def _take_state(self) -> None:
        """Take the newest report over; directory and texts stay where there is none."""
        if self._terminal is None:
            return
        self._terminal.collect_reports()
        report = self._terminal.reports.newest()
        if report is not None:
            fresh = self._terminal.reports.first() or Report()
            self._state = self._dialect.state(self._state.cwd, report, fresh)


def _refuse(command: str) -> str:
    if "\0" in command:
        return "the command holds a NUL character and was not run"
    if len(command.encode("utf-8", "surrogateescape")) > MAX_COMMAND_BYTES:
        return f"the command is longer than {MAX_COMMAND_BYTES} bytes and was not run"
    return ""
