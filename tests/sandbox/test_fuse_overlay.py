"""The FUSE driver: when it is chosen, and that its daemon ends with its instance, all written."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.argv import FUSE_DRIVER, KERNEL_DRIVER, Tools, find_tools
from sandboxes.runtime.exceptions import ImageUnusable, RuntimeMissing, SandboxGone
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.overlay import CHOICE, choose_driver, forget_driver
from sandboxes.runtime.processes import is_running
from sandboxes.runtime.protocol import Limits, SandboxHandle, SandboxSpec
from tests.sandbox.conftest import (
    PREFIX,
    REPOSITORY,
    Start,
    chosen_tools,
    lacking,
    open_folder,
    runtime_with,
    starter,
)
from tests.sandbox.test_apptainer_runtime import eventually, kept, output_of, processes_of

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def tools(base_image: Path) -> Tools:
    try:
        return chosen_tools("fuse")
    except RuntimeMissing as fault:
        lacking(str(fault))
        raise


@pytest.fixture(scope="module")
def runtime(tools: Tools) -> Iterator[ApptainerRuntime]:
    with runtime_with(tools) as made:
        yield made


@pytest.fixture
def start(runtime: ApptainerRuntime, base_image: Path) -> Iterator[Start]:
    made: list[str] = []
    yield starter(runtime, str(base_image), made)
    for name in made:
        runtime.stop(name)


def record_of(runtime: ApptainerRuntime, handle: SandboxHandle) -> dict[str, int]:
    record = read_record(Layout(runtime.root).instance(handle.name) / "record.json")
    assert record is not None
    return record


def daemon_runs(record: dict[str, int]) -> bool:
    return is_running(record["daemon_pid"], record["daemon_ticks"])


def test_the_daemon_serves_and_stays_outside(runtime: ApptainerRuntime, start: Start) -> None:
    handle = start()
    daemon = Path(f"/proc/{record_of(runtime, handle)['daemon_pid']}")

    shown = output_of(
        runtime,
        handle,
        "stat -f -c %T /; cat /proc/[0-9]*/comm | grep -c fuse-overlayfs;"
        "readlink /proc/[0-9]*/fd/* | grep -c /dev/fuse; ls /dev/fuse 2>&1 | grep -c 'No such'",
    )

    assert shown == "fuseblk\n0\n0\n1\n"
    assert daemon.joinpath("comm").read_text() == "fuse-overlayfs\n"
    assert daemon.stat().st_uid == resolve_account(None).uid
    assert " - fuse " not in daemon.joinpath("mountinfo").read_text()


def test_what_a_killed_process_wrote_is_in_the_frozen_layer(
    runtime: ApptainerRuntime, start: Start
) -> None:
    handle = start()
    program = (
        "import mmap, os, time\n"
        "f = open('/app/mapped', 'wb+'); f.truncate(2**20); m = mmap.mmap(f.fileno(), 2**20)\n"
        "m[:] = b'm' * 2**20\n"
        "g = open('/app/open', 'wb', buffering=0); g.write(b'o' * 2**20)\n"
        "print('written', flush=True); os.setsid() if os.fork() == 0 else os._exit(0)\n"
        "[os.close(n) for n in (0, 1, 2)]; time.sleep(1000)\n"
    )
    assert output_of(runtime, handle, f'python3 -c "{program}"') == "written\n"

    layer = runtime.freeze(handle)

    again = start(layers=(layer,))
    assert runtime.read_file(again, "/app/mapped", max_bytes=2**20) == b"m" * 2**20
    assert runtime.read_file(again, "/app/open", max_bytes=2**20) == b"o" * 2**20


def test_the_daemon_ends_with_stop_and_nothing_is_left(
    runtime: ApptainerRuntime, start: Start
) -> None:
    runtime.prepare()
    processes, paths = processes_of(runtime), kept(runtime)
    mounts = Path("/proc/self/mountinfo").read_text()

    handles = [start() for _ in range(2)]
    shell = runtime.open_shell(handles[0])
    shell.run("sleep 1000 & exec 5>/app/held", timeout_seconds=30)
    records = [record_of(runtime, handle) for handle in handles]
    assert all(daemon_runs(record) for record in records)
    for handle in handles:
        runtime.stop(handle.name)
    shell.close()

    assert not any(daemon_runs(record) for record in records)
    assert eventually(lambda: processes_of(runtime) <= processes)
    assert eventually(lambda: kept(runtime) <= paths)
    assert Path("/proc/self/mountinfo").read_text() == mounts


def test_the_daemon_ends_when_the_instance_is_killed(
    runtime: ApptainerRuntime, start: Start
) -> None:
    handle = start()
    record = record_of(runtime, handle)

    os.kill(handle.pid, signal.SIGKILL)

    assert eventually(lambda: not daemon_runs(record))
    assert eventually(lambda: not is_running(record["keeper_pid"], record["keeper_ticks"]))


def test_the_daemon_ends_after_its_keeper_was_killed(
    runtime: ApptainerRuntime, start: Start
) -> None:
    handle = start()
    record = record_of(runtime, handle)

    os.kill(record["keeper_pid"], signal.SIGKILL)

    assert eventually(lambda: not is_running(record["keeper_pid"], record["keeper_ticks"]))
    assert output_of(runtime, handle, "echo x > /app/x; cat /app/x") == "x\n"
    runtime.stop(handle.name)
    assert eventually(lambda: not daemon_runs(record))


def test_a_sandbox_without_its_daemon_is_ended(runtime: ApptainerRuntime, start: Start) -> None:
    handle = start()
    record = record_of(runtime, handle)

    os.kill(record["daemon_pid"], signal.SIGKILL)

    assert eventually(lambda: not runtime.alive(handle))
    with pytest.raises(SandboxGone) as gone:
        output_of(runtime, handle, "true")
    assert gone.value.limit is None
    assert eventually(lambda: not is_running(record["keeper_pid"], record["keeper_ticks"]))


def test_a_warm_sandbox_is_handed_out(runtime: ApptainerRuntime, base_image: Path) -> None:
    spec = SandboxSpec(
        name=f"{PREFIX}handed", image=str(base_image), limits=Limits(lifetime_seconds=600)
    )
    warm = runtime.warm(spec, timeout_seconds=60)
    record = record_of(runtime, SandboxHandle(name=warm, pid=0, start_ticks=0, layer=""))

    handle = runtime.start(spec, timeout_seconds=60)

    assert handle.pid == record["pid"]
    shown = output_of(runtime, handle, "rm -r /etc/apt; mkdir /etc/apt; ls -A /etc/apt; pwd")
    assert shown == "/app\n"
    layer = runtime.freeze(handle)
    assert not daemon_runs(record)
    assert (runtime.root / "layers" / layer / "diff" / "etc" / "apt").is_dir()


@pytest.mark.parametrize(
    "script",
    [
        "mkdir /etc/.wh.passwd",
        "mv /etc/debian_version /etc/apt/.wh.sources.list",
        "mkdir /a /a/.wh..wh..opq; chmod 000 /a",
        "ln -s x /etc/.wh.x",
    ],
)
def test_a_layer_that_would_hide_files_is_refused(
    runtime: ApptainerRuntime, start: Start, script: str
) -> None:
    handle = start()
    output_of(runtime, handle, script)

    layer = runtime.freeze(handle)

    with pytest.raises(ImageUnusable, match=rf"a name in {layer} for a deletion: .*\.wh\."):
        start(layers=(layer,))


def test_a_file_whose_name_marks_a_deletion_cannot_be_made(
    runtime: ApptainerRuntime, start: Start
) -> None:
    handle = start()

    shown = output_of(
        runtime, handle, "cd /etc; (: > .wh.passwd) 2>&1 | grep -o Invalid.*; rm -r apt; ls passwd"
    )
    again = start(layers=(runtime.freeze(handle),))

    assert shown == "Invalid argument\npasswd\n"
    assert output_of(runtime, again, "ls /etc/passwd; ls /etc/apt 2>&1 | grep -c 'No such'") == (
        "/etc/passwd\n1\n"
    )


CHOOSE = """
import json, sys
from pathlib import Path
from sandboxes.runtime import overlay
from sandboxes.runtime.account import become
from sandboxes.runtime.argv import Tools
from sandboxes.runtime.exceptions import RuntimeMissing
from sandboxes.runtime.layout import Layout
layout, tools = Layout(Path(sys.argv[1])), Tools(**json.loads(sys.argv[2]))
if sys.argv[3] != "0":
    become(int(sys.argv[3]), int(sys.argv[4]))
