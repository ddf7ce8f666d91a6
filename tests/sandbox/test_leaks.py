"""What of the host, of the service and of other sandboxes can be seen or reached from inside.

Run as test_escapes is: started by root, and by an ordinary user.
"""

import ctypes
import json
import os
import platform
import socket
import stat
import uuid
from pathlib import Path

import pytest

from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.processes import is_running, read_stat
from sandboxes.runtime.protocol import SandboxHandle
from tests.sandbox.conftest import REPOSITORY, Start, chosen_tools, runtime_with, starter
from tests.sandbox.tries import python, record_of, tried

pytestmark = pytest.mark.sandbox

# Prints what each open descriptor of a process is.
DESCRIPTORS = """
import json, os, stat, sys
def kind(path):
    mode = os.stat(path).st_mode
    return stat.filemode(mode)[0] + " " + os.readlink(path).split(":")[0]
print(json.dumps({name: kind(f"/proc/{sys.argv[1]}/fd/{name}")
                  for name in os.listdir(f"/proc/{sys.argv[1]}/fd")
                  if os.path.exists(f"/proc/{sys.argv[1]}/fd/{name}")}))
"""


def readable(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def test_processes_of_the_host_are_not_there(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    record = record_of(apptainer_runtime, hostile)
    keeper = read_stat(record["keeper_pid"])
    assert keeper is not None
    beyond = {os.getpid(), keeper.pid, keeper.parent, hostile.pid}
    program = """
import ctypes, errno, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
seen = {int(name) for name in os.listdir("/proc") if name.isdigit()}
found = {}
for pid in set(map(int, sys.argv[1:])) - seen:
    ways = {"signal": lambda: libc.kill(pid, 0), "trace": lambda: libc.ptrace(16, pid, 0, 0),
            "handle": lambda: libc.syscall(434, pid, 0)}
    found[pid] = {}
    for name, way in ways.items():
        found[pid][name] = "done" if way() != -1 else errno.errorcode[ctypes.get_errno()]
    found[pid]["files"] = os.path.exists("/proc/%d" % pid)
print(json.dumps([sorted(open("/proc/%d/comm" % p).read() for p in seen), found]))
"""

    names, found = json.loads(python(apptainer_runtime, hostile, program, *map(str, beyond)))

    assert names in (["appinit\n", "python3\n"], ["python3\n", "sinit\n"])
    assert len(found) >= 3
    refused = {"signal": "ESRCH", "trace": "ESRCH", "handle": "ESRCH", "files": False}
    assert all(ways == refused for ways in found.values())


def test_only_its_own_descriptors_reach_a_program(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    program = json.loads(python(apptainer_runtime, hostile, DESCRIPTORS, "self"))
    first = json.loads(python(apptainer_runtime, hostile, DESCRIPTORS, "1"))

    # One is the folder that lists them; a pipe is no way to anywhere.
    assert {program.pop(name) for name in ("0", "1", "2")} == {"p pipe"}
    assert [word for word in program.values() if not word.startswith("d /proc/")] == []
    # Of the instance's first process: no folder, no socket, no file of a disk.
    assert {kind.split(" ")[0] for kind in first.values()} <= {"c", "-", "?", "p"}
    files = [kind for name, kind in first.items() if kind.startswith("- /")]
    assert all(kind.endswith((f"{hostile.name}.out", f"{hostile.name}.err")) for kind in files)


def test_the_logs_of_the_engine_are_no_way_to_the_disk(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    result = apptainer_runtime.exec(
        hostile,
        ["sh", "-c", "for n in 1 2; do head -c 3000000 /dev/zero > /proc/1/fd/$n; done"],
        timeout_seconds=60,
    )

    assert result.stderr.count(b"No space left on device") == 2
    logs = apptainer_runtime.root / "apptainer" / "instances" / "logs"
    assert [path for path in logs.rglob("*") if path.is_file()] == []


def test_a_shell_has_its_own_terminal_and_no_other(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    shell = apptainer_runtime.open_shell(hostile)
    apptainer_runtime.write_file(hostile, "/app/fds.py", DESCRIPTORS.encode())
    apptainer_runtime.write_file(
        hostile,
        "/app/type.py",
        b"import fcntl, termios\nterminal = open('/dev/tty')\n"
        b"try:\n  for c in b'touch /typed\\n': fcntl.ioctl(terminal, termios.TIOCSTI, bytes([c]))\n"
        b"except OSError as fault: print(fault.errno)\n",
    )

    inside = json.loads(shell.run("python3 /app/fds.py self", timeout_seconds=30).output)
    own = json.loads(shell.run("python3 /app/fds.py $$", timeout_seconds=30).output)
    shell.run("python3 /app/type.py", timeout_seconds=30)
    after = shell.run("echo next; ls /dev/pts", timeout_seconds=30)
    program = "import os; os.open('/dev/tty', os.O_RDWR)"
    without = apptainer_runtime.exec(hostile, ["python3", "-c", program], timeout_seconds=30)
    shell.close()

    terminals = {name for name, kind in inside.items() if kind.startswith("c /dev/pts")}
    assert terminals <= {"1", "2"}
    assert {name for name in inside if inside[name].startswith(("- ", "? ", "b ", "s "))} == set()
    assert {kind.split(" ")[0] for kind in own.values()} <= {"c", "p"}
    # What it types arrives at its own shell, if anywhere, and at no terminal of the host.
    assert after.output == "next\nptmx\n"
    assert b"No such device or address" in without.stderr
    stat_of_spawner = read_stat(record_of(apptainer_runtime, hostile)["keeper_pid"])
    assert stat_of_spawner is not None
    assert stat_of_spawner.session == stat_of_spawner.pid


KEYS = """
libc.syscall.restype = ctypes.c_long
session, own = ctypes.c_long(-3), ctypes.c_long(-4)
def add(ring, name):
    return lambda: checked(libc.syscall(248, b"user", name, b"value", 5, ring))
def search(ring, name):
    return lambda: checked(libc.syscall(250, 10, ring, b"user", name, 0))
def request(name):
    return lambda: checked(libc.syscall(249, b"user", name, None, 0))
def read(number):
    buffer = ctypes.create_string_buffer(9)
    return lambda: checked(libc.syscall(250, 11, ctypes.c_long(number), buffer, 9, 0))
"""


def keyctl(number: int, *words: object) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    result: int = call(ctypes.c_long(number), *words)
    assert result >= 0, os.strerror(ctypes.get_errno())
    return result


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
def test_keys_of_the_kernel_are_not_shared(base_image: Path) -> None:
    # A key of the session that starts the service, which every program it starts inherits.
    session, made = ctypes.c_long(-3), []
    key = keyctl(248, b"user", b"prorl-key", b"secret", ctypes.c_size_t(6), session)
    with runtime_with(chosen_tools()) as runtime:
        start = starter(runtime, str(base_image), made)
        first, second = start(), start()
        in_first = tried(
            runtime,
            first,
            f"""{KEYS}
tries["the service's, by number"] = read({key})
tries["the service's, by name"] = search(session, b"prorl-key")
tries["the service's, asked for"] = request(b"prorl-key")
tries["common keyring"] = add(session, b"prorl-first")
tries["own keyring"] = add(own, b"prorl-first")
tries["own key"] = search(own, b"prorl-first")
""",
        )
        in_second = tried(
            runtime, second, f'{KEYS}\ntries["the other\'s"] = search(own, b"prorl-first")'
        )
    keyctl(250, 9, ctypes.c_long(key), session)  # unlink

    refused = ("by number", "by name", "asked for")
    assert in_first == {
        **{f"the service's, {how}": "EACCES" for how in refused},
        **{"common keyring": "EACCES", "own keyring": "done", "own key": "done"},
    }
    assert in_second == {"the other's": "ENOKEY"}


def test_sockets_of_the_host_are_out_of_reach(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    name = f"\0prorl-{uuid.uuid4().hex}"
    program = "import socket, sys; socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(name)
        server.listen()
        client.connect(name)

        refused = apptainer_runtime.exec(
            hostile, ["python3", "-c", program, name[1:]], timeout_seconds=30
        )

    assert b"ConnectionRefusedError" in refused.stderr
    shown = apptainer_runtime.exec(
        hostile, ["sh", "-c", "tail -n +2 /proc/net/unix; find / -xdev -type s"], timeout_seconds=60
    )
    assert shown.stdout == b""


def test_devices_are_the_harmless_ones(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    program = """
import json, os, stat
found = {}
for folder, _, names in os.walk("/dev"):
    for name in names:
        path = os.path.join(folder, name)
        mode = os.lstat(path).st_mode
        if not stat.S_ISLNK(mode):
            found[path] = stat.filemode(mode)[0]
print(json.dumps(found))
"""

    found = json.loads(python(apptainer_runtime, hostile, program))

    harmless = {f"/dev/{name}" for name in ("full", "null", "random", "tty", "urandom", "zero")}
    assert set(found) - {"/dev/pts/ptmx"} <= harmless
    assert set(found.values()) == {"c"}


def test_privileges_count_in_there_only(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    account = resolve_account(None)
    shown = apptainer_runtime.exec(
        hostile,
        [
            *("sh", "-c"),
            "cat /proc/self/uid_map; readlink /proc/self/ns/user;"
            "grep -h NoNewPrivs /proc/1/status /proc/self/status;"
            "cp /usr/bin/id /id && chmod 4755 /id && setpriv --dump | head -1; /id -u; rm /id",
        ],
        timeout_seconds=30,
    ).stdout.decode()

    lines = shown.splitlines()
    space = str(Path(f"/proc/{hostile.pid}/ns/user").readlink())
    outside = Path(f"/proc/{hostile.pid}/status").read_text()
    assert lines[0].split() == ["0", "0", "1"]
    assert lines[1] == space != str(Path("/proc/self/ns/user").readlink())
    assert lines[2:4] == ["NoNewPrivs:\t1"] * 2
    assert lines[-1] == "0"
    owners = next(line for line in outside.splitlines() if line.startswith("Uid:"))
    assert owners.split()[1:] == [str(account.uid)] * 4
    assert account.uid != 0


def test_the_environment_holds_what_was_given_and_no_more(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    program = "import json, os; print(json.dumps(sorted(os.environ)))"
    script = "for p in /proc/[0-9]*; do tr '\\0' '\\n' < $p/environ; done | cut -d= -f1 | sort -u"

    names = json.loads(python(apptainer_runtime, hostile, program))
    everybody = apptainer_runtime.exec(hostile, ["sh", "-c", script], timeout_seconds=30)

    given = {"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
    assert set(names) - {"PWD", "OLDPWD", "LC_CTYPE", "SHLVL", "_"} == given
    engine = ("APPTAINER", "SINGULARITY", "ENGINE_CONFIG", "_WRAPPER", "GOGC")
    left = [n for n in everybody.stdout.decode().split() if not n.startswith(engine)]
    assert set(left) - {"PWD", "OLDPWD", "LC_CTYPE", "SHLVL", "_"} <= given


def test_folders_of_the_runtime_let_nobody_else_in(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle
) -> None:
    folder = apptainer_runtime.root / "instances" / hostile.name

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == resolve_account(None).uid


def test_another_sandbox_is_out_of_reach(
    apptainer_runtime: ApptainerRuntime, hostile: SandboxHandle, start_apptainer: Start
) -> None:
    other = start_apptainer()
    prepare = """
import ctypes, os, socket, subprocess, sys, time
open("/app/mine", "w").write("m"); open("/dev/shm/mine", "w").write("m"); open("/tmp/mine", "w")
assert ctypes.CDLL(None).shmget(4711, 4096, 0o1666) >= 0
if os.fork() == 0:
    os.setsid()
    server = socket.socket(socket.AF_UNIX); server.bind("\\0mine"); server.listen()
    os.write(1, b"ready"); [os.close(n) for n in (0, 1, 2)]; time.sleep(1000)
"""
    assert python(apptainer_runtime, other, prepare) == "ready"

    ended = tried(
        apptainer_runtime,
        hostile,
        """
import socket
tries["file"] = lambda: os.stat("/app/mine")
tries["temporary file"] = lambda: os.stat("/tmp/mine")
tries["shared file"] = lambda: os.stat("/dev/shm/mine")
tries["shared memory"] = lambda: checked(libc.shmget(4711, 4096, 0))
tries["socket"] = lambda: socket.socket(socket.AF_UNIX).connect("\\0mine")
tries["signal to all"] = lambda: os.kill(-1, 9)
""",
    )

    assert ended == {
        **{"file": "ENOENT", "temporary file": "ENOENT", "shared file": "ENOENT"},
        **{"shared memory": "ENOENT", "socket": "ECONNREFUSED"},
        "signal to all": ended["signal to all"],
    }
    shown = apptainer_runtime.exec(other, ["cat", "/proc/net/unix"], timeout_seconds=30).stdout
    assert b"@mine" in shown
    record = record_of(apptainer_runtime, other)
    assert is_running(record["keeper_pid"], record["keeper_ticks"])


def test_files_of_the_host_are_not_there(
    apptainer_runtime: ApptainerRuntime,
    hostile: SandboxHandle,
    base_image: Path,
    tmp_path: Path,
) -> None:
    hidden = [apptainer_runtime.root, REPOSITORY, tmp_path, Path(__file__)]
    for base in ("/home", "/root", "/mnt", "/srv", "/etc", "/opt"):
        below = readable(Path(base))
        hidden += [path for path in below if not (base_image / str(path)[1:]).exists()]
    program = "import os, sys; print([p for p in sys.argv[1:] if os.path.lexists(p)])"

    shown = python(apptainer_runtime, hostile, program, *map(str, hidden))

    assert all(path.exists() for path in hidden[:4])
    assert shown == "[]\n"
