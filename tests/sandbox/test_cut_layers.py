"""Only some folders of what a sandbox's programs wrote are taken over, on each overlay driver."""

from collections.abc import Callable
from typing import Any

import pytest

from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.exceptions import LayerMissing
from sandboxes.runtime.protocol import Runtime, SandboxHandle
from tests.sandbox.conftest import Start

SETUP = """
mkdir -p /srv/place/old /srv/place/kept
echo old > /srv/place/old/file; echo kept > /srv/place/kept/a
ln -s / /srv/place/up; chmod 751 /srv; ln -s /srv/place /workspace; echo 1 > /etc/setting
"""
AGENT = """
cd /srv/place
rm -r old; mkdir old; echo new > old/new
rm kept/a; echo b > kept/b; chmod 600 kept/b; ln kept/b kept/twin
ln -s /tests/expected answer; ln -s ../../tests relative; ln -s / root; ln -s root/tests/x chained
ln -s /proc/self/root/tests/x magic; ln -s kept/b fine; ln -s /etc/setting setting
ln -s /sys/devices/virtual/net/lo/subsystem/../../../tests/expected mounted
ln -s /nothing/../tests/expected lost; touch .wh.up || true; ln -s up/tests/expected marked
mkdir d; far=$(printf 'd/../%.0s' {1..300}); ln -s ${far}fine x0
for n in {1..9}; do ln -s ${far}x$((n - 1)) x$n; done
mkfifo pipe; mkdir closed; echo in > closed/in; chmod 000 closed
printf '#!/bin/sh\\necho hacked' > /bin/cat; rm /usr/bin/tail; echo 2 > /etc/setting
echo 'exit 9' > /root/.bashrc; mkdir /srv/other; echo LD > /etc/ld.so.preload.fake
"""
LOOK = """
cd /srv/place
for each in old/file old/new kept/a kept/b closed/in; do
  [ -e $each ] && echo "$each $(head -n 1 $each)"
done
stat -c '%n %a' /srv kept/b closed
[ kept/b -ef kept/twin ] && echo same
[ -p pipe ] && echo pipe
for each in answer relative chained magic mounted lost marked x9; do
  cat $each/x $each 2>/dev/null || echo "$each nothing"
done
cat fine x1 setting /etc/setting
tail -n 1 fine
"""
SEEN = """old/new new
kept/b b
closed/in in
/srv 751
kept/b 600
closed 0
same
pipe
answer nothing
relative nothing
chained nothing
magic nothing
mounted nothing
lost nothing
marked nothing
x9 nothing
b
b
1
1
b
"""


def sh(runtime: Runtime, handle: SandboxHandle, script: str) -> str:
    """Run a script that must succeed, with nothing of the image's start-up files."""
    result = runtime.exec(
        handle, ["bash", "-ec", script], cwd="/", timeout_seconds=60, output_bytes=1 << 20
    )
    assert result.exit_code == 0, result.stderr
    return result.stdout.decode()