layout.make()
try:
    said = overlay.choose_driver(layout, tools)
except RuntimeMissing as fault:
    said = str(fault)
found = overlay.read_record(layout.root / overlay.CHOICE)
left = [path.name for path in (layout.root / "tmp").iterdir()]
print(json.dumps({"said": said, "choice": found, "left": left}))
"""


def choose_on(kind: str, tools: Tools) -> dict[str, object]:
    """Let the driver be chosen for a folder on a file system of that kind."""
    account, folder = resolve_account(None), open_folder("prorl-choice-")
    spaces, who = ["-m"], [str(account.uid), str(account.gid)]
    if os.geteuid() != 0:
        spaces, who = ["-U", "-r", "-m"], ["0", "0"]
    mount = f'mount -t {kind} {kind} "$1" && chmod 777 "$1" && shift && exec "$@"'
    argv = [sys.executable, "-c", CHOOSE, str(folder), json.dumps(asdict(tools)), *who]
    try:
        ended = subprocess.run(
            [tools.unshare, *spaces, "--", "/bin/sh", "-c", mount, "sh", str(folder), *argv],
            capture_output=True,
            check=True,
            cwd=REPOSITORY,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(["", *sys.path])},
        )
    finally:
        folder.rmdir()
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


def test_the_kernels_overlay_comes_first_where_it_works(tools: Tools) -> None:
    chosen = choose_on("tmpfs", replace(tools, overlay="auto"))

    assert chosen == {
        "said": KERNEL_DRIVER,
        "choice": {"kernel": os.uname().release, "driver": KERNEL_DRIVER},
        "left": [],
    }


def test_fuse_takes_over_where_the_kernels_overlay_cannot_delete(tools: Tools) -> None:
    # A ramfs keeps no extended attributes, which the kernel's overlay needs for deletions.
    chosen = choose_on("ramfs", replace(tools, overlay="auto"))

    assert chosen == {
        "said": FUSE_DRIVER,
        "choice": {"kernel": os.uname().release, "driver": FUSE_DRIVER},
        "left": [],
    }


def test_a_node_without_any_driver_says_what_each_one_said(tools: Tools) -> None:
    chosen = choose_on("ramfs", replace(tools, overlay="auto", fuse_overlayfs=""))

    assert chosen["choice"] is None
    assert chosen["left"] == []
    assert "overlay-userxattr: rm: cannot remove" in str(chosen["said"])
    assert "fuse-overlayfs: not installed" in str(chosen["said"])


def test_the_choice_is_kept_for_one_kernel(tmp_path: Path, tools: Tools) -> None:
    layout, found, release = Layout(tmp_path), replace(tools, overlay="auto"), os.uname().release
    layout.make()
    write_record(tmp_path / CHOICE, {"kernel": release, "driver": FUSE_DRIVER})

    assert choose_driver(layout, found) == FUSE_DRIVER
    for stale in ("2.6.32", release):
        write_record(tmp_path / CHOICE, {"kernel": stale, "driver": FUSE_DRIVER})
        now = found if stale != release else replace(found, fuse_overlayfs="")
        assert choose_driver(layout, now) == KERNEL_DRIVER
        assert read_record(tmp_path / CHOICE) == {"kernel": release, "driver": KERNEL_DRIVER}
    forget_driver(layout)
    forget_driver(layout)
    assert not (tmp_path / CHOICE).exists()
    assert choose_driver(layout, replace(found, overlay="fuse")) == FUSE_DRIVER
    assert choose_driver(layout, replace(found, overlay="kernel")) == KERNEL_DRIVER
    assert not (tmp_path / CHOICE).exists()


TWICE = """
import json, os, sys
from pathlib import Path
from sandboxes.runtime import overlay
from sandboxes.runtime.exceptions import StartFailed
from sandboxes.runtime.factory import make_runtime
from sandboxes.runtime.layout import read_record, write_record
from sandboxes.runtime.protocol import (SandboxSpec)
root = Path(sys.argv[1]) / "root"
runtime = make_runtime("apptainer", root, "test-", None)
choice = {"kernel": os.uname().release, "driver": overlay.KERNEL_DRIVER}
write_record(root / overlay.CHOICE, choice)
spec, said = SandboxSpec(name="test-refused", image=sys.argv[2]), ""
try:
    runtime.start(spec, timeout_seconds=60)
