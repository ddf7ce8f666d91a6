"""What every runtime that runs real processes promises."""

import pytest

from sandboxes.runtime.exceptions import (
    FileFault,
    FileMissing,
    LayerMissing,
    OutputTooLarge,
    SandboxCancelled,
    SandboxGone,
    StartFailed,
)
from sandboxes.runtime.protocol import Limits, Runtime, SandboxHandle, SandboxSpec
from tests.sandbox.conftest import PREFIX, Start, every_runtime


@every_runtime
def test_a_file_is_what_was_written(runtime: Runtime, start: Start) -> None:
    handle = start()

    runtime.write_files(handle, {"/deep/er/a b": (b"\0\xff", 0o600), "/app/x": (b"1", 0o644)})
    runtime.write_file(handle, "/app/../app/x", b"22")

    assert runtime.read_file(handle, "/deep/er/a b", max_bytes=2) == b"\0\xff"
    assert runtime.read_file(handle, "/app/x", max_bytes=100) == b"22"
    with pytest.raises(FileMissing):
        runtime.read_file(handle, "/nothing", max_bytes=10)
    with pytest.raises(OutputTooLarge):
        runtime.read_file(handle, "/app/x", max_bytes=1)
    with pytest.raises(ValueError, match="not an absolute path"):
        runtime.write_file(handle, "relative", b"")


def test_a_program_reports_its_code_and_both_streams(runtime: Runtime, start: Start) -> None:
    result = runtime.exec(
        start(), ["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_seconds=30
    )

    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert (result.timed_out, result.cancelled, result.truncated) == (False, False, False)


def test_a_program_reads_its_input_and_environment(runtime: Runtime, start: Start) -> None:
    handle = start(env={"FROM_SPEC": "one", "BOTH": "spec"})

    result = runtime.exec(
        handle,
        ["sh", "-c", 'cat; echo "$FROM_SPEC $BOTH"'],
        stdin=b"x" * 300_000 + b"\n",
        env={"BOTH": "call"},
        output_bytes=400_000,
        timeout_seconds=30,
    )

    assert result.stdout == b"x" * 300_000 + b"\none call\n"


def test_a_program_ended_by_a_signal_reports_it(runtime: Runtime, start: Start) -> None:
    result = runtime.exec(start(), ["sh", "-c", "kill -9 $$"], timeout_seconds=30)

    assert result.exit_code == 137


def test_a_program_that_is_not_there_reports_127(runtime: Runtime, start: Start) -> None:
    result = runtime.exec(start(), ["no-such-program"], timeout_seconds=30)

    assert result.exit_code == 127
    assert b"no-such-program" in result.stderr


def test_a_program_is_killed_at_its_timeout(runtime: Runtime, start: Start) -> None:
    handle = start()
    marker = "sleep 3456.25"

    result = runtime.exec(
        handle, ["sh", "-c", f"echo begun; {marker} & {marker}"], timeout_seconds=0.5
    )

    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"begun\n")
    listed = runtime.exec(handle, ["ps", "-eo", "args"], timeout_seconds=30).stdout.decode()
    assert marker not in listed.splitlines()


def test_a_program_is_killed_when_cancelled(runtime: Runtime, start: Start) -> None:
    result = runtime.exec(start(), ["sleep", "60"], timeout_seconds=30, cancelled=lambda: True)

    assert (result.exit_code, result.cancelled, result.timed_out) == (None, True, False)


def test_a_daemon_that_holds_the_output_open_is_not_awaited(runtime: Runtime, start: Start) -> None:
    handle = start()

    result = runtime.exec(handle, ["sh", "-c", "sleep 300 & echo $!"], timeout_seconds=60)

    assert (result.exit_code, result.timed_out) == (0, False)
    pid = result.stdout.decode().strip()
    assert runtime.exec(handle, ["kill", "-0", pid], timeout_seconds=30).exit_code == 0


def test_large_output_keeps_head_and_tail(runtime: Runtime, start: Start) -> None:
    result = runtime.exec(start(), ["seq", "1", "200000"], output_bytes=1000, timeout_seconds=60)

    assert result.truncated
    assert result.stdout.startswith(b"1\n2\n3\n")
    assert result.stdout.endswith(b"199999\n200000\n")
    assert b"bytes left out" in result.stdout
    assert len(result.stdout) < 1100


def test_files_go_in_and_out(runtime: Runtime, start: Start) -> None:
    handle = start()

    runtime.write_files(
        handle, {"/deep/er/run.sh": (b"#!/bin/sh\necho ran\n", 0o755), "/a b": (b"\0\xff", 0o600)}
    )
    runtime.write_file(handle, "/deep/er/run.sh.txt", b"text")

    assert runtime.read_file(handle, "/a b", max_bytes=2) == b"\0\xff"
    assert runtime.read_file(handle, "/deep/er/run.sh.txt", max_bytes=100) == b"text"
    ran = runtime.exec(handle, ["./run.sh"], cwd="/deep/er", timeout_seconds=30)
    assert ran.stdout == b"ran\n"


