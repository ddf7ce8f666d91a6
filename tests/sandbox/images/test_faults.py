"""Kills, cancels, time limits, full disks and hostile layers leave no half image and no process."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandboxes.images.exceptions import ImageDiskFull, ImageTimeout, ImageWorkLost
from sandboxes.images.specs import ImageSpec
from sandboxes.runtime.account import Account
from sandboxes.runtime.exceptions import RuntimeMissing, SandboxCancelled, SandboxFault
from tests.sandbox.conftest import REPOSITORY, open_folder
from tests.sandbox.images.conftest import Images, MakeImages
from tests.sandbox.images.endless import ENDLESS, eventually, working
from tests.sandbox.images.oci import folder_members, member, push_image
from tests.sandbox.images.test_builds import definition

pytestmark = pytest.mark.sandbox


def program_of(root: Path) -> int:
    """Return the process that carries the only order of this process out."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for thread in Path("/proc/self/task").iterdir():
        children += (thread / "children").read_text().split()
    for pid in children:
        if b"sandboxes.images.program" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return int(pid)
    raise AssertionError("no program")


def test_many_who_want_one_image_get_it_made_once(images: Images, sif: Path) -> None:
    text = definition(sif, "echo made > /made")

    with ThreadPoolExecutor(6) as pool:
        found = list(
            pool.map(
                lambda again: images.get("definition:", definition=text, again=again),
                [True, False] * 3,
            )
        )

    assert len({image.folder for image in found}) == 1
    assert [image.reused for image in found].count(False) == 1
    assert images.log().count("+ echo made") == 1
    assert (len(images.kept()), images.left()) == (1, [])


def test_a_cancel_in_the_middle_leaves_nothing(images: Images, sif: Path) -> None:
    with pytest.raises(SandboxCancelled):
        images.get(
            "definition:",
            definition=definition(sif, ENDLESS),
            cancelled=lambda: "86398.5" in images.log(),
        )

    assert working(images.root) == set()
    assert (images.kept(), images.left()) == ([], [])
    assert list(images.root.glob("tmp/build-temp-*")) == []


def test_the_time_limit_ends_all_that_the_build_started(images: Images, sif: Path) -> None:
    with pytest.raises(ImageTimeout, match="within 8 s"):
        images.get("definition:", definition=definition(sif, ENDLESS), timeout_seconds=8)

    assert working(images.root) == set()
    assert (images.kept(), images.left()) == ([], [])


def test_a_killed_program_is_told_and_what_it_leaves_is_swept(images: Images, sif: Path) -> None:
    def kill(text: str) -> None:
        images.said.append(text)
        if "86398.5" in text:
            os.kill(program_of(images.root), signal.SIGKILL)

    with pytest.raises(ImageWorkLost, match="SIGKILL"):
        images.get("definition:", definition=definition(sif, ENDLESS), on_log=kill)

    assert eventually(lambda: working(images.root) == set())
    assert len([path for path in images.left() if Path(path).is_dir()]) == 2
    image = images.get("definition:", definition=definition(sif, "true"))
    assert (images.kept(), images.left()) == ([image.digest], [])


OWNER = """
import sys
from pathlib import Path
from sandboxes.images.specs import ImageSpec
from sandboxes.images.store import ImageStore
from sandboxes.runtime.account import resolve_account
store = ImageStore(Path(sys.argv[1]), resolve_account(None))
spec = ImageSpec(name="image", source="definition:", definition=sys.argv[2])
store.get(spec, timeout_seconds=600, on_log=lambda text: print(text, flush=True))
"""


def test_a_build_ends_with_the_worker_that_wanted_it(images: Images, sif: Path) -> None:
    text = definition(sif, ENDLESS)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(images.root), text],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    for line in owner.stdout:
        if "86398.5" in line:
            break
    started = working(images.root)

    owner.kill()
    owner.wait()
    owner.stdout.close()

    assert len(started) > 2
    assert eventually(lambda: working(images.root) == set())
    assert eventually(lambda: images.left() == [])
    assert images.kept() == []


@pytest.mark.parametrize(
    "hostile",
    [
        [member("../../../../../../tmp/prorl-escaped", b"x")],
        [member("/tmp/prorl-escaped", b"x")],
        [
            member("way", type=b"2", linkname="/tmp"),
            member("way/prorl-escaped", b"x"),
        ],
        [
            member("up", type=b"2", linkname="../../../../../../../tmp"),
            member("up/prorl-escaped", b"x"),
        ],
        [member("hard", type=b"1", linkname="../../../../../../etc/hostname")],
        [member("dev/sda", type=b"4", devmajor=8), member("dev/mem", type=b"3", devmajor=1)],
        [member(".singularity.d", type=b"2", linkname="/tmp")],
        [member("fifo", type=b"6")],
    ],
    ids=["dots", "absolute", "link", "link-up", "hard-link", "devices", "meta-link", "fifo"],
)
def test_a_hostile_layer_stays_inside(
    images: Images, registry: str, rootfs: Path, shared: Path, account: Account, hostile: list
) -> None:
    name = f"tests/hostile:{abs(hash(str(hostile)))}"
    reference = push_image(registry, name, [folder_members(rootfs), hostile], shared)
    host = {path for path in Path("/tmp").iterdir() if "prorl-escaped" in path.name}

    try:
        image = images.get(f"docker://{reference}")
    except SandboxFault:
        assert images.kept() == []
    else:
        tree = Path(image.folder)
        assert not (tree / ".singularity.d").is_symlink()
        assert [path for path in tree.rglob("*") if path.is_block_device()] == []
        assert [path for path in tree.rglob("*") if path.is_char_device()] == []
        assert (tree / "hard").read_bytes() if (tree / "hard").exists() else True
        assert Path("/etc/hostname").stat().st_nlink == 1

    assert images.left() == []
    escaped = {path for path in Path("/tmp").iterdir() if "prorl-escaped" in path.name}
    assert escaped == host == set()


