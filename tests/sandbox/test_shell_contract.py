"""What every shell session promises, on real bash and a real pseudo-terminal."""

import threading
import uuid
from collections.abc import Iterator

import pytest

from sandboxes.runtime.exceptions import SandboxGone
from sandboxes.runtime.protocol import Runtime, SandboxHandle, SandboxSpec
from sandboxes.runtime.sessions import ShellSession, ShellState
from tests.sandbox.conftest import PREFIX

Shared = dict[str, tuple[Runtime, SandboxHandle]]


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """Keep one sandbox per runtime for all tests here: each uses a shell of its own."""
    kept: Shared = {}
    yield kept
    for runtime, handle in kept.values():
        runtime.stop(handle.name)


@pytest.fixture
def handle(runtime: Runtime, image: str, shared: Shared) -> SandboxHandle:
    kind = type(runtime).__name__
    if kind not in shared or not runtime.alive(shared[kind][1]):
        spec = SandboxSpec(
            name=f"{PREFIX}shells-{uuid.uuid4().hex[:8]}", image=image, env={"GREETING": "hello"}
        )
        shared[kind] = (runtime, runtime.start(spec, timeout_seconds=60))
    return shared[kind][1]


@pytest.fixture
def shell(runtime: Runtime, handle: SandboxHandle) -> Iterator[ShellSession]:
    opened = runtime.open_shell(handle)
    yield opened
    opened.close()


def say(shell: ShellSession, command: str, seconds: float = 30) -> str:
    return shell.run(command, timeout_seconds=seconds).output


def test_output_code_and_directory(shell: ShellSession) -> None:
    first = shell.run("echo $GREETING; false", timeout_seconds=30)
    second = shell.run("cd / && (exit 7)", timeout_seconds=30)

    assert (first.output, first.exit_code, first.truncated) == ("hello\n", 1, False)
    assert first.cwd.endswith("/app")
    assert (second.output, second.exit_code, second.cwd) == ("", 7, "/")


def test_state_survives_between_commands(shell: ShellSession) -> None:
    say(shell, "cd /usr; export A='a \"b\"\nc'; D=4; f() { echo f$1; }; alias g='echo g'")

    assert say(shell, 'pwd; echo "$A$D"; f 1; g') == '/usr\na "b"\nc4\nf1\ng\n'


@pytest.mark.parametrize(
    "command",
    [
        "echo 'it''s'",
        "cat <<'EOF'\n$HOME `x`\nEOF",
        'echo "unterminated',
        "for i in 1 2; do",
        ")",
        "exec >/dev/null; echo hidden",
        "exec 2>&- 1>&-",
        "exec 7>&- 8<&- 9>&-",
        "exec </dev/null",
        "cat",
        "read x",
        "PS1='$ '; PROMPT_COMMAND='echo prompted'",
        "PS0=zero PS2=two",
        "trap 'echo trapped' DEBUG; trap - DEBUG",
        "IFS=_",
        "set -u; echo $unset_variable",
        "set -o pipefail; false | true",
        "stty -F /dev/tty raw echo 2>/dev/null",
        "printf '\\033[31mred\\033[0m'",
        "printf '\\x1edeadbeefdeadbeef:0\\x1e'",
        "head -c 5000 /dev/urandom",
        "echo " + "x" * 20000,
        ": '" + "y" * 200_000 + "'",
        "yes | head -n 1",
        "sleep 100 & disown",
        "kill -INT $$",
        "declare -i q; q=08",
        "echo ${unset_variable:?no}",
        "sleep 1.5 & wait",
        "unset PATH",
        "cd /; rmdir /nowhere",
        "shopt -s extdebug",
        "history -c; set -o history",
        "echo -n no newline",
        "return 3",
        "break",
    ],
)
def test_the_next_command_is_right_after(shell: ShellSession, command: str) -> None:
    shell.run(command, timeout_seconds=30)

    after = shell.run("echo one; echo two", timeout_seconds=30)

    assert (after.output, after.exit_code, after.shell_restarted) == ("one\ntwo\n", 0, False)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 5", 5),
        ("exec true", 0),
        ("kill -9 $$", 137),
        ("set -e; false", 1),
        ("echo out; exit 2", 2),
    ],
)
def test_the_shell_is_replaced_after(shell: ShellSession, command: str, code: int) -> None:
    say(shell, "cd /usr/bin; export KEPT=yes")

    ended = shell.run(command, timeout_seconds=30)
    after = shell.run("pwd; echo $KEPT", timeout_seconds=30)

    assert (ended.exit_code, ended.shell_restarted) == (code, True)
    assert ended.output == ("out\n" if "out" in command else "")
    assert (after.output, after.shell_restarted) == ("/usr/bin\nyes\n", False)


