"""What is deleted and made again, through every layer, on each driver of the overlay.

A plain folder is the judge: it starts as a copy of the image's trees and sees the same commands.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.exceptions import LayerMissing
from sandboxes.runtime.protocol import SandboxHandle
from tests.sandbox.conftest import Start

pytestmark = pytest.mark.sandbox

TREES = ("etc/alternatives", "etc/apt", "etc/pam.d", "etc/systemd")
TREES += ("usr/share/git-core", "usr/share/perl5")

# Prints every path below the trees with its type, mode and content.
LISTING = """
import hashlib, json, os, stat, sys
os.chdir(sys.argv[1])
found = {}
def look(path):
    status = os.lstat(path)
    kind, mode = stat.S_IFMT(status.st_mode), oct(stat.S_IMODE(status.st_mode))
    if stat.S_ISLNK(kind):
        found[path] = ["link", os.readlink(path)]
    elif stat.S_ISREG(kind):
        with open(path, "rb") as stream:
            found[path] = ["file", mode, hashlib.sha256(stream.read()).hexdigest()]
    elif stat.S_ISDIR(kind):
        found[path] = ["folder", mode]
        for name in os.listdir(path):
            look(path + "/" + name)
    else:
        found[path] = [str(kind), mode]
for tree in sys.argv[2:]:
    if os.path.lexists(tree):
        look(tree)