def test_device_nodes_in_a_sif_are_left_out_and_named(
    images: Images, rootfs: Path, shared: Path
) -> None:
    squash, path = shared / "devices.squashfs", shared / "devices.sif"
    subprocess.run(
        [
            *("mksquashfs", str(rootfs), str(squash), "-quiet", "-no-progress", "-all-root"),
            *("-p", "dev/evil b 666 0 0 8 0", "-p", ".singularity.d d 755 0 0"),
        ],
        check=True,
        capture_output=True,
    )
    _as_sif(squash, path)

    image = images.get(str(path))

    assert image.note == "device nodes were left out"
    assert list((Path(image.folder) / "dev").iterdir()) == []


def _as_sif(squash: Path, path: Path) -> None:
    """Put a squashfs into a SIF whose only object it is."""
    import struct

    data = squash.read_bytes()
    header = struct.pack(
        "<32s10s3s3s16s8q",
        b"#!/usr/bin/env run-singularity\n",
        *(b"SIF_MAGIC\0", b"01\0", b"02\0", b"u" * 16),
        *(0, 0, 0, 1, 128, 585, 4096, len(data)),
    )
    extra = struct.pack("<ii", 1, 2).ljust(384, b"\0")
    entry = struct.pack(
        "<i?IIIqqqqqqq128s384s",
        *(0x4004, True, 1, 0, 0, 4096, len(data), len(data), 0, 0, 0, 0, b"rootfs", extra),
    )
    path.write_bytes((header + entry).ljust(4096, b"\0") + data)


@pytest.fixture
def small_disk(account: Account) -> Iterator[Path]:
    """Yield a root on a file system of 9 MiB: room for two images of busybox and a half."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a file system here")
    folder = open_folder("prorl-image-small-")
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9m,mode=755", "tmpfs", str(folder)], check=True
    )
    yield folder / "root"
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_told_and_leaves_no_half_image(
    make_images: MakeImages, small_disk: Path, sif: Path
) -> None:
    images = make_images(small_disk)

    with pytest.raises(ImageDiskFull, match=r"(?i)no space left"):
        images.get(
            "definition:", definition=definition(sif, "dd if=/dev/zero of=/big bs=1M count=40")
        )

    assert (images.kept(), images.left()) == ([], [])
    assert images.log().count("the disk is full: making room") == 1
    assert images.get(str(sif)).folder


def test_images_in_no_use_make_room_for_a_new_one(
    make_images: MakeImages, small_disk: Path, sif: Path, rootfs: Path, tmp_path: Path
) -> None:
    images = make_images(small_disk, grace_seconds=0.0)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    sources = [tmp_path / name for name in ("one", "two", "three", "four")]
    for number, source in enumerate(sources):
        (source / "bin").mkdir(parents=True)
        (source / "bin" / "sh").write_bytes(bytes([number]) * 3_500_000)

    found = [images.get(str(source)).digest for source in sources]

    assert "the disk is full: making room" in images.log()
    assert found[-1] in images.kept()
    assert found[0] not in images.kept()
    assert images.left() == []


def test_work_stops_before_the_disk_is_full(
    make_images: MakeImages, small_disk: Path, sif: Path
) -> None:
    images = make_images(small_disk, reserve_bytes=8_900_000)
    endless = "while true; do dd if=/dev/zero of=/big bs=256k count=1; done"

    with pytest.raises(ImageDiskFull, match="are kept free"):
        images.get("definition:", definition=definition(sif, endless))

    assert working(images.root) == set()
    assert (images.kept(), images.left()) == ([], [])


def test_the_engines_folders_are_where_the_operator_wants_them(
    make_images: MakeImages, sif: Path, account: Account
) -> None:
    folder = open_folder("prorl-image-engine-")
    for name in ("tmp", "cache"):
        (folder / name).mkdir()
        if os.geteuid() == 0:
            os.chown(folder / name, account.uid, account.gid)
    images = make_images(tmp=folder / "tmp", engine_cache=folder / "cache")
    text = definition(sif).replace("%post", "%setup\n    echo in $APPTAINER_ROOTFS\n%post")

    images.get("definition:", definition=text)

    assert f"in {folder}/tmp/work-" in images.log()
    assert list((folder / "tmp").iterdir()) == []
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_a_folder_that_the_account_cannot_write_is_named(
    make_images: MakeImages, sif: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o500)
    images = make_images(tmp=tmp_path)

    with pytest.raises(RuntimeMissing, match=str(tmp_path)):
        images.get(str(sif))


def test_a_reader_of_the_cache_does_not_wait_for_a_build(images: Images, sif: Path) -> None:
    other = ImageSpec(name="image", source=str(sif))
    images.get(str(sif))
    looked: list[bool] = []
    done = threading.Event()

    def look(text: str) -> None:
        images.said.append(text)
        if "86398.5" in text:
            looked.append(images.store.find(other) is not None)
            done.set()

    with pytest.raises(SandboxCancelled):
        images.get(
            "definition:",
            definition=definition(sif, ENDLESS),
            on_log=look,
            cancelled=done.is_set,
        )

    assert looked == [True]
