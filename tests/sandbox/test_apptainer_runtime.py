"""What only real isolation can promise, on real Apptainer instances."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxes.runtime import keeper
from sandboxes.runtime.account import resolve_account
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.exceptions import (
    FileMissing,
    ImageMissing,
    ImageUnusable,
    SandboxCancelled,
    SandboxGone,
    StartTimeout,
)
from sandboxes.runtime.layout import Layout, read_record, write_record
from sandboxes.runtime.processes import is_running, read_stat
from sandboxes.runtime.protocol import Limits, SandboxHandle, SandboxSpec
from sandboxes.runtime.usage import namespace_members
from tests.sandbox.conftest import PREFIX, REPOSITORY, Start
from tests.sandbox.counting import eventually, kept, processes_of

pytestmark = pytest.mark.sandbox


def output_of(runtime: ApptainerRuntime, handle: SandboxHandle, script: str) -> str:
    result = runtime.exec(handle, ["sh", "-c", script], timeout_seconds=60)
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode()


def test_directories_files_and_links_of_the_image_can_be_replaced(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer()

    shown = output_of(
        apptainer_runtime,
        handle,
        "set -e; rm -rf /usr/share/perl5 /etc/apt; mkdir /usr/share/perl5 /etc/apt;"
        "echo new > /etc/apt/new; rm /etc/os-release; ln -s /etc/apt/new /etc/os-release;"
        "rm /etc/debian_version; echo x > /etc/debian_version; mv /usr/lib/git-core /usr/lib/moved;"
        "rm -rf /usr/share/zoneinfo/Europe 2>/dev/null; chmod 000 /var/lib/dpkg;"
        "ls -A /usr/share/perl5 /etc/apt; cat /etc/os-release",
    )

    assert shown == "/etc/apt:\nnew\n\n/usr/share/perl5:\nnew\n"


def test_a_deletion_stays_deleted_on_the_frozen_layer(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    first = start_apptainer()
    output_of(
        apptainer_runtime,
        first,
        "rm -rf /etc/apt /etc/debian_version; mkdir /etc/apt; echo 1 > /etc/apt/only",
    )

    layer = apptainer_runtime.freeze(first)
    second = start_apptainer(layers=(layer,))

    assert output_of(apptainer_runtime, second, "ls -A /etc/apt") == "only\n"
    with pytest.raises(FileMissing):
        apptainer_runtime.read_file(second, "/etc/debian_version", max_bytes=100)
    fresh = start_apptainer()
    assert apptainer_runtime.read_file(fresh, "/etc/debian_version", max_bytes=100)
    apptainer_runtime.stop(second.name)
    apptainer_runtime.discard_layer(layer)


def test_there_is_no_network(apptainer_runtime: ApptainerRuntime, start_apptainer: Start) -> None:
    handle = start_apptainer()

    shown = output_of(
        apptainer_runtime,
        handle,
        "tail -n +2 /proc/net/route; tail -n +3 /proc/net/dev | cut -d: -f1; "
        "bash -c 'echo > /dev/tcp/192.0.2.1/80' 2>&1 | grep -o 'Network is unreachable' | sort -u",
    )

    assert shown.split("\n") == ["    lo", "Network is unreachable", ""]


def test_the_host_network_is_there_when_asked_for(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer(network="host")

    shown = output_of(apptainer_runtime, handle, "readlink /proc/self/ns/net")

    assert shown.strip() == str(Path("/proc/self/ns/net").readlink())


def test_no_process_is_uid_0_on_the_host(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer()
    account = resolve_account(None)
    shell = apptainer_runtime.open_shell(handle)
    inside = shell.run("id -u; sleep 1000 & sleep 1000 &", timeout_seconds=30)

    members = namespace_members(handle.pid)
    owners = {Path(f"/proc/{pid}").stat().st_uid for pid in members}

    assert inside.output.startswith("0\n")
    assert len(members) >= 4
    assert owners == {account.uid}
    assert account.uid != 0
    shell.close()


def test_root_inside_is_harmless(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer()

    shown = output_of(
        apptainer_runtime,
        handle,
        "grep NoNewPrivs /proc/self/status; cat /proc/1/status | grep NoNewPrivs;"
        "for f in /proc/sys/kernel/core_pattern /proc/sysrq-trigger; do"
        " (echo x > $f) 2>/dev/null && echo wrote $f; done;"
        "find /sys/fs/cgroup -maxdepth 3 -name 'cgroup.procs' -writable; cat /proc/1/comm;"
        f"hostname; ls {Path(__file__).parent} /root/.ssh 2>/dev/null; true",
    )

    assert shown == "NoNewPrivs:\t1\nNoNewPrivs:\t1\nappinit\nsandbox\n"


def test_the_environment_of_the_host_is_not_visible(
    apptainer_runtime: ApptainerRuntime,
    start_apptainer: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRORL_TEST_SECRET", "s3cret")
    handle = start_apptainer()

    shown = output_of(apptainer_runtime, handle, "env; cat /proc/*/environ | tr '\\0' '\\n'")
    shell = apptainer_runtime.open_shell(handle)

    assert "s3cret" not in shown
    assert "s3cret" not in shell.run("env; export -p", timeout_seconds=30).output
    assert "PRORL_" not in shown
    shell.close()


def test_nothing_is_left_after_stop(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    apptainer_runtime.prepare()
    processes, mounts = processes_of(apptainer_runtime), Path("/proc/self/mountinfo").read_text()
    paths = kept(apptainer_runtime)

    handles = [start_apptainer() for _ in range(3)]
    shells = [apptainer_runtime.open_shell(handle) for handle in handles]
    for shell in shells:
        shell.run(
            "mkdir /a; chmod 000 /a; (setsid sleep 1000 &) ; sleep 1000 &", timeout_seconds=30
        )
    assert len(processes_of(apptainer_runtime)) > len(processes)
    for handle in handles:
        apptainer_runtime.stop(handle.name)
    for shell in shells:
        shell.close()

    assert eventually(lambda: processes_of(apptainer_runtime) <= processes)
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert eventually(lambda: kept(apptainer_runtime) == paths)


def test_a_missing_or_foreign_image_is_named(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start, tmp_path: Path
) -> None:
    before = kept(apptainer_runtime)
    with pytest.raises(ImageMissing, match="nowhere"):
        start_apptainer(image=str(tmp_path / "nowhere.sif"))
    text = apptainer_runtime.root.parent / "text.sif"
    text.write_text("no image\n" * 100)
    text.chmod(0o644)
    with pytest.raises(ImageUnusable, match="neither a SIF image"):
        start_apptainer(image=str(text))
    text.chmod(0)
    with pytest.raises(ImageUnusable, match="read"):
        start_apptainer(image=str(text))
    with pytest.raises(ImageUnusable, match="singularity"):
        start_apptainer(image="/usr")
    assert kept(apptainer_runtime) - before == set()


def test_a_sif_image_is_unpacked_once_and_starts(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    folder = runtime_folder(apptainer_runtime)
    tree, packed = folder / "tree", folder / "small.sif"
    build_small_tree(tree)
    engine = shutil.which("apptainer") or shutil.which("singularity")
    assert engine is not None
    subprocess.run(
        [engine, "build", str(packed), str(tree)],
        check=True,
        capture_output=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], "APPTAINER_CONFIGDIR": str(folder / "config")},
    )
    packed.chmod(0o644)

    first, second = start_apptainer(image=str(packed)), start_apptainer(image=str(packed))

    for handle in (first, second):
        assert output_of(apptainer_runtime, handle, "cat /hello") == "from a SIF\n"
    images = [p for p in (apptainer_runtime.root / "images").iterdir() if p.is_dir()]
    assert len(images) == 1


def runtime_folder(runtime: ApptainerRuntime) -> Path:
    folder = runtime.root.parent / "sif"
    folder.mkdir()
    folder.chmod(0o755)
    return folder


def build_small_tree(tree: Path) -> None:
    """Copy a shell and three programs with their libraries into a folder."""
    (tree / "etc").mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (tree / "etc" / name).write_text("root:x:0:0:root:/root:/bin/sh\n")
    for program in ("sh", "cat", "mkdir", "env"):
        path = Path(str(shutil.which(program))).resolve()
        listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=True)
        copy_into(tree, path, Path("/bin") / program)
        for word in listed.stdout.split():
            if word.startswith("/"):
                copy_into(tree, Path(word).resolve(), Path(word))
    for folder in ("proc", "sys", "dev", "tmp", "root", "app", ".singularity.d"):
        (tree / folder).mkdir(exist_ok=True)
    (tree / "hello").write_text("from a SIF\n")


def copy_into(tree: Path, source: Path, target: Path) -> None:
    copy = tree / target.relative_to("/")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, copy)


def test_sixteen_start_at_once(apptainer_runtime: ApptainerRuntime, start_apptainer: Start) -> None:
    with ThreadPoolExecutor(16) as pool:
        handles = list(pool.map(lambda _: start_apptainer(), range(16)))
        shown = list(
            pool.map(
                lambda h: output_of(apptainer_runtime, h, f"echo {h.name} > /me; cat /me"), handles
            )
        )
        assert shown == [f"{handle.name}\n" for handle in handles]
        assert apptainer_runtime.list() == sorted(handle.name for handle in handles)
        list(pool.map(lambda h: apptainer_runtime.stop(h.name), handles))

    assert apptainer_runtime.list() == []
    assert not any(apptainer_runtime.alive(handle) for handle in handles)


def test_a_slow_program_holds_nobody_up(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer()
    order: list[str] = []

    def slow() -> None:
        apptainer_runtime.exec(handle, ["sh", "-c", "cat /release"], timeout_seconds=60)
        order.append("slow")

    output_of(apptainer_runtime, handle, "mkfifo /release")
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(slow) for _ in range(8)]
        for _ in range(20):
            apptainer_runtime.exec(handle, ["true"], timeout_seconds=60)
            order.append("quick")
        while not all(future.done() for future in waiting):
            output_of(apptainer_runtime, handle, "timeout 0.2 sh -c 'echo > /release'; true")

    assert order[:20] == ["quick"] * 20
    assert order.count("slow") == 8


def test_limits_of_memory_disk_and_processes(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    limits = Limits(memory_bytes=60 * 2**20, disk_bytes=20 * 2**20, processes=30)
    hungry, filling, forking = (start_apptainer(limits=limits) for _ in range(3))

    with pytest.raises(SandboxGone, match="memory"):
        until_gone(
            apptainer_runtime,
            hungry,
            "python3 -c 'x = bytearray(200*2**20); import time; time.sleep(60)'",
        )
    with pytest.raises(SandboxGone, match="disk"):
        until_gone(
            apptainer_runtime,
            filling,
            "for i in 1 2 3; do head -c 15000000 /dev/zero > /f$i; done; sleep 60",
        )
    forked = apptainer_runtime.exec(
        forking,
        ["sh", "-c", "for i in $(seq 60); do sleep 1000 & done"],
        timeout_seconds=60,
    )
    assert b"Cannot fork" in forked.stderr
    assert len(namespace_members(forking.pid)) <= 30
    assert apptainer_runtime.alive(start_apptainer())


def until_gone(runtime: ApptainerRuntime, handle: SandboxHandle, script: str) -> None:
    runtime.exec(handle, ["sh", "-c", script], timeout_seconds=60)
    runtime.exec(handle, ["true"], timeout_seconds=60)


def test_a_start_that_takes_too_long_leaves_nothing(
    apptainer_runtime: ApptainerRuntime, base_image: Path
) -> None:
    apptainer_runtime.prepare()
    processes, paths = processes_of(apptainer_runtime), kept(apptainer_runtime)
    spec = SandboxSpec(name=f"{PREFIX}late", image=str(base_image))

    with pytest.raises(StartTimeout):
        apptainer_runtime.start(spec, timeout_seconds=0.05)
    asked = iter([False, False, True])
    with pytest.raises(SandboxCancelled):
        apptainer_runtime.start(spec, timeout_seconds=30, cancelled=lambda: next(asked, True))

    assert eventually(lambda: processes_of(apptainer_runtime) <= processes)
    assert eventually(lambda: kept(apptainer_runtime) == paths)
    handle = apptainer_runtime.start(spec, timeout_seconds=30)
    assert apptainer_runtime.alive(handle)
    apptainer_runtime.stop(spec.name)


WORKER = """
import json, sys, threading, time
from pathlib import Path
from sandboxes.runtime.factory import make_runtime
from sandboxes.runtime.protocol import (Limits, SandboxSpec)
root, name, image, lifetime = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
runtime = make_runtime("apptainer", root, "test-", None)
handle = runtime.start(
    SandboxSpec(name=name, image=image, env={"MINE": "yes"},
                limits=Limits(lifetime_seconds=lifetime)),
    timeout_seconds=60,
)
shell = runtime.open_shell(handle)
pid = shell.run("touch /made; sleep 1234 & echo $!", timeout_seconds=30).output.split()[-1]
print(json.dumps({"handle": handle.as_dict(), "job": pid}), flush=True)
threading.Event().wait()
"""


def start_worker(
    runtime: ApptainerRuntime, image: Path, name: str, lifetime: float
) -> tuple["subprocess.Popen[str]", SandboxHandle, str]:
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(runtime.root), name, str(image), str(lifetime)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]),
        },
    )
    assert worker.stdout is not None
    told = json.loads(worker.stdout.readline())
    return worker, SandboxHandle.from_dict(told["handle"]), str(told["job"])


def end_worker(worker: "subprocess.Popen[str]") -> None:
    worker.kill()
    worker.wait()
    assert worker.stdout is not None
    worker.stdout.close()


def test_an_instance_outlives_its_worker_and_another_process_goes_on(
    apptainer_runtime: ApptainerRuntime, base_image: Path
) -> None:
    name = f"{PREFIX}outlives"
    worker, handle, job = start_worker(apptainer_runtime, base_image, name, 600)

    shared = output_of(apptainer_runtime, handle, "ls /made; echo $MINE; pwd")
    end_worker(worker)

    assert shared == "/made\nyes\n/app\n"
    assert eventually(
        lambda: (
            apptainer_runtime.exec(handle, ["kill", "-0", job], timeout_seconds=30).exit_code != 0
        )
    )
    assert apptainer_runtime.alive(handle)
    assert apptainer_runtime.list() == [name]
    assert output_of(apptainer_runtime, handle, "ls /made") == "/made\n"
    apptainer_runtime.stop(name)
    assert not apptainer_runtime.alive(handle)


def test_the_watchdog_ends_an_instance_whose_worker_is_gone(
    apptainer_runtime: ApptainerRuntime, base_image: Path
) -> None:
    name = f"{PREFIX}watched"
    worker, handle, _ = start_worker(apptainer_runtime, base_image, name, 4)
    end_worker(worker)
    record = read_record(Layout(apptainer_runtime.root).instance(name) / "record.json")
    assert record is not None
    assert apptainer_runtime.alive(handle)

    assert eventually(lambda: not apptainer_runtime.alive(handle))
    assert eventually(lambda: not is_running(record["keeper_pid"], record["keeper_ticks"]))
    with pytest.raises(SandboxGone, match="lifetime"):
        apptainer_runtime.exec(handle, ["true"], timeout_seconds=30)
    apptainer_runtime.stop(name)


def test_the_watchdog_ends_with_its_instance(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer()
    record = read_record(Layout(apptainer_runtime.root).instance(handle.name) / "record.json")
    assert record is not None

    os.kill(handle.pid, signal.SIGKILL)

    assert eventually(lambda: not is_running(record["keeper_pid"], record["keeper_ticks"]))
    with pytest.raises(SandboxGone):
        apptainer_runtime.open_shell(handle)


def test_stop_ends_a_start_that_is_under_way(
    apptainer_runtime: ApptainerRuntime, base_image: Path
) -> None:
    apptainer_runtime.prepare()
    processes = processes_of(apptainer_runtime)
    spec = SandboxSpec(name=f"{PREFIX}interrupted", image=str(base_image))
    record = Layout(apptainer_runtime.root).instance(spec.name) / "record.json"

    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(apptainer_runtime.start, spec, timeout_seconds=30)
        assert eventually(record.exists)
        apptainer_runtime.stop(spec.name)
        with pytest.raises(SandboxCancelled):
            starting.result()

    assert apptainer_runtime.list() == []
    assert eventually(lambda: processes_of(apptainer_runtime) <= processes)


def test_another_spawner_takes_over_when_it_was_killed(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer()
    record = read_record(Layout(apptainer_runtime.root).instance(handle.name) / "record.json")
    assert record is not None
    keeper_stat = read_stat(record["keeper_pid"])
    assert keeper_stat is not None

    os.kill(keeper_stat.parent, signal.SIGKILL)

    assert eventually(lambda: read_stat(record["keeper_pid"]).parent != keeper_stat.parent)  # type: ignore[union-attr]
    assert output_of(apptainer_runtime, handle, "echo still here") == "still here\n"


def test_the_engine_enters_where_nsenter_may_not(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle = start_apptainer(env={"MINE": "a b"})
    path = Layout(apptainer_runtime.root).instance(handle.name) / "record.json"
    record = read_record(path)
    assert record is not None
    assert record["entry"] == keeper.ENTRY_NSENTER
    write_record(path, record | {"entry": keeper.ENTRY_ENGINE})
    path.chmod(0o644)

    shown = output_of(
        apptainer_runtime, handle, "pwd; echo $MINE; id -u; env | grep -c SECRET; true"
    )
    shell = apptainer_runtime.open_shell(handle)
    said = shell.run("cd /usr; echo $MINE; pwd", timeout_seconds=30)
    late = shell.run("sleep 1000", timeout_seconds=0.5)

    assert shown == "/app\na b\n0\n0\n"
    assert (said.output, said.cwd) == ("a b\n/usr\n", "/usr")
    assert late.timed_out
    assert shell.run("echo next", timeout_seconds=30).output == "next\n"
    shell.close()


def test_the_node_is_found_in_order(apptainer_runtime: ApptainerRuntime) -> None:
    before = kept(apptainer_runtime)

    findings = apptainer_runtime.check()

    assert [finding for finding in findings if not finding.ok] == []
    assert {finding.name for finding in findings} >= {"apptainer", "account", "/dev/fuse", "disk"}
    assert kept(apptainer_runtime) - before == set()
    assert list((apptainer_runtime.root / "tmp").iterdir()) == []
