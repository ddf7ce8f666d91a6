"""What holds when a process of the runtime is killed, or stopped before it is ready."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.exceptions import RuntimeMissing, SandboxCancelled, StartFailed
from sandboxes.runtime.inside import namespace_members
from sandboxes.runtime.layout import Layout
from sandboxes.runtime.processes import ProcessStat, all_stats, kill_process, read_stat
from sandboxes.runtime.protocol import Limits, Runtime, SandboxHandle, SandboxSpec
from tests.sandbox.conftest import PREFIX, Start
from tests.sandbox.counting import eventually
from tests.sandbox.tries import record_of

LIMITS = Limits(lifetime_seconds=600)


def kill_keeper(runtime: Runtime, handle: SandboxHandle) -> None:
    assert isinstance(runtime, ApptainerRuntime)
    record = record_of(runtime, handle)
    assert kill_process(record["keeper_pid"], record["keeper_ticks"], wait_seconds=10)


def find_copy(root: Path) -> ProcessStat | None:
    """Return the program that copies a layer below a runtime's root."""
    for stat in all_stats():
        try:
            words = Path(f"/proc/{stat.pid}/cmdline").read_bytes()
        except FileNotFoundError:
            continue
        if words.startswith(b"/bin/cp\0") and str(root).encode() in words:
            return stat
    return None


def stopped(handle: SandboxHandle) -> list[int]:
    stats = [read_stat(pid) for pid in namespace_members(handle.pid)]
    return [stat.pid for stat in stats if stat is not None and stat.state == "T"]


@pytest.mark.sandbox
@pytest.mark.parametrize("victim", ["job", "guardian"])
def test_a_sandbox_goes_on_when_a_part_of_its_snapshot_is_killed(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start, victim: str
) -> None:
    runtime, handle = apptainer_runtime, start_apptainer()
    shell = runtime.open_shell(handle)
    shell.run("head -c 300M /dev/zero | tr '\\0' x > /opt/big", timeout_seconds=60)
    shell.run("n=5; (while sleep 0.05; do date +%N > /opt/beat; done) &", timeout_seconds=30)
    found: list[object] = []

    def copy() -> None:
        try:
            found.append(runtime.snapshot(handle))
        except RuntimeMissing as fault:
            found.append(fault)

    thread = threading.Thread(target=copy)
    thread.start()
    copies: list[ProcessStat] = []

    def copying() -> bool:
        copies.extend(filter(None, [find_copy(runtime.root)]))
        return bool(copies)

    assert eventually(copying)
    job = copies[0].parent
    others = [s for s in all_stats() if s.parent == job and s.pid != copies[0].pid]
    assert [s.session == s.pid for s in others] == [True]
    assert stopped(handle)  # so it was in the middle
    os.kill(job if victim == "job" else others[0].pid, signal.SIGKILL)
    thread.join()

    assert eventually(lambda: not stopped(handle))
    told = shell.run("jobs -rp | wc -l; echo $n", timeout_seconds=30)
    assert (told.output.split(), told.shell_restarted) == (["1", "5"], False)

    def beat() -> bytes:
        return runtime.read_file(handle, "/opt/beat", max_bytes=100)

    before = beat()
    assert eventually(lambda: beat() != before)
    shell.close()
    assert eventually(lambda: find_copy(runtime.root) is None)
    left = list((runtime.root / "tmp").glob("snapshot-*"))
    assert len(left) == (victim == "job")  # for the sweep, once it is an hour old
    assert isinstance(found[0], RuntimeMissing if victim == "job" else str)
    if victim == "guardian":
        runtime.discard_layer(str(found[0]))
    for path in left:
        subprocess.run(["/bin/rm", "-rf", "--", str(path)], check=True)


@pytest.mark.sandbox
def test_an_instance_whose_keeper_was_killed_is_told(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start, base_image: Path
) -> None:
    runtime = apptainer_runtime
    guarded, lost, ended = start_apptainer(), start_apptainer(), start_apptainer()
    spec = SandboxSpec(name="", image=str(base_image), limits=LIMITS)
    ahead = runtime.warm(spec, timeout_seconds=60)
    assert runtime.unguarded() == []

    kill_keeper(runtime, lost)
    kill_keeper(runtime, SandboxHandle(name=ahead, pid=0, start_ticks=0, layer=ahead))
    assert kill_process(ended.pid, ended.start_ticks, wait_seconds=10)

    assert runtime.unguarded() == [lost.name]
    assert runtime.alive(lost)
    assert ahead in runtime.list()  # nobody can take it any more
    assert ahead not in runtime.list_warm()
    for name in (lost.name, ahead):
        runtime.stop(name)
    assert runtime.unguarded() == []
    assert runtime.alive(guarded)
    assert not runtime.alive(lost)


def test_a_name_that_was_stopped_at_its_start_can_be_started_again(
    runtime: Runtime, image: str
) -> None:
    layout = Layout(runtime.root)  # type: ignore[attr-defined]
    spec = SandboxSpec(name=f"{PREFIX}{uuid.uuid4().hex[:12]}", image=image, limits=LIMITS)
    first: list[object] = []

    def begin() -> None:
        try:
            first.append(runtime.start(spec, timeout_seconds=60))
        except (StartFailed, SandboxCancelled) as fault:
            first.append(fault)

    for _ in range(3):
        first.clear()
        thread = threading.Thread(target=begin)
        thread.start()
        while not layout.instance(spec.name).exists() and thread.is_alive():
            pass
        runtime.stop(spec.name)

        handle = runtime.start(spec, timeout_seconds=60)

        thread.join()
        assert isinstance(first[0], (SandboxCancelled, SandboxHandle))
        assert runtime.alive(handle)
        runtime.write_file(handle, "/app/x", b"1")
        assert runtime.read_file(handle, "/app/x", max_bytes=10) == b"1"
        assert list((layout.root / "tmp").glob("start-*")) == []
        runtime.stop(spec.name)
        assert not runtime.alive(handle)


@pytest.mark.sandbox
def test_programs_keep_the_limit_of_open_files_that_the_worker_found(
    base_image: Path,
) -> None:
    program = """
import json, resource, sys
from pathlib import Path
from sandboxes.runtime.open_files import raise_file_limit
from sandboxes.runtime.protocol import Limits, SandboxSpec
from tests.sandbox.conftest import chosen_tools, runtime_with
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
raise_file_limit()
with runtime_with(chosen_tools()) as runtime:
    spec = SandboxSpec(name="test-files", image=sys.argv[1], limits=Limits(lifetime_seconds=60))
    handle = runtime.start(spec, timeout_seconds=60)
    shown = runtime.exec(handle, ["sh", "-c", "ulimit -n"], timeout_seconds=30).stdout.decode()
    shell = runtime.open_shell(handle)
    typed = shell.run("ulimit -n", timeout_seconds=30).output
    shell.close()
print(json.dumps([shown, typed, resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard]))
"""

    shown = subprocess.run(
        [sys.executable, "-c", program, str(base_image)], capture_output=True, check=True
    )

    assert json.loads(shown.stdout) == ["300\n", "300\n", True]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 300


def test_a_sweep_spares_what_is_in_use(runtime: Runtime, start: Start) -> None:
    handle = start()
    runtime.write_file(handle, "/app/x", b"1")

    runtime.sweep()

    assert runtime.read_file(handle, "/app/x", max_bytes=10) == b"1"
    assert handle.name in runtime.list()