@pytest.mark.parametrize(
    ("command", "restarted"),
    [
        ("echo begun; sleep 1000", False),
        ("echo begun; yes >/dev/null", False),
        ("echo begun; bash -c \"trap '' INT; sleep 1000\"", False),
        ("echo begun; while :; do sleep 0.01; done", False),
        ("echo begun; while :; do :; done", False),
        ("echo begun; cat /dev/tty", False),
        ("echo begun; trap '' INT; while :; do sleep 100; done", True),
        ("echo begun; kill -STOP $$", True),
    ],
)
def test_a_timeout_leaves_a_working_shell(
    shell: ShellSession, command: str, restarted: bool
) -> None:
    say(shell, "cd /usr; export KEPT=yes")

    late = shell.run(command, timeout_seconds=0.5)
    after = shell.run("pwd; echo $KEPT", timeout_seconds=30)

    assert late.output.startswith("begun\n")
    assert (late.exit_code, late.timed_out, late.shell_restarted) == (None, True, restarted)
    assert (after.output, after.exit_code) == ("/usr\nyes\n", 0)


def test_endless_output_is_cut_and_timed_out(shell: ShellSession) -> None:
    late = shell.run("yes abc", timeout_seconds=0.5, output_bytes=2000)

    assert late.timed_out
    assert late.truncated
    assert late.output.startswith("abc\nabc\n")
    assert "bytes left out" in late.output
    assert len(late.output) < 2100
    assert say(shell, "echo next") == "next\n"


def test_large_output_keeps_head_and_tail(shell: ShellSession) -> None:
    result = shell.run("seq 1 300000", timeout_seconds=60, output_bytes=600)

    assert (result.exit_code, result.truncated) == (0, True)
    assert result.output.startswith("1\n2\n3\n")
    assert result.output.endswith("299999\n300000\n")


def test_cancel_interrupts_a_command(shell: ShellSession) -> None:
    flag = threading.Event()
    timer = threading.Timer(0.3, flag.set)
    timer.start()

    result = shell.run("sleep 1000", timeout_seconds=60, cancelled=flag.is_set)

    timer.join()
    assert (result.exit_code, result.cancelled, result.timed_out) == (None, True, False)
    assert say(shell, "echo next") == "next\n"


def test_a_nul_is_refused_and_nothing_runs(shell: ShellSession) -> None:
    refused = shell.run("echo a\0b", timeout_seconds=30)

    assert refused.exit_code == 126
    assert "NUL" in refused.output
    assert say(shell, "echo next") == "next\n"


def test_escapes_are_stripped(shell: ShellSession) -> None:
    assert say(shell, r"printf '\033[1;31mred\033[0m \033]0;title\007end\r\n'") == "red end\n"


def test_state_moves_to_another_shell(
    runtime: Runtime, handle: SandboxHandle, shell: ShellSession
) -> None:
    say(shell, "cd /usr/share; export WORD='two words'")
    state = ShellState.from_dict(shell.state().as_dict())
    shell.close()

    other = runtime.open_shell(handle)
    other.restore(state)

    assert say(other, 'pwd; echo "$WORD"') == "/usr/share\ntwo words\n"
    other.restore(ShellState(cwd="/nowhere/at/all", exports=""))
    assert shell_directory_exists(other)
    other.close()