except StartFailed as fault:
    said = str(fault)
forgotten = read_record(root / overlay.CHOICE)
handle = runtime.start(spec, timeout_seconds=60)
shown = runtime.exec(handle, ["sh", "-c", "rm -r /etc/apt; ls /etc/apt"], timeout_seconds=60)
runtime.stop(spec.name)
runtime.close()
print(json.dumps([said, forgotten, shown.exit_code, read_record(root / overlay.CHOICE)]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount what refuses our mount")
def test_a_refused_mount_lets_the_next_start_find_out_again(base_image: Path, tools: Tools) -> None:
    # The kernel takes no overlay as the upper layer of another one, as inside a container.
    folder = open_folder("prorl-refused-")
    for part in ("lower", "upper", "work", "merged"):
        (folder / part).mkdir()
    mount = (
        'cd "$1" && mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged'
        ' && shift && cd / && exec "$@"'
    )
    argv = [sys.executable, "-c", TWICE, str(folder / "merged"), str(base_image)]

    ended = subprocess.run(
        [tools.unshare, "-m", "--", "/bin/sh", "-c", mount, "sh", str(folder), *argv],
        capture_output=True,
        text=True,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
        },
    )
    shutil.rmtree(folder)

    assert ended.returncode == 0, ended.stderr
    said, forgotten, code, choice = json.loads(ended.stdout)
    assert "ended with 97" in said
    assert forgotten is None
    assert code == 2
    assert choice == {"kernel": os.uname().release, "driver": FUSE_DRIVER}


def test_a_forced_driver_needs_its_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandboxes.runtime.argv.HOST_PATH", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(RuntimeMissing, match=r"unshare, fuse-overlayfs: run"):
        find_tools(overlay="fuse")