@pytest.mark.sandbox
def test_of_what_was_written_only_the_workspace_comes_along(
    overlay_runtime: ApptainerRuntime, start_overlay: Start
) -> None:
    runtime = overlay_runtime
    setup = start_overlay(workdir="/")
    sh(runtime, setup, SETUP)
    prepared = runtime.freeze(setup, key=f"cut-{setup.name}")
    agent = start_overlay(layers=(prepared,), workdir="/workspace")
    sh(runtime, agent, AGENT)
    left = runtime.freeze(agent)

    layers = runtime.cut_layers(
        (left, prepared), folders=["/workspace"], sealed=["/tests", "/logs"]
    )
    graded = start_overlay(layers=layers, workdir="/workspace", hidden=("/tests", "/logs"))
    runtime.write_files(graded, {"/tests/expected": (b"42", 0o644), "/tests/x": (b"42", 0o644)})

    seen = runtime.exec(graded, ["bash", "-c", LOOK], cwd="/", timeout_seconds=60)
    assert seen.stdout.decode() == SEEN
    assert (
        sh(
            runtime,
            graded,
            "ls /srv; ! grep 'exit 9' /root/.bashrc; test ! -e /etc/ld.so.preload.fake",
        )
        == "place\n"
    )
    # The same frozen layer carries a whole sandbox still.
    whole = start_overlay(layers=(left, prepared), workdir="/")
    assert sh(runtime, whole, "cat /etc/setting") == "hacked\n"
    for name in (graded.name, whole.name):
        runtime.stop(name)
    for reference in (layers[0], left):
        runtime.discard_layer(reference)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("agent", "seen"),
    [
        ("rm -r /srv", "empty"),
        ("rm -r /srv/place", "empty"),
        ("rm -r /srv; mkdir -p /srv/place; echo n > /srv/place/n", "n"),
        ("rm -r /srv; mkdir /srv", "empty"),
        ("rm -r /srv; mkdir -p /x/place; echo x > /x/place/x; ln -s /x /srv", "empty"),
        ("rm -r /srv; echo file > /srv", "empty"),
        ("true", "old"),
        ("chmod 000 /srv/place/old /srv", "old"),
        ("mv /srv/place /srv/moved; mkdir /srv/place; mv /srv/moved /srv/place/m", "m"),
    ],
)
def test_what_becomes_of_the_folders_above_the_workspace(
    agent: str, seen: str, overlay_runtime: ApptainerRuntime, start_overlay: Start
) -> None:
    runtime = overlay_runtime
    setup = start_overlay(workdir="/")
    sh(runtime, setup, "mkdir -p /srv/place/old")
    prepared = runtime.freeze(setup, key=f"above-{setup.name}")
    writer = start_overlay(layers=(prepared,), workdir="/")
    sh(runtime, writer, agent)
    left = runtime.freeze(writer)

    layers = runtime.cut_layers((left, prepared), folders=["/srv/place"])
    graded = start_overlay(layers=layers, workdir="/srv/place")

    assert sh(runtime, graded, "ls -A /srv/place | grep . || echo empty") == f"{seen}\n"
    assert sh(runtime, graded, "ls /srv; test ! -e /x") == "place\n"
    runtime.stop(graded.name)
    for reference in (layers[0], left):
        runtime.discard_layer(reference)


@pytest.mark.sandbox
def test_a_snapshots_layers_are_cut_each(
    apptainer_runtime: ApptainerRuntime, start_apptainer: Start
) -> None:
    runtime = apptainer_runtime
    trunk = start_apptainer()
    sh(runtime, trunk, "echo 1 > /app/one; echo 1 > /app/two; echo bad > /etc/bad")
    below = runtime.snapshot(trunk)
    branch = start_apptainer(layers=(below,))
    sh(runtime, branch, "rm /app/one; echo 3 > /app/three; echo worse > /etc/worse")
    left = runtime.freeze(branch)

    layers = runtime.cut_layers((left, below), folders=["/app", "/app/deeper"])

    assert len(layers) == 2
    graded = start_apptainer(layers=layers)
    assert sh(runtime, graded, "ls /app") == "three\ntwo\n"
    assert sh(runtime, graded, "ls /etc/bad /etc/worse 2>/dev/null || echo none") == "none\n"
    runtime.stop(graded.name)
    for reference in (*layers, left, below):
        runtime.discard_layer(reference)


@pytest.mark.parametrize(
    "runtime",
    [pytest.param("apptainer", marks=pytest.mark.sandbox), "local", "fake"],
    indirect=True,
)
def test_every_runtime_cuts(runtime: Runtime, request: pytest.FixtureRequest) -> None:
    start: Callable[..., Any] = request.getfixturevalue("start")
    handle = start()
    runtime.write_files(handle, {"/app/in": (b"in", 0o644), "/opt/out": (b"out", 0o644)})
    left = runtime.freeze(handle)

    layers = runtime.cut_layers((left,), folders=["/app"])

    graded = start(layers=layers)
    assert runtime.read_file(graded, "/app/in", max_bytes=10) == b"in"
    with pytest.raises(Exception, match="/opt/out"):
        runtime.read_file(graded, "/opt/out", max_bytes=10)
    runtime.stop(graded.name)
    for reference in (*layers, left):
        runtime.discard_layer(reference)


def test_a_layer_that_is_not_there_is_missing(
    apptainer_runtime: ApptainerRuntime,
) -> None:
    with pytest.raises(LayerMissing):
        apptainer_runtime.cut_layers((f"layer-{'0' * 32}",), folders=["/app"])
