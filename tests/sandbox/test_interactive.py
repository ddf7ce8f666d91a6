"""Programs that are typed at, silence and time limits apart, and what a fresh shell keeps."""

import uuid
from collections.abc import Iterator

import pytest

from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec
from sandboxes.runtime.sessions import CommandResult, ShellSession
from tests.sandbox.conftest import PREFIX

pytestmark = pytest.mark.sandbox

_ASK = r"""python3 -c '
import getpass
name = input("name? ")
word = getpass.getpass("word? ")
print(name, len(word))
'"""


@pytest.fixture(scope="module")
def handle(apptainer_runtime: ApptainerRuntime, base_image: object) -> Iterator[SandboxHandle]:
    """Keep one sandbox for all tests here: each uses a shell of its own."""
    spec = SandboxSpec(name=f"{PREFIX}typed-{uuid.uuid4().hex[:8]}", image=str(base_image))
    yield apptainer_runtime.start(spec, timeout_seconds=60)
    apptainer_runtime.stop(spec.name)


@pytest.fixture(params=[True, False], ids=["terminal", "pipes"])
def shell(
    request: pytest.FixtureRequest, apptainer_runtime: ApptainerRuntime, handle: SandboxHandle
) -> Iterator[ShellSession]:
    opened = apptainer_runtime.open_shell(handle, cwd="/usr", terminal=request.param)
    yield opened
    opened.close()


def begin(shell: ShellSession, command: str, waits_for: str) -> str:
    """Start an interactive program and return all it printed until it waits with that text."""
    result = shell.run(command, timeout_seconds=60, idle_seconds=0.3, interactive=True)
    return _go_on(shell, result, waits_for)


def type_at(shell: ShellSession, text: str, waits_for: str) -> str:
    """Type and return all that was printed until the program waits with that text."""
    result = shell.send(text, timeout_seconds=60, idle_seconds=0.3)
    return _go_on(shell, result, waits_for)


def _go_on(shell: ShellSession, result: CommandResult, waits_for: str) -> str:
    seen = result.output
    for _ in range(100):  # a busy machine: silence comes before the program has started
        assert (result.running, result.exit_code) == (True, None)
        if seen.endswith(waits_for):
            return seen
        result = shell.send("", timeout_seconds=60, idle_seconds=0.3)
        seen += result.output
    raise AssertionError(f"never waited with {waits_for!r}: {seen!r}")


def finish(shell: ShellSession, text: str) -> CommandResult:
    """Type what ends the program and return how it ended, with all that it printed."""
    result = shell.send(text, timeout_seconds=60)
    assert not result.running
    return result


def interrupt(shell: ShellSession) -> CommandResult:
    """Press Ctrl-C as a person does: one that falls between two programs of a loop meets nobody."""
    for _ in range(20):
        result = shell.send("\x03", timeout_seconds=1)
        if not result.running:
            return result
    raise AssertionError("it went on through every Ctrl-C")


def test_a_python_is_typed_at(shell: ShellSession) -> None:
    banner = begin(shell, "python3 -i", ">>> ")
    six = type_at(shell, "x = 2 * 3\nx\n", "6\n>>> ")
    ended = finish(shell, "\x04")
    after = shell.run("echo next", timeout_seconds=10)

    assert "Python 3" in banner
    assert "6\n>>> " in six
    assert (ended.exit_code, ended.cwd) == (0, "/usr")
    assert (after.output, after.exit_code) == ("next\n", 0)


def test_cat_repeats_until_the_end_of_input(shell: ShellSession) -> None:
    begin(shell, "cat; echo ended", "")

    assert type_at(shell, "one\n", "one\n") == "one\n"
    assert type_at(shell, "zwei 三\n", "三\n") == "zwei 三\n"
    ended = finish(shell, "\x04")
    assert (ended.output, ended.exit_code) == ("ended\n", 0)


def test_read_takes_a_line_into_the_shell(shell: ShellSession) -> None:
    begin(shell, "read -p 'who? ' WHO", "who? ")

    assert finish(shell, "Ada Lovelace\n").exit_code == 0
    assert shell.run('echo "$WHO"', timeout_seconds=10).output == "Ada Lovelace\n"


def test_a_password_is_read_without_echo(shell: ShellSession) -> None:
    begin(shell, _ASK, "name? ")
    asked = type_at(shell, "Ada\n", "word? ")
    ended = finish(shell, "secret\n")

    assert asked == "word? "
    assert (ended.output, ended.exit_code) == ("\nAda 6\n", 0)


def test_a_bash_in_bash(shell: ShellSession) -> None:
    begin(shell, "PS1='in> ' bash --norc --noediting", "in> ")
    inner = type_at(shell, "cd /; X=inner; echo $X\n", "in> ")
    ended = finish(shell, "exit 7\n")
    after = shell.run("echo $X; pwd", timeout_seconds=10)

    assert inner == "inner\nin> "
    assert (ended.exit_code, after.output) == (7, "\n/usr\n")


