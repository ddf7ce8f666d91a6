"""A persistent bash: one command at a time, with a marker nobody can guess.

The terminal receives one short fixed line per command, and the command's text travels on
a descriptor of its own: a terminal line of 4096 bytes or more would hang. The command runs
with stdin from /dev/null and its output on a copy of the terminal, so that `exec >file`,
`exec <file` and closed descriptors of a command do not reach the shell itself.
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Callable

from sandboxes.runtime.exceptions import EnterFailed, SandboxGone, ShellFailed
from sandboxes.runtime.processes import ends_soon
from sandboxes.runtime.protocol import (
    DEFAULT_OUTPUT_BYTES,
    Cancelled,
    CommandResult,
    ShellState,
)
from sandboxes.runtime.spawner import POLL_SECONDS
from sandboxes.runtime.streams import HeadTail, printable
from sandboxes.runtime.terminal import Terminal

OPEN_SECONDS = 30.0
MAX_COMMAND_BYTES = 1024 * 1024
# How long each step of a recovery waits, and whether it kills the foreground first. An
# interrupt that falls between two programs of a loop meets nobody: it is tried again.
_LADDER = ((0.1, False), (0.4, False), (0.5, True), (0.5, True), (0.5, True))
_SETTLE_SECONDS = 0.02
_NUDGE_SECONDS = 1.0

_LINE = rb" IFS= \builtin read -r -d '' -u 8 __PRORL_ORDER && \builtin eval " + (
    rb'"$__PRORL_ORDER"'
)
_SETUP = r"""PS0= PS1= PS2= HISTFILE=
\builtin unset -v PROMPT_COMMAND
\builtin set +o history +o histexpand
\builtin shopt -u checkwinsize
exec 7>&1
"""
_COMMAND = r"""\builtin unset -v __PRORL_ORDER
\builtin eval {command} </dev/null >&7 2>&7 7>&- 8<&- 9>&-
__PRORL_CODE=$?
"""
_REPORT = r"""{{ \builtin printf '%s\0%s\0' {token} "$PWD"
\builtin declare -px
\builtin printf '\0'; }} >&9
"""
_MARK = r"""\builtin printf '\036%s:%s\036' {token} "$__PRORL_CODE" >&7
PS0= PS1= PS2=; \builtin unset -v PROMPT_COMMAND"""
_RECOVERY = (
    r""" __PRORL_CODE=$?; \builtin printf '%s\0%s\0' {token} "$PWD" >&9; """
    r"""\builtin printf '\036%s:%s\036' {token} "$__PRORL_CODE" >&7"""
)
_STALE = re.compile(rb"\x1e[0-9a-f]{16}:\d+\x1e")
_MARK_BYTES = 64
_FAREWELL = re.compile(r"(?:^|(?<=\n))(?:exit|logout)\n\Z")  # an interactive bash says so
_NOISE = ("declare -x PWD=", "declare -x OLDPWD=", "declare -x SHLVL=", "declare -x _=")


class _Capture:
    """Collect output and find the marker, looking at the end of the stream only."""

    def __init__(self, token: str, limit: int) -> None:
        self._mark = re.compile(rb"\x1e" + token.encode() + rb":(\d+)\x1e")
        self._kept = HeadTail(limit)
        self._held = b""
        self.code: int | None = None

    def feed(self, data: bytes) -> bool:
        """Take bytes; returns whether the marker arrived."""
        self._held += data
        found = self._mark.search(self._held)
        if found:
            self.code = int(found[1])
            self._kept.feed(_STALE.sub(b"", self._held[: found.start()]))
            self._held = b""
            return True
        cut = len(self._held) - _MARK_BYTES
        if cut > 0:
            for stale in _STALE.finditer(self._held):
                if stale.start() < cut < stale.end():
                    cut = stale.start()
            self._kept.feed(_STALE.sub(b"", self._held[:cut]))
            self._held = self._held[cut:]
        return False

    def text(self) -> tuple[str, bool]:
        """Return the printable output and whether its middle is missing."""
        self._kept.feed(_STALE.sub(b"", self._held))
        self._held = b""
        return printable(self._kept.joined()), self._kept.truncated


class BashSession:
    """Keep one bash alive over many commands; replaces it when it ends."""

    def __init__(
        self, open_terminal: Callable[[], Terminal], alive: Callable[[], bool], cwd: str
    ) -> None:
        self._open_terminal = open_terminal
        self._alive = alive
        self._state = ShellState(cwd=cwd, exports="")
        self._terminal: Terminal | None = None
        self._start()

    def run(
        self,
        command: str,
        *,
        timeout_seconds: float,
        output_bytes: int = DEFAULT_OUTPUT_BYTES,
        cancelled: Cancelled | None = None,
    ) -> CommandResult:
        """Run a command; see `ShellSession.run`."""
        began = time.monotonic()
        refusal = _refuse(command)
        if refusal:
            return CommandResult(
                output=refusal, exit_code=126, cwd=self._state.cwd, duration_seconds=0.0
            )
        terminal = self._terminal or self._start()
        token = secrets.token_hex(8)
        capture = _Capture(token, output_bytes)
        body = _COMMAND.format(command=shlex.quote(command)) + _REPORT.format(token=token)
        _send(terminal, body + _MARK.format(token=token))
        why = self._follow(terminal, capture, began + timeout_seconds, cancelled, nudge=token)
        exit_code = capture.code
        restarted = False
        if why in ("timeout", "cancelled"):
            exit_code = None
            restarted = not self._recover(terminal, capture, token)
        elif why == "ended":
            exit_code, restarted = terminal.exit_code, True
        if restarted:
            self._start()
        else:
            self._keep_state(terminal, token)
        output, truncated = capture.text()
        if why == "ended":
            output = _FAREWELL.sub("", output)
        return CommandResult(
            output=output,
            exit_code=exit_code,
            cwd=self._state.cwd,
            duration_seconds=time.monotonic() - began,
            truncated=truncated,
            timed_out=why == "timeout",
            cancelled=why == "cancelled",
            shell_restarted=restarted,
        )

    def state(self) -> ShellState:
        """Return directory and exports after the last command."""
        return self._state

    def restore(self, state: ShellState) -> None:
        """Take over a directory and exports."""
        self._state = state
        terminal = self._terminal
        if terminal is None:
            self._start()
        else:
            self._prepare(terminal, "")

    def close(self) -> None:
        """End the shell and its session; idempotent."""
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None

    def _start(self) -> Terminal:
        """Open a shell in the last known state, in place of the present one."""
        self.close()
        if not self._alive():
            raise SandboxGone("the sandbox of this shell no longer runs")
        terminal = self._open_terminal()
        try:
            self._prepare(terminal, _SETUP)
        except BaseException:
            terminal.close()
            raise
        self._terminal = terminal
        return terminal

    def _prepare(self, terminal: Terminal, setup: str) -> None:
        """Bring a shell to the remembered state and wait until it is idle."""
        token = secrets.token_hex(8)
        capture = _Capture(token, 8192)
        exports = "\n".join(
            line for line in self._state.exports.split("\n") if not line.startswith(_NOISE)
        )
        body = (
            f"{setup}\\builtin eval {_quote(exports)} 2>/dev/null\n"
            f"\\builtin cd -- {_quote(self._state.cwd)} 2>/dev/null || \\builtin cd /\n"
            "__PRORL_CODE=0\n"
        )
        _send(terminal, body + _REPORT.format(token=token) + _MARK.format(token=token))
        why = self._follow(terminal, capture, time.monotonic() + OPEN_SECONDS, None)
        if why == "ended":
            if ends_soon(self._alive):
                raise SandboxGone("the sandbox ended while a shell started in it")
            raise EnterFailed(f"no shell: {capture.text()[0].strip()[-1000:]}")
        if why is not None:
            raise ShellFailed(f"the shell did not become ready in {OPEN_SECONDS:g} s")
        terminal.note_shell_group()
        self._keep_state(terminal, token)

    def _follow(
        self,
        terminal: Terminal,
        capture: _Capture,
        deadline: float,
        cancelled: Cancelled | None,
        nudge: str = "",
    ) -> str | None:
        """Read until the marker; returns why there is none: timeout, cancelled or ended.

        Some errors make bash forget its whole line, the marker with it (`kill -INT $$`, or
        08 in arithmetic). So a silent shell in front is asked for the marker `nudge` again;
        when it is only busy, the question waits in the terminal and does no harm.
        """
        patience = _NUDGE_SECONDS
        asked = time.monotonic()
        while True:
            now = time.monotonic()
            left = deadline - now
            if cancelled is not None and cancelled():
                return "cancelled"
            if left <= 0:
                return "timeout"
            if nudge and now - asked >= patience:
                asked, patience = now, 2 * patience
                if terminal.shell_in_front():
                    terminal.type(_RECOVERY.format(token=nudge).encode())
            wait = min(left, asked + patience - now) if nudge else left
            data = terminal.read(wait if cancelled is None else min(wait, POLL_SECONDS))
            if data:
                asked = time.monotonic()
                if capture.feed(data):
                    return None
            if terminal.ended:
                return "ended"

    def _recover(self, terminal: Terminal, capture: _Capture, token: str) -> bool:
        """Interrupt, then kill the foreground, until the shell answers; False: it does not."""
        for seconds, kills in _LADDER:
            terminal.reset_modes()
            terminal.forget_orders()
            if kills:
                terminal.kill_foreground()
            terminal.interrupt()
            # An interrupt empties the terminal's input: the line must come after it.
            self._follow(terminal, capture, time.monotonic() + _SETTLE_SECONDS, None)
            if capture.code is not None:
                return True
            terminal.type(_RECOVERY.format(token=token).encode())
            self._follow(terminal, capture, time.monotonic() + seconds, None)
            if capture.code is not None:
                return True
            if terminal.ended:
                return False
        return False

    def _keep_state(self, terminal: Terminal, token: str) -> None:
        """Take the newest report of that command; exports stay where it brought none."""
        fields = terminal.report()
        starts = [index for index, field in enumerate(fields) if field == token.encode()]
        if not starts or len(fields) <= starts[-1] + 1:
            return
        values = [field.decode("utf-8", "replace") for field in fields[starts[-1] + 1 :]]
        exports = values[1] if len(values) > 1 else self._state.exports
        self._state = ShellState(cwd=values[0] or self._state.cwd, exports=exports)


def _send(terminal: Terminal, body: str) -> None:
    terminal.reset_modes()
    terminal.order(body.encode("utf-8", "surrogateescape"))
    terminal.type(_LINE)


def _quote(text: str) -> str:
    return shlex.quote(text.replace("\0", ""))


def _refuse(command: str) -> str:
    if "\0" in command:
        return "the command holds a NUL character and was not run"
    if len(command.encode("utf-8", "surrogateescape")) > MAX_COMMAND_BYTES:
        return f"the command is longer than {MAX_COMMAND_BYTES} bytes and was not run"
    return ""
