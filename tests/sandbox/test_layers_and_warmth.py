"""Prepared layers, snapshots, instances started ahead, and sockets in a sandbox's network."""

import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.exceptions import (
    EnterFailed,
    FileMissing,
    LayerMissing,
    SandboxCancelled,
    SandboxGone,
    StartFailed,
    StartTimeout,
)
from sandboxes.runtime.protocol import Limits, Runtime, SandboxHandle, SandboxSpec
from tests.sandbox.conftest import Start, every_runtime

Warm = Callable[..., str]


@pytest.fixture
def key() -> str:
    return uuid.uuid4().hex


@pytest.fixture
def warm(runtime: Runtime, image: str) -> Iterator[Warm]:
    """Start instances ahead; those not handed out are stopped afterwards."""

    def start_ahead(**changes: object) -> str:
        values: dict[str, object] = {"name": "", "image": image}
        values |= {"limits": Limits(lifetime_seconds=600)} | changes
        return runtime.warm(SandboxSpec(**values), timeout_seconds=60)  # type: ignore[arg-type]

    yield start_ahead
    for name in runtime.list_warm():
        runtime.stop(name)


def content(runtime: Runtime, handle: SandboxHandle, path: str) -> bytes:
    return runtime.read_file(handle, path, max_bytes=1000)


def forget(runtime: Runtime, *handles: SandboxHandle) -> None:
    """Stop sandboxes and delete every prepared layer that is then in no use."""
    for handle in handles:
        runtime.stop(handle.name)


@every_runtime
def test_a_prepared_layer_is_found_by_its_key(runtime: Runtime, start: Start, key: str) -> None:
    assert runtime.find_layer(key) is None
    first = start()
    runtime.write_file(first, "/app/prepared", b"yes")

    made = runtime.freeze(first, key=key)

    assert runtime.find_layer(key) == made
    assert made not in runtime.list_layers()
    assert runtime.layer_bytes() > 0
    one, two = start(layers=(made,)), start(layers=(made,))
    runtime.write_file(one, "/app/prepared", b"changed")
    assert content(runtime, two, "/app/prepared") == b"yes"


@every_runtime
def test_the_first_to_prepare_a_key_wins(runtime: Runtime, start: Start, key: str) -> None:
    first, second = start(), start()
    runtime.write_file(first, "/app/who", b"first")
    runtime.write_file(second, "/app/who", b"second")

    assert runtime.freeze(first, key=key) == runtime.freeze(second, key=key)

    reference = runtime.find_layer(key)
    assert reference is not None
    assert content(runtime, start(layers=(reference,)), "/app/who") == b"first"


@every_runtime
def test_one_at_a_time_prepares_a_key(runtime: Runtime, key: str) -> None:
    inside: list[int] = []
    most: list[int] = []

    def prepare(number: int) -> None:
        with runtime.hold_layer(key, timeout_seconds=60):
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(prepare, range(40)))

    assert most == [1] * 40


@every_runtime
def test_waiting_for_a_layer_ends(runtime: Runtime, key: str) -> None:
    with runtime.hold_layer(key, timeout_seconds=1):
        with pytest.raises(StartTimeout), runtime.hold_layer(key, timeout_seconds=0.1):
            pass
        with (
            pytest.raises(SandboxCancelled),
            runtime.hold_layer(key, timeout_seconds=60, cancelled=lambda: True),
        ):
            pass
    with runtime.hold_layer(key, timeout_seconds=1):
        pass


