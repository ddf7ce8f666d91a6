"""Hostile and unlucky programs, one by one: a labelled outcome, an unharmed neighbour, no rest.

What a program tries against the kernel's own borders is in test_escapes, and what it takes too
much of in test_limits.
"""

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.disk import measure_folder
from sandboxes.runtime.exceptions import (
    EnterFailed,
    SandboxFault,
    SandboxGone,
    ShellFailed,
)
from sandboxes.runtime.inside import namespace_members
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.processes import all_pids, is_running, read_stat
from sandboxes.runtime.protocol import Limits, SandboxHandle, SandboxSpec
from tests.sandbox.conftest import PREFIX, Start, open_folder, starter
from tests.sandbox.counting import (
    eventually,
    networks_of,
    nothing_stays,
    output_of,
    runtime_of,
)

pytestmark = pytest.mark.sandbox

MIB = 2**20
LIMITS = Limits(memory_bytes=512 * MIB, processes=200, lifetime_seconds=600)
CANARY = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"


@pytest.fixture(scope="module")
def runtime(base_image: Path) -> Iterator[ApptainerRuntime]:
    """Yield a runtime of this module's own."""
    folder = open_folder("prorl-containment-tests-")
    with runtime_of(folder, "auto") as made:
        yield made
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def neighbour(runtime: ApptainerRuntime, base_image: Path) -> SandboxHandle:
    """Start the sandbox that must stay unharmed."""
    spec = SandboxSpec(name=f"{PREFIX}neighbour", image=str(base_image), limits=LIMITS)
    return runtime.start(spec, timeout_seconds=60)


@pytest.fixture(scope="module")
def canary() -> Iterator["subprocess.Popen[str]"]:
    """Keep a Python on the host that belongs to the sandboxes' own account."""
    account = resolve_account(None)
    other = {"user": account.uid, "group": account.gid} if os.geteuid() == 0 else {}
    process = subprocess.Popen(
        ["/usr/bin/python3", "-c", CANARY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd="/",
        **other,  # type: ignore[call-overload]
    )
    yield process
    process.communicate(timeout=30)


@pytest.fixture(autouse=True)
def unharmed(
    runtime: ApptainerRuntime, neighbour: SandboxHandle, canary: "subprocess.Popen[str]"
) -> Iterator[None]:
    """Count before and after each test, and ask the neighbour and the host's process."""
    with nothing_stays(runtime):
        yield
        assert output_of(runtime, neighbour, "echo $((6 * 7))") == "42\n"
        assert canary.stdin is not None
        assert canary.stdout is not None
        canary.stdin.write("abc\n")
        canary.stdin.flush()
        assert select.select([canary.stdout], [], [], 30)[0]
        assert canary.stdout.readline() == "cba\n"


@pytest.fixture
def start(runtime: ApptainerRuntime, base_image: Path, unharmed: None) -> Iterator[Start]:
    """Start sandboxes; they are stopped afterwards."""
    made: list[str] = []
    yield starter(runtime, str(base_image), made)
    for name in made:
        runtime.stop(name)


def test_a_gigabyte_without_a_line_end_is_cut(runtime: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=LIMITS)

    result = runtime.exec(
        handle,
        ["sh", "-c", "printf begin; head -c 1G /dev/zero | tr '\\0' x; printf end"],
        timeout_seconds=120,
        output_bytes=10_000,
    )

    assert result.exit_code == 0
    assert result.truncated
    assert result.stdout.startswith(b"beginxxxx")
    assert result.stdout.endswith(b"xxxxend")
    assert len(result.stdout) < 11_000


def test_any_byte_comes_back_as_it_was(runtime: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=LIMITS)
    data = bytes(range(256)) * 100

    runtime.write_file(handle, "/data", data)
    result = runtime.exec(handle, ["cat", "/data"], timeout_seconds=60)
    shell = runtime.open_shell(handle)
    told = shell.run("cat /data; echo; echo end", timeout_seconds=60)
    after = shell.run("echo next", timeout_seconds=60)
    shell.close()

    assert (result.exit_code, result.stdout) == (0, data)
    assert told.exit_code == 0
    assert told.output.endswith("end\n")
    assert after.output == "next\n"


DEAF = "trap '' INT TERM HUP QUIT TSTP; while :; do read -t 1 < /dev/zero; done"


def test_a_program_that_ignores_signals_ends_at_its_timeout(
    runtime: ApptainerRuntime, start: Start
) -> None:
    handle = start(limits=LIMITS)
    resting = set(namespace_members(handle.pid))

    late = runtime.exec(handle, ["bash", "-c", DEAF], timeout_seconds=1)
    shell = runtime.open_shell(handle)
    typed = shell.run(f'bash -c "{DEAF}"', timeout_seconds=1)
    after = shell.run("echo next", timeout_seconds=60)
    shell.close()

    assert (late.timed_out, late.exit_code) == (True, None)
    assert (typed.timed_out, typed.exit_code) == (True, None)
    assert after.output == "next\n"
    assert eventually(lambda: set(namespace_members(handle.pid)) == resting)


def test_a_daemon_lives_on_and_dies_with_its_sandbox(
    runtime: ApptainerRuntime, start: Start
) -> None:
    handle = start(limits=LIMITS)
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for number in range(3): os.close(number)\n"
        "        open('/daemon', 'w').write(str(os.getpid()))\n"
        "        time.sleep(1000)\n"
    )

    output_of(runtime, handle, f'python3 -c "{daemon}"; while ! [ -s /daemon ]; do :; done')
    # The parents are gone once somebody has collected them.
    assert eventually(lambda: len(namespace_members(handle.pid)) == 2)
    members = namespace_members(handle.pid)
    network = networks_of({handle.pid})
    runtime.stop(handle.name)

    assert not any(read_stat(pid) for pid in members)
    assert not network & networks_of(set(all_pids()))


