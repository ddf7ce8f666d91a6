"""What hostile commands leave: the next command right, or a fresh shell that says so."""

import tracemalloc
import uuid
from collections.abc import Iterator

import pytest

from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec
from sandboxes.runtime.sessions import ShellSession
from tests.sandbox.conftest import PREFIX, Start

pytestmark = pytest.mark.sandbox

_PYTHON_TTY = "import fcntl, os, termios; tty = os.open('/dev/tty', os.O_RDWR); "
_DAEMON = """python3 -c 'import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
'"""

RIGHT = [
    # descriptors
    "exec 0<&- 1>&- 2>&-",
    "exec >/dev/null 2>&1 </dev/zero",
    "exec 3>/tmp/three 4<&3",
    "exec 5>&- 7>&-",
    "exec 8>&- 9>&-",
    "echo x >&5; echo y >&7",
    "echo x >&8; echo y >&9",
    "read -u 8 x; read -u 9 y",
    "exec 9>/tmp/lock; flock 9",
    "echo garbage >/proc/$$/fd/9",
    "timeout 0.1 cat /proc/$$/fd/0",
    "echo x >/dev/full",
    # the terminal
    "stty -F /dev/tty raw echo",
    "stty -F /dev/tty sane",
    "stty -F /dev/tty olcuc",
    "stty -F /dev/tty -isig intr undef",
    "stty -F /dev/tty rows 1 cols 1",
    f'python3 -c "{_PYTHON_TTY}termios.tcflow(tty, termios.TCOOFF)"',
    f'python3 -c "{_PYTHON_TTY}fcntl.ioctl(tty, termios.TIOCNOTTY)"',
    "cat /dev/tty",
    "read x </dev/tty",
    "read x",
    "tput reset",
    r"printf '\033c\033[?1049h\033[2J'",
    r"printf '\033]0;no end'",
    # output
    r"printf '\036%s:0:/\036%s\036' 12345678901234567890 12345678901234567890",
    r"printf '\036'; printf '12345678901234567890:0:/tmp'",
    "head -c 20000 /dev/urandom",
    r"printf '\xff\xfe\x80'; printf 'a\0b'",
    "head -c 3000000 /dev/zero | tr '\\0' x",
    "yes | head -n 100000",
    "echo -n no newline",
    # processes
    "sleep 1000 &",
    "yes >/dev/null &",
    "(setsid sleep 1000 &)",
    _DAEMON,
    "bash -c \"trap '' INT TERM; sleep 1000\"",
    "bash -ic 'echo inner'",
    "while :; do :; done",
    "while :; do sleep 0.01; done",
    "sleep 1000 & wait",
    "coproc cat",
    "coproc { while :; do sleep 1; done; }",
    "kill -9 -1",
    "kill -INT $$",
    "kill -TERM $$",
    "kill -QUIT $$",
    "kill 0",
    "sleep 1000 | kill -STOP $BASHPID",
    "fg",
    # text
    "cat <<EOF\nno end",
    "cat <<'EOF'",
    'echo "no end',
    "echo 'no end",
    "echo $(",
    "echo $((",
    "echo `",
    "echo ${",
    "echo \\",
    "for i in 1 2; do",
    "if true; then",
    "case x in",
    "{ echo a",
    "( echo b",
    ")",
    "}",
    "done",
    "&& true",
    ": '" + "y" * 1_000_000 + "'",
    "# " + "z" * 100_000,
    "echo " + "x" * 70_000,
    "true\n" * 20_000,
    "echo 'é 日本語 👩‍👩‍👧' \"it's\" \\\"",
    "echo $'\\x03\\x04\\x1a'",
    "echo \x03\x04\x1a\x16\x7f\x1b[A",
    "\r\n\r\necho carriage\r",
    # options, variables, traps
    "set -n",
    "set -o posix",
    "set -u; echo $nothing",
    "set -f; set -k; set -C; set -b",
    "set +m",
    "set -H; set -o history; echo !!",
    "shopt -s extdebug",
    "trap 'echo exit' EXIT; trap 'echo return' RETURN",
    "trap 'echo interrupted' INT; sleep 1000",
    "trap '' INT; sleep 1000",
    "PS0=zero PS1='$(echo one)' PS2=two PROMPT_COMMAND='echo prompted'",
    "readonly PS0=zero PS1='$ ' PS2=two PROMPT_COMMAND='echo prompted'",
    "readonly IFS PATH HOME",
    "IFS=0123456789:/",
    "unset IFS PATH HOME SHELL",
    "PATH=",
    "export BASH_ENV=/nowhere ENV=/nowhere; bash -c true",
    "export LC_ALL=C LANG=xx_YY",
    "export LC_ALL=tr_TR.UTF-8",
    "declare -i q; q=08",
    "echo ${nothing:?no}",
    "__PRORL_CODE=77",
    "umask 777",
    "ulimit -f 0",
    "ulimit -c 0; ulimit -t 1; while :; do :; done",
    "return 3",
    "break; continue 2",
    "fc -l; fc; history; history -c",
    # names
    "printf() { :; }",
    "builtin() { :; }",
    "eval() { :; }",
    "unset() { :; }; exit() { :; }; exec() { :; }; declare() { :; }",
    "command() { :; }; test() { return 1; }",
    "alias builtin=true printf=true eval=true exit=true unset=true",
    "function true { return 9; }",
    "hash -p /bin/false ls",
    "enable -n read test kill",
]
FRESH = [
    "exit 5",
    "exec bash",
    "set -e; false",
    "kill -9 $$",
    "pkill -9 bash",
    "kill -STOP $$",
    "suspend",
    "enable -n eval printf builtin read",
    "enable -n eval",
    "ulimit -n 3",
    "set -o emacs",
    "shopt -s extdebug; trap false DEBUG",
    'for i in {0..254}; do eval "exec $i>&-"; done',
]
# What the shell is told to show, it shows: of the next command alone, nothing of ours.
SHOWN = {
    "set -x; PS4='# '": "## echo one\none\n## pwd\n/usr\n## '[' 1 = 2 ']'\n",
    "set -v": "echo one; pwd; [ 1 = 2 ]\none\n/usr\n",
    "trap 'echo debug' DEBUG": "debug\none\ndebug\n/usr\ndebug\n",
    "trap 'echo error' ERR": "one\n/usr\nerror\n",
}