def test_a_pager_shows_page_after_page(shell: ShellSession) -> None:
    first = begin(shell, "seq 1 60 >/tmp/long; stty rows 10; TERM=xterm more /tmp/long", "%)")
    second = type_at(shell, " ", "%)")
    quit_ = finish(shell, "q")

    assert first.startswith("1\n2\n")
    assert "\n9\n" in first
    assert "10\n" in second
    assert quit_.exit_code == 0


def test_control_c_ends_what_runs(shell: ShellSession) -> None:
    begin(shell, "echo begun; sleep 1000", "begun\n")

    assert finish(shell, "\x03").exit_code == 130
    assert shell.run("echo next", timeout_seconds=10).output == "next\n"


def test_control_z_stops_a_job_and_fg_goes_on_with_it(shell: ShellSession) -> None:
    begin(shell, "cat", "")
    stopped = finish(shell, "\x1a")
    between = shell.run("echo between", timeout_seconds=10)
    begin(shell, "fg", "cat\n")
    again = type_at(shell, "again\n", "again\n")
    ended = finish(shell, "\x04")

    assert (stopped.exit_code, stopped.running) == (148, False)
    assert "Stopped" in stopped.output
    assert (between.output, between.exit_code) == ("between\n", 0)
    assert (again, ended.exit_code) == ("again\n", 0)


def test_a_new_command_interrupts_what_was_left_running(shell: ShellSession) -> None:
    begin(shell, "python3 -i", ">>> ")

    after = shell.run("echo next", timeout_seconds=10)

    assert after.output == "[the program left running was interrupted first]\nnext\n"
    assert (after.exit_code, after.shell_restarted) == (0, False)
    assert "python3" not in shell.run("ps -e -o args || true", timeout_seconds=10).output


def test_what_nobody_read_is_not_read_by_the_next_program(shell: ShellSession) -> None:
    begin(shell, "read x", "")
    finish(shell, "first\nleft over\n")

    assert begin(shell, "cat", "") == ""
    assert type_at(shell, "mine\n", "mine\n") == "mine\n"
    assert finish(shell, "\x04").output == ""


def test_the_total_time_leaves_a_talking_program_running(shell: ShellSession) -> None:
    talking = shell.run(
        "while :; do echo tick; sleep 0.05; done",
        timeout_seconds=0.5,
        idle_seconds=60,
        interactive=True,
    )
    assert (talking.running, talking.timed_out, talking.idle) == (True, True, False)
    assert talking.output.startswith("tick\n")
    assert interrupt(shell).exit_code == 130


def test_typing_where_nothing_runs_is_refused(shell: ShellSession) -> None:
    refused = shell.send("x\n", timeout_seconds=10)

    assert (refused.exit_code, refused.running) == (126, False)
    assert refused.output.startswith("nothing is running")


def test_a_line_that_no_terminal_takes_is_refused(shell: ShellSession) -> None:
    begin(shell, "cat", "")

    refused = shell.send("x" * 4096 + "\n", timeout_seconds=10)
    longest = shell.send("y" * 4095 + "\n", timeout_seconds=10, idle_seconds=0.5)

    assert (refused.exit_code, refused.running) == (126, True)
    assert longest.output in ("", "y" * 4095 + "\n")
    assert finish(shell, "\x04").exit_code == 0


def test_silence_and_the_total_time_are_apart(shell: ShellSession) -> None:
    silent = shell.run("echo a; sleep 1000", timeout_seconds=60, idle_seconds=0.3)
    late = shell.run("while :; do echo b; sleep 0.05; done", timeout_seconds=0.5, idle_seconds=60)
    talks = shell.run(
        "for i in 1 2 3; do sleep 0.1; echo $i; done", timeout_seconds=60, idle_seconds=5
    )

    assert (silent.output, silent.idle, silent.timed_out) == ("a\n", True, False)
    assert (silent.exit_code, silent.running, silent.shell_restarted) == (None, False, False)
    assert (late.idle, late.timed_out, late.exit_code) == (False, True, None)
    assert (talks.output, talks.exit_code, talks.idle) == ("1\n2\n3\n", 0, False)


def test_a_fresh_shell_keeps_what_it_can(shell: ShellSession) -> None:
    shell.run(
        "cd /usr/share; export WORD='two  words' LINES2=$'a\\nb'; f() { echo \"f $1\"; }; "
        "g() { f in-g; }; export -f g; alias hi='echo hello'; "
        "shopt -s nullglob extglob; set -o noclobber; set -u; sleep 1000 &",
        timeout_seconds=10,
    )
    shell.run("true", timeout_seconds=10)

    lost = shell.run("kill -9 $$", timeout_seconds=10)
    after = shell.run(
        'pwd; echo "$WORD"; echo "$LINES2"; f 1; bash -c g; hi; echo no*such; jobs; '
        "set -o | grep -E 'noclobber|nounset|monitor'; shopt nullglob extglob dotglob",
        timeout_seconds=10,
    )

    assert (lost.exit_code, lost.shell_restarted) == (137, True)
    assert after.output.replace("\t", " ").split("\n") == [
        "/usr/share",
        "two  words",
        "a",
        "b",
        "f 1",
        "environment: f: command not found",
        "hello",
        "",
        "monitor         on",
        "noclobber       on",
        "nounset         on",
        "nullglob        on",
        "extglob         on",
        "dotglob         off",
        "",
    ]