print(json.dumps(found, sort_keys=True))
"""

PREPARED = """
cd usr/share/perl5
rm -r Debconf
rm Error.pm; mv Git.pm Moved.pm
echo tail >> Error/Simple.pm; chmod 600 Error/Simple.pm
ln Moved.pm Twin.pm
rm -r Git; mkdir Git
cd ../git-core/templates
rm -r hooks; echo flat > hooks
rm -r info; ln -s hooks info
rm description; mkfifo description
rm -r branches; mkdir -m 700 branches; echo b > 'branches/two words'
cd /; cd "$1/etc"
rm -r apt; mkdir apt; echo only > apt/only
rm pam.d/login pam.d/su; echo new > pam.d/su
rm pam.d/passwd; mkdir pam.d/passwd; echo in > pam.d/passwd/in
: > pam.d/chsh
rm alternatives/awk; mkdir alternatives/awk; echo 1 > alternatives/awk/1
rm alternatives/pager; ln -s /nowhere alternatives/pager
rm alternatives/README; ln -s ../apt/only alternatives/README
mv systemd/system systemd/moved
chmod 000 systemd/user
"""
SNAPSHOT = """
cd usr/share/perl5
mkdir Debconf; echo again > Debconf/Base.pm
cp Moved.pm Error.pm; rm Moved.pm
rm -r Git; echo file > Git
rm -r Error
cd ../git-core/templates
rm hooks; mkdir hooks; echo x > hooks/pre-push.sample
rm info; mkdir info
rm description; echo text > description
rm -r branches
cd /; cd "$1/etc"
rm -r apt; mkdir apt
echo back > pam.d/login; rm pam.d/su
rm -r pam.d/passwd; echo file > pam.d/passwd
rm -r alternatives/awk; ln -s mawk alternatives/awk
rm alternatives/pager; echo plain > alternatives/pager
rm -r systemd
"""
TOP = """
cd usr/share
rm -r perl5; mkdir -p perl5/Debconf/DbDriver; echo top > perl5/Debconf/DbDriver/top
mv git-core/templates git-core/before; mkdir git-core/templates
rm git-core/before/hooks/pre-push.sample
rm -r git-core/contrib; ln -s before git-core/contrib
cd /; cd "$1/etc"
echo more > apt/more; mkdir apt/apt.conf.d
rm -r pam.d; mkdir -p pam.d/deep/er; echo d > pam.d/deep/er/login
rm -r alternatives
mkdir -p systemd/system; ln -s ../system systemd/system/loop
"""
GRADING = """
cd usr/share
rm -r perl5 git-core
mkdir perl5 git-core; echo last > git-core/last
cd /; cd "$1/etc"
rm -r apt pam.d systemd
mkdir alternatives; echo last > alternatives/awk
"""
STRICT = 'set -eu; umask 022; cd "$1"\n'


class Judge:
    """Hold the trees in a plain folder, owned by root of a user namespace of its own."""

    def __init__(self, folder: Path, image: Path) -> None:
        self._folder = folder
        for tree in TREES:
            shutil.copytree(image / tree, folder / tree, symlinks=True)

    def run(self, script: str) -> None:
        self._as_root(["/bin/sh", "-c", STRICT + script, "sh", str(self._folder)])

    def listing(self) -> dict[str, list[str]]:
        shown = self._as_root([sys.executable, "-c", LISTING, str(self._folder), *TREES])
        return json.loads(shown)  # type: ignore[no-any-return]

    def _as_root(self, argv: list[str]) -> bytes:
        return subprocess.run(
            ["unshare", "-U", "-r", *argv], check=True, capture_output=True
        ).stdout


@pytest.fixture
def judge(base_image: Path, tmp_path: Path) -> Iterator[Judge]:
    folder = tmp_path / "judge"
    yield Judge(folder, base_image)
    subprocess.run(["unshare", "-U", "-r", "rm", "-r", str(folder)], check=True)


def change(runtime: ApptainerRuntime, handle: SandboxHandle, script: str) -> None:
    argv = ["/bin/sh", "-c", STRICT + script, "sh", "/"]
    result = runtime.exec(handle, argv, timeout_seconds=60)
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"", b"")


def listing(runtime: ApptainerRuntime, handle: SandboxHandle) -> dict[str, list[str]]:
    argv = ["python3", "-c", LISTING, "/", *TREES]
    result = runtime.exec(handle, argv, timeout_seconds=60, output_bytes=4 * 2**20)
    assert (result.exit_code, result.stderr) == (0, b"")
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_every_layer_deletes_and_makes_again(
    overlay_runtime: ApptainerRuntime, start_overlay: Start, judge: Judge
) -> None:
    runtime, image = overlay_runtime, judge.listing()
    setup = start_overlay()
    assert listing(runtime, setup) == image

    # The prepared layer, over the image.
    change(runtime, setup, PREPARED)
    judge.run(PREPARED)
    assert listing(runtime, setup) == judge.listing()
    prepared = runtime.freeze(setup)

    # A snapshot of a live sandbox, over the prepared layer.
    live = start_overlay(layers=(prepared,))
    assert listing(runtime, live) == judge.listing()
    change(runtime, live, SNAPSHOT)
    judge.run(SNAPSHOT)
    assert listing(runtime, live) == judge.listing()
    snapshot = runtime.snapshot(live)
    change(runtime, live, "rm -r usr/share etc/apt")  # comes too late for the snapshot

    # The top layer, over both.
    last = start_overlay(layers=(snapshot, prepared))
    assert listing(runtime, last) == judge.listing()
    change(runtime, last, TOP)
    judge.run(TOP)
    assert listing(runtime, last) == judge.listing()
    top = runtime.freeze(last)

    # Grading, over all of them.
    grading = start_overlay(layers=(top, snapshot, prepared))
    assert listing(runtime, grading) == judge.listing()
    change(runtime, grading, GRADING)
    judge.run(GRADING)
    assert listing(runtime, grading) == judge.listing()

    # Nothing of all this reached the image.
    assert listing(runtime, start_overlay()) == image


def test_a_layer_of_another_driver_is_refused(
    overlay_runtime: ApptainerRuntime, start_overlay: Start
) -> None:
    layer = overlay_runtime.freeze(start_overlay())
    path = overlay_runtime.root / "layers" / layer / "layer.json"
    record = json.loads(path.read_text())
    assert record["driver"] in ("overlay-userxattr", "fuse-overlayfs")
    path.write_text(json.dumps(record | {"driver": "another"}))

    with pytest.raises(LayerMissing, match="written by another"):
        start_overlay(layers=(layer,))