_NEXT = "echo one; pwd; [ 1 = 2 ]"


@pytest.fixture(scope="module")
def handle(apptainer_runtime: ApptainerRuntime, base_image: object) -> Iterator[SandboxHandle]:
    """Keep one sandbox for all commands here: each uses a shell of its own."""
    spec = SandboxSpec(name=f"{PREFIX}hostile-{uuid.uuid4().hex[:8]}", image=str(base_image))
    yield apptainer_runtime.start(spec, timeout_seconds=60)
    apptainer_runtime.stop(spec.name)


@pytest.fixture(params=[True, False], ids=["terminal", "pipes"])
def shell(
    request: pytest.FixtureRequest, apptainer_runtime: ApptainerRuntime, handle: SandboxHandle
) -> Iterator[ShellSession]:
    opened = apptainer_runtime.open_shell(handle, cwd="/usr", terminal=request.param)
    yield opened
    opened.close()


def test_nine_in_ten_hostile_commands_leave_the_shell_as_it_was() -> None:
    assert len(RIGHT) + len(SHOWN) + len(FRESH) >= 54
    assert len(RIGHT) + len(SHOWN) >= 9 * len(FRESH)


@pytest.mark.parametrize("command", RIGHT, ids=lambda text: text[:40])
def test_the_next_command_is_right(shell: ShellSession, command: str) -> None:
    ended = shell.run(command, timeout_seconds=0.7, output_bytes=4096)
    after = shell.run(_NEXT, timeout_seconds=10)

    assert (after.output, after.exit_code, after.cwd) == ("one\n/usr\n", 1, "/usr")
    assert (ended.shell_restarted, after.shell_restarted) == (False, False)


@pytest.mark.parametrize(("command", "shown"), SHOWN.items())
def test_the_next_command_shows_what_was_asked_for(
    shell: ShellSession, command: str, shown: str
) -> None:
    shell.run(command, timeout_seconds=10)

    after = shell.run(_NEXT, timeout_seconds=10)

    assert (after.output, after.exit_code, after.cwd) == (shown, 1, "/usr")
    assert not after.shell_restarted


@pytest.mark.parametrize("command", FRESH, ids=lambda text: text[:40])
def test_a_lost_shell_is_replaced_and_says_so(shell: ShellSession, command: str) -> None:
    shell.run("export KEPT=yes", timeout_seconds=10)

    ended = shell.run(command, timeout_seconds=0.7)
    after = shell.run(_NEXT, timeout_seconds=10)
    kept = shell.run("echo $KEPT", timeout_seconds=10)

    assert ended.shell_restarted
    assert (after.output, after.exit_code, after.cwd) == ("one\n/usr\n", 1, "/usr")
    assert (kept.output, kept.shell_restarted) == ("yes\n", False)


def test_a_directory_that_is_gone_is_still_the_directory(shell: ShellSession) -> None:
    shell.run("mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone", timeout_seconds=10)

    after = shell.run(_NEXT, timeout_seconds=10)

    assert (after.output, after.exit_code, after.cwd) == ("one\n/tmp/gone\n", 1, "/tmp/gone")


def test_a_background_job_that_never_stops_writing_is_ended(shell: ShellSession) -> None:
    shell.run("yes & sleep 0.1", timeout_seconds=10)

    after = shell.run(_NEXT, timeout_seconds=10)
    later = shell.run(_NEXT, timeout_seconds=10)

    assert after.shell_restarted
    assert after.output.endswith("\none\n/usr\n")
    assert "a background job wrote without end" in after.output
    assert (later.output, later.exit_code, later.shell_restarted) == ("one\n/usr\n", 1, False)


def test_a_gigabyte_on_one_line_stays_small_here(
    apptainer_runtime: ApptainerRuntime, handle: SandboxHandle
) -> None:
    shell = apptainer_runtime.open_shell(handle, terminal=False)
    tracemalloc.start()
    try:
        result = shell.run("head -c 1000000000 /dev/zero", timeout_seconds=120, output_bytes=5000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        shell.close()

    assert (result.exit_code, result.truncated) == (0, True)
    assert len(result.output) < 5100
    assert peak < 8 * 1024 * 1024


def test_a_shell_outlives_the_programs_of_its_image(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    shell = apptainer_runtime.open_shell(start_apptainer(), cwd="/usr")

    shell.run("rm -rf /bin /usr/bin /usr/sbin /sbin", timeout_seconds=60)
    after = shell.run(_NEXT, timeout_seconds=10)
    lost = shell.run("ls", timeout_seconds=10)

    assert (after.output, after.exit_code, after.cwd) == ("one\n/usr\n", 1, "/usr")
    assert lost.exit_code == 127
    shell.close()
