r"""The lines that a shell is given: one set for bash, one for any POSIX sh.

Descriptors of the shell: 0 these lines, 5 the terminal, 7 the output pipe (on pipes only), 9 the
reports. Its own 1 and 2 are /dev/null: prompts, traces (`set -x`) and what traps print between
commands reach nobody. A command takes two lines, so that an error which makes the shell forget
its line does not cost the other: the command, and the marker that answers. Only when the answer
has arrived is the shell given a third, that reports the state: nobody waits for it.
`\builtin` and `command` keep aliases and functions of these names out of the way.
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from dataclasses import replace

from sandboxes.runtime.reports import Report
from sandboxes.runtime.sessions import ShellState

TERMINAL_DESCRIPTOR = 5
PIPE_DESCRIPTOR = 7

# Understood by every shell: it says which one it is in the place of the directory.
_HELLO = r"""exec 5>&2 >/dev/null 2>&1
PS0= PS1= PS2= HISTFILE=
if test -n "${{BASH_VERSION-}}"; then
\builtin unset -v PROMPT_COMMAND; \builtin set +o history +o histexpand
\builtin shopt -u checkwinsize
fi
cd -- {cwd} || cd /
command printf '\036{token}:0:%s/%s\036{token}\036' "${{BASH_VERSION:+bash}}" "$PWD" >&{out}
"""


def hello(token: str, cwd: str, *, piped: bool) -> bytes:
    """Return the first lines, which set the shell up; the marker says `DIALECT/cwd`."""
    out = PIPE_DESCRIPTOR if piped else TERMINAL_DESCRIPTOR
    return _encode(_HELLO.format(token=token, cwd=shlex.quote(cwd), out=out))


class Dialect(ABC):
    """Build the lines of one kind of shell; `nudged` says that an error takes later lines too."""

    nudged: bool

    def __init__(self, *, piped: bool) -> None:
        self._piped = piped
        closes = "5>&- 9>&-" + (" 7>&-" if piped else "")
        out = PIPE_DESCRIPTOR if piped else TERMINAL_DESCRIPTOR
        self._silent = f" </dev/null >&{out} 2>&{out} {closes}\n"
        self._typing = f" <&5 >&5 2>&5 {closes}\n"
        self._out = f" >&{out}"

    @abstractmethod
    def evaluate(self, text: str) -> str:
        """Return the words that run `text`, errors in it included, without ending the line."""

    @abstractmethod
    def mark(self, token: str, out: str) -> str:
        """Return the line that answers."""

    @abstractmethod
    def report(self, token: str) -> bytes:
        """Return the line that reports, to be given once the answer is there."""

    @abstractmethod
    def restore(self, state: ShellState) -> bytes:
        """Return the lines that bring a fresh shell to a state; a missing directory is left."""

    @abstractmethod
    def options(self, report: Report, fresh: Report) -> str:
        """Return commands that bring a fresh shell's options to those of a report."""

    def exit_code(self, code: int | None) -> int | None:
        """Return what the end of the shell says of its last command; None is unknown."""
        return code

    def order(self, command: str, token: str, *, interactive: bool = False) -> bytes:
        """Return the lines of one command; an interactive one reads and writes the terminal."""
        ends = self._typing if interactive else self._silent
        return _encode(self.evaluate(command) + ends) + self.answer(token, interactive=interactive)

    def simple_order(self, command: str, token: str) -> bytes:
        """Return one shorter line for a command that cannot change what it relies on."""
        return f"{{ {command}; }}{self._silent.rstrip()}; {self.simple_mark(token)}".encode()

    def simple_mark(self, token: str) -> str:
        """Return the line that answers such a command."""
        return self.mark(token, self._out)

    def answer(self, token: str, *, interactive: bool = False) -> bytes:
        """Return the line that answers, alone to ask once more."""
        return _encode(self.mark(token, " >&5" if interactive else self._out))

    def state(self, cwd: str, report: Report, fresh: Report) -> ShellState:
        """Return a report as a state."""
        return ShellState(
            cwd=cwd,
            exports=_without_noise(report.exports),
            functions=report.functions + _exported(report.exported_functions),
            aliases=report.aliases,
            options=self.options(report, fresh),
        )


# A single simple command without quotes, expansions or operators.
_SIMPLE = re.compile(r"[\w./:@%+-][\w./:@%+=,~ -]*", re.ASCII)
_WORDS = """
. alias bind break builtin case cd command complete compopt continue coproc declare disown do done
elif else enable esac eval exec exit export fc fg fi for function getopts hash history if in let
local logout mapfile popd printf pushd read readarray readonly return select set shift shopt source
suspend then time trap typeset ulimit umask unalias unset until while
"""
_CHANGING = frozenset(_WORDS.split())


def may_change(command: str) -> bool:
    """Tell whether a command may change the state, where no function, alias or trap does."""
    command = command.strip(" ")
    return (
        not _SIMPLE.fullmatch(command)
        or command.partition(" ")[0] in _CHANGING
        or ("=" in command.partition(" ")[0])
    )


_NOISE = re.compile(r"(?:declare -x|export) (?:PWD|OLDPWD|SHLVL|_|__PRORL_CODE)(?:=|$)")


def _without_noise(exports: str) -> str:
    return "\n".join(line for line in exports.split("\n") if not _NOISE.match(line))


def _exported(names: str) -> str:
    lines = [line for line in names.split("\n") if re.match(r"declare -\w*x", line)]
    return "".join(f"{line}\n" for line in lines)


def _encode(text: str) -> bytes:
    return text.replace("\0", "").encode("utf-8", "surrogateescape")


