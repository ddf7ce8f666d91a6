"""tmux as OpenHands drives it: type the command, look at the screen until a prompt shows.

Re-made from `openhands-tools` 1.58 (tools/terminal, MIT licence) with the same library, the
same prompt, the same steps and waits. Version 0.x looked every 0.5 s on a screen of 1000 by
1000; 1.x looks after 0.02 s first, then ever later. The tmux server runs on the host and its
window's shell in the sandbox, so the sandbox does not slow tmux itself down.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.sandbox.stage import Stage, WayLacking
from benchmarks.sandbox.ways import CALL_SECONDS, WayBroken
from sandboxes.runtime.argv import SANDBOX_ENV
from sandboxes.runtime.protocol import SandboxHandle

_BEGIN, _END = "###PS1JSON###", "###PS1END###"
_PROMPT = re.compile(rf"^{_BEGIN}((?:(?!{_BEGIN}).)*?){_END}", re.DOTALL | re.MULTILINE)
_HISTORY_LINES = 10_000
_SETTLE_SECONDS = 0.1
_LATEST_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class TmuxForm:
    """Tell the two generations apart: size of the screen, and when it is looked at first."""

    columns: int
    lines: int
    first_poll_seconds: float


FIXED_POLL = TmuxForm(columns=1000, lines=1000, first_poll_seconds=0.5)
GROWING_POLL = TmuxForm(columns=256, lines=200, first_poll_seconds=0.02)


class TmuxWay:
    """Keep one tmux window with a bash in the sandbox."""

    def __init__(self, stage: Stage, handle: SandboxHandle, form: TmuxForm) -> None:
        if shutil.which("tmux") is None:
            raise WayLacking("tmux is not installed on this machine")
        try:
            # Not a plain import: only requirements-bench.txt brings it.
            libtmux: Any = importlib.import_module("libtmux")
        except ImportError:
            raise WayLacking("libtmux is missing: install requirements-bench.txt") from None
        self._form = form
        self._server = libtmux.Server(
            socket_path=str(stage.folder / f"tmux-{form.columns}"), config_file=os.devnull
        )
        session = self._server.new_session(
            session_name="bench", start_directory="/", x=form.columns, y=form.lines
        )
        try:
            session.set_option("history-limit", str(_HISTORY_LINES))
            first = session.active_window
            window = session.new_window(
                window_name="terminal", window_shell=shlex.join(_shell_words(stage, handle))
            )
            self._pane = window.active_pane
            first.kill()
            self._pane.send_keys(
                f'set +H; export PROMPT_COMMAND=\'export PS1="{_prompt_text()}"\'; export PS2=""'
            )
            time.sleep(_SETTLE_SECONDS)
            self._clear()
            self._await_prompt()
        except BaseException:
            self._server.kill()
            raise

    def run(self, command: str) -> str:
        """Run a command; see `Way.run`. Only what the history keeps comes back."""
        before = self._screen()
        count = len(_PROMPT.findall(before))
        self._pane.send_keys(command, enter=False, literal=True)
        self._pane.send_keys("Enter", enter=False)
        began = time.monotonic()
        while True:
            screen = self._screen()
            prompts = list(_PROMPT.finditer(screen))
            ready = len(prompts) > count or screen.rstrip().endswith(_END)
            if ready and screen != before:
                break
            elapsed = time.monotonic() - began
            if elapsed > CALL_SECONDS:
                raise WayBroken(f"no prompt within {CALL_SECONDS:g} s: {command}")
            time.sleep(min(_LATEST_POLL_SECONDS, max(self._form.first_poll_seconds, elapsed / 4)))
        start = prompts[-2].end() if len(prompts) > 1 else 0
        output = screen[start : prompts[-1].start()].lstrip()
        self._clear()
        return output.removeprefix(command).strip("\n")

    def close(self) -> None:
        """End the tmux server and its shell."""
        self._server.kill()

    def _screen(self) -> str:
        lines = self._pane.cmd("capture-pane", "-J", "-pS", "-").stdout
        return "\n".join(line.rstrip() for line in lines)

    def _clear(self) -> None:
        self._pane.send_keys("clear", enter=True)
        time.sleep(_SETTLE_SECONDS)
        self._pane.cmd("clear-history")

    def _await_prompt(self) -> None:
        deadline = time.monotonic() + CALL_SECONDS
        while not self._screen().rstrip().endswith(_END):
            if time.monotonic() > deadline:
                raise WayBroken(f"the tmux shell shows no prompt: {self._screen()[-500:]!r}")
            time.sleep(_SETTLE_SECONDS)


def _shell_words(stage: Stage, handle: SandboxHandle) -> list[str]:
    env = SANDBOX_ENV | {"TERM": "screen", "PAGER": "cat", "GIT_PAGER": "cat"}
    return [
        *stage.as_account(stage.entry(handle.pid)),
        *("/usr/bin/env", "-i", *(f"{key}={value}" for key, value in env.items())),
        "/bin/bash",
    ]


def _prompt_text() -> str:
    fields = {
        "pid": "$!",
        "exit_code": "$?",
        "username": r"\u",
        "hostname": r"\h",
        "working_dir": r"$(pwd)",
        "py_interpreter_path": r'$(command -v python || echo "")',
    }
    text = json.dumps(fields, indent=2).replace('"', r"\"")
    return f"\n{_BEGIN}\n{text}\n{_END}\n"
