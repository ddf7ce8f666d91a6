"""Each limit of a sandbox, kept by control groups and without them, beside a neighbour."""

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxes.runtime.account import become, resolve_account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.cgroups import Group
from sandboxes.runtime.confine import SANDBOX_SCORE
from sandboxes.runtime.disk import measure_folder
from sandboxes.runtime.exceptions import SandboxGone
from sandboxes.runtime.inside import View, namespace_members
from sandboxes.runtime.layout import Layout, read_record
from sandboxes.runtime.memory import Memory, memory_mounts
from sandboxes.runtime.processes import is_running, kill_process
from sandboxes.runtime.protocol import Limits, SandboxHandle, SandboxSpec
from tests.sandbox.conftest import PREFIX, Start, open_folder, starter
from tests.sandbox.counting import eventually, groups_of, nothing_stays, output_of, runtime_of

pytestmark = pytest.mark.sandbox

MIB = 2**20
MEMORY = Limits(memory_bytes=150 * MIB, lifetime_seconds=600)
WAIT = "; sleep 20"


@pytest.fixture(scope="module", params=["auto", "none"])
def node(request: pytest.FixtureRequest, base_image: Path) -> Iterator[ApptainerRuntime]:
    """Yield a runtime with the control groups of this node, and one that must do without."""
    folder = open_folder("prorl-limits-tests-")
    with runtime_of(folder, request.param) as made:
        if request.param == "auto" and not made._delegated():
            # A property of the machine, which no installation changes: both ways are tested
            # where it has control groups, the watchdog's everywhere.
            pytest.skip("no control groups are delegated to this user: see `doctor`")
        yield made
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def neighbour(node: ApptainerRuntime, base_image: Path) -> SandboxHandle:
    """Start the sandbox that must stay unharmed."""
    spec = SandboxSpec(name=f"{PREFIX}neighbour", image=str(base_image), limits=MEMORY)
    return node.start(spec, timeout_seconds=60)


@pytest.fixture
def start(node: ApptainerRuntime, base_image: Path, neighbour: SandboxHandle) -> Iterator[Start]:
    """Start sandboxes; they are stopped afterwards, and the neighbour must answer right."""
    made: list[str] = []
    yield starter(node, str(base_image), made)
    for name in made:
        node.stop(name)
    assert output_of(node, neighbour, "echo $((6 * 7))") == "42\n"


def end_of(runtime: ApptainerRuntime, handle: SandboxHandle, script: str) -> str | None:
    """Run a script that must cost the sandbox its life; returns the limit that was named."""
    runtime.exec(handle, ["bash", "-c", script], timeout_seconds=60)
    with pytest.raises(SandboxGone) as raised:
        runtime.exec(handle, ["true"], timeout_seconds=60)
    return raised.value.limit


PYTHON_HOGS = {
    "at once": "x = b'x' * (600 << 20)",
    "step by step": "x = []\nfor _ in range(600): x.append(b'x' * (1 << 20))",
    "in children": (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0: x = b'x' * (100 << 20); time.sleep(20)\n"
    ),
    "in a memfd": (
        "import os\nfor _ in range(6):\n"
        "    fd = os.memfd_create('x')\n"
        "    for _ in range(100): os.write(fd, bytes(1 << 20))\n"
    ),
    "in a segment": (
        "import ctypes\nc = ctypes.CDLL(None)\nc.shmat.restype = ctypes.c_void_p\n"
        "i = c.shmget(0, ctypes.c_size_t(500 << 20), 0o1600)\n"
        "a = c.shmat(i, None, 0)\n"
        "ctypes.memset(ctypes.c_void_p(a), 1, 500 << 20)\nc.shmdt(ctypes.c_void_p(a))\n"
    ),
}


@pytest.mark.parametrize("hog", PYTHON_HOGS)
def test_a_program_that_takes_too_much_memory_ends_its_sandbox(
    node: ApptainerRuntime, start: Start, hog: str
) -> None:
    handle = start(limits=MEMORY)
    code = f"{PYTHON_HOGS[hog]}\nimport time\ntime.sleep(20)"

    result = node.exec(handle, ["python3", "-c", code], timeout_seconds=60)

    assert result.exit_code not in (0, None)
    with pytest.raises(SandboxGone) as raised:
        node.exec(handle, ["true"], timeout_seconds=60)
    assert raised.value.limit == "memory"


@pytest.mark.parametrize(
    "script",
    [
        "head -c 500M /dev/zero > /dev/shm/x",
        "mkdir /m && mount -t tmpfs x /m && head -c 500M /dev/zero > /m/x",
        "mkdir /m && mount -t ramfs x /m && head -c 500M /dev/zero > /m/x",
        "unshare -m sh -c 'mount -t tmpfs x /mnt && head -c 500M /dev/zero > /mnt/x; sleep 100'",
    ],
    ids=["shm", "tmpfs", "ramfs", "another mount namespace"],
)
def test_files_in_memory_count_as_memory(node: ApptainerRuntime, start: Start, script: str) -> None:
    handle = start(limits=MEMORY)

    assert end_of(node, handle, script + WAIT) == "memory"