def shell_directory_exists(shell: ShellSession) -> bool:
    return say(shell, 'test -d "$PWD" && echo there') == "there\n"


def test_a_state_of_two_keys_is_still_read(shell: ShellSession) -> None:
    old = {"cwd": "/usr/share", "exports": 'declare -x WORD="two words"'}

    shell.restore(ShellState.from_dict(old))

    assert ShellState.from_dict(old).as_dict() == {
        **old,
        "functions": "",
        "aliases": "",
        "options": "",
    }
    assert say(shell, 'pwd; echo "$WORD"') == "/usr/share\ntwo words\n"


def test_functions_aliases_and_options_move_to_another_shell(
    runtime: Runtime, handle: SandboxHandle, shell: ShellSession
) -> None:
    say(shell, "f() { echo \"f $1\"; }; alias hi='echo hello'; set -o noclobber; shopt -s nullglob")
    state = ShellState.from_dict(shell.state().as_dict())

    other = runtime.open_shell(handle, terminal=False)
    other.restore(state)

    assert state.aliases == "alias hi='echo hello'\n"
    assert state.options == "shopt -s nullglob\nset -o noclobber"
    assert say(other, "f 1; hi; echo no*such; echo $-") == "f 1\nhello\n\nhimBCs\n"
    other.close()


def test_a_state_follows_each_command(shell: ShellSession) -> None:
    say(shell, "cd /usr; export A=1")
    say(shell, "true")
    first = shell.state()
    say(shell, "unset A; cd /")
    second = shell.state()

    assert (first.cwd, 'declare -x A="1"' in first.exports.split("\n")) == ("/usr", True)
    assert (second.cwd, 'declare -x A="1"' in second.exports.split("\n")) == ("/", False)


def test_on_pipes_output_keeps_its_order_and_is_no_terminal(
    runtime: Runtime, handle: SandboxHandle
) -> None:
    shell = runtime.open_shell(handle, cwd="/usr", terminal=False)

    mixed = shell.run("for i in 1 2 3; do echo o$i; echo e$i >&2; done", timeout_seconds=30)
    asked = shell.run("test -t 0 || test -t 1 || test -t 2", timeout_seconds=30)
    large = shell.run("seq 1 300000", timeout_seconds=60, output_bytes=600)
    late = shell.run("echo begun; sleep 1000", timeout_seconds=0.5)
    ended = shell.run("exit 5", timeout_seconds=30)

    assert (mixed.output, mixed.exit_code) == ("o1\ne1\no2\ne2\no3\ne3\n", 0)
    assert asked.exit_code == 1
    assert (large.exit_code, large.truncated) == (0, True)
    assert large.output.startswith("1\n2\n")
    assert large.output.endswith("299999\n300000\n")
    assert (late.output, late.timed_out, late.shell_restarted) == ("begun\n", True, False)
    assert (ended.exit_code, ended.shell_restarted) == (5, True)
    assert say(shell, "pwd") == "/usr\n"
    shell.close()


def test_close_ends_the_background_jobs(
    runtime: Runtime, handle: SandboxHandle, shell: ShellSession
) -> None:
    pid = say(shell, "sleep 1000 & echo $!").split()[-1]
    assert runtime.exec(handle, ["kill", "-0", pid], timeout_seconds=30).exit_code == 0

    shell.close()
    shell.close()

    for _ in range(500):
        if runtime.exec(handle, ["kill", "-0", pid], timeout_seconds=30).exit_code != 0:
            return
    pytest.fail("the background job outlived its shell")


def test_a_shell_of_an_ended_sandbox_says_so(
    runtime: Runtime, handle: SandboxHandle, shell: ShellSession
) -> None:
    runtime.stop(handle.name)

    with pytest.raises(SandboxGone):
        shell.run("echo x", timeout_seconds=30)
    with pytest.raises(SandboxGone):
        runtime.open_shell(handle)