class Bash(Dialect):
    r"""Speak to bash: `\builtin` is out of reach for aliases, and for functions after `unset`.

    When it cannot answer any more (`enable -n builtin`, `ulimit -n 3`) it leaves by itself.
    """

    nudged = False
    # What would end or blind the session itself stays as a fresh shell has it.
    _KEPT = frozenset(("history", "histexpand", "onecmd", "noexec", "emacs", "vi"))

    def evaluate(self, text: str) -> str:
        r"""Return `\builtin eval` with the text."""
        return f"\\builtin eval {shlex.quote(text)}"

    def mark(self, token: str, out: str) -> str:
        """Return the line; a shell that cannot print leaves."""
        return (
            "__PRORL_CODE=$?; \\unset -f builtin; "
            # By eval, though printf would do: without it the next command could not run either.
            rf"""\builtin eval "\builtin printf '\036{token}:%s:%s\036{token}\036' """
            rf"""'$__PRORL_CODE' \"\$PWD\"{out}" || \exit "$__PRORL_CODE" """
            "\n"
        )

    def simple_mark(self, token: str) -> str:
        """Return the line without its guards."""
        return (
            rf"""\builtin printf '\036{token}:%s:%s\036{token}\036' "$?" "$PWD"{self._out}"""
            "\n"
        )

    def report(self, token: str) -> bytes:
        """Return the line, which also empties the prompts."""
        return _encode(
            rf"""{{ \builtin printf '\036B{token}\0%s\0%s\0' "$SHELLOPTS" "${{BASHOPTS-}}"; """
            r"\builtin declare -px; \builtin printf '\0'; \builtin declare -f; "
            r"\builtin printf '\0'; \builtin declare -F; \builtin printf '\0'; "
            r"\builtin alias -p; \builtin printf '\0'; \builtin trap -p DEBUG; "
            rf"\builtin printf '\0\036E{token}\0'; }} >&9; "
            "PS0= PS1= PS2=; \\builtin unset -v PROMPT_COMMAND || \\builtin true\n"
        )

    def restore(self, state: ShellState) -> bytes:
        """Return one line each, so that one that fails costs no other; `set` comes last."""
        options = state.options.split("\n")
        switches = "\n".join(line for line in options if line.startswith("shopt "))
        sets = "\n".join(line for line in options if line.startswith("set "))
        parts = (
            state.exports,
            f"\\builtin cd -- {shlex.quote(state.cwd)} || \\builtin cd /",
            switches,
            state.functions,
            state.aliases,
            sets,
        )
        return _encode("".join(self.evaluate(part) + "\n" for part in parts if part))

    def options(self, report: Report, fresh: Report) -> str:
        """Return `shopt` and `set` commands for what differs."""
        lines = []
        for words, now, then in (
            (("shopt -s", "shopt -u"), report.switches, fresh.switches),
            (("set -o", "set +o"), report.options, fresh.options),
        ):
            on, before = set(now.split(":")), set(then.split(":"))
            for word, names in zip(words, (on - before, before - on), strict=True):
                lines += [f"{word} {name}" for name in sorted(names - self._KEPT - {""})]
        return "\n".join(lines)


class PosixShell(Dialect):
    """Speak to dash or busybox: functions cannot be read back, so they are not restored.

    An error or Ctrl-C makes these shells forget the lines they have read: they are asked again.
    """

    nudged = True
    _KEPT = ("vi", "emacs", "noexec", "ignoreeof", "stdin", "interactive")

    def evaluate(self, text: str) -> str:
        """Return `command eval`: errors of a bare eval would leave the line."""
        return f"\\command eval {shlex.quote(text)}"

    def exit_code(self, code: int | None) -> int | None:
        """Return the code, but not dash's 2: it cannot hand a terminal of outside back."""
        return None if code == 2 else code

    def mark(self, token: str, out: str) -> str:
        """Return the line; a shell that cannot print leaves."""
        return (
            rf"""__PRORL_CODE=$?; \command printf '\036{token}:%s:%s\036{token}\036' """
            rf""""$__PRORL_CODE" "$PWD"{out} || \exit "$__PRORL_CODE" """
            "\n"
        )

    def report(self, token: str) -> bytes:
        """Return the line, which also empties the prompts."""
        return _encode(
            rf"{{ \command printf '\036B{token}\0'; \set +o; "
            r"\command printf '\0\0'; \export -p; \command printf '\0\0\0'; \alias; "
            rf"\command printf '\0\0\036E{token}\0'; }} >&9; PS1= PS2="
            "\n"
        )

    def restore(self, state: ShellState) -> bytes:
        """Return the lines; functions that a bash left are not understood here."""
        parts = (
            state.exports,
            f"\\cd -- {shlex.quote(state.cwd)} || \\cd /",
            state.aliases,
            "\n".join(line for line in state.options.split("\n") if line.startswith("set ")),
        )
        return _encode("".join(self.evaluate(part) + "\n" for part in parts if part))

    def options(self, report: Report, fresh: Report) -> str:
        """Return the `set` commands that a fresh shell's list does not have."""
        usual = set(fresh.options.split("\n"))
        lines = (line for line in report.options.split("\n") if line and line not in usual)
        return "\n".join(line for line in lines if not line.endswith(self._KEPT))

    def state(self, cwd: str, report: Report, fresh: Report) -> ShellState:
        """Return a report as a state; `alias` prints without its own name here."""
        aliases = re.sub(r"(?m)^(?!alias )(?=[^\s='\"]+=')", "alias ", report.aliases)
        return super().state(cwd, replace(report, aliases=aliases), fresh)


def dialect_of(answer: str, *, piped: bool) -> tuple[Dialect, str]:
    """Return the dialect and the directory that the answer to `hello` names."""
    name, _, cwd = answer.partition("/")
    return (Bash if name == "bash" else PosixShell)(piped=piped), cwd