def test_pages_that_processes_share_count_once(node: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=MEMORY)
    own = frozenset(device for device, _, _ in memory_mounts(Path("/proc/self/mountinfo")))
    code = (
        "import os, time\nx = b'x' * (60 << 20)\n"
        "for _ in range(7):\n    if os.fork() == 0: break\n"
        "else: print('ready', flush=True)\n"
        "time.sleep(20)"
    )
    output_of(node, handle, f'python3 -c "{code}" > /out & while ! [ -s /out ]; do :; done')

    above, held = Memory(View(handle.pid), foreign=own).above(MEMORY.memory_bytes or 0)

    assert not above
    assert 60 * MIB < held < 150 * MIB
    assert node.alive(handle)


def test_a_sandbox_that_may_take_all_is_left_alone(node: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=Limits(lifetime_seconds=600))

    shown = output_of(node, handle, "python3 -c \"print(len(b'x' * (300 << 20)))\"")

    assert shown == f"{300 * MIB}\n"


def count_of_sleeps(runtime: ApptainerRuntime, handle: SandboxHandle) -> int:
    """Start many processes in a sandbox until it is refused one; returns how many there are."""
    runtime.exec(
        handle,
        ["sh", "-c", "for i in $(seq 100); do sleep 1000 & done"],
        timeout_seconds=60,
    )
    found = 0
    for pid in namespace_members(handle.pid):
        try:
            found += Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
        except OSError:
            continue
    return found


def test_two_sandboxes_of_one_account_do_not_take_each_others_processes(
    node: ApptainerRuntime, start: Start
) -> None:
    limits = Limits(processes=40, lifetime_seconds=600)
    first, second = start(limits=limits), start(limits=limits)

    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(lambda handle: count_of_sleeps(node, handle), (first, second)))

    assert max(counts) <= 40
    assert sum(counts) > 40, counts  # one limit for both would be met by then
    assert node.alive(first)
    assert node.alive(second)


def test_a_fork_bomb_is_refused_more_and_ends_with_its_sandbox(
    node: ApptainerRuntime, start: Start, neighbour: SandboxHandle
) -> None:
    with nothing_stays(node):
        handle = start(limits=Limits(processes=60, lifetime_seconds=600))

        bomb = node.exec(handle, ["sh", "-c", "b() { b | b & }; b; sleep 60"], timeout_seconds=2)
        asked = output_of(node, neighbour, "echo still here")
        members = len(namespace_members(handle.pid))
        node.stop(handle.name)

        assert b"Cannot fork" in bomb.stderr
        assert members <= 60
        assert asked == "still here\n"


def test_a_share_of_the_processors_is_kept_where_groups_can(
    node: ApptainerRuntime, start: Start
) -> None:
    handle = start(limits=Limits(cpus=0.2, lifetime_seconds=600))
    record = record_of(node, handle)

    output_of(node, handle, "timeout 1 bash -c 'while :; do :; done'; true")

    if node.enforcement()["cpu"] == "none":
        assert "cpu" not in record["cgroups"]
    else:
        lines = (Path(record["cgroups"]["cpu"]) / "cpu.stat").read_text().splitlines()
        assert int(dict(line.split() for line in lines)["nr_throttled"]) > 0


def record_of(runtime: ApptainerRuntime, handle: SandboxHandle) -> dict[str, dict[str, str]]:
    record = read_record(Layout(runtime.root).instance(handle.name) / "record.json")
    assert record is not None
    return record


DISK = Limits(disk_bytes=16 * MIB, lifetime_seconds=600)
# A limit counts each entry with 4 KiB at least: 16 MiB are 4096 entries. A million files meets
# 3.8 GiB in the same way; six thousand keep the test short.
FILLERS = {
    "layer": "for i in 1 2 3; do head -c 8M /dev/zero > /f$i; done",
    "tmp": "for i in 1 2 3; do head -c 8M /dev/zero > /tmp/f$i; done",
    "home": "for i in 1 2 3; do head -c 8M /dev/zero > /root/f$i; done",
    "small files": "mkdir /many; cd /many; seq 6000 | xargs touch",
    "hidden": "mkdir /h; for i in 1 2 3; do head -c 8M /dev/zero > /h/f$i; done; chmod 000 /h",
    "deep": (
        "n=$(printf %200s | tr ' ' d); for i in $(seq 40); do mkdir $n; cd $n; done;"
        "for i in 1 2 3; do head -c 8M /dev/zero > f$i; done"
    ),
    "deleted": (
        "exec 5>/a 6>/b 7>/c; rm /a /b /c; for i in 5 6 7; do head -c 8M /dev/zero >&$i; done"
    ),
}


@pytest.mark.parametrize("filler", FILLERS)
def test_a_program_that_fills_the_disk_ends_its_sandbox(
    node: ApptainerRuntime, start: Start, filler: str
) -> None:
    handle = start(limits=DISK)

    assert end_of(node, handle, FILLERS[filler] + WAIT) == "disk"


