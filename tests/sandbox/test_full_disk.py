"""What holds when the node's disk is nearly full, and when no block of it is left."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.exceptions import FileFault, SandboxFault, SandboxGone
from sandboxes.runtime.processes import is_running
from sandboxes.runtime.protocol import Limits
from tests.sandbox.conftest import lacking, open_folder, starter
from tests.sandbox.counting import eventually, kept, nothing_stays, output_of, runtime_of

pytestmark = pytest.mark.sandbox

MIB = 2**20
LIMITS = Limits(memory_bytes=512 * MIB, processes=200, lifetime_seconds=600)


@pytest.fixture
def small(base_image: Path) -> Iterator[ApptainerRuntime]:
    """Yield a runtime on a file system of 96 MiB that only it uses."""
    if os.geteuid() != 0:
        lacking("only root can mount a small file system")
    folder = open_folder("prorl-small-tests-")
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m,nr_inodes=20000,mode=755", "tmpfs", str(folder)],
        check=True,
    )
    try:
        with runtime_of(folder, "auto") as made:
            yield made
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def test_the_largest_is_ended_when_the_nodes_disk_runs_full(
    small: ApptainerRuntime, base_image: Path
) -> None:
    start = starter(small, str(base_image), [])
    with nothing_stays(small):
        modest, greedy = start(limits=LIMITS), start(limits=LIMITS)
        output_of(small, modest, "head -c 8M /dev/zero > /f")

        small.exec(
            greedy,
            ["sh", "-c", "head -c 200M /dev/zero > /f; sleep 20"],
            timeout_seconds=60,
        )

        with pytest.raises(SandboxGone, match="ended: node_disk") as raised:
            small.exec(greedy, ["true"], timeout_seconds=60)
        assert raised.value.limit is None  # it is the node's trouble: another try may go well
        small.stop(greedy.name)
        assert output_of(small, modest, "head -c 8M /dev/zero > /g; echo room") == "room\n"
        small.stop(modest.name)


def test_on_a_full_disk_each_call_answers_and_stop_cleans_up(
    small: ApptainerRuntime, base_image: Path
) -> None:
    limits = Limits(lifetime_seconds=600)
    before = kept(small)
    start = starter(small, str(base_image), [])
    handle = start(limits=limits)
    filler = small.root.parent / "filler"
    fill(filler)

    with pytest.raises(SandboxFault) as refused:
        start(limits=limits)
    with pytest.raises(FileFault, match="No space left"):
        small.write_file(handle, "/big", b"x" * MIB)
    full = small.exec(handle, ["cp", "/etc/passwd", "/y"], timeout_seconds=60)
    assert small.list() == [handle.name]
    assert refused.value.code == "sandbox.start_failed"
    assert "No space left" in str(refused.value)
    assert full.exit_code not in (0, None)
    assert b"No space left" in full.stderr
    assert output_of(small, handle, "echo $((6 * 7))") == "42\n"

    small.stop(handle.name)

    assert not is_running(handle.pid, handle.start_ticks)
    assert eventually(lambda: kept(small) == before)
    filler.unlink()
    assert output_of(small, start(limits=limits), "echo again") == "again\n"
    for name in small.list():
        small.stop(name)


def test_a_full_disk_does_not_harm_what_is_frozen(
    small: ApptainerRuntime, base_image: Path
) -> None:
    start, limits = starter(small, str(base_image), []), Limits(lifetime_seconds=600)
    with nothing_stays(small):
        handle = start(limits=limits)
        output_of(small, handle, "head -c 1M /dev/urandom > /mine; md5sum < /mine > /sum")
        filler = small.root.parent / "filler"
        fill(filler)

        layer = small.freeze(handle)  # what the instance itself held is room enough for it
        filler.unlink()
        second = start(limits=limits, layers=(layer,))

        assert output_of(small, second, "md5sum < /mine | cmp - /sum && echo whole") == "whole\n"
        small.stop(second.name)
        small.discard_layer(layer)


def fill(path: Path) -> None:
    """Write until the file system has no block left."""
    with path.open("wb", buffering=0) as stream:
        for size in (MIB, 4096, 1):
            try:
                while stream.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