def test_reading_says_what_is_wrong(runtime: Runtime, start: Start) -> None:
    handle = start()
    runtime.write_file(handle, "/five", b"12345")
    runtime.exec(handle, ["mkfifo", "pipe"], cwd="/app", timeout_seconds=30)

    with pytest.raises(FileMissing):
        runtime.read_file(handle, "/nothing", max_bytes=10)
    with pytest.raises(OutputTooLarge):
        runtime.read_file(handle, "/five", max_bytes=4)
    with pytest.raises(FileFault):
        runtime.read_file(handle, "/app/pipe", max_bytes=10)
    with pytest.raises(ValueError, match="not an absolute path"):
        runtime.write_file(handle, "relative", b"")


@every_runtime
def test_a_frozen_layer_carries_files_and_the_base_does_not(
    runtime: Runtime, start: Start, image: str
) -> None:
    first = start()
    runtime.write_file(first, "/app/kept", b"one")

    layer = runtime.freeze(first)

    assert runtime.layer_image(layer) == image
    assert not runtime.alive(first)
    assert first.name not in runtime.list()
    second = start(layers=(layer,))
    assert runtime.read_file(second, "/app/kept", max_bytes=10) == b"one"
    runtime.write_file(second, "/app/kept", b"two")
    top = runtime.freeze(second)
    assert set(runtime.list_layers()) >= {layer, top}
    assert runtime.read_file(start(layers=(layer,)), "/app/kept", max_bytes=10) == b"one"
    both = start(layers=(top, layer))
    assert runtime.read_file(both, "/app/kept", max_bytes=10) == b"two"
    with pytest.raises(FileMissing):
        runtime.read_file(start(), "/app/kept", max_bytes=10)
    for name in [both.name, *runtime.list()]:
        runtime.stop(name)
    runtime.discard_layer(top)
    runtime.discard_layer(layer)
    assert not {layer, top} & set(runtime.list_layers())
    with pytest.raises(LayerMissing):
        runtime.layer_image(layer)
    with pytest.raises(LayerMissing):
        start(layers=(layer,))


@every_runtime
def test_stop_is_idempotent_and_frees_the_name(runtime: Runtime, start: Start) -> None:
    handle = start()
    assert runtime.list() == [handle.name]

    runtime.stop(handle.name)
    runtime.stop(handle.name)

    assert runtime.list() == []
    assert not runtime.alive(handle)
    again = start(name=handle.name)
    assert runtime.alive(again)
    assert not runtime.alive(handle)
    with pytest.raises(SandboxGone):
        runtime.exec(handle, ["true"], timeout_seconds=30)


@every_runtime
def test_a_name_in_use_or_of_others_is_refused(runtime: Runtime, start: Start) -> None:
    handle = start()

    with pytest.raises(StartFailed, match="in use"):
        start(name=handle.name)
    with pytest.raises(StartFailed, match="begins with"):
        runtime.start(SandboxSpec(name="other-1", image="/"), timeout_seconds=30)
    with pytest.raises(StartFailed, match="begins with"):
        runtime.stop(f"{PREFIX}../../etc")
    assert runtime.alive(handle)


@every_runtime
def test_a_cancelled_start_leaves_nothing(runtime: Runtime, image: str) -> None:
    spec = SandboxSpec(name=f"{PREFIX}given-up", image=image)

    with pytest.raises(SandboxCancelled):
        runtime.start(spec, timeout_seconds=30, cancelled=lambda: True)

    runtime.stop(spec.name)
    assert spec.name not in runtime.list()


@every_runtime
def test_a_handle_travels_as_json(runtime: Runtime, start: Start) -> None:
    handle = start()

    assert SandboxHandle.from_dict(handle.as_dict()) == handle


def test_the_lifetime_ends_a_sandbox(runtime: Runtime, start: Start) -> None:
    handle = start(limits=Limits(lifetime_seconds=2))

    result = _run_until_gone(runtime, handle)

    assert result
    assert runtime.list() == [handle.name]
    runtime.stop(handle.name)
    assert runtime.list() == []


def _run_until_gone(runtime: Runtime, handle: SandboxHandle) -> bool:
    """Ask until the sandbox is gone; each try takes time of its own."""
    for _ in range(2000):
        if not runtime.alive(handle):
            return True
        try:
            runtime.exec(handle, ["sleep", "0.05"], timeout_seconds=30)
        except SandboxGone:
            return True
    return False