def test_one_file_is_no_longer_than_the_disk_limit(node: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=DISK)

    result = node.exec(handle, ["truncate", "-s", "10G", "/sparse"], timeout_seconds=60)

    assert result.exit_code not in (0, None)
    assert output_of(node, handle, "stat -c %s /sparse") == "0\n"


def test_a_sparse_file_counts_its_blocks(node: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=Limits(disk_bytes=11 * 1024 * MIB, lifetime_seconds=600))
    upper = Layout(node.root).instance(handle.name) / "upper"

    shown = output_of(
        node, handle, "truncate -s 10G /sparse; ln /sparse /linked; stat -c %s /sparse"
    )
    taken = measure_folder(upper)

    assert shown == f"{10 * 1024 * MIB}\n"
    assert taken.counted < MIB
    assert node.alive(handle)


def test_a_hand_out_brings_its_own_limits(
    node: ApptainerRuntime, base_image: Path, start: Start
) -> None:
    warm = SandboxSpec(
        name="", image=str(base_image), limits=Limits(lifetime_seconds=600, processes=400)
    )
    node.warm(warm, timeout_seconds=60)

    handle = start(limits=MEMORY)

    assert node.list_warm() == {}
    hog = "python3 -c \"x = b'x' * (600 << 20); import time; time.sleep(20)\""
    assert end_of(node, handle, hog) == "memory"


def test_every_process_of_a_sandbox_is_the_better_victim(
    node: ApptainerRuntime, start: Start
) -> None:
    handle = start()
    lowered = (
        "import pathlib, time\n"
        "file = pathlib.Path('/proc/self/oom_score_adj')\n"
        "try: file.write_text('0')\n"
        "except OSError: pass\n"
        "pathlib.Path('/told').write_text(file.read_text())\n"
        "time.sleep(1000)"
    )

    output_of(node, handle, f'setsid python3 -c "{lowered}" & while ! [ -s /told ]; do :; done')

    assert len(namespace_members(handle.pid)) >= 2
    assert eventually(lambda: scores_of(handle) == {SANDBOX_SCORE})


def scores_of(handle: SandboxHandle) -> set[int]:
    members = namespace_members(handle.pid)
    return {int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in members}


def test_a_sandbox_reaches_no_control_group(node: ApptainerRuntime, start: Start) -> None:
    handle = start(limits=MEMORY)

    shown = output_of(
        node,
        handle,
        "ls -A /sys/fs/cgroup 2>/dev/null; mkdir /c; umount /sys/fs/cgroup 2>/dev/null;"
        "ls -A /sys/fs/cgroup 2>/dev/null;"
        "for kind in 'cgroup -o memory' 'cgroup -o pids' cgroup2; do"
        " mount -t $kind x /c 2>/dev/null && echo mounted $kind;"
        " unshare -C mount -t $kind x /c 2>/dev/null && echo mounted $kind again;"
        " unshare -Ur -mC mount -t $kind x /c 2>/dev/null && echo mounted $kind nested;"
        "done; ls -A /c; echo end",
    )

    assert shown == "end\n"


def test_the_way_that_each_limit_is_kept_is_told(node: ApptainerRuntime) -> None:
    found = node.enforcement()

    assert set(found) == {"memory", "cpu", "processes", "disk"}
    assert found["disk"] == "watchdog"
    if node._delegated():
        assert {found["memory"], found["processes"]} <= {"cgroup v1", "cgroup v2"}
    else:
        assert found == {
            "memory": "watchdog",
            "cpu": "none",
            "processes": "rlimit",
            "disk": "watchdog",
        }


def test_the_node_tells_how_each_limit_is_kept(node: ApptainerRuntime) -> None:
    found = {check.name: check.detail for check in node.check() if check.ok}

    for name, way in node.enforcement().items():
        assert found[f"limit: {name}"].startswith(f"{way}: ")
        wanted = name != "disk" and not way.startswith("cgroup")
        assert ("Delegate=yes" in found[f"limit: {name}"]) == wanted


def test_groups_that_nobody_uses_are_swept(
    node: ApptainerRuntime, start: Start, neighbour: SandboxHandle
) -> None:
    delegated = node._delegated()
    if not delegated:
        return  # the runtime without groups has nothing to sweep
    before = groups_of(node)
    leave_group(delegated, f"{PREFIX}stale")
    assert groups_of(node) > before

    node.sweep()

    assert groups_of(node) == before
    assert node.alive(neighbour)


def leave_group(delegated: dict[str, str], name: str) -> None:
    """Make a group as the account that instances' groups belong to."""
    account = resolve_account(None)
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                become(account.uid, account.gid)
            Group.make(delegated, name)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def test_stop_removes_what_a_killed_watchdog_left(node: ApptainerRuntime, start: Start) -> None:
    with nothing_stays(node):
        handle = start(limits=MEMORY)
        record = record_of(node, handle)
        keeper, ticks = int(str(record["keeper_pid"])), int(str(record["keeper_ticks"]))
        assert kill_process(keeper, ticks, wait_seconds=10)

        assert output_of(node, handle, "echo goes on") == "goes on\n"
        node.stop(handle.name)

        assert not is_running(handle.pid, handle.start_ticks)