@pytest.mark.parametrize("order", ["kill -9 -1", "kill -9 1", "pkill -9 python", "pkill -9 ."])
def test_killing_all_that_one_sees_kills_nobody_else(
    runtime: ApptainerRuntime, start: Start, order: str
) -> None:
    handle = start(limits=LIMITS)
    own = runtime.exec(
        handle,
        ["sh", "-c", "python3 -c 'import time; time.sleep(100)' & echo $!"],
        timeout_seconds=60,
    )

    ended = runtime.exec(handle, ["bash", "-c", order], timeout_seconds=60)

    assert own.exit_code == 0
    assert not ended.timed_out
    assert output_of(runtime, handle, "echo still here") == "still here\n"


def test_a_sandbox_without_its_programs_answers_with_a_fault(
    runtime: ApptainerRuntime, start: Start
) -> None:
    handle = start(limits=LIMITS)
    gone = "rm -rf /bin /sbin /lib /lib64 /usr"

    runtime.exec(handle, ["sh", "-c", gone], timeout_seconds=60)

    with pytest.raises(EnterFailed):
        runtime.exec(handle, ["true"], timeout_seconds=60)
    with pytest.raises((EnterFailed, ShellFailed)):
        runtime.open_shell(handle)
    with pytest.raises(EnterFailed):
        runtime.read_file(handle, "/etc/passwd", max_bytes=1000)
    with pytest.raises(EnterFailed):
        runtime.write_file(handle, "/x", b"x")
    assert runtime.alive(handle)
    layer = runtime.freeze(handle)
    runtime.discard_layer(layer)


def test_links_lead_nowhere_but_inside(
    runtime: ApptainerRuntime, start: Start, tmp_path: Path
) -> None:
    handle = start(limits=LIMITS)
    outside = open_folder("prorl-outside-")
    (outside / "secret").write_text("of the host")
    inside = output_of(
        runtime,
        handle,
        f"mkdir -p {outside}; echo mine > {outside}/secret; ln -s {outside} /dir;"
        f"ln -s {outside}/secret /file; ln -s / /app/root; ln -s ../../../../../.. /app/up;"
        "ln -s loop /loop; echo of the sandbox > /etc/passwd; cat /etc/passwd",
    )

    def read(path: str) -> bytes:
        return runtime.read_file(handle, path, max_bytes=1000)

    assert read("/dir/secret") == read("/file") == b"mine\n"
    assert read("/app/root/etc/passwd") == inside.encode()
    assert read("/app/up/etc/passwd") == inside.encode()
    assert read("/../../../../../../etc/passwd") == inside.encode()
    with pytest.raises(SandboxFault):
        read("/loop")
    runtime.write_files(
        handle,
        {
            "/dir/new": (b"1", 0o644),
            "/app/up/up": (b"2", 0o644),
            "/../../../dots": (b"3", 0o644),
        },
    )
    assert output_of(runtime, handle, f"cat {outside}/new /up /dots") == "123"
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert not Path("/up").exists()
    assert not Path("/dots").exists()
    shutil.rmtree(outside)