@every_runtime
def test_eviction_takes_the_oldest_and_spares_what_is_used(
    runtime: Runtime, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandboxes.runtime.layers.GRACE_SECONDS", 0.0)
    runtime.evict_layers(keep_bytes=-1)
    keys = [uuid.uuid4().hex for _ in range(3)]
    made = []
    for number, each in enumerate(keys):
        handle = start()
        runtime.write_file(handle, "/app/big", bytes([number]) * 100_000)
        made.append(runtime.freeze(handle, key=each))
    carrier = start(layers=(made[0],))
    runtime.find_layer(keys[1])  # used after the third

    assert runtime.evict_layers(keep_bytes=runtime.layer_bytes() - 1) == 1

    found = [runtime.find_layer(each) for each in keys]
    assert found == [made[0], made[1], None]
    assert runtime.evict_layers(keep_bytes=-1) == 1
    assert [runtime.find_layer(each) for each in keys] == [made[0], None, None]
    # A layer frozen above it keeps it too, after its sandbox is gone.
    top = runtime.freeze(carrier)
    assert runtime.evict_layers(keep_bytes=-1) == 0
    above = start(layers=(top, made[0]))
    assert runtime.read_file(above, "/app/big", max_bytes=100_000) == b"\0" * 100_000
    for name in runtime.list():
        runtime.stop(name)
    runtime.discard_layer(top)
    assert runtime.evict_layers(keep_bytes=-1) == 1
    with pytest.raises(LayerMissing):
        start(layers=(made[0],))


def test_a_snapshot_is_the_moment_and_the_sandbox_goes_on(runtime: Runtime, start: Start) -> None:
    handle = start()
    mode = "0" if isinstance(runtime, ApptainerRuntime) else "700"
    script = f"echo before >file; ln file link; ln -s file soft; mkdir d; chmod {mode} d"
    runtime.exec(handle, ["sh", "-c", script], timeout_seconds=30)
    shell = runtime.open_shell(handle)
    shell.run("n=5; sleep 300 & echo $!", timeout_seconds=30)

    taken = runtime.snapshot(handle)

    still = shell.run("jobs -r | wc -l; echo $n", timeout_seconds=30)
    assert (still.output.split(), still.shell_restarted) == (["1", "5"], False)
    runtime.exec(handle, ["sh", "-c", "echo after >file"], timeout_seconds=30)
    copy = start(layers=(taken,))
    script = "cat file link soft; stat -c %h file; stat -c %a d; touch new; chmod 755 d"
    result = runtime.exec(copy, ["sh", "-c", script], timeout_seconds=30)
    assert result.stdout.decode().split() == ["before", "before", "before", "2", mode]
    assert content(runtime, handle, "/app/file") == b"after\n"
    shell.close()
    runtime.exec(handle, ["chmod", "755", "d"], timeout_seconds=30)
    forget(runtime, copy)
    runtime.discard_layer(taken)


@every_runtime
def test_a_hidden_folder_begins_empty(runtime: Runtime, start: Start) -> None:
    first = start()
    runtime.write_files(first, {"/tests/old": (b"planted", 0o644), "/app/x": (b"1", 0o644)})
    layer = runtime.freeze(first)

    handle = start(layers=(layer,), hidden=("/tests", "/logs"))

    with pytest.raises(FileMissing):
        runtime.read_file(handle, "/tests/old", max_bytes=10)
    runtime.write_file(handle, "/tests/new", b"ours")
    assert runtime.read_file(handle, "/tests/new", max_bytes=10) == b"ours"
    assert runtime.read_file(handle, "/app/x", max_bytes=10) == b"1"
    for name in runtime.list():
        runtime.stop(name)
    runtime.discard_layer(layer)


def test_a_link_of_the_agent_does_not_stand_for_a_hidden_folder(
    runtime: Runtime, start: Start
) -> None:
    first = start()
    runtime.exec(first, ["mkdir", "-p", "/elsewhere"], timeout_seconds=30)
    runtime.exec(first, ["ln", "-s", "/elsewhere", "/tests"], cwd="/", timeout_seconds=30)
    layer = runtime.freeze(first)

    handle = start(layers=(layer,), hidden=("/tests",))
    runtime.write_file(handle, "/tests/new", b"ours")

    with pytest.raises(FileMissing):
        runtime.read_file(handle, "/elsewhere/new", max_bytes=10)
    for name in runtime.list():
        runtime.stop(name)
    runtime.discard_layer(layer)


@pytest.mark.sandbox
def test_only_folders_at_the_root_can_be_hidden(start_apptainer: Start) -> None:
    for path in ("/", "/a/b", "/..", ""):
        with pytest.raises(StartFailed, match="can be hidden"):
            start_apptainer(hidden=(path,))


def test_a_layer_that_is_used_by_now_is_not_evicted(
    runtime: Runtime, start: Start, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandboxes.runtime.layers.GRACE_SECONDS", 0.0)
    first = start()
    runtime.write_file(first, "/app/x", b"1")
    layer = runtime.freeze(first, key=key)
    started: list[SandboxHandle] = []
    decided = runtime._evict  # type: ignore[attr-defined]

    def start_meanwhile(reference: str) -> bool:
        started.append(start(layers=(layer,)))
        return bool(decided(reference))

    monkeypatch.setattr(runtime._layers, "_evict", start_meanwhile)  # type: ignore[attr-defined]

    assert runtime.evict_layers(keep_bytes=-1) == 0

    (handle,) = started
    assert runtime.read_file(handle, "/app/x", max_bytes=10) == b"1"
    assert runtime.find_layer(key) == layer


@every_runtime
def test_a_snapshot_keeps_the_files_of_its_moment(runtime: Runtime, start: Start) -> None:
    handle = start()
    runtime.write_file(handle, "/app/file", b"before")

    taken = runtime.snapshot(handle)

    runtime.write_file(handle, "/app/file", b"after")
    assert content(runtime, start(layers=(taken,)), "/app/file") == b"before"
    assert content(runtime, handle, "/app/file") == b"after"
    assert taken in runtime.list_layers()
    for name in runtime.list():
        runtime.stop(name)
    runtime.discard_layer(taken)


@every_runtime
def test_a_snapshot_of_an_ended_sandbox_is_refused(runtime: Runtime, start: Start) -> None:
    handle = start()
    runtime.stop(handle.name)

    with pytest.raises(SandboxGone):
        runtime.snapshot(handle)


def test_a_warm_sandbox_is_handed_out_once(runtime: Runtime, start: Start, warm: Warm) -> None:
    ahead = warm()
    assert (list(runtime.list_warm()), ahead in runtime.list()) == ([ahead], False)

    first = start(env={"WORD": "w"}, limits=Limits(lifetime_seconds=500))
    second = start()

    assert runtime.list_warm() == {}
    assert runtime.list() == sorted([first.name, second.name])
    assert first.pid != second.pid
    said = runtime.exec(first, ["sh", "-c", "pwd; echo $WORD"], timeout_seconds=30).stdout
    assert said.decode().endswith("/app\nw\n")
    runtime.stop(first.name)
    assert not runtime.alive(first)
    assert runtime.alive(second)


@every_runtime
def test_a_warm_sandbox_of_another_shape_is_not_taken(
    runtime: Runtime, start: Start, warm: Warm
) -> None:
    ahead = warm(workdir="/elsewhere")

    start()

    assert list(runtime.list_warm()) == [ahead]


def test_many_takers_get_one_each(runtime: Runtime, start: Start, warm: Warm) -> None:
    for _ in range(3):
        warm()

    with ThreadPoolExecutor(6) as pool:
        handles = [each.result() for each in [pool.submit(start) for _ in range(6)]]

    assert len({handle.pid for handle in handles}) == 6
    assert runtime.list_warm() == {}
    for handle in handles:
        assert runtime.exec(handle, ["true"], timeout_seconds=30).exit_code == 0


def test_the_lifetime_of_a_warm_sandbox_begins_anew(
    runtime: Runtime, start: Start, warm: Warm
) -> None:
    warm(limits=Limits(lifetime_seconds=600))
    handle = start(limits=Limits(lifetime_seconds=1))

    for _ in range(3000):
        if not runtime.alive(handle):
            break
        threading.Event().wait(0.01)

    assert not runtime.alive(handle)
    with pytest.raises(SandboxGone):
        runtime.exec(handle, ["true"], timeout_seconds=30)


@every_runtime
def test_a_warm_sandbox_freezes_under_its_new_name(
    runtime: Runtime, start: Start, warm: Warm
) -> None:
    warm()
    handle = start()
    runtime.write_file(handle, "/app/file", b"kept")

    layer = runtime.freeze(handle)

    assert content(runtime, start(layers=(layer,)), "/app/file") == b"kept"
    for name in runtime.list():
        runtime.stop(name)
    runtime.discard_layer(layer)


@every_runtime
def test_a_name_in_use_does_not_cost_a_warm_sandbox(
    runtime: Runtime, start: Start, warm: Warm
) -> None:
    handle = start()
    ahead = warm()

    with pytest.raises(StartFailed, match="in use"):
        start(name=handle.name)

    assert list(runtime.list_warm()) == [ahead]


@pytest.mark.sandbox
def test_a_program_inside_reaches_the_listener_and_nothing_else(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    handle, other = start_apptainer(), start_apptainer()
    with apptainer_runtime.listen(handle, 8080) as server:
        answer = threading.Thread(target=_answer_once, args=(server,))
        answer.start()
        client = "exec 3<>/dev/tcp/127.0.0.1/8080; echo hello >&3; head -n 1 <&3"

        inside = apptainer_runtime.exec(handle, ["bash", "-c", client], timeout_seconds=30)

        answer.join(timeout=30)
        assert (inside.exit_code, inside.stdout) == (0, b"you said hello\n")
        elsewhere = apptainer_runtime.exec(other, ["bash", "-c", client], timeout_seconds=30)
        assert elsewhere.exit_code != 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", 8080), timeout=5).close()
        with pytest.raises(EnterFailed, match="in use"):
            apptainer_runtime.listen(handle, 8080)
    with apptainer_runtime.listen(handle, 0) as free:
        assert free.getsockname()[0] == "127.0.0.1"
        assert free.getsockname()[1] > 0
    apptainer_runtime.stop(handle.name)
    with pytest.raises(SandboxGone):
        apptainer_runtime.listen(handle, 8080)


def _answer_once(server: socket.socket) -> None:
    server.settimeout(30)
    connection, _ = server.accept()
    with connection, connection.makefile("rw") as stream:
        stream.write("you said " + stream.readline())
        stream.flush()


@pytest.mark.sandbox
def test_a_missing_gpu_is_named(start_apptainer: Start) -> None:
    with pytest.raises(StartFailed, match="no rocm device on this node"):
        start_apptainer(gpu="rocm")
