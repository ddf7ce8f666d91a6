"""The scripted runtime keeps the promises that callers rely on."""

from pathlib import Path

import pytest

from sandboxes.runtime.exceptions import (
    FileMissing,
    LayerMissing,
    OutputTooLarge,
    SandboxGone,
    StartFailed,
)
from sandboxes.runtime.factory import make_runtime
from sandboxes.runtime.fake import Answer, FakeRuntime, FakeSandbox
from sandboxes.runtime.protocol import SandboxHandle, SandboxSpec


def begin(runtime: FakeRuntime, name: str = "t-1", layers: tuple[str, ...] = ()) -> SandboxHandle:
    return runtime.start(SandboxSpec(name=name, image="any", layers=layers), timeout_seconds=1)


def test_the_script_answers_programs_and_commands() -> None:
    def script(sandbox: FakeSandbox, command: str, stdin: bytes) -> Answer:
        sandbox.files["/seen"] = (stdin, 0o644)
        return Answer(output=f"ran {command}", exit_code=3)

    runtime = FakeRuntime("t-", script)
    handle = begin(runtime)

    result = runtime.exec(handle, ["a", "b"], stdin=b"in", timeout_seconds=1)
    shell = runtime.open_shell(handle)
    command = shell.run("cd /tmp", timeout_seconds=1)

    assert (result.stdout, result.exit_code) == (b"ran a b", 3)
    assert runtime.sandboxes["t-1"].commands == ["cd /tmp"]
    assert (command.output, command.cwd, shell.state().cwd) == ("ran cd /tmp", "/tmp", "/tmp")
    assert shell.run("x", timeout_seconds=1, cancelled=lambda: True).cancelled


def test_files_travel_through_frozen_layers() -> None:
    runtime = FakeRuntime("t-")
    first = begin(runtime)
    runtime.write_file(first, "/a", b"one")
    layer = runtime.freeze(first)

    second = begin(runtime, "t-2", (layer,))

    assert runtime.read_file(second, "/a", max_bytes=3) == b"one"
    with pytest.raises(OutputTooLarge):
        runtime.read_file(second, "/a", max_bytes=2)
    with pytest.raises(FileMissing):
        runtime.read_file(second, "/b", max_bytes=2)
    with pytest.raises(SandboxGone):
        runtime.read_file(first, "/a", max_bytes=3)
    runtime.discard_layer(layer)
    with pytest.raises(LayerMissing):
        begin(runtime, "t-3", (layer,))


def test_names_are_unique_and_stop_is_idempotent() -> None:
    runtime = FakeRuntime("t-")
    handle = begin(runtime)

    with pytest.raises(StartFailed):
        begin(runtime)
    with pytest.raises(StartFailed):
        begin(runtime, "other")
    assert runtime.list() == ["t-1"]
    runtime.stop("t-1")
    runtime.stop("t-1")
    assert not runtime.alive(handle)
    assert begin(runtime) != handle


def test_queued_faults_are_raised_once(tmp_path: Path) -> None:
    runtime = make_runtime("fake", tmp_path, "t-", None)
    assert isinstance(runtime, FakeRuntime)
    runtime.fail_next("start", StartFailed("no"), StartFailed("still no"))

    for _ in range(2):
        with pytest.raises(StartFailed):
            begin(runtime)
    assert runtime.alive(begin(runtime))
    assert runtime.calls == [("start", "t-1")] * 3


def test_the_processes_of_a_node_share_their_sandboxes(tmp_path: Path) -> None:
    started, driven = (make_runtime("fake", tmp_path / "node", "t-", None) for _ in range(2))
    handle = begin(started)

    shell = driven.open_shell(handle)
    command = shell.run("cd /tmp", timeout_seconds=1)
    driven.freeze(handle)

    assert command.cwd == "/tmp"
    assert (started.alive(handle), started.list(), driven.list()) == (False, [], [])
    with pytest.raises(SandboxGone):
        started.open_shell(handle)


def test_one_process_stops_what_another_started(tmp_path: Path) -> None:
    started, other = (FakeRuntime("t-", shared=tmp_path) for _ in range(2))
    handle = begin(started)

    with pytest.raises(StartFailed):
        begin(other)
    assert other.list() == ["t-1"]
    other.stop("t-1")

    assert (started.alive(handle), started.list()) == (False, [])