def test_layers_and_deletions_follow_no_link_out(runtime: ApptainerRuntime, start: Start) -> None:
    outside = open_folder("prorl-outside-")
    (outside / "big").write_bytes(b"x" * 5 * MIB)
    account = resolve_account(None)
    for path in (outside, outside / "big"):
        if os.geteuid() == 0:
            os.chown(path, account.uid, account.gid)
    first = start(limits=LIMITS)
    output_of(runtime, first, f"ln -s {outside} /dir; rm -rf /opt; ln -s {outside} /opt")
    upper = Layout(runtime.root).instance(first.name) / "upper"

    taken = measure_folder(upper)
    layer = runtime.freeze(first)
    second = start(limits=LIMITS, layers=(layer,))
    shown = output_of(runtime, second, "readlink /dir; ls /dir 2>&1; true")
    runtime.stop(second.name)
    runtime.discard_layer(layer)

    assert taken.bytes < MIB
    assert shown.startswith(f"{outside}\n")
    assert "big" not in shown
    assert (outside / "big").read_bytes() == b"x" * 5 * MIB
    shutil.rmtree(outside)


def test_an_instance_killed_from_outside_is_gone_without_a_limit(
    runtime: ApptainerRuntime, start: Start
) -> None:
    handle = start(limits=LIMITS)

    os.kill(handle.pid, signal.SIGKILL)

    assert eventually(lambda: not runtime.alive(handle))
    with pytest.raises(SandboxGone) as raised:
        runtime.exec(handle, ["true"], timeout_seconds=60)
    assert (raised.value.code, raised.value.limit) == ("sandbox.gone", None)
    runtime.stop(handle.name)
    assert handle.name not in runtime.list()


def test_an_instance_does_not_go_on_without_its_watchdog(
    runtime: ApptainerRuntime, start: Start
) -> None:
    handle = start(limits=LIMITS)
    path = Layout(runtime.root).instance(handle.name) / "record.json"
    record = read_record(path)
    assert record is not None
    write_record(path, {key: value for key, value in record.items() if key != "limits"})
    path.chmod(0o644)

    os.kill(record["keeper_pid"], signal.SIGUSR1)  # it reads its record again, and fails

    assert eventually(lambda: not is_running(record["keeper_pid"], record["keeper_ticks"]))
    with pytest.raises(SandboxGone, match="ended: watchdog") as raised:
        runtime.exec(handle, ["true"], timeout_seconds=60)
    assert raised.value.limit is None


def test_a_crash_leaves_no_core(runtime: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=LIMITS)

    crashed = runtime.exec(handle, ["python3", "-c", "import os; os.abort()"], timeout_seconds=60)
    shown = output_of(
        runtime,
        handle,
        "ulimit -c; ulimit -c unlimited 2>/dev/null; ulimit -c; grep core /proc/1/limits;"
        "ls -A /app",
    )

    assert crashed.exit_code == 128 + signal.SIGABRT
    lines = shown.splitlines()
    assert lines[:2] == ["0", "0"]
    assert lines[2].split() == ["Max", "core", "file", "size", "0", "0", "bytes"]
    assert len(lines) == 3


def test_set_uid_programs_give_nothing(runtime: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=LIMITS)

    shown = output_of(
        runtime,
        handle,
        "cp /usr/bin/id /own; chmod 6755 /own; /own -u; grep -E 'NoNewPrivs' /proc/self/status;"
        "mknod /disk b 254 0 2>/dev/null && echo made a device;"
        "mount | grep -c ' / .*nosuid,nodev'",
    )

    assert shown == "0\nNoNewPrivs:\t1\n1\n"


def test_a_hog_of_memory_harms_nobody_else(runtime: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=Limits(memory_bytes=300 * MIB, lifetime_seconds=600))
    hog = "x = []\nwhile True: x.append(b'x' * (1 << 20))"

    ended = runtime.exec(handle, ["python3", "-c", hog], timeout_seconds=60)

    assert ended.exit_code not in (0, None)
    with pytest.raises(SandboxGone) as raised:
        runtime.exec(handle, ["true"], timeout_seconds=60)
    assert raised.value.limit == "memory"


def test_sixty_four_start_at_once(
    runtime: ApptainerRuntime, base_image: Path, start: Start
) -> None:
    def run(number: int) -> str:
        handle = start(limits=LIMITS)
        return output_of(runtime, handle, f"echo {number} > /me; cat /me")

    with ThreadPoolExecutor(64) as pool:
        shown = list(pool.map(run, range(64)))
        names = [name for name in runtime.list() if not name.endswith("neighbour")]
        list(pool.map(runtime.stop, names))

    assert shown == [f"{number}\n" for number in range(64)]
    assert len(names) == 64
    assert runtime.list() == [f"{PREFIX}neighbour"]
